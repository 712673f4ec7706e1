"""Pains A27: chat templates render as Hugging Face defines them, with one bos, and a user's mistake is a 400."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from overlap_serve.errors import InvalidRequest, ModelLoadError
from overlap_serve.text import template as template_module
from overlap_serve.text.template import ChatTemplate, Message, TextModel, fake_text, load_text
from tests.text.built import byte_fallback, byte_level, saved

# Llama 2: writes bos, roles must alternate, concatenates content.
LLAMA = """{%- if messages[0]['role'] == 'system' -%}
    {%- set loop_messages = messages[1:] -%}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- else -%}
    {%- set loop_messages = messages -%}
    {%- set system = '' -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- set content = (system if loop.first else '') + message['content'] -%}
    {%- if message['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + content.strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}"""

# Qwen: no bos, tool calls, arguments as a mapping.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system', 'tool') or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)

# DeepSeek V3: `content is none` chooses the branch, arguments are text.
DEEPSEEK = """{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<U>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is none %}{%- for tool in message['tool_calls'] %}\
{{ '<C>' + tool['function']['name'] + '```' + tool['function']['arguments'] + '```' }}{%- endfor %}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<A>' + message['content'] }}{%- endif %}{%- endfor %}"""

PARTS_AND_STRINGS = """{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}{%- if part.type == 'text' %}[{{ part.text }}]{%- endif %}{%- endfor %}
{%- endif %}{%- endfor %}"""
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é<b>"}'}}


def made(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens or {"bos_token": "<s>", "eos_token": "</s>"})


def user(content: object = "hi") -> Message:
    return {"role": "user", "content": content}


# -- one bos


def with_bos(backend: Backend) -> Backend:
    """The tokenizer adds bos by itself, as those of Llama do."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def token_id(model: TextModel, token: str) -> int:
    found = model.tokenizer.token_id(token)
    assert found is not None
    return found


def test_a27_a_llama_style_prompt_has_exactly_one_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA}
    model = load_text(saved(with_bos(byte_fallback()), tmp_path, config))
    assert model.template is not None
    text = model.template.render([{"role": "system", "content": "be brief"}, user()])
    assert text == "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhi [/INST]"
    bos = token_id(model, "<s>")
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == bos and ids.count(bos) == 1
    assert model.tokenizer.encode(text, add_special_tokens=True).count(bos) == 2  # what would go wrong


def test_a27_a_qwen_style_prompt_has_no_bos(tmp_path: Path) -> None:
    config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": QWEN}
    model = load_text(saved(with_bos(byte_level()), tmp_path, config))
    assert model.template is not None
    ids = model.tokenizer.encode(model.template.render([user()]), add_special_tokens=False)
    assert ids.count(token_id(model, "<s>")) == 0
    assert ids.count(token_id(model, "<|im_end|>")) == 1


def test_a27_the_fake_model_writes_one_bos() -> None:
    model = fake_text()
    assert model.template is not None
    text = model.template.render([{"role": "system", "content": "s"}, user()])
    assert text == "<|bos|><|system|>\ns\n<|user|>\nhi\n<|assistant|>\n"
    assert model.tokenizer.encode(text, add_special_tokens=False).count(256) == 1


# -- mistakes


def failure(source: str, messages: list[Message]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        made(source).render(messages)
    return caught.value


def test_a27_two_user_messages_in_a_row_are_a_400_with_the_templates_own_words() -> None:
    error = failure(LLAMA, [user(), user()])
    assert error.message == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert (error.http_status, error.code, error.param) == (400, "chat_template_error", "messages")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[7].content.x }}", "has no element 7"),
        ("{{ messages[0].nothing + 'x' }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ undefined_name | tojson }}", "Undefined is not JSON serializable"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a27_any_failure_of_a_template_is_a_400(source: str, words: str) -> None:
    error = failure(source, [user()])
    assert (error.http_status, error.code) == (400, "chat_template_error")
    assert words in error.message


def test_a_giant_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARS", 1000)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    assert "longer than 1000 characters" in failure(source, [user()]).message


def test_a_template_that_does_not_compile_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not compile"):
        made("{% if %}")
    saved(byte_level(), tmp_path, {"chat_template": "{{ unclosed"})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: the chat template does not compile"):
        load_text(tmp_path)


# -- messages


def test_a27_empty_and_null_tool_calls_are_removed() -> None:
    source = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else 'none' }}{% endfor %}"
    values: tuple[object, ...] = ([], None)
    for value in values:
        assert made(source).render([user(), {"role": "assistant", "content": "x", "tool_calls": value}]) == "nonenone"


def test_null_fields_are_absent() -> None:
    source = "{% for m in messages %}{{ m.keys() | sort | join(',') }}{% endfor %}"
    message: Message = {"role": "user", "content": "x", "name": None, "refusal": None, "reasoning": None}
    assert made(source).render([message]) == "content,role"


def test_a27_null_content_beside_tool_calls_is_what_each_template_can_render() -> None:
    messages: list[Message] = [user(), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert made(QWEN).render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": "é<b>"}}\n</tool_call><|im_end|>\n'
    )
    assert made(CHATML).render(messages) == "<|user|>hi<|assistant|><|a|>"
    assert made(LLAMA).render(messages) == "<s>[INST] hi [/INST]  </s>"
    assert made(DEEPSEEK).render(messages) == '<U>hi<C>f```{"x": "é<b>"}```'


def test_arguments_that_are_not_a_json_object_stay_text() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{{ a is mapping }} {{ a | tojson }} {% endfor %}{% endfor %}"
    )
    for text, shown in (('{"a": 1}', 'True {"a": 1} '), ("[1]", 'False "[1]" '), ("{bad", 'False "{bad" ')):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        assert made(source).render([user(), {"role": "assistant", "tool_calls": [call]}]) == shown


def test_the_callers_messages_are_not_changed() -> None:
    messages: list[Message] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}], "tool_calls": [CALL]},
        user(),
    ]
    before = json.dumps(messages)
    made(CHATML).render(messages)
    made(CHATML).render([{"role": "assistant", "content": "a"}], continue_final_message=True)
    assert json.dumps(messages) == before


def test_roles_that_a_template_does_not_know_are_mapped() -> None:
    messages: list[Message] = [{"role": "developer", "content": "d"}, {"role": "function", "name": "f", "content": "r"}]
    assert made(CHATML).render(messages) == "<|system|>d<|tool|>r<|a|>"
    # Only code counts: neither a comment nor the template's own text makes a role.
    assert made("{# developer #}a developer's chat" + CHATML).render(messages).endswith("<|system|>d<|tool|>r<|a|>")
    own = "{% for m in messages %}{% if m.role == 'developer' %}[DEV {{ m.content }}]{% endif %}{% endfor %}"
    assert made(own).render(messages) == "[DEV d]"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_passed_under_both_names(name: str) -> None:
    source = "{% for m in messages %}{{ m.reasoning }}{{ m.reasoning_content }}{% endfor %}"
    assert made(source).render([{"role": "assistant", "content": "x", name: "think"}]) == "thinkthink"


PARTS = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "text", "text": "c"}]


@pytest.mark.parametrize(
    ("source", "iterates", "parts", "string"),
    [
        (CHATML, False, "<|user|>abc<|a|>", "<|user|>hi<|a|>"),
        (QWEN, False, "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n", None),
        (LLAMA, False, "<s>[INST] abc [/INST]", None),
        (PARTS_AND_STRINGS, True, "<user>[a][b][c]", "<user>hi"),
        (PARTS_ONLY, True, "<user>[a][b][c]", "<user>[hi]"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False, '"abc"', '"hi"'),
        ("{{ messages[1].content }}", False, None, None),
        ("{{ raise_exception('never') }}", False, None, None),
    ],
)
def test_text_parts_are_joined_unless_the_template_iterates_them(
    source: str, iterates: bool, parts: str | None, string: str | None
) -> None:
    template = made(source)
    assert template.iterates_parts is iterates
    if parts is not None:
        assert template.render([user(PARTS)]) == parts
    if string is not None:
        assert template.render([user()]) == string


@pytest.mark.parametrize("source", [CHATML, PARTS_ONLY])
def test_other_content_parts_are_refused_with_their_place(source: str) -> None:
    error = failure(
        source, [user(), user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])]
    )
    assert (error.code, error.param) == ("unsupported_content_part", "messages[1].content[1]")
    assert "'image_url'" in error.message


# -- variables and environment


def test_variables_reach_the_template_but_cannot_replace_the_chat() -> None:
    source = "{{ messages[0].content }} {{ tools }} {{ add_generation_prompt }} {{ enable_thinking }} {{ documents }}"
    forged = {"messages": [], "tools": ["forged"], "add_generation_prompt": False, "enable_thinking": True}
    assert made(source).render([user()], variables=forged) == "hi None True True None"
    assert made(source).render([user()], documents=[{"text": "d"}], tools=[]) == "hi None True  [{'text': 'd'}]"
    assert made(source).render([user()], variables={"documents": ["v"]}) == "hi None True  ['v']"


def test_tools_are_rendered_as_json_without_html_escapes() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é <b> 'x' & y"}}
    text = made(QWEN).render([user()], tools=[tool])
    assert text.startswith(f"<|im_start|>system\n# Tools\n\n{json.dumps(tool, ensure_ascii=False)}<|im_end|>\n")
    source = (
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}"
        "{{ tools[0] | tojson(ensure_ascii=True) }}"
    )
    expected = json.dumps([tool], indent=2, ensure_ascii=False)
    expected += json.dumps([tool], separators=(",", ":"), sort_keys=True, ensure_ascii=False) + json.dumps(tool)
    assert made(source).render([user()], tools=[tool]) == expected


def test_environment_is_that_of_hugging_face() -> None:
    source = """{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
{% generation %}
{% set inner = 'x' %}
{{ message.content }}{{ inner }}
{% endgeneration %}
{{- inner }}
{% break %}
{% endfor %}
{{ strftime_now('%Y') }}{{ missing }}"""
    messages: list[Message] = [{"role": "system", "content": "s"}, user(), user("never")]
    assert made(source).render(messages) == f"hix\n\n{datetime.now().year}"


def test_special_tokens_are_variables() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}"
    assert made(source, bos_token="<s>", eos_token="</s>", pad_token="<p>").render([user()]) == "<s>|</s>|<p>|"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (CHATML, "The answer ", "<|user|>hi<|assistant|>The answer "),
        (CHATML, [{"type": "text", "text": "The "}, {"type": "text", "text": "end"}], "<|user|>hi<|assistant|>The end"),
        (LLAMA, " The answer ", "<s>[INST] hi [/INST] The answer "),
        (PARTS_ONLY, "The end", "<user>[hi]<assistant>[The end"),
        (PARTS_AND_STRINGS, [{"type": "text", "text": "The end"}], "<user>hi<assistant>[The end"),
    ],
)
def test_the_final_message_is_continued(source: str, content: object, expected: str) -> None:
    messages: list[Message] = [user(), {"role": "assistant", "content": content}]
    assert made(source).render(messages, continue_final_message=True) == expected


def test_a_final_message_that_cannot_be_continued_is_a_400() -> None:
    for source, last in ((CHATML, {"role": "assistant", "content": None}), ("{{ messages[0].content }}", user())):
        with pytest.raises(InvalidRequest, match="continue_final_message") as caught:
            made(source).render([user(), last], continue_final_message=True)
        assert caught.value.code == "chat_template_error"
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        made(CHATML).render([], continue_final_message=True)


def test_a_template_renders_in_many_threads_at_once() -> None:
    template = made(CHATML)
    results: list[bool] = []

    def render(name: str) -> None:
        results.extend(template.render([user(name)] * 20) == f"<|user|>{name}" * 20 + "<|a|>" for _ in range(50))

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200


# -- folders


def rendered(folder: Path, given: Path | None = None) -> str | None:
    template = load_text(folder, given).template
    return None if template is None else template.render([user()])


def test_template_is_taken_from_the_file_given_then_the_jinja_file_then_the_configuration(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path)
    assert rendered(tmp_path) is None
    saved(byte_level(), tmp_path, {"chat_template": "config {{ bos_token }}", "bos_token": "<s>"})
    assert rendered(tmp_path) == "config <s>"
    (tmp_path / "chat_template.jinja").write_text("é jinja", encoding="utf-8")
    assert rendered(tmp_path) == "é jinja"
    (tmp_path / "mine").write_text("mine")
    assert rendered(tmp_path, tmp_path / "mine") == "mine"


def test_a_list_of_named_templates_gives_the_default(tmp_path: Path) -> None:
    tools = {"name": "tool_use", "template": "tools"}
    saved(byte_level(), tmp_path, {"chat_template": [tools, {"name": "default", "template": "plain"}]})
    assert rendered(tmp_path) == "plain"
    saved(byte_level(), tmp_path, {"chat_template": [tools]})
    assert rendered(tmp_path) == "tools"
    saved(byte_level(), tmp_path, {"chat_template": [tools, {"name": "rag", "template": "rag"}]})
    with pytest.raises(ModelLoadError, match="holds rag, tool_use, but none is named default"):
        load_text(tmp_path)


def test_unreadable_templates_are_load_errors_that_name_the_file(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path, {"chat_template": 7})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template must be"):
        load_text(tmp_path)
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_text(tmp_path, tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ModelLoadError, match="latin"):
        load_text(tmp_path, tmp_path / "latin")
