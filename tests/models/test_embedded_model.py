"""The embedded default model, in float32, against transformers on the prepared folder. Needs the model in the cache.

Run with `pytest -m model`; `overlap-serve models prepare` fetches what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import read_facts
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.embedded import NUM_TOKENS, PROMPTS, embedded_folder, transformers_tokens
from tests.models.checkpoints import DenseAttend

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded_folder()


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return build_decoder(folder, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


class Batch:
    """An `Attend` of several sequences that decode side by side, so that one read of the weights serves all of them."""

    def __init__(self, sequences: list[DenseAttend]) -> None:
        self.sequences = sequences

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        rows = [slice(row, row + 1) for row in range(len(self.sequences))]
        pairs = zip(self.sequences, rows, strict=True)
        return torch.cat([attend(layer, q_TNH[row], k_TKH[row], v_TKH[row]) for attend, row in pairs])


@torch.inference_mode()
def greedy(decoder: Decoder, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Prefill each prompt alone, then decode all rows together."""
    sequences = [DenseAttend(decoder.config) for _ in prompts]
    hidden = [
        decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)[-1:]
        for prompt, attend in zip(prompts, sequences, strict=True)
    ]
    positions_B = torch.tensor([len(prompt) for prompt in prompts])
    tokens_B = decoder.logits(torch.cat(hidden)).argmax(-1)
    steps = [tokens_B]
    for step in range(num_tokens - 1):
        hidden_BD = decoder.forward(tokens_B, positions_B + step, Batch(sequences))
        tokens_B = decoder.logits(hidden_BD).argmax(-1)
        steps.append(tokens_B)
    rows: list[list[int]] = torch.stack(steps, dim=1).tolist()
    return rows


def test_greedy_tokens_equal_transformers_in_float32(folder: Path, decoder: Decoder, tokenizer: Any) -> None:
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert greedy(decoder, prompts, NUM_TOKENS) == transformers_tokens()


def test_the_capital_of_france_is_paris(folder: Path, decoder: Decoder, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    (tokens,) = greedy(decoder, [tokenizer.encode(text)], 16)
    end = min(tokens.index(eos) for eos in read_facts(folder).eos_token_ids if eos in tokens)
    assert tokenizer.decode(tokens[:end]) == "The capital of France is Paris."


def test_tokenizer_and_facts(folder: Path, tokenizer: Any) -> None:
    facts = read_facts(folder)
    assert (facts.eos_token_ids, facts.vocab_size, facts.max_position_embeddings) == ((2,), 49152, 8192)
    assert facts.kv_elements_per_token == 2 * 30 * 3 * 64
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x  42")) == ["x", "ĠĠ", "4", "2"]
