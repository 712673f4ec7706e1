"""One rank over real zmq: request in, tokens to the detokenizer, `Ended` to the control plane, status and metrics beside it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from overlap_serve.config import EngineSpec, FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.messages import Ended, GenerateRequest, Message, Route, TokenOutput, pack_ids
from overlap_serve.runtime.worker import Worker
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.transport import Inbox, Outbox

KEY = b"k" * 16
HOST = HostFacts(num_cpus=2, bf16=False, cuda=False)


class Running:
    def __init__(self, spec: EngineSpec) -> None:
        name = uuid.uuid4()
        self.detokenizer = Inbox(f"inproc://detok-{name}", KEY)
        self.control = Inbox(f"inproc://control-{name}", KEY)
        self.outbox = Outbox(KEY, "test")
        self.worker = Worker(spec, f"inproc://worker-{name}", KEY, control=self.control.endpoint, replica="s0")
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def submit(self, rid: str, max_tokens: int, prompt: Sequence[int] = (1, 2, 3)) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        route = Route(self.detokenizer.endpoint, "ingress")
        self.outbox.send(
            self.worker.endpoint, [GenerateRequest(rid, 0, pack_ids(list(prompt)), 1, sampling, TextParams(), route)]
        )

    def until_all_ended(self, rids: set[str]) -> dict[str, list[int]]:
        """Ids of requests that run side by side."""
        ids: dict[str, list[int]] = {rid: [] for rid in rids}
        open_rids = set(rids)
        while open_rids:
            arrived = self.detokenizer.drain(30.0)
            assert arrived, "no output"
            for message in arrived:
                assert isinstance(message, TokenOutput) and message.failure is None
                ids[message.rid].extend(message.token_ids)
                if message.finish:
                    open_rids.remove(message.rid)
        return ids

    def until_ended(self, rid: str) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while not (outputs and outputs[-1].finish):
            arrived: list[Message] = self.detokenizer.drain(10.0)
            assert arrived, "no output"
            outputs += [m for m in arrived if isinstance(m, TokenOutput) and m.rid == rid]
        assert self.control.drain(10.0) == [Ended(rid, 0)]
        return outputs

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
        for box in (self.detokenizer, self.control, self.outbox):
            box.close()


@pytest.fixture
def running() -> Iterator[Running]:
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=1.0))
    it = Running(resolve(config, fake_facts(config.fake), HOST, ""))
    yield it
    it.close()


def test_request_goes_through_and_leaves_nothing_behind(running: Running) -> None:
    running.submit("r", 5)
    outputs = running.until_ended("r")
    assert sum(len(o.token_ids) for o in outputs) == 5 and outputs[-1].finish == "length"
    opening = outputs[0].open
    assert opening is not None and opening.scheduler == running.worker.endpoint and opening.prompt_tokens == 3
    running.worker.check_at_rest()


def test_status_and_metrics_are_at_zero_after_the_last_request(running: Running) -> None:
    for i in range(3):
        running.submit(f"r{i}", 4)
        running.until_ended(f"r{i}")
    running.submit("last", 1)
    running.until_ended("last")
    running.worker.stop()
    running.thread.join(10)
    status = running.worker.status()
    assert (status.status, status.running, status.waiting, status.kv_usage) == ("dead", 0, 0, 0.0)
    assert status.capacity_tokens > 1000
    families = {f.name: f for f in text_string_to_metric_families(running.worker.metrics_snapshot().decode())}
    values = {s.name: s.value for f in families.values() for s in f.samples if s.labels.get("replica") == "s0"}
    assert values["overlap_generation_tokens_total"] == 13
    assert values["overlap_running_requests"] == 0
    assert values["overlap_depth"] == 1
    assert values["overlap_request_decode_time_seconds_count"] == 4
