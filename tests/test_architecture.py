"""Policies that a linter does not know: what a process loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "overlap_serve",
    "overlap_serve.cache.radix",
    "overlap_serve.cli",
    "overlap_serve.config",
    "overlap_serve.llm",
    "overlap_serve.models.families",
    "overlap_serve.models.source",
    "overlap_serve.openai.protocol",
    "overlap_serve.openai.stream",
    "overlap_serve.messages",
    "overlap_serve.runtime.detokenizer",
    "overlap_serve.runtime.frontend",
    "overlap_serve.runtime.worker",
    "overlap_serve.scheduler.scheduler",
    "overlap_serve.text.detokenizer",
    "overlap_serve.text.template",
    "overlap_serve.text.tokenizer",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_text_processes_and_the_fake_engine_load_no_torch(module: str) -> None:
    """torch costs 3 s and 300 MB per process; import-linter cannot see what a parent package drags in at run time."""
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
