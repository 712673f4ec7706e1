"""The embedded default model for tests: its folder, some prompts, and what transformers makes of them in float32."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import ModelLoadError
from overlap_serve.models.source import resolve_model

NUM_TOKENS = 64
PROMPTS = [
    "The quick brown fox",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "2 + 2 = 4, 3 + 3 = 6,  4 + 4 =",
    "The three primary colours are",
    "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at 100 degrees because",
    "Der schnelle braune Fuchs springt über",
]


def embedded_folder() -> Path:
    """The prepared folder; skips the test where it is neither there nor to be had."""
    try:
        return resolve_model(DEFAULT_MODEL)
    except ModelLoadError as error:
        pytest.skip(f"needs the embedded model: {error}")


@functools.cache
def transformers_tokens() -> list[list[int]]:
    """NUM_TOKENS greedy ids of each prompt, by transformers' own loop without end tokens; padded on the left, decoded side by side."""
    folder = embedded_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=2)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows: list[list[int]] = model.generate(ids, attention_mask=mask)[:, longest:].tolist()
    assert [len(row) for row in rows] == [NUM_TOKENS] * len(PROMPTS)
    return rows
