"""The embedded model through the whole rank: chunked, batched, prefix-cached, at both depths, equal to transformers in float32."""

from __future__ import annotations

import pytest

from overlap_serve.config import ServeConfig
from overlap_serve.runtime.model import engine_spec
from overlap_serve.text.tokenizer import Tokenizer
from tests.embedded import NUM_TOKENS, PROMPTS, embedded_folder, transformers_tokens
from tests.runtime.test_worker import HOST, Running

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("depth", "step_tokens"), [(0, 12), (1, 256)])
def test_greedy_tokens_equal_transformers_through_the_loop(depth: int, step_tokens: int) -> None:
    tokenizer = Tokenizer.from_folder(embedded_folder())
    prompts = {f"r{i}": tokenizer.encode(text, add_special_tokens=True) for i, text in enumerate(PROMPTS)}
    config = ServeConfig(
        device="cpu",
        dtype="float32",
        overlap_depth=depth,
        max_step_tokens=step_tokens,
        max_running_requests=8,
        kv_cache_tokens=4096,
    )
    running = Running(engine_spec(config, HOST))
    for rid, prompt in prompts.items():
        running.submit(rid, NUM_TOKENS, prompt)
    ids = running.until_all_ended(set(prompts))
    running.close()
    assert [ids[f"r{i}"] for i in range(len(PROMPTS))] == transformers_tokens()
