"""The embedded model through the whole application (issue 2, point 7)."""

from __future__ import annotations

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
