"""What a request asks of the sampler, and why a request can end. Wire types: they travel in `GenerateRequest` and `Join`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from overlap_serve.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
AbortCause = Literal["client", "api", "deadline", "shutdown", "stop"]

GREEDY_BELOW = 1e-5  # temperatures under this are argmax


class Range(NamedTuple):
    """Closed interval of allowed values."""

    low: float
    high: float


# One table for HTTP validation and for offline use (http-api section 2.1). top_p and repetition_penalty exclude their low end.
LIMITS: dict[str, Range] = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 2.0),
    "logit_bias": Range(-100.0, 100.0),
}
EXCLUDES_LOW = frozenset({"top_p", "repetition_penalty"})
MAX_LOGIT_BIAS = 1024


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the raw model distribution, and of the `top` likeliest (id, logprob), falling.

    Natural logs; -inf and NaN are -9999.0 already. For the first prompt token, which nothing predicts, logprob is None.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Checked parameters of one choice.

    max_tokens: upper bound of generated tokens, >= 1, already clamped to what model and KV cache allow.
    top_k: 0 = off. seed: always set (the ingress draws one when the client brings none); noise is a pure function of
    (seed, choice index, absolute token position).
    stop_token_ids end with `stop_reason` = the id; eos_token_ids with `stop_reason` null. Both are masked while fewer than
    min_tokens tokens exist; `ignore_eos` disables eos_token_ids only.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report beside each generated or prompt token; -1: report nothing.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            values = self.logit_bias.values() if name == "logit_bias" else (getattr(self, name),)
            for value in values:
                if not (low <= value <= high) or (name in EXCLUDES_LOW and value == low):
                    raise InvalidRequest(f"{name} is {value}, allowed is {low}..{high}", param=name)
        if self.max_tokens < 1 or self.min_tokens < 0 or self.min_tokens > self.max_tokens or self.top_k < 0:
            raise InvalidRequest(
                f"max_tokens {self.max_tokens}, min_tokens {self.min_tokens}, top_k {self.top_k}: "
                "needs max_tokens >= 1, 0 <= min_tokens <= max_tokens, top_k >= 0",
                param="max_tokens",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that ends this request: stop ids, and end ids unless `ignore_eos`."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How generated ids become text (http-api sections 5 and 6); only the detokenizer reads it.

    min_tokens: no stop string may start before the text offset reached after this many tokens.
    stop_token_ids, eos_token_ids: the last token of a choice that ended with `stop`; its text is cut even when special tokens are
    shown, unless `include_stop_str_in_output`.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
