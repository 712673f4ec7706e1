"""What a model folder says of its model: configuration, facts for the front, and where each checkpoint tensor belongs.

Imports no torch, because the ingress reads facts here. One family is a reader of its config.json and a table of weight rules;
the decoder is the same for all. Families differ in data, not in code.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from overlap_serve.config import GenerationDefaults, ModelFacts
from overlap_serve.errors import ModelLoadError

log = logging.getLogger(__name__)

T = TypeVar("T")


# -- configuration


class LinearRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="linear"):
    """All frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="llama3"):
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearRope | Llama3Rope


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder, fully described; the whole model, not one rank's part.

    head_dim H is not always hidden_size / num_heads. rope_scaling None: plain rotary embedding. attention_bias: q, k and v have
    biases; attention_out_bias: the output projection has one. eos_token_ids, bos_token_id: of config.json only, see `read_facts`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """K and V values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelLoadError that names file and key."""
    file = folder / "config.json"
    raw = _read(file)
    head = _decode(raw, _Head, file)
    for name in head.architectures:
        if name in _READERS:
            if head.quantization_config is not None:
                raise ModelLoadError(
                    f"{file}: quantization_config is set, but quantized checkpoints are not supported; use the original one"
                )
            return _READERS[name](raw, name, file)
    raise ModelLoadError(f"{file}: architectures is {head.architectures}, supported are {', '.join(sorted(_READERS))}")


Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Head(msgspec.Struct):
    architectures: list[str]
    quantization_config: dict[str, Any] | None = None


class _LlamaFile(msgspec.Struct):
    """config.json of the Llama family; the defaults are those of transformers' LlamaConfig."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def _read_llama(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = _decode(raw, _LlamaFile, file)
    if given.hidden_act != "silu":
        raise ModelLoadError(f"{file}: hidden_act is {given.hidden_act!r}, {architecture} supports silu")
    rope_theta, rope_scaling = _read_rope(given, file)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_dim=given.head_dim or _default_head_dim(given, file),
        intermediate_size=given.intermediate_size,
        max_position_embeddings=given.max_position_embeddings,
        rms_norm_eps=given.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=given.tie_word_embeddings,
        attention_bias=given.attention_bias,
        attention_out_bias=given.attention_bias,  # one switch for q, k, v and o in this family
        mlp_bias=given.mlp_bias,
        eos_token_ids=_ids(given.eos_token_id),
        bos_token_id=given.bos_token_id,
    )
    _check_heads(config, file)
    return config


def _default_head_dim(given: _LlamaFile, file: Path) -> int:
    if given.hidden_size % given.num_attention_heads:
        raise ModelLoadError(
            f"{file}: hidden_size {given.hidden_size} is not a multiple of num_attention_heads "
            f"{given.num_attention_heads}, and head_dim is not given"
        )
    return given.hidden_size // given.num_attention_heads


def _read_rope(given: _LlamaFile, file: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    rope = {**(given.rope_scaling or {}), **(given.rope_parameters or {})}
    key = "rope_parameters" if given.rope_parameters else "rope_scaling"
    theta = _convert(rope.get("rope_theta", given.rope_theta or 10000.0), float, f"{file}: {key}.rope_theta")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(
            f"{file}: {key}.partial_rotary_factor is {rope['partial_rotary_factor']}, supported is 1.0"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in _ROPES:
        raise ModelLoadError(f"{file}: {key}.rope_type is {kind!r}, supported are default, {', '.join(_ROPES)}")
    fields = {"original_max_position_embeddings": given.max_position_embeddings, **rope, "rope_type": kind}
    return theta, _convert(fields, _ROPES[kind], f"{file}: {key}")


_ROPES: dict[str, type[RopeScaling]] = {"linear": LinearRope, "llama3": Llama3Rope}


def _check_heads(config: ModelConfig, file: Path) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{file}: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{file}: head_dim is {config.head_dim}, rotary embedding needs an even number")


# -- facts for configuration and ingress


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TokenizerConfigFile(msgspec.Struct):
    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`, with every end token that any of its files names.

    Raises ModelLoadError that names file and key. generation_config.json and the tokenizer files are optional.
    """
    config = read_config(folder)
    generation = _decode_optional(folder / "generation_config.json", _GenerationFile)
    eos = (*_ids(generation.eos_token_id), *config.eos_token_ids, *_tokenizer_eos(folder))
    return ModelFacts(
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        kv_elements_per_token=config.kv_elements_per_token,
        eos_token_ids=tuple(_known(dict.fromkeys(eos), config.vocab_size, folder)),
        generation=_generation_defaults(generation),
    )


