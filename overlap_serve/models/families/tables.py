"""Where each checkpoint tensor of a family belongs, and how it is divided over the ranks. Data for `weights`."""

from __future__ import annotations

import enum

import msgspec


class Shard(enum.Enum):
    """How a tensor is divided over the ranks of a tensor-parallel group.

    VOCAB: rows, the last rank padded. HEADS: rows of whole heads. COLUMN: rows (output features). ROW: columns (input features;
    the layer sums over ranks). REPLICATED: everywhere whole. Experts are divided like dense MLPs, each by COLUMN and ROW, so that
    every rank has the same work whatever the router chooses.
    """

    VOCAB = enum.auto()
    HEADS = enum.auto()
    COLUMN = enum.auto()
    ROW = enum.auto()
    REPLICATED = enum.auto()


class Part(enum.Enum):
    """Rows of a fused tensor."""

    Q = enum.auto()
    K = enum.auto()
    V = enum.auto()
    GATE = enum.auto()
    UP = enum.auto()


QKV = (Part.Q, Part.K, Part.V)
GATE_UP = (Part.GATE, Part.UP)

# Fused parameters hold the parts of one of these groups (or its first ones), in order, each part this rank's share.
FUSED: tuple[tuple[Part, ...], ...] = (QKV, GATE_UP)


class Rule(msgspec.Struct, frozen=True):
    """A checkpoint tensor fills a parameter, or some parts of it, which it holds in this order.

    `{layer}` stands for every layer, `{expert}` for every expert of a layer. Active only where the decoder has the parameter:
    biases and an untied head are rules that some models do not use.
    """

    checkpoint_name: str
    parameter: str
    shard: Shard
    parts: tuple[Part, ...] = ()


class Ignore(msgspec.Struct, frozen=True):
    """A checkpoint tensor that is known and not needed; a name that ends in * is a prefix. An active rule of the same name wins."""

    checkpoint_name: str


Table = tuple[Rule | Ignore, ...]

# -- building blocks; `layer` is the checkpoint's prefix of a layer


def _linear(name: str, parameter: str, shard: Shard, *parts: Part) -> Table:
    """Weight and bias of a projection. The bias of a ROW projection is added once, after the sum over ranks."""
    bias = Shard.REPLICATED if shard is Shard.ROW else shard
    return (
        Rule(f"{name}.weight", f"{parameter}.weight", shard, parts),
        Rule(f"{name}.bias", f"{parameter}.bias", bias, parts),
    )


def _norm(name: str, parameter: str) -> Table:
    return (Rule(f"{name}.weight", f"{parameter}.weight", Shard.REPLICATED),)


def _ends(model: str = "model.", head: str = "lm_head.weight") -> Table:
    """Embedding, last norm and head."""
    return (
        Rule(f"{model}embed_tokens.weight", "embed.weight", Shard.VOCAB),
        *_norm(f"{model}norm", "norm"),
        Rule(head, "head.weight", Shard.VOCAB),
        Ignore(head),  # tied checkpoints sometimes carry a copy of the embedding
    )


