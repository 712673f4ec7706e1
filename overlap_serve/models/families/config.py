"""`ModelConfig`: everything in which decoders differ, as data. Knows no file and no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# -- rotary scaling; the arithmetic is in `layers.rope_frequencies`

Factor = Annotated[float, msgspec.Meta(gt=0)]
Length = Annotated[int, msgspec.Meta(gt=1)]  # some formulas divide by its logarithm


class LinearRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="linear"):
    """All frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: Factor


class DynamicRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="dynamic"):
    """A larger base once the context exceeds the original length (NTK-aware scaling, arXiv:2309.00071 section 3.1)."""

    factor: Factor
    original_max_position_embeddings: Length


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="llama3"):
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: Factor
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: Length


class YarnRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="yarn"):
    """Frequencies between interpolated and kept, by how often they turn in the original context (arXiv:2309.00071).

    attention_factor None: derived from factor, or from mscale / mscale_all_dim where both are given (DeepSeek).
    """

    factor: Factor
    original_max_position_embeddings: Length
    attention_factor: float | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class LongRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="longrope"):
    """A divisor for each frequency, one list for short and one for long contexts (arXiv:2402.13753).

    attention_factor None: derived from factor.
    """

    short_factor: tuple[Factor, ...]
    long_factor: tuple[Factor, ...]
    factor: Factor
    original_max_position_embeddings: Length
    attention_factor: float | None = None


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope

# -- the decoder

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts in the MLP's place. layers: those that have them, ascending. normalize: chosen weights sum to one."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[int, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder, fully described; the whole model, not one rank's part.

    Sizes. head_dim H is not always hidden_size / num_heads. max_position_embeddings: positions that the model can serve, with
    its rotary scaling; rotary_dim: leading dimensions of a head that are rotated, None: all.
    Attention. attention_bias: q, k and v have biases; attention_out_bias: the output projection has one. attention_scale None:
    1/sqrt(H). windows: per layer, how many tokens it sees, its own included; None: all; empty: no layer has a window. Layers with
    a window use local_rope_theta and local_rope_scaling, if that theta is set. qk_norm: over each head, or over the projection.
    Norms. post_norm: of the outputs of attention and MLP. Weights are multiplied as norm_offset + weight, before the cast to the
    model's dtype if norm_cast_last.
    eos_token_ids, bos_token_id: of config.json only, see `read_facts`.
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
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    local_rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    attention_bias: bool = False
    attention_out_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    qk_norm: Literal["none", "head", "projection"] = "none"
    windows: tuple[int | None, ...] = ()
    mlp_bias: bool = False
    experts: Experts | None = None
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0
    norm_cast_last: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """K and V values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def splits(self) -> dict[str, int]:
        """What tensor-parallel ranks divide evenly, by its name."""
        splits = {"attention heads": self.num_heads}
        if self.experts is None or len(self.experts.layers) < self.num_layers:
            splits["intermediate features"] = self.intermediate_size
        if self.experts is not None:
            splits["intermediate features of an expert"] = self.experts.intermediate_size
        return splits

    def has_local_rope(self, layer: int) -> bool:
        return self.local_rope_theta is not None and bool(self.windows) and self.windows[layer] is not None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers
