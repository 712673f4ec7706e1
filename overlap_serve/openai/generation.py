"""What chat and text completions have in common: length, sampling, stops, labels; and what it means to sampler and detokenizer.

Owns one field per shared row of http-api sections 2.1 and 8. Knows neither messages nor prompts. A check sees the fields
declared above its own, so their order matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AliasChoices, Field, ValidationInfo, field_validator

from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.fields import (
    JsonObject,
    Limit,
    LogitBias,
    Number,
    Rejected,
    RequestFacts,
    ResponseFormat,
    Seed,
    ServedRequest,
    StopStrings,
    StopTokenIds,
    StructuredOutputs,
    TopCount,
    Whole,
    context_of,
    only,
    within,
)
from overlap_serve.openai.problems import fault, shown
from overlap_serve.sampling import SamplingParams, TextParams

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_request_id(text: str) -> bool:
    """Whether a client's id is usable as a label (http-api section 1); others are replaced, not refused."""
    return _REQUEST_ID.fullmatch(text) is not None


class StreamOptions(JsonObject):
    """continuous_usage_stats has no effect without include_usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(ServedRequest):
    """What chat and text completions have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Limit = 1
    best_of: Limit | None = None

    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    min_tokens: Annotated[int, Field(ge=0), Whole] = 0
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1), Whole] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, within("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None

    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool = Field(
        default=False, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), Whole] = 0
    timeout_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    cache_salt: str = Field(
        default="", min_length=1, max_length=128, validation_alias=AliasChoices("cache_salt", "extra_key")
    )
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Whole] | None = None
    request_id: str | None = Field(default=None, validation_alias=AliasChoices("request_id", "rid"))
    user: str | None = Field(default=None, validation_alias=AliasChoices("user", "safety_identifier"))
    prompt_logprobs: TopCount | None = None

    # Features that this version lacks: only values that ask for nothing pass.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Rejected = None
    guided_regex: Rejected = None
    guided_choice: Rejected = None
    guided_grammar: Rejected = None
    regex: Rejected = None
    ebnf: Rejected = None
    lora_path: Rejected = None
    # Never supported.
    use_beam_search: Annotated[bool, only(False)] = False
    beam_width: Annotated[int, Whole, only(1)] = 1
    length_penalty: Annotated[Number, only(1.0)] = 1.0
    stop_regex: Rejected = None

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and info.data.get("stream") is False:
            raise fault("invalid_value", "is only allowed with stream: true")
        return value

    @field_validator("n")
    @classmethod
    def _at_most_max_n(cls, value: int, info: ValidationInfo) -> int:
        limit = context_of(info).config.max_n
        if value > limit:
            raise fault("integer_above_max_value", f"is {shown(value)}, must be at most {limit}")
        return value

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n", value):
            raise fault("unsupported_parameter", "is only supported equal to n; set n alone")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _below_limit(cls, value: int, info: ValidationInfo) -> int:
        known = {"max_completion_tokens", "max_tokens"} <= info.data.keys()  # else one is wrong, and reported
        limit = cls.limit_of(info.data) if known else None
        if limit is not None and value > limit:
            raise fault("integer_above_max_value", f"is {shown(value)}, must be at most max_tokens, {shown(limit)}")
        return value

    @field_validator("priority")
    @classmethod
    def _priority_is_on(cls, value: int, info: ValidationInfo) -> int:
        if value != 0 and not context_of(info).config.priority:
            raise fault(
                "unsupported_parameter", "must be 0: priorities are off on this server (its setting `priority`)"
            )
        return value

    @field_validator("timeout_s")
    @classmethod
    def _at_most_max_timeout(cls, value: float | None, info: ValidationInfo) -> float | None:
        limit = context_of(info).config.max_timeout
        if value is not None and value > limit:
            raise fault("decimal_above_max_value", f"is {value:g}, must be at most {limit:g}")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None, info: ValidationInfo) -> int | None:
        limit = context_of(info).facts.max_model_len
        if value == 0:
            raise fault("integer_below_min_value", "is 0, must be -1 (as much as fits) or at least 1")
        if value is not None and value > limit:
            raise fault("integer_above_max_value", f"is {shown(value)}, must be at most {limit}")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _not_in_a_stream(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream") is True:
            raise fault("invalid_value", "is not allowed with stream: true; ask without stream")
        return value

    @classmethod
    def limit_of(cls, fields: Mapping[str, object]) -> int | None:
        """The requested bound of generated tokens among checked fields, None for no bound."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = fields.get(name)
            if isinstance(value, int):
                return value
        return None

    @property
    def token_limit(self) -> int | None:
        """Requested bound of generated tokens, for `token_budget`; None for no bound."""
        return self.limit_of({"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens})

    @property
    def label(self) -> str | None:
        """The client's own id of the request: for logs and abort by id, never a key."""
        return self.request_id if self.request_id is not None and is_request_id(self.request_id) else None

    @property
    def num_logprobs(self) -> int:
        """Alternatives wanted beside each generated token; -1: no log-probabilities at all."""
        return -1

    @property
    def num_prompt_logprobs(self) -> int:
        """The same of the prompt's tokens."""
        return _first(self.prompt_logprobs, -1)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return (
            self.stream_options is not None
            and self.stream_options.include_usage
            and self.stream_options.continuous_usage_stats
        )

    def stop_token_strings(self, facts: RequestFacts) -> dict[int, str]:
        """Stop strings that are exactly one special token, by its id: their text is hidden, so the id must stop."""
        special = facts.special_token_ids
        found = {special[text]: text for text in self.stop if text in special}
        return {token_id: text for token_id, text in found.items() if token_id not in self.stop_token_ids}

    def sampling(self, max_tokens: int, seed: int, facts: RequestFacts) -> SamplingParams:
        """max_tokens: from `token_budget`. seed: used when the client brings none.

        Raises InvalidRequest when min_tokens exceeds max_tokens.
        """
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {shown(self.min_tokens)}, but this prompt leaves room for {max_tokens} tokens",
                code="integer_above_max_value",
                param="min_tokens",
            )
        defaults = facts.generation
        top_k = _first(self.top_k, defaults.top_k)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=_first(self.temperature, defaults.temperature),
            top_k=min(max(top_k, 0), facts.vocab_size),
            top_p=_first(self.top_p, defaults.top_p),
            min_p=_first(self.min_p, defaults.min_p),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=self.logit_bias,
            seed=_first(self.seed, seed),
            stop_token_ids=self._all_stop_token_ids(facts),
            eos_token_ids=facts.eos_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=min(self.num_logprobs, facts.vocab_size),
            prompt_logprobs=min(self.num_prompt_logprobs, facts.vocab_size),
        )

    def text_params(self, facts: RequestFacts) -> TextParams:
        # With ignore_eos an end token ends nothing, so its text is text like any other.
        return TextParams(
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self._all_stop_token_ids(facts),
            eos_token_ids=() if self.ignore_eos else facts.eos_token_ids,
        )

    def _all_stop_token_ids(self, facts: RequestFacts) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.stop_token_ids, *self.stop_token_strings(facts))))


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
