"""`serve run` with `device: cuda`: the whole shape on a GPU answers with the same text as on a CPU, in float32.

Stands alone on httpx: the GPU machine has neither the openai client nor HAProxy.
"""

from __future__ import annotations

import time

import httpx
import pytest

from benchmarks.server import serve_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

QUESTIONS = ["What is the capital of France?", "Name three planets.", "Write a line about the sea."]


def answers(url: str) -> list[str]:
    texts = []
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["message"]["content"])
    return texts


def test_cuda_answers_like_cpu_in_float32() -> None:
    texts = {}
    for device in ("cuda", "cpu"):
        begin = time.monotonic()
        with serve_run({"device": device, "dtype": "float32"}) as server:
            server.wait_ready()
            started = time.monotonic()
            texts[device] = answers(server.url)
            print(f"{device}: ready after {started - begin:.1f} s, answered after {time.monotonic() - started:.1f} s")
            attention = [
                line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if "overlap_build_info{" in line
            ]
            print(attention)
    assert texts["cuda"][0] == "The capital of France is Paris."
    assert texts["cuda"] == texts["cpu"]
    print(texts["cuda"])
