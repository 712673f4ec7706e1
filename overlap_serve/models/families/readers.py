"""config.json of each family to `ModelConfig`. Defaults are those of the family's configuration class in transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec.structs import replace

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families.config import Activation, Experts, LongRope, ModelConfig, RopeScaling
from overlap_serve.models.families.files import decode, read
from overlap_serve.models.families.rope import Rope, read_rope, served_positions

Positive = Annotated[int, msgspec.Meta(ge=1)]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelLoadError that names file and key."""
    file = folder / "config.json"
    raw = read(file)
    head = decode(raw, _Head, file)
    for name in head.architectures:
        if name in READERS:
            if head.quantization_config is not None:
                raise ModelLoadError(
                    f"{file}: quantization_config is set, but quantized checkpoints are not supported; use the original one"
                )
            return READERS[name](raw, name, file)
    code = "; the checkpoint brings code of its own (auto_map), which is never run" if head.auto_map else ""
    raise ModelLoadError(
        f"{file}: architectures is {head.architectures}, supported are {', '.join(sorted(READERS))}{code}"
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class _Head(msgspec.Struct):
    architectures: list[str]
    quantization_config: dict[str, Any] | None = None
    auto_map: dict[str, Any] | None = None


# -- what all families share


class _File(msgspec.Struct, kw_only=True):
    """The keys of all families; the defaults are those of transformers' LlamaConfig."""

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
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Positive | None = None
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def _rope(given: _File, file: Path, theta: float = 10000.0) -> Rope:
    """From rope_parameters (transformers 5), or from rope_theta and rope_scaling (before)."""
    settings = {**(given.rope_scaling or {}), **(given.rope_parameters or {})}
    where = f"{file}: {'rope_parameters' if given.rope_parameters else 'rope_scaling'}"
    partial = given.partial_rotary_factor or 1.0
    rope = read_rope(
        settings,
        where,
        theta=given.rope_theta or theta,
        partial=partial,
        max_positions=given.max_position_embeddings,
    )
    if rope.partial != 1.0:
        raise ModelLoadError(f"{where}.partial_rotary_factor is {rope.partial}, in this family supported is 1.0")
    return rope


def _common(given: _File, architecture: str, file: Path, rope: Rope, activation: str | None = None) -> ModelConfig:
    """What the shared keys say; the families change the rest."""
    head_dim = given.head_dim or _default_head_dim(given, file)
    rotary_dim = int(head_dim * rope.partial)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=given.intermediate_size,
        max_position_embeddings=served_positions(given.max_position_embeddings, rope.scaling),
        rms_norm_eps=given.rms_norm_eps,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        activation=_activation(activation or given.hidden_act, file),
        tie_word_embeddings=given.tie_word_embeddings,
        attention_bias=given.attention_bias,
        attention_out_bias=given.attention_bias,
        mlp_bias=given.mlp_bias,
        eos_token_ids=token_ids(given.eos_token_id),
        bos_token_id=given.bos_token_id,
    )
    _check_heads(config, rotary_dim, file)
    return config


def _default_head_dim(given: _File, file: Path) -> int:
    if given.hidden_size % given.num_attention_heads:
        raise ModelLoadError(
            f"{file}: hidden_size {given.hidden_size} is not a multiple of num_attention_heads "
            f"{given.num_attention_heads}, and head_dim is not given"
        )
    return given.hidden_size // given.num_attention_heads


def _activation(name: str, file: Path) -> Activation:
    for known in ACTIVATIONS:
        if name == known:
            return known
    raise ModelLoadError(f"{file}: hidden_act is {name!r}, supported are {', '.join(ACTIVATIONS)}")


def _check_heads(config: ModelConfig, rotary_dim: int, file: Path) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{file}: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim:
        raise ModelLoadError(
            f"{file}: head_dim is {config.head_dim}, of which {rotary_dim} are rotated; rotary embedding needs an even number"
        )
    _check_factors(config.rope_scaling, rotary_dim, file)


