"""Types of request fields, and the facts that their checks need.

Strict as http-api section 2.1 says: an integer-valued float passes as an integer, an integer as a number, a boolean never as
a number, and a string as nothing but a string. Every object of a request is a `JsonObject`, which is strict; the types are what
pydantic's own strictness does not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from overlap_serve.config import GenerationDefaults, ServeConfig
from overlap_serve.openai.problems import fault, json_type, shown, wrong_type
from overlap_serve.sampling import EXCLUDES_LOW, LIMITS, MAX_LOGIT_BIAS

MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class RequestFacts:
    """What the checks need of the model that is served.

    vocab_size: rows of the output head. num_token_ids: length of the tokenizer, which may be less (padding) or more.
    special_token_ids: text of a special token -> its id.
    """

    model_name: str
    vocab_size: int
    num_token_ids: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    special_token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def id_limit(self) -> int:
        """Ids in [0, id_limit) have both a row in the model and a text."""
        return min(self.vocab_size, self.num_token_ids)


@dataclass(frozen=True)
class Context:
    """Handed to every validator. ignored: names to report, see `ignored.py`. echo: the prompt is asked for, so an answer may be empty."""

    config: ServeConfig
    facts: RequestFacts
    ignored: tuple[str, ...]
    echo: bool = False


def context_of(info: ValidationInfo) -> Context:
    assert isinstance(info.context, Context)
    return info.context


def whole(value: object) -> object:
    """1.0 -> 1; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class JsonObject(BaseModel):
    """An object of a request: strict types, frozen, unknown keys pass (they are reported), null means absent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class ServedRequest(JsonObject):
    """A request to a model of this server."""

    model: str = Field(default="", validate_default=True)

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    def model_post_init(self, context: object) -> None:
        assert isinstance(context, Context)
        self._ignored = context.ignored

    @field_validator("model")
    @classmethod
    def _served(cls, value: str, info: ValidationInfo) -> str:
        name = context_of(info).facts.model_name
        if value not in ("", name):
            raise fault("model_not_found", f"{shown(value)} does not exist; this server has {shown(name)}")
        return name

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Inert and unknown fields that came with a value, safe for the header `x-ignored-fields`."""
        return self._ignored


Whole = BeforeValidator(whole)
Limit = Annotated[int, Field(ge=1), Whole]
LimitOrZero = Annotated[int, Field(ge=0), Whole]  # 0: generate nothing
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), Whole]
Number = Annotated[float, Field(allow_inf_nan=False)]


def within(name: str) -> Any:
    """Bounds of a sampling parameter, from the table that `SamplingParams` checks too."""
    low, high = LIMITS[name]
    if name in EXCLUDES_LOW:
        return Field(gt=low, le=high, allow_inf_nan=False)
    return Field(ge=low, le=high, allow_inf_nan=False)


def only(*nothing: object, instead: str = "") -> AfterValidator:
    """A field of a feature that this version lacks: values in `nothing` ask for nothing and pass."""
    hint = f"; {instead}" if instead else ""

    def check(value: object) -> object:
        if any(value == harmless for harmless in nothing):
            return value
        raise fault("unsupported_parameter", f"is not supported by this version{hint}")

    return AfterValidator(check)


Rejected = Annotated[object, only()]


def _plain_text_format(value: dict[str, object]) -> dict[str, object]:
    if value.get("type") == "text":
        return value
    raise fault("unsupported_parameter", 'is not supported by this version, except {"type": "text"}')


def _no_constraint(value: dict[str, object]) -> dict[str, object]:
    if all(item is None for item in value.values()):
        return value
    raise fault("unsupported_parameter", "is not supported by this version")


def _text_only(value: list[object]) -> list[object]:
    if all(item == "text" for item in value):
        return value
    raise fault("unsupported_parameter", 'is not supported, except ["text"]')


ResponseFormat = Annotated[dict[str, object], AfterValidator(_plain_text_format)]
StructuredOutputs = Annotated[dict[str, object], AfterValidator(_no_constraint)]
Modalities = Annotated[list[object], AfterValidator(_text_only)]


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise wrong_type("a string or an array of strings", value)
    if len(strings) > MAX_STOPS:
        raise fault("array_above_max_length", f"has {len(strings)} strings, allowed are at most {MAX_STOPS}")
    for position, string in enumerate(strings):
        if not isinstance(string, str):
            raise fault("invalid_type", f"must hold strings, item {position} is {json_type(string)}")
        if string == "":
            raise fault("invalid_value", f"must not hold empty strings, item {position} is one; leave it out")
        if len(string) > MAX_STOP_CHARS:
            raise fault(
                "string_above_max_length",
                f"has {len(string)} characters in item {position}, allowed are at most {MAX_STOP_CHARS}",
            )
    return tuple(strings)


