"""Packed weights against plain ones: layers, whole decoders of several families, tensor-parallel shards, the embedded model."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_serve.models.decoder import Decoder
from overlap_serve.models.layers import Linear, RowLinear
from overlap_serve.models.packed import can_pack
from overlap_serve.models.tp import TP, NoTP
from overlap_serve.models.weights import build_decoder
from tests.embedded import embedded_folder
from tests.models.checkpoints import DenseAttend, make_checkpoint
from tests.models.test_tp import Group, ThreadTP

CPU = torch.device("cpu")
CHANGES: list[dict[str, Any]] = [
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"architecture": "Qwen3ForCausalLM"},
    {"architecture": "Gemma3ForCausalLM"},
    {"architecture": "Phi3ForCausalLM"},
    {"architecture": "MixtralForCausalLM"},
]


def needs_packing(dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip(f"no packed products of {dtype} here")


def build(folder: Path, dtype: torch.dtype, tp: TP) -> Decoder:
    return build_decoder(folder, load_format="auto", dtype=dtype, device=CPU, tp=tp)


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    """Of 12 tokens, in chunks of 8, 3 and 1, each with all its rows."""
    attend = DenseAttend(decoder.config)
    chunks = [torch.arange(0, 8), torch.arange(8, 11), torch.arange(11, 12)]
    return torch.cat([decoder.logits(decoder.forward(8 * places, places, attend)) for places in chunks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_product_is_the_exact_one_rounded(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    needs_packing(dtype)
    generator = torch.Generator().manual_seed(num_rows)
    layer = Linear(70, 90, bias=bias, dtype=dtype, device=CPU)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    x_XF = torch.randn(num_rows, 70, generator=generator).to(dtype)
    exact_XF = x_XF.double() @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
    layer.pack()
    y_XF = layer(x_XF)
    assert (y_XF.dtype, y_XF.shape) == (dtype, exact_XF.shape)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y_XF.double(), exact_XF, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_packed_decoder_gives_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    needs_packing(torch.float32)
    make_checkpoint(tmp_path, **changes)
    decoder = build(tmp_path, torch.float32, NoTP())
    expected = logits(decoder)
    decoder.pack()
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_packed_shards_give_what_one_plain_rank_gives(changes: dict[str, Any], tmp_path: Path) -> None:
    needs_packing(torch.float32)
    make_checkpoint(tmp_path, **changes)
    expected = logits(build(tmp_path, torch.float32, NoTP()))
    group = Group(2)

    def rank_logits(rank: int) -> Tensor:
        decoder = build(tmp_path, torch.float32, ThreadTP(rank, 2, group))
        decoder.pack()
        return logits(decoder)

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(rank_logits, range(2)):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_packing_drops_the_plain_matrices_but_a_tied_embedding(tied: bool, tmp_path: Path) -> None:
    needs_packing(torch.float32)
    make_checkpoint(tmp_path, tie_word_embeddings=tied)
    decoder = build(tmp_path, torch.float32, NoTP())
    assert any(isinstance(module, RowLinear) for module in decoder.modules())
    decoder.pack()
    matrices = [name for name, parameter in decoder.named_parameters() if parameter.dim() == 2]
    assert matrices == ["embed.weight"]
    assert (decoder.embed.packed is not None) == tied


def test_only_types_and_machines_with_packed_products_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
    assert not can_pack(torch.float32, torch.device("meta"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not can_pack(torch.float32, CPU)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, CPU)


@pytest.mark.model
def test_the_embedded_model_packed_in_bfloat16_is_as_near_to_float32_as_plain() -> None:
    needs_packing(torch.bfloat16)
    folder = embedded_folder()
    exact = logits(build(folder, torch.float32, NoTP()))
    decoder = build(folder, torch.bfloat16, NoTP())
    plain = logits(decoder)
    decoder.pack()
    packed = logits(decoder)
    assert (packed - exact).square().mean() < 1.3 * (plain - exact).square().mean()