def _check_factors(scaling: RopeScaling | None, rotary_dim: int, file: Path) -> None:
    if not isinstance(scaling, LongRope):
        return
    for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(factors) != rotary_dim // 2:
            raise ModelLoadError(
                f"{file}: {name} of the rope settings has {len(factors)} numbers, {rotary_dim // 2} are needed"
            )


def _windows(
    given: _File, file: Path, is_windowed: Callable[[int], bool], window: int | None
) -> tuple[int | None, ...]:
    """Window of each layer, by layer_types where the file has them, else by `is_windowed(layer)`; empty if none has one."""
    layers = range(given.num_hidden_layers)
    if given.layer_types is None:
        windowed = [is_windowed(layer) for layer in layers]
    else:
        unknown = sorted(set(given.layer_types) - {"sliding_attention", "full_attention"})
        if unknown:
            raise ModelLoadError(
                f"{file}: layer_types has {', '.join(unknown)}; supported are full_attention, sliding_attention"
            )
        if len(given.layer_types) != len(layers):
            raise ModelLoadError(f"{file}: layer_types has {len(given.layer_types)} entries for {len(layers)} layers")
        windowed = [kind == "sliding_attention" for kind in given.layer_types]
    if not any(windowed):
        return ()
    if window is None:
        raise ModelLoadError(
            f"{file}: layer_types has sliding_attention, but sliding_window is not set or switched off"
        )
    return tuple(window if windowed[layer] else None for layer in layers)


# -- Llama, Mistral, Qwen


def _read_llama(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _File, file)
    return _common(given, architecture, file, _rope(given, file))


class _MistralFile(_File, kw_only=True):
    num_key_value_heads: Positive | None = 8
    sliding_window: Positive | None = 4096


def _read_mistral(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _MistralFile, file)
    config = _common(given, architecture, file, _rope(given, file))
    windows = _windows(given, file, lambda layer: given.sliding_window is not None, given.sliding_window)
    return replace(config, windows=windows, attention_bias=False, attention_out_bias=False, mlp_bias=False)


class _QwenFile(_File, kw_only=True):
    num_key_value_heads: Positive | None = 32
    use_sliding_window: bool = False
    sliding_window: Positive | None = 4096
    max_window_layers: int = 28

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


def _qwen_windows(given: _QwenFile, file: Path) -> tuple[int | None, ...]:
    """The first max_window_layers layers see everything."""
    return _windows(
        given, file, lambda layer: given.window is not None and layer >= given.max_window_layers, given.window
    )


def _read_qwen2(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _QwenFile, file)
    config = _common(given, architecture, file, _rope(given, file))
    windows = _qwen_windows(given, file)
    return replace(config, windows=windows, attention_bias=True, attention_out_bias=False, mlp_bias=False)


class _Qwen3File(_QwenFile, kw_only=True):
    head_dim: Positive | None = 128


def _read_qwen3(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _Qwen3File, file)
    config = _common(given, architecture, file, _rope(given, file))
    return replace(config, windows=_qwen_windows(given, file), qk_norm="head", mlp_bias=False)


# -- routed experts


class _Qwen3MoeFile(_QwenFile, kw_only=True):
    """num_experts is called num_local_experts by transformers 5."""

    num_key_value_heads: Positive | None = 4
    num_experts: Positive | None = None
    num_local_experts: Positive = 128
    num_experts_per_tok: Positive = 8
    moe_intermediate_size: Positive = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[int] | None = None


def _read_qwen3_moe(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _Qwen3MoeFile, file)
    dense = set(given.mlp_only_layers or ())
    experts = Experts(
        num_experts=given.num_experts or given.num_local_experts,
        num_per_token=given.num_experts_per_tok,
        intermediate_size=given.moe_intermediate_size,
        normalize=given.norm_topk_prob,
        layers=tuple(
            layer
            for layer in range(given.num_hidden_layers)
            if layer not in dense and (layer + 1) % given.decoder_sparse_step == 0
        ),
    )
    _check_experts(experts, file)
    config = _common(given, architecture, file, _rope(given, file))
    windows = _windows(given, file, lambda layer: given.window is not None, given.window)
    return replace(config, windows=windows, qk_norm="head", mlp_bias=False, experts=experts)


