"""Chat templates: messages to the text of a prompt, in a sandbox, as Hugging Face defines them. And `TextModel`.

Owns the differences between what the API takes (OpenAI messages) and what templates expect; they are found once, by trial
renderings when the template is made (`_Dialect`). Knows no tokens: the template writes bos itself, so rendered text is tokenized without
adding special tokens. Templates are the model's own and trusted to end; messages are not trusted at all: whatever goes wrong
while rendering is the request's error, with the template's own words.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from overlap_serve.errors import InvalidRequest, ModelLoadError
from overlap_serve.text.tokenizer import Tokenizer, read_json

Message = dict[str, object]

MAX_RENDERED_CHARS = 64 * 1024 * 1024  # twice the default body limit

# Quotes and backslashes: a list that is printed instead of iterated shows them escaped.
_PROBE = "probe \\ \" ' text"
_PROBE_FUNCTION = "probe_function"
# Appended to a message to be continued; trailing space shows whether the template strips (as in transformers).
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_ABSENT = object()

FAKE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class ChatTemplate:
    """A compiled template; immutable and thread-safe.

    iterates_parts: the template reads content as a list of parts; otherwise `render` joins text parts without a separator.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: variables such as `bos_token`. Raises ModelLoadError if the source does not compile."""
        environment = _environment()
        try:
            self._has_developer = _compares_with(environment.parse(source), "developer")
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._dialect = _find_dialect(self._try)
        self.iterates_parts = self._dialect.iterates_parts

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. continue_final_message: it ends inside the last message, and no generation prompt is added.

        variables cannot override messages, tools and add_generation_prompt. Takes as long as the template does: the caller limits
        time. Raises InvalidRequest: `chat_template_error` with the template's message, or `unsupported_content_part`.
        """
        chat = [self._normalize(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            _tag_last_text(chat)
        values: dict[str, object] = {"documents": None, **self._special_tokens, **(variables or {})}
        if documents is not None:
            values["documents"] = list(documents)
        values["messages"] = chat
        values["tools"] = list(tools) if tools else None
        values["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            text = self._run(values)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is code over a client's data: anything can come out of it
            raise _template_error(str(error) or type(error).__name__) from None
        return _cut_at_tag(text) if continue_final_message else text

    def _run(self, values: Mapping[str, object]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(values):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise _template_error(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _try(self, chat: list[Message]) -> str | None:
        values = {
            **self._special_tokens,
            "messages": chat,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._run(values)
        except Exception:  # a trial: the answer is that this form does not render
            return None

    def _normalize(self, index: int, message: Mapping[str, object]) -> Message:
        """A message as this template expects it. Absent and null are the same, except for content."""
        out = {key: value for key, value in message.items() if value is not None and key != "content"}
        if out.get("role") == "function":
            out["role"] = "tool"
        elif out.get("role") == "developer" and not self._has_developer:
            out["role"] = "system"
        if out.get("tool_calls") == []:
            del out["tool_calls"]
        if "tool_calls" in out:
            out["tool_calls"] = _map_arguments(out["tool_calls"], self._dialect.parse_arguments)
        reasoning = out.get("reasoning_content", out.get("reasoning"))
        if reasoning is not None:
            out["reasoning_content"] = out["reasoning"] = reasoning
        content = self._content(f"messages[{index}].content", message.get("content"))
        if content is not _ABSENT:
            out["content"] = content
        return out

    def _content(self, path: str, content: object) -> object:
        if content is None:
            return self._dialect.null_content
        if isinstance(content, str):
            return [_text_part(content)] if self._dialect.only_parts else content
        if not isinstance(content, Sequence):
            raise InvalidRequest("content must be a string or a list of parts", code="invalid_type", param=path)
        texts = [_part_text(f"{path}[{i}]", part) for i, part in enumerate(content)]
        return [_text_part(text) for text in texts] if self.iterates_parts else "".join(texts)


@dataclass(frozen=True)
class _Dialect:
    """What a template expects where templates differ.

    only_parts: it cannot show a string as content. parse_arguments: the arguments of tool calls are mappings, not JSON text.
    null_content: what stands for the content of a message without text: None, "" or `_ABSENT`.
    """

    iterates_parts: bool
    only_parts: bool
    parse_arguments: bool
    null_content: object


def _find_dialect(render: Callable[[list[Message]], str | None]) -> _Dialect:
    """`render` gives None for a chat that the template refuses."""

    def shows(content: object) -> bool:
        user: Message = {"role": "user", "content": content}
        system: Message = {"role": "system", "content": content}
        return any(_PROBE in (render(chat) or "") for chat in ([user], [system, user]))

    iterates_parts = shows([_text_part(_PROBE)])
    only_parts = iterates_parts and not shows(_PROBE)
    user: Message = {"role": "user", "content": [_text_part(_PROBE)] if only_parts else _PROBE}
    fallback: _Dialect | None = None
    for parse, null in itertools.product((True, False), (None, _ABSENT, "")):
        call = _probe_call(parse)
        text = render([user, call if null is _ABSENT else {**call, "content": null}])
        if text is None or "None" in text:
            continue
        dialect = _Dialect(iterates_parts, only_parts, parse, null)
        if _PROBE_FUNCTION in text:
            return dialect
        fallback = fallback or dialect  # the call is lost: right only for a template that knows no tools
    return fallback or _Dialect(iterates_parts, only_parts, parse_arguments=True, null_content=_ABSENT)


def _probe_call(parsed: bool) -> Message:
    """An assistant's turn that only calls a function."""
    arguments: object = {"key": "value"} if parsed else '{"key": "value"}'
    function = {"name": _PROBE_FUNCTION, "arguments": arguments}
    # Nine letters and digits: the only ids that Mistral's templates take.
    return {"role": "assistant", "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": function}]}


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _part_text(path: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
    if not isinstance(text, str):
        message = f"content parts of type {kind!r} are not supported; this model takes text" if kind else "not a part"
        raise InvalidRequest(message, code="unsupported_content_part", param=path)
    return text


def _map_arguments(calls: object, parse: bool) -> object:
    """Tool calls with `arguments` that hold a JSON object as mappings; other strings stay. Calls of other shapes stay too."""
    if not parse or not isinstance(calls, Sequence) or isinstance(calls, str):
        return calls
    return [_map_call(call) for call in calls]


def _map_call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _tag_last_text(chat: list[Message]) -> None:
    """Mark the end of the message to be continued."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
    elif isinstance(content, list) and content:
        last: Message = content[-1]
        content[-1] = {**last, "text": f"{last['text']}{_CONTINUE_TAG}"}
    else:
        raise _template_error("continue_final_message needs a last message with text content")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.rstrip())
    if at < 0:
        raise _template_error("continue_final_message: the chat template does not show the last message as it is")
    kept_space = text.startswith(_CONTINUE_TAG, at)
    return text[:at] if kept_space else text[:at].rstrip()


def _template_error(text: str) -> InvalidRequest:
    return InvalidRequest(text, code="chat_template_error", param="messages")


# -- the Jinja environment of chat templates (transformers/utils/chat_template_utils.py)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _compares_with(template: nodes.Template, word: str) -> bool:
    """Does the template's code know this word as a string?"""
    return any(constant.value == word for constant in template.find_all(nodes.Const))


# -- what a model folder says about text


@dataclass(frozen=True)
class TextModel:
    """Tokenizer and chat template of a model; template None: the model has none (completions only)."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text(folder: Path, chat_template: Path | None = None) -> TextModel:
    """From a Hugging Face style folder. chat_template: a file that replaces the model's own. Raises ModelLoadError naming the file."""
    tokenizer = Tokenizer.from_folder(folder)
    found = _template_source(folder, chat_template)
    if found is None:
        return TextModel(tokenizer, None)
    path, source = found
    try:
        return TextModel(tokenizer, ChatTemplate(source, tokenizer.special_tokens))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error.message}") from None


def fake_text() -> TextModel:
    """Text of `engine: fake`: bytes, and a template that begins with bos."""
    tokenizer = Tokenizer.bytes()
    return TextModel(tokenizer, ChatTemplate(FAKE_TEMPLATE, tokenizer.special_tokens))


def _template_source(folder: Path, given: Path | None) -> tuple[Path, str] | None:
    if given is not None:
        return given, _read_text(given)
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own, _read_text(own)
    config = folder / "tokenizer_config.json"
    template = read_json(config).get("chat_template")
    if isinstance(template, list):
        template = _default_template(config, template)
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{config}: chat_template must be a string or a list of named templates")
    return None if template is None else (config, template)


def _default_template(path: Path, entries: list[object]) -> object:
    """Of [{"name", "template"}, ...]: the one named default, or the only one."""
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, Mapping)}
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    names = ", ".join(sorted(str(name) for name in named))
    raise ModelLoadError(f"{path}: chat_template holds {names or 'no template'}, but none is named default")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot read the chat template: {error}") from None
