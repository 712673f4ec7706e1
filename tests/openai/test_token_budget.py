"""http-api section 2.3: the edges of P, M, C and the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_serve.errors import ContextLengthExceeded, InvalidRequest
from overlap_serve.openai.protocol import kept_prompt_tokens, token_budget

M = 100


def budget(
    prompt: int, limit: int | None, *, capacity: int = 1000, default: int | None = None, clamp: bool = False
) -> int:
    return token_budget(
        prompt,
        limit,
        max_model_len=M,
        capacity_tokens=capacity,
        default_max_tokens=default,
        clamp=clamp,
        param="messages",
    )


@pytest.mark.parametrize(
    ("prompt", "limit", "options", "expected"),
    [
        (1, None, {}, 99),
        (M - 1, None, {}, 1),
        (M - 1, 1, {}, 1),
        (10, 90, {}, 90),
        (10, 5, {}, 5),
        (10, 91, {"clamp": True}, 90),
        (10, 2**31, {"clamp": True}, 90),
        (10, None, {"default": 7}, 7),
        (10, None, {"default": 700}, 90),
        (10, 50, {"default": 7}, 50),  # the default is no bound for those who ask
        (10, None, {"capacity": 40}, 30),
        (10, 80, {"capacity": 40}, 30),  # ends with `length`
        (39, None, {"capacity": 40}, 1),
        (10, 91, {"capacity": 40, "clamp": True}, 30),
        (M - 1, None, {"capacity": M}, 1),
    ],
)
def test_effective_max_tokens(prompt: int, limit: int | None, options: dict[str, int], expected: int) -> None:
    assert budget(prompt, limit, **options) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "limit", "options"),
    [
        (M, None, {}),
        (M + 1, None, {}),
        (4 * M, 1, {}),
        (M, 1, {"clamp": True}),
        (M - 1, 2, {}),
        (10, 91, {}),
        (10, 2**31, {}),
        (40, None, {"capacity": 40}),
        (41, 1, {"capacity": 40}),
        (40, 1, {"capacity": 40, "clamp": True}),
        (1, None, {"capacity": 1}),
    ],
)
def test_a1_a2_what_can_never_run_is_refused_with_the_phrase_clients_map(
    prompt: int, limit: int | None, options: dict[str, int]
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        budget(prompt, limit, **options)  # type: ignore[arg-type]
    error = caught.value
    assert (error.http_status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"This model's maximum context length is {M} tokens" in error.message
    assert str(prompt) in error.message


def test_a_limit_that_does_not_fit_is_refused_with_all_three_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens.* 102 tokens: 33 .* 69 to generate.*at most 67"):
        budget(33, 69)


def test_a_prompt_without_tokens_is_empty() -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget(0, 5)
    assert caught.value.code == "empty_prompt"


@given(
    st.integers(0, 60),
    st.none() | st.integers(1, 60),
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    st.booleans(),
)
def test_whatever_is_accepted_fits_model_and_cache(
    prompt: int, limit: int | None, capacity: int, default: int | None, clamp: bool
) -> None:
    try:
        got = token_budget(
            prompt,
            limit,
            max_model_len=30,
            capacity_tokens=capacity,
            default_max_tokens=default,
            clamp=clamp,
            param="prompt",
        )
    except InvalidRequest:
        # At least one token would fit exactly when the prompt leaves room in both; then only the limit can be at fault.
        assert prompt == 0 or prompt >= min(30, capacity) or (limit is not None and prompt + limit > 30 and not clamp)
        return
    assert 1 <= got <= min(30, capacity) - prompt
    assert limit is None or got <= limit


@pytest.mark.parametrize(
    ("truncate", "limit", "capacity", "kept"),
    [(50, None, 1000, 50), (-1, None, 1000, 99), (-1, 20, 1000, 80), (-1, 20, 60, 40), (-1, 500, 1000, 1)],
)
def test_truncation_keeps_what_leaves_room_for_the_answer(
    truncate: int, limit: int | None, capacity: int, kept: int
) -> None:
    assert kept_prompt_tokens(truncate, limit, max_model_len=M, capacity_tokens=capacity) == kept