def checked_token_ids(value: list[object], limit: int, where: str = "") -> tuple[int, ...]:
    """Checks at C speed: a prompt may have half a million ids. where: ` of prompt 3`, for the message."""
    ids = value if {int}.issuperset(map(type, value)) else [whole(item) for item in value]
    for position, item in enumerate(() if ids is value else ids):
        if type(item) is not int:
            raise fault("invalid_type", f"must hold token ids, item {position}{where} is {json_type(item)}")
    checked: list[int] = ids  # type: ignore[assignment]  # all are int by now
    if checked and (min(checked) < 0 or max(checked) >= limit):
        position, item = next((p, i) for p, i in enumerate(checked) if not 0 <= i < limit)
        raise fault(
            "invalid_token_id",
            f"holds {shown(item)} at item {position}{where}, this model's token ids are 0 to {limit - 1}",
        )
    return tuple(checked)


def _stop_token_ids(value: object, info: ValidationInfo) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type("an array of token ids", value)
    return checked_token_ids(value, context_of(info).facts.id_limit)


def _logit_bias(value: object, info: ValidationInfo) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong_type("an object of token id to bias", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise fault("array_above_max_length", f"has {len(value)} entries, allowed are at most {MAX_LOGIT_BIAS}")
    limit = context_of(info).facts.id_limit
    return {_bias_key(key, limit): _bias(key, bias) for key, bias in value.items()}


def _bias_key(key: str, limit: int) -> int:
    if _DECIMAL.fullmatch(key) is None or int(key) >= limit:
        raise fault(
            "invalid_token_id",
            f"has the key {shown(key)}, keys are this model's token ids in decimal, 0 to {limit - 1}",
        )
    return int(key)


def _bias(key: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)):
        raise fault("invalid_type", f"must hold numbers, the bias of token {key} is {json_type(bias)}")
    low, high = LIMITS["logit_bias"]
    if low <= bias <= high:
        return float(bias)
    side = "decimal_below_min_value" if bias < low else "decimal_above_max_value"
    raise fault(side, f"has {shown(bias)} for token {key}, allowed are {low:g} to {high:g}")


def _prompts(value: object, info: ValidationInfo) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, ids, or lists of ids -> prompts. Mixed arrays are refused."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list):
        raise wrong_type("a string or an array", value)
    if not value:
        raise fault("empty_prompt", "is empty; send some text")
    limit = context_of(info).facts.id_limit
    kinds = set(map(type, value))
    if kinds <= {int, float}:
        return (checked_token_ids(value, limit),)
    if kinds not in ({str}, {list}):
        raise fault("invalid_type", "must hold only strings, only token ids, or only arrays of token ids")
    if len(value) > MAX_PROMPTS:
        raise fault("array_above_max_length", f"has {len(value)} prompts, allowed are at most {MAX_PROMPTS}")
    if kinds == {str}:
        return tuple(_text_prompt(text, f"item {position} ") for position, text in enumerate(value))
    return tuple(_id_prompt(ids, limit, position) for position, ids in enumerate(value))


def _text_prompt(text: str, which: str = "") -> str:
    if text == "":
        raise fault("empty_prompt", f"{which}is empty; send some text")
    return text


def _id_prompt(ids: list[object], limit: int, position: int) -> tuple[int, ...]:
    if not ids:
        raise fault("empty_prompt", f"item {position} is empty; send some token ids")
    return checked_token_ids(ids, limit, f" of prompt {position}")


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS_SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 1}}

StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_stop_strings),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {**_STRINGS_SCHEMA, "maxItems": MAX_STOPS}]}),
]
StopTokenIds = Annotated[tuple[int, ...], PlainValidator(_stop_token_ids), WithJsonSchema(_IDS_SCHEMA)]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "maxProperties": MAX_LOGIT_BIAS, "additionalProperties": {"type": "number"}}),
]
Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {**_STRINGS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
                {**_IDS_SCHEMA, "minItems": 1},
                {"type": "array", "items": {**_IDS_SCHEMA, "minItems": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
