"""Offline use with a real model, and the Python of the README's section on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.llm import LLM, SamplingParams
from tests.embedded import embedded_folder

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True)
def _embedded_model() -> None:
    embedded_folder()


@pytest.mark.model
def test_the_embedded_model_knows_the_capital_of_france() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(DEFAULT_MODEL, max_model_len=512, kv_cache_tokens=4096, device="cpu", num_threads=1) as llm:
        [answer] = llm.chat(question, greedy)
        [same] = llm.generate([answer.prompt_token_ids], greedy)
    assert "Paris" in answer.text
    assert same.text == answer.text
    assert same.usage.cached_tokens > 0


@pytest.mark.model
def test_the_readmes_offline_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = README.read_text().split("\n## Offline\n")[1].split("\n## ")[0]
    [snippet] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert "Paris" in shown[0]
    assert sum("completion_tokens=32" in line for line in shown) == 2
