"""What a checked request asks of sampler, detokenizer and template."""

from __future__ import annotations

import pytest

from overlap_serve.errors import InvalidRequest
from tests.openai.common import FACTS, USER, chat, completion, refused_chat


def test_defaults_come_from_the_models_generation_config() -> None:
    params = chat().sampling(10, 3, FACTS)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (params.max_tokens, params.seed, params.min_p, params.eos_token_ids) == (10, 3, 0.0, (2, 7))


def test_a_requests_own_values_win_even_when_they_are_zero() -> None:
    request = chat(
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0.5,
        repetition_penalty=1,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=0,
        min_tokens=2,
        logit_bias={"5": 1},
        stop_token_ids=[9],
        ignore_eos=True,
    )
    params = request.sampling(10, 3, FACTS)
    assert params.greedy and params.ignore_eos
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 0, 0.5, 1.0)
    assert (params.presence_penalty, params.frequency_penalty, params.seed, params.min_tokens) == (1.0, -1.0, 0, 2)
    assert (params.logit_bias, params.stop_token_ids) == ({5: 1.0}, (9,))
    assert params.end_token_ids() == (9,)


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (1, 1), (10**9, 1000)])
def test_top_k_is_off_below_one_and_capped_at_the_vocabulary(given: int, used: int) -> None:
    assert chat(top_k=given).sampling(1, 0, FACTS).top_k == used


def test_min_tokens_beyond_what_fits_is_refused_when_the_prompt_is_known() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(min_tokens=11).sampling(10, 0, FACTS)
    assert (caught.value.code, caught.value.param) == ("integer_above_max_value", "min_tokens")


def test_a_stop_string_that_is_a_special_token_also_stops_by_id() -> None:
    request = completion(stop=["a", "<|sep|>", "<|sep|>x"], stop_token_ids=[5, 5])
    assert request.sampling(10, 0, FACTS).stop_token_ids == (5, 8)
    text = request.text_params(FACTS)
    assert (text.stop, text.stop_token_ids) == (("a", "<|sep|>", "<|sep|>x"), (5, 8))
    assert request.stop_token_strings(FACTS) == {8: "<|sep|>"}
    # Asked for by id as well: the id is the reason that the client knows.
    assert completion(stop="<|sep|>", stop_token_ids=[8]).stop_token_strings(FACTS) == {}


def test_text_params() -> None:
    text = chat(min_tokens=3, no_stop_trim=True, skip_special_tokens=False).text_params(FACTS)
    assert (text.min_tokens, text.include_stop_str_in_output, text.skip_special_tokens) == (3, True, False)
    assert text.eos_token_ids == (2, 7)
    assert chat(ignore_eos=True).text_params(FACTS).eos_token_ids == ()


def test_template_variables() -> None:
    assert chat().template_kwargs() == {}
    assert chat(reasoning_effort="low").template_kwargs() == {"reasoning_effort": "low"}
    assert chat(reasoning_effort="none").template_kwargs() == {"reasoning_effort": "none", "enable_thinking": False}
    assert chat(reasoning_effort="none", enable_thinking=True).template_kwargs()["enable_thinking"] is True
    request = chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False, "x": 1}, documents=[{"a": 1}])
    assert request.template_kwargs() == {"enable_thinking": False, "x": 1, "documents": [{"a": 1}]}


def test_the_template_opens_a_turn_unless_told_otherwise() -> None:
    assistant = {"role": "assistant", "content": "so"}
    assert chat().generation_prompt
    assert not chat(add_generation_prompt=False).generation_prompt
    assert not chat(messages=[USER, assistant], continue_final_message=True).generation_prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "so"}], "add_generation_prompt": True},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]},
            ]
        },
    ],
)
def test_only_a_final_assistant_text_can_be_continued(fields: dict[str, object]) -> None:
    error = refused_chat(continue_final_message=True, **fields)
    assert (error.code, error.param) == ("invalid_value", "continue_final_message")
