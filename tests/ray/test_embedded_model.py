"""The embedded model through the whole application (issue 2, point 7)."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from tests.ray.conftest import deployed

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]


def test_capital_of_france_stream_and_not(cluster_url: str) -> None:
    with deployed(cluster_url, device="cpu", drain_timeout=20.0) as app:
        ask = {
            "model": app.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 32,
        }
        whole = app.openai.chat.completions.create(**ask)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "The capital of France is Paris."
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(app.openai.chat.completions.create(**ask, stream=True))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "The capital of France is Paris."


NUM_CLIENTS, NUM_REQUESTS, LEAVING_SHARE = 32, 200, 0.2


async def one_request(http: httpx.AsyncClient, rng: random.Random, model: str, number: int) -> str:
    """A streamed chat; a fifth of the clients leave after a few events. How it ended: left, stop or length."""
    leaves_after = rng.randint(0, 8) if rng.random() < LEAVING_SHARE else None
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Write {rng.randint(1, 9)} words about the number {number}."}],
        "max_tokens": rng.randint(2, 24),
        "temperature": rng.choice((0.0, 0.8)),
        "stream": True,
    }
    finish = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        num_events = 0
        async for line in response.aiter_lines():
            if num_events == leaves_after:
                return "left"
            if line.startswith("data: {"):
                num_events += 1
                choices = json.loads(line.removeprefix("data: "))["choices"]
                finish = finish or next((c["finish_reason"] for c in choices if c["finish_reason"]), "")
        assert line == "" or line == "data: [DONE]"
    return finish


async def load(url: str, model: str) -> Counter[str]:
    rng = random.Random(7)
    numbers = iter(range(NUM_REQUESTS))
    ends: Counter[str] = Counter()

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            for number in numbers:
                ends[await one_request(http, rng, model, number)] += 1

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return ends


def test_200_streams_of_32_clients_of_which_a_fifth_leaves_leave_nothing_behind(cluster_url: str) -> None:
    with deployed(cluster_url, device="cpu", drain_timeout=20.0, kv_cache_tokens=8192) as app:
        ends = asyncio.run(load(app.url, app.model))
        assert sum(ends.values()) == NUM_REQUESTS
        assert ends["left"] > 10 and ends["stop"] + ends["length"] == NUM_REQUESTS - ends["left"]
        app.wait_idle(30)
        counted = app.metrics()
        assert counted["overlap_requests_accepted_total"] == NUM_REQUESTS
        # Who leaves between the last token and the end of the stream may find the request finished.
        assert counted["overlap_requests_finished_total"] >= NUM_REQUESTS - ends["left"]
        assert counted["overlap_requests_finished_total"] + counted["overlap_requests_aborted_total"] == NUM_REQUESTS
        assert counted.get("overlap_requests_failed_total", 0) == 0
        assert counted["overlap_open_requests"] == counted["overlap_detokenizer_open_streams"] == 0
        assert counted["overlap_kv_pages"] == 8192 // 16  # free + cached + owned
        assert counted["overlap_kv_usage_ratio"] == 0
        assert counted.get("overlap_transport_dropped_total", 0) == 0