def _attention(layer: str) -> Table:
    return (
        *_linear(f"{layer}self_attn.q_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.Q),
        *_linear(f"{layer}self_attn.k_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.K),
        *_linear(f"{layer}self_attn.v_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, Part.V),
        *_linear(f"{layer}self_attn.o_proj", "layers.{layer}.attention.wo", Shard.ROW),
        # Buffers that old versions of transformers saved.
        Ignore(f"{layer}self_attn.rotary_emb.inv_freq"),
    )


def _head_norms(layer: str) -> Table:
    """Norms over each head of q and k."""
    return (
        *_norm(f"{layer}self_attn.q_norm", "layers.{layer}.attention.qk_norm.q_norm"),
        *_norm(f"{layer}self_attn.k_norm", "layers.{layer}.attention.qk_norm.k_norm"),
    )


def _pre_norms(layer: str) -> Table:
    return (
        *_norm(f"{layer}input_layernorm", "layers.{layer}.attention_norm"),
        *_norm(f"{layer}post_attention_layernorm", "layers.{layer}.mlp_norm"),
    )


def _post_norms(layer: str) -> Table:
    return (
        *_norm(f"{layer}post_attention_layernorm", "layers.{layer}.attention_post_norm"),
        *_norm(f"{layer}post_feedforward_layernorm", "layers.{layer}.mlp_post_norm"),
    )


def _mlp(layer: str) -> Table:
    return (
        *_linear(f"{layer}mlp.gate_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, Part.GATE),
        *_linear(f"{layer}mlp.up_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, Part.UP),
        *_linear(f"{layer}mlp.down_proj", "layers.{layer}.mlp.w_down", Shard.ROW),
    )


def _experts(router: str, experts: str, gate: str, up: str, down: str) -> Table:
    """One tensor for each expert and projection."""
    return (
        Rule(f"{router}.weight", "layers.{layer}.mlp.router.weight", Shard.REPLICATED),
        Rule(f"{experts}.{{expert}}.{gate}.weight", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, (Part.GATE,)),
        Rule(f"{experts}.{{expert}}.{up}.weight", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, (Part.UP,)),
        Rule(f"{experts}.{{expert}}.{down}.weight", "layers.{layer}.mlp.w_down", Shard.ROW),
    )


def _stacked_experts(layer: str) -> Table:
    """All experts of a layer in one tensor, gate and up fused: as transformers 5 names them in memory."""
    return (
        Rule(f"{layer}mlp.gate.weight", "layers.{layer}.mlp.router.weight", Shard.REPLICATED),
        Rule(f"{layer}mlp.experts.gate_up_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, GATE_UP),
        Rule(f"{layer}mlp.experts.down_proj", "layers.{layer}.mlp.w_down", Shard.ROW),
    )


# -- families

_LAYER = "model.layers.{layer}."

_LLAMA: Table = (*_ends(), *_pre_norms(_LAYER), *_attention(_LAYER), *_mlp(_LAYER))
_QWEN3: Table = (*_LLAMA, *_head_norms(_LAYER))
_MOE_BASE: Table = (*_ends(), *_pre_norms(_LAYER), *_attention(_LAYER))
_QWEN3_MOE_BASE: Table = (*_MOE_BASE, *_head_norms(_LAYER), *_mlp(_LAYER))

_PHI3: Table = (
    *_ends(),
    *_pre_norms(_LAYER),
    *_linear(f"{_LAYER}self_attn.qkv_proj", "layers.{layer}.attention.wqkv", Shard.HEADS, *QKV),
    *_linear(f"{_LAYER}self_attn.o_proj", "layers.{layer}.attention.wo", Shard.ROW),
    *_linear(f"{_LAYER}mlp.gate_up_proj", "layers.{layer}.mlp.w_gate_up", Shard.COLUMN, *GATE_UP),
    *_linear(f"{_LAYER}mlp.down_proj", "layers.{layer}.mlp.w_down", Shard.ROW),
    Ignore(f"{_LAYER}self_attn.rotary_emb.inv_freq"),
)

_OLMO2: Table = (
    *_ends(),
    *_post_norms(_LAYER),
    *_attention(_LAYER),
    Rule(f"{_LAYER}self_attn.q_norm.weight", "layers.{layer}.attention.qk_norm.weight", Shard.HEADS, (Part.Q,)),
    Rule(f"{_LAYER}self_attn.k_norm.weight", "layers.{layer}.attention.qk_norm.weight", Shard.HEADS, (Part.K,)),
    *_mlp(_LAYER),
)


def _gemma2(layer: str) -> Table:
    return (
        *_norm(f"{layer}input_layernorm", "layers.{layer}.attention_norm"),
        *_norm(f"{layer}pre_feedforward_layernorm", "layers.{layer}.mlp_norm"),
        *_post_norms(layer),
        *_attention(layer),
        *_mlp(layer),
    )


def _gemma3_multimodal(model: str, head: str, others: tuple[str, ...]) -> Table:
    layer = f"{model}layers.{{layer}}."
    return (*_ends(model, head), *_gemma2(layer), *_head_norms(layer), *(Ignore(f"{name}.*") for name in others))


# The forms in which checkpoints of a family are written; the loader takes the one with most of its names in the checkpoint.
WEIGHTS: dict[str, tuple[Table, ...]] = {
    "Gemma2ForCausalLM": ((*_ends(), *_gemma2(_LAYER)),),
    "Gemma3ForCausalLM": ((*_ends(), *_gemma2(_LAYER), *_head_norms(_LAYER)),),
    "Gemma3ForConditionalGeneration": (
        _gemma3_multimodal(
            "language_model.model.", "language_model.lm_head.weight", ("vision_tower", "multi_modal_projector")
        ),
        _gemma3_multimodal(
            "model.language_model.", "lm_head.weight", ("model.vision_tower", "model.multi_modal_projector")
        ),
    ),
    "LlamaForCausalLM": (_LLAMA,),
    "MistralForCausalLM": (_LLAMA,),
    "MixtralForCausalLM": (
        (
            *_MOE_BASE,
            *_experts(f"{_LAYER}block_sparse_moe.gate", f"{_LAYER}block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
        (*_MOE_BASE, *_stacked_experts(_LAYER)),
    ),
    "Olmo2ForCausalLM": (_OLMO2,),
    "Phi3ForCausalLM": (_PHI3,),
    "Qwen2ForCausalLM": (_LLAMA,),
    "Qwen3ForCausalLM": (_QWEN3,),
    "Qwen3MoeForCausalLM": (
        (
            *_QWEN3_MOE_BASE,
            *_experts(f"{_LAYER}mlp.gate", f"{_LAYER}mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ),
        (*_QWEN3_MOE_BASE, *_stacked_experts(_LAYER)),
    ),
}