class _MixtralFile(_File, kw_only=True):
    num_key_value_heads: Positive | None = 8
    rms_norm_eps: float = 1e-5
    num_local_experts: Positive = 8
    num_experts_per_tok: Positive = 2


def _read_mixtral(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _MixtralFile, file)
    experts = Experts(
        num_experts=given.num_local_experts,
        num_per_token=given.num_experts_per_tok,
        intermediate_size=given.intermediate_size,
        normalize=True,
        layers=tuple(range(given.num_hidden_layers)),
    )
    _check_experts(experts, file)
    config = _common(given, architecture, file, _rope(given, file, theta=1e6))
    windows = _windows(given, file, lambda layer: given.sliding_window is not None, given.sliding_window)
    return replace(
        config, windows=windows, attention_bias=False, attention_out_bias=False, mlp_bias=False, experts=experts
    )


def _check_experts(experts: Experts, file: Path) -> None:
    if experts.num_per_token > experts.num_experts:
        raise ModelLoadError(
            f"{file}: num_experts_per_tok is {experts.num_per_token}, the model has {experts.num_experts} experts"
        )


# -- Phi-3 and Phi-4


class _Phi3File(_File, kw_only=True):
    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Positive = 4096


def _read_phi3(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _Phi3File, file)
    # The length beside the rope settings wins over one inside; "su" and "yarn" are what the first checkpoints called longrope.
    settings = {
        **(given.rope_scaling or {}),
        **(given.rope_parameters or {}),
        "original_max_position_embeddings": given.original_max_position_embeddings,
    }
    rope = read_rope(
        settings,
        f"{file}: {'rope_parameters' if given.rope_parameters else 'rope_scaling'}",
        theta=given.rope_theta or 10000.0,
        partial=given.partial_rotary_factor or 1.0,
        max_positions=given.max_position_embeddings,
        aliases={"su": "longrope", "yarn": "longrope"},
    )
    config = _common(given, architecture, file, rope)
    windows = _windows(given, file, lambda layer: given.sliding_window is not None, given.sliding_window)
    return replace(config, windows=windows, attention_bias=False, attention_out_bias=False, mlp_bias=False)


# -- OLMo 2


class _Olmo2File(_File, kw_only=True):
    rms_norm_eps: float = 1e-5


def _read_olmo2(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    given = decode(raw, _Olmo2File, file)
    config = _common(given, architecture, file, _rope(given, file))
    return replace(config, mlp_bias=False, qk_norm="projection", pre_norm=False, post_norm=True, norm_cast_last=True)


# -- Gemma


class _GemmaFile(_File, kw_only=True):
    num_key_value_heads: Positive | None = 4
    head_dim: Positive | None = 256
    hidden_activation: str | None = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256
    sliding_window: Positive | None = 4096
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None


class _Gemma2File(_GemmaFile, kw_only=True):
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0


def _read_gemma2(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    """Every other layer has a window, beginning with the first."""
    given = decode(raw, _Gemma2File, file)
    config = _gemma(given, architecture, file, _rope(given, file))
    return replace(config, windows=_windows(given, file, lambda layer: layer % 2 == 0, given.sliding_window))


def _gemma(given: _GemmaFile, architecture: str, file: Path, rope: Rope) -> ModelConfig:
    if given.use_bidirectional_attention:
        raise ModelLoadError(
            f"{file}: use_bidirectional_attention is set; such a model embeds text, it cannot generate"
        )
    return replace(
        _common(given, architecture, file, rope, given.hidden_activation or "gelu_pytorch_tanh"),
        embedding_scale=given.hidden_size**0.5,
        attention_scale=given.query_pre_attn_scalar**-0.5,
        attention_soft_cap=given.attn_logit_softcapping or None,
        logit_soft_cap=given.final_logit_softcapping or None,
        mlp_bias=False,
        post_norm=True,
        norm_offset=1.0,
        norm_cast_last=True,
    )


class _Gemma3File(_GemmaFile, kw_only=True):
    """Files of multimodal checkpoints state only what differs from transformers' Gemma3TextConfig, so all defaults matter."""

    vocab_size: Positive = 262_208
    hidden_size: Positive = 2304
    intermediate_size: Positive = 9216
    num_hidden_layers: Positive = 26
    num_attention_heads: Positive = 8
    max_position_embeddings: Positive = 131_072
    rope_local_base_freq: float = 10_000.0
    sliding_window_pattern: Positive = 6


def _read_gemma3(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    return _gemma3(decode(raw, _Gemma3File, file), architecture, file)


def _gemma3(given: _Gemma3File, architecture: str, file: Path) -> ModelConfig:
    """Every sixth layer sees everything; the others have a window and rotary settings of their own."""
    if given.attn_logit_softcapping:
        raise ModelLoadError(f"{file}: attn_logit_softcapping is set, which no Gemma 3 model has been trained with")
    everywhere, local = _gemma3_ropes(given, file)
    windows = _windows(given, file, lambda layer: (layer + 1) % given.sliding_window_pattern != 0, given.sliding_window)
    config = _gemma(given, architecture, file, everywhere)
    _check_factors(local.scaling, config.head_dim, file)
    return replace(
        config,
        windows=windows,
        qk_norm="head",
        local_rope_theta=local.theta,
        local_rope_scaling=local.scaling,
    )


def _gemma3_ropes(given: _Gemma3File, file: Path) -> tuple[Rope, Rope]:
    """Of layers without and with a window: nested in rope_parameters (transformers 5), or the older keys, of which rope_scaling
    is for the first only."""
    nested = given.rope_parameters or {}
    layer_types = ("full_attention", "sliding_attention")
    for key, value in nested.items():
        if key not in layer_types or not isinstance(value, dict | None):
            raise ModelLoadError(f"{file}: rope_parameters.{key} is unknown; supported are {', '.join(layer_types)}")
    thetas = (given.rope_theta or 1e6, given.rope_local_base_freq)
    older: tuple[Mapping[str, Any], ...] = (given.rope_scaling or {}, {})
    everywhere, local = (
        read_rope(
            {**settings, **(nested.get(kind) or {})},
            f"{file}: rope_parameters.{kind}",
            theta=theta,
            max_positions=given.max_position_embeddings,
        )
        for kind, theta, settings in zip(layer_types, thetas, older, strict=True)
    )
    return everywhere, local


class _Gemma3MultimodalFile(msgspec.Struct):
    text_config: _Gemma3File
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def _read_gemma3_multimodal(raw: bytes, architecture: str, file: Path) -> ModelConfig:
    """The text part."""
    given = decode(raw, _Gemma3MultimodalFile, file)
    config = _gemma3(given.text_config, architecture, file)
    return replace(
        config,
        eos_token_ids=token_ids(given.eos_token_id) or config.eos_token_ids,
        bos_token_id=config.bos_token_id if given.bos_token_id is None else given.bos_token_id,
    )


READERS: dict[str, Callable[[bytes, str, Path], ModelConfig]] = {
    "Gemma2ForCausalLM": _read_gemma2,
    "Gemma3ForCausalLM": _read_gemma3,
    "Gemma3ForConditionalGeneration": _read_gemma3_multimodal,
    "LlamaForCausalLM": _read_llama,
    "MistralForCausalLM": _read_mistral,
    "MixtralForCausalLM": _read_mixtral,
    "Olmo2ForCausalLM": _read_olmo2,
    "Phi3ForCausalLM": _read_phi3,
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
}
