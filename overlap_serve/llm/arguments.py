"""Arguments of `LLM`, as the bodies that the HTTP API would take: one validation and one meaning of every field.

Owns the shapes that Python callers use. Checks only what JSON cannot say; values are judged where those of HTTP requests are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from overlap_serve.config import ServeConfig, parse_config
from overlap_serve.errors import ConfigError, InvalidRequest

Fields = Mapping[str, object]
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, object]]

# Fields of ServeConfig that only a server has a use for. As arguments of LLM they are refused; a whole ServeConfig may hold them.
SERVER_ONLY = frozenset(
    {
        "served_model_name",
        "tensor_parallel_size",
        "placement_strategy",
        "rank_timeout",
        "scheduler_replicas",
        "ingress_replicas",
        "detokenizer_replicas",
        "api_keys",
        "admin_api_keys",
        "api_keys_file",
        "admin_api_keys_file",
        "protect_metrics",
        "metrics_compat",
        "strict_fields",
        "max_body_bytes",
        "sse_ping_s",
        "slow_client_timeout",
        "stream_interval_ms",
        "health_generate",
        "profile_dir",
        "ready_stall_s",
        "live_stall_s",
        "drain_timeout",
    }
)
# Fields of a request body that shape the HTTP answer, or that are arguments of their own here.
NOT_SAMPLING = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "echo", "return_token_ids", "request_id", "rid", "user"}
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What to ask of the sampler, by the names of the OpenAI API and its usual extensions. None: the API's default, which for
    temperature, top_p, top_k, min_p and repetition_penalty is the model's own (generation_config.json).

    max_tokens: default 16 for `generate`, as much as fits for `chat`. seed: without one, every prompt gets its own at random.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report for each generated or prompt token.
    timeout_s: seconds from the call; what is not ready then ends with finish_reason `abort`.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None

    def fields(self) -> dict[str, object]:
        """Those that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


Sampling = SamplingParams | Fields | None


def offline_config(model: str | ServeConfig, fields: Fields) -> ServeConfig:
    if isinstance(model, ServeConfig):
        if fields:
            raise ConfigError(f"{', '.join(sorted(fields))}: set them in the ServeConfig that was given")
        return model
    if useless := sorted(SERVER_ONLY.intersection(fields)):
        raise ConfigError(f"{', '.join(useless)}: only a server has a use for that; leave it out")
    return parse_config({"model": model, **fields})


def prompt_items(prompts: object) -> list[object]:
    """A list of texts and lists of ids."""
    if isinstance(prompts, str):
        return [prompts]
    items = _list(prompts, "prompts must be a text, token ids, or a list of either")
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return [
        item if isinstance(item, str) else _list(item, f"prompts[{i}] must be a text or a list of token ids")
        for i, item in enumerate(items)
    ]


def conversation_items(messages: object) -> list[list[object]]:
    items = _list(messages, "messages must be a list of messages, or a list of such lists")
    if items and all(isinstance(item, Mapping) for item in items):
        return [conversation_item(items, "messages")]
    return [conversation_item(item, f"messages[{i}]") for i, item in enumerate(items)]


def conversation_item(messages: object, name: str) -> list[object]:
    return [
        dict(message) if isinstance(message, Mapping) else message
        for message in _list(messages, f'{name} must be a list of {{"role": ..., "content": ...}}')
    ]


def check_text(body: Fields) -> None:
    """Python's strings can hold what no JSON body can. Raises InvalidRequest."""
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds half of a surrogate pair; it cannot be encoded") from None
    except TypeError:
        return  # a value of a strange type, which the checks of its field refuse


def _list(value: object, otherwise: str) -> list[object]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    raise InvalidRequest(f"{otherwise}, not {type(value).__name__}", code="invalid_type")


def sampling_fields(sampling: object, count: int) -> list[dict[str, object]]:
    """The fields of each of `count` requests."""
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return [_fields(sampling)] * count
    items = _list(
        sampling, "sampling must be SamplingParams, a dict, None, or a list with one of these for each prompt"
    )
    if len(items) != count:
        raise InvalidRequest(
            f"sampling has {len(items)} entries for {count} prompts; give one for all, or one for each",
            param="sampling",
        )
    return [_fields(item) for item in items]


def _fields(sampling: object) -> dict[str, object]:
    """As in a JSON body."""
    if isinstance(sampling, SamplingParams):
        sampling = sampling.fields()
    if sampling is None:
        return {}
    if not isinstance(sampling, Mapping):
        raise InvalidRequest(
            f"sampling must be SamplingParams or a dict, not {type(sampling).__name__}", param="sampling"
        )
    if wrong := sorted(NOT_SAMPLING.intersection(sampling)):
        raise InvalidRequest(
            f"{', '.join(wrong)}: not a sampling parameter", code="unsupported_parameter", param=wrong[0]
        )
    return {str(name): _plain(value) for name, value in sampling.items()}


def _plain(value: object) -> object:
    """A Python value as JSON would hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | range):
        return list(value)
    return value


def chat_fields(fields: dict[str, object]) -> dict[str, object]:
    """The chat API writes `logprobs: 3` in two fields."""
    count = fields.get("logprobs")
    if isinstance(count, int) and not isinstance(count, bool):
        return {**fields, "logprobs": True, "top_logprobs": count}
    return fields