def _generation_defaults(given: _GenerationFile) -> GenerationDefaults:
    """What the file sets; null and absent mean our own default. top_k below 1 is off."""
    values = {
        name: value
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        if (value := msgspec.structs.asdict(given)[name]) is not None
    }
    return GenerationDefaults(top_k=max(given.top_k or 0, 0), **values)


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """Id of the tokenizer's own end token, if its files name one."""
    settings = _decode_optional(folder / "tokenizer_config.json", _TokenizerConfigFile)
    if settings.eos_token is None:
        return ()
    text = settings.eos_token if isinstance(settings.eos_token, str) else settings.eos_token.content
    for id_, token in settings.added_tokens_decoder.items():
        if token.content == text:
            return (id_,)
    added = _decode_optional(folder / "tokenizer.json", _TokenizerFile).added_tokens
    return tuple(token.id for token in added if token.content == text)


def _known(ids: Iterable[int], vocab_size: int, folder: Path) -> list[int]:
    """Ids that the output head can produce; others could only index out of range."""
    known = []
    for id_ in ids:
        if 0 <= id_ < vocab_size:
            known.append(id_)
        else:
            log.warning("%s: end token id %d is outside the vocabulary of %d, it is left out", folder, id_, vocab_size)
    return known


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


# -- weight tables


class Shard(enum.Enum):
    """How a tensor is divided over the ranks of a tensor-parallel group.

    VOCAB: rows, the last rank padded. HEADS: rows of whole heads. COLUMN: rows (output features). ROW: columns (input features;
    the layer sums over ranks). REPLICATED: everywhere whole.
    """

    VOCAB = enum.auto()
    HEADS = enum.auto()
    COLUMN = enum.auto()
    ROW = enum.auto()
    REPLICATED = enum.auto()


class Part(enum.Enum):
    """Place of a checkpoint tensor among the rows of a fused parameter."""

    Q = enum.auto()
    K = enum.auto()
    V = enum.auto()
    GATE = enum.auto()
    UP = enum.auto()


# Fused parameters hold the parts of one of these groups, in order, each part this rank's share.
FUSED: tuple[tuple[Part, ...], ...] = ((Part.Q, Part.K, Part.V), (Part.GATE, Part.UP))


class Rule(msgspec.Struct, frozen=True):
    """A checkpoint tensor fills a parameter, or one part of it. `{layer}` stands for every layer.

    Active only where the decoder has the parameter: biases and an untied head are rules that some models do not use.
    """

    checkpoint_name: str
    parameter: str
    shard: Shard
    part: Part | None = None


class Ignore(msgspec.Struct, frozen=True):
    """A checkpoint tensor that is known and not needed. An active rule of the same name wins."""

    checkpoint_name: str


Table = tuple[Rule | Ignore, ...]


def _linear(name: str, parameter: str, shard: Shard, part: Part | None = None) -> Table:
    """Weight and bias of a projection. The bias of a ROW projection is added once, after the sum over ranks."""
    bias = Shard.REPLICATED if shard is Shard.ROW else shard
    return (
        Rule(f"{name}.weight", f"{parameter}.weight", shard, part),
        Rule(f"{name}.bias", f"{parameter}.bias", bias, part),
    )


_LLAMA: Table = (
    Rule("model.embed_tokens.weight", "embed.weight", Shard.VOCAB),
    Rule("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.attention_norm.weight", Shard.REPLICATED),
    *_linear("model.layers.{layer}.self_attn.q_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.Q),
    *_linear("model.layers.{layer}.self_attn.k_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.K),
    *_linear("model.layers.{layer}.self_attn.v_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.V),
    *_linear("model.layers.{layer}.self_attn.o_proj", "layers.{layer}.attention.wo", Shard.ROW),
    Rule("model.layers.{layer}.post_attention_layernorm.weight", "layers.{layer}.mlp_norm.weight", Shard.REPLICATED),
    *_linear("model.layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, Part.GATE),
    *_linear("model.layers.{layer}.mlp.up_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, Part.UP),
    *_linear("model.layers.{layer}.mlp.down_proj", "layers.{layer}.mlp.w_down", Shard.ROW),
    Rule("model.norm.weight", "norm.weight", Shard.REPLICATED),
    Rule("lm_head.weight", "head.weight", Shard.VOCAB),
    Ignore("lm_head.weight"),  # tied checkpoints sometimes carry a copy of the embedding
    Ignore("model.layers.{layer}.self_attn.rotary_emb.inv_freq"),  # buffers that old versions of transformers saved
)

_READERS: dict[str, Callable[[bytes, str, Path], ModelConfig]] = {"LlamaForCausalLM": _read_llama}
WEIGHTS: dict[str, Table] = {"LlamaForCausalLM": _LLAMA}


# -- reading json


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{file}: {error.strerror or error}; a model folder needs config.json, tokenizer.json and safetensors files"
        ) from None


def _decode(raw: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{file}: {error}") from None


def _decode_optional(file: Path, kind: type[T]) -> T:
    return _decode(file.read_bytes() if file.exists() else b"{}", kind, file)


def _convert(value: object, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{where}: {error}") from None
