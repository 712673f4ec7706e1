"""The one Ray test of `make test`: the whole distributed shape answers, and leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.ray.conftest import deployed, eventually, fake_args, processes

pytestmark = [pytest.mark.ray, pytest.mark.smoke, pytest.mark.timeout(240)]

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_answers_stream_and_not_counts_everywhere_and_leaves_no_process(cluster_url: str) -> None:
    with deployed(cluster_url, **fake_args(fake={"base_ms": 1.0})) as app:
        ask = {"model": app.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
        whole = app.openai.chat.completions.create(**ask)  # type: ignore[call-overload]
        chunks = list(app.openai.chat.completions.create(**ask, stream=True))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(text) == 32  # the fake model speaks printable bytes
        assert text == whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 32

        app.wait_idle()
        counted = app.metrics()
        assert counted["overlap_requests_accepted_total"] == counted["overlap_requests_finished_total"] == 2
        assert counted["overlap_generation_tokens_total"] == 64  # of the rank's process
        assert counted["overlap_detokenizer_open_streams"] == 0  # of the detokenizer's process
        assert len(processes("ray::RankActor")) == 1
    eventually(
        lambda: not processes("ray::RankActor") and not processes("ray::ServeReplica"),
        10,
        "all our processes have ended",
    )
