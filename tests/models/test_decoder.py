"""The decoder against transformers on tiny random checkpoints: whole prefill, chunks, decode."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_serve.models.decoder import Decoder
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import DenseAttend, edit_json, make_checkpoint

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_query_untied": {},
    "tied": {"tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "explicit_head_dim": {"head_dim": 12},
    "attention_biases": {"attention_bias": True},
    "mlp_biases": {"mlp_bias": True},
    "everything": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "rope_parameters": LLAMA3,
        "rms_norm_eps": 1e-3,
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    folder = tmp_path_factory.mktemp("llama")
    reference = make_checkpoint(folder, **VARIANTS[request.param])
    return load(folder), reference


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_decoder(folder, load_format="auto", dtype=dtype, device=CPU, tp=NoTP())


@torch.inference_mode()
def run(decoder: Decoder, tokens_T: Tensor, chunks: list[int]) -> Tensor:
    """Logits of every token, computed in chunks of these sizes with one growing cache."""
    attend = DenseAttend()
    positions_T = torch.arange(len(tokens_T), dtype=torch.int32)
    steps = [slice(end - length, end) for length, end in zip(chunks, accumulate(chunks), strict=True)]
    hidden = [decoder.forward(tokens_T[step], positions_T[step], attend) for step in steps]
    return torch.cat([decoder.logits(hidden_TD) for hidden_TD in hidden])


@torch.inference_mode()
def expected(reference: Any, tokens_T: Tensor) -> Tensor:
    logits: Tensor = reference(tokens_T[None].long()).logits[0]
    return logits


def some_tokens(num_tokens: int = 40) -> Tensor:
    return torch.randint(0, 101, (num_tokens,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)


@pytest.mark.parametrize(
    "chunks", [[40], [16, 1, 7, 16], [24, *[1] * 16]], ids=["whole_prefill", "chunked_prefill", "prefill_then_decode"]
)
def test_logits_equal_transformers(pair: tuple[Decoder, Any], chunks: list[int]) -> None:
    decoder, reference = pair
    tokens_T = some_tokens()
    logits_TV = run(decoder, tokens_T, chunks)
    wanted_TV = expected(reference, tokens_T)
    assert wanted_TV.std() > 0.3  # a model of zeros would agree with anything
    torch.testing.assert_close(logits_TV, wanted_TV, rtol=1e-5, atol=1e-5)


def test_bfloat16_follows_transformers_in_bfloat16(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path).to(torch.bfloat16)
    logits_TV = run(load(tmp_path, torch.bfloat16), some_tokens(), [40])
    assert logits_TV.dtype == torch.float32
    wanted_TV = expected(reference, some_tokens()).float()
    assert (logits_TV - wanted_TV).abs().max() < 0.05 * wanted_TV.abs().max()


def test_rope_settings_of_older_config_files_mean_the_same(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, rope_parameters=LLAMA3)
    old = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_json(tmp_path / "config.json", {"rope_theta": 500.0, "rope_scaling": old}, remove=("rope_parameters",))
    torch.testing.assert_close(
        run(load(tmp_path), some_tokens(), [40]), expected(reference, some_tokens()), rtol=1e-5, atol=1e-5
    )


def test_a_row_depends_on_its_own_token_and_position_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    decoder, tokens_T = load(tmp_path), some_tokens(8)
    positions_T = torch.tensor([5, 0, 3, 3, 9, 1, 63, 2])  # rows of several requests, in any order

    def forward(rows: slice) -> Tensor:
        return decoder.forward(tokens_T[rows], positions_T[rows], lambda layer, q, k, v: q)

    alone_TD = torch.cat([forward(slice(row, row + 1)) for row in range(8)])
    torch.testing.assert_close(forward(slice(0, 8)), alone_TD, rtol=1e-5, atol=1e-5)


def test_parameters_never_ask_for_gradients_and_forward_works_without_inference_mode(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    decoder = load(tmp_path)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    hidden_TD = decoder.forward(some_tokens(3), torch.arange(3), DenseAttend())
    assert hidden_TD.shape == (3, 32)
    assert not hidden_TD.requires_grad


def test_attend_is_called_once_a_layer_in_order_with_this_ranks_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, head_dim=10)
    decoder = load(tmp_path)
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        calls.append((layer, tuple(q_TNH.shape), tuple(k_TKH.shape), tuple(v_TKH.shape)))
        return q_TNH

    decoder.forward(some_tokens(5), torch.arange(5), attend)
    assert calls == [(layer, (5, 4, 10), (5, 2, 10), (5, 2, 10)) for layer in range(3)]
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.config.head_dim) == (4, 2, 10)
