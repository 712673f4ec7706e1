"""Rig H: the whole path of a request in one process, with the fake engine. Real sockets everywhere, no Ray.

    client -> uvicorn -> Frontend -> (zmq) Worker -> (zmq) DetokenizerService -> (zmq) Frontend -> client

Three threads: the worker's loop, the detokenizer's, and the event loop of HTTP server and frontend. `ZmqCalls` stands for the open
Serve call: it hands the request to the worker and returns when the worker says `Ended`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from deployments.http import build_http_app
from overlap_serve.config import FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.messages import AbortRequest, Ended, GenerateRequest, LoopAnswer, ReplicaStatus
from overlap_serve.runtime.control import Heard, ProfileAnswer
from overlap_serve.runtime.detokenizer import DetokenizerService
from overlap_serve.runtime.frontend import Frontend
from overlap_serve.runtime.orders import Orders
from overlap_serve.runtime.worker import Worker
from overlap_serve.text.template import fake_text
from overlap_serve.transport import Inbox, Outbox

KEY = b"rig"
LOOPBACK = "tcp://127.0.0.1"
MODEL = "fake"
SETTLE_S = 10.0

T = TypeVar("T")


class ZmqCalls:
    """`Submit` over zmq. Lives on the event loop, except for the constructor."""

    def __init__(self) -> None:
        self._inbox = Inbox(LOOPBACK, KEY)
        self._outbox = Outbox(KEY, "rig_scheduler")
        self._open: dict[str, asyncio.Future[None]] = {}
        self.control = self._inbox.endpoint
        self.scheduler = ""
        self.orders = Orders(lambda messages: self._outbox.send(self.scheduler, messages))

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._receive)
        self._receive()

    @contextmanager
    def nowhere(self) -> Iterator[None]:
        """Requests reach no scheduler: they are accepted and stay without output."""
        real, self.scheduler = self.scheduler, self.control
        try:
            yield
        finally:
            self.scheduler = real

    async def __call__(self, request: GenerateRequest) -> None:
        ended = self._open[request.rid] = asyncio.get_running_loop().create_future()
        self._outbox.send(self.scheduler, [request])
        try:
            await ended
        except asyncio.CancelledError:
            self._outbox.send(self.scheduler, [AbortRequest(request.rid, "client")])
            raise
        finally:
            del self._open[request.rid]

    def rids(self) -> list[str]:
        """Of the open calls, one per prompt, in the order in which they were made."""
        return list(self._open)

    def lose(self) -> None:
        """The scheduler dies under its open calls."""
        for ended in self._open.values():
            if not ended.done():
                ended.set_exception(ConnectionError("the replica is gone"))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()
        self._outbox.close()

    def _receive(self) -> None:
        for message in self._inbox.drain():
            if isinstance(message, LoopAnswer):
                self.orders.answered(message)
            future = self._open.get(message.rid) if isinstance(message, Ended) else None
            if future is not None and not future.done():
                future.set_result(None)


class RigCluster:
    """`Cluster` over the objects of the rig. Tests may set what it says."""

    def __init__(self, worker: Worker, detokenizer: DetokenizerService, orders: Orders) -> None:
        self._worker = worker
        self._detokenizer = detokenizer
        self._orders = orders
        self.ordered_pause = False
        self.num_silent = 0
        self.statuses: list[ReplicaStatus] | None = None
        self.endpoints: list[str] = [detokenizer.endpoint]
        self.asked_to_abort: list[str | None] = []
        self.aborted_elsewhere = 0

    def detokenizers(self) -> Sequence[str]:
        return self.endpoints

    def leaving_detokenizers(self) -> Sequence[str]:
        return []

    def replicas(self) -> Sequence[ReplicaStatus]:
        return [self._worker.status()] if self.statuses is None else self.statuses

    async def metric_snapshots(self) -> list[bytes]:
        return [self._worker.metrics_snapshot(), self._detokenizer.metrics_snapshot()]

    async def abort_everywhere(self, label: str | None) -> int:
        self.asked_to_abort.append(label)
        return self.aborted_elsewhere

    def paused(self) -> bool:
        return self.ordered_pause

    async def set_paused(self, paused: bool) -> Heard[LoopAnswer]:
        self.ordered_pause = paused
        return Heard([await self._orders.send("pause" if paused else "resume")], self.num_silent)

    async def flush(self, force: bool) -> Heard[LoopAnswer]:
        return Heard([await self._orders.send("flush", force=force)], self.num_silent)

    async def start_profile(self) -> Heard[ProfileAnswer]:
        raise AssertionError("the fake engine is never asked")

    async def stop_profile(self) -> Heard[ProfileAnswer]:
        raise AssertionError("the fake engine is never asked")


class HttpRig:
    """A running server. All methods are for the test's own thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        facts = fake_facts(config.fake)
        text = fake_text()
        spec = resolve(config, facts, HostFacts(num_cpus=2, bf16=False, cuda=False), "")
        self.calls = ZmqCalls()
        self.worker = Worker(spec, LOOPBACK, KEY, control=self.calls.control, replica="scheduler-0")
        self.calls.scheduler = self.worker.endpoint
        self.detokenizer = DetokenizerService(text.tokenizer, LOOPBACK, KEY, "detokenizer-0")
        self.cluster = RigCluster(self.worker, self.detokenizer, self.calls.orders)
        self.frontend = Frontend(
            config,
            text,
            facts,
            bind=LOOPBACK,
            key=KEY,
            submit=self.calls,
            cluster=self.cluster,
            replica="ingress-0",
            registry=CollectorRegistry(),
        )
        # Not `create_server`: asyncio sets TCP_NODELAY only on sockets that say IPPROTO_TCP, and without it every answer of head and
        # body takes 40 ms (Nagle's algorithm against delayed acknowledgements).
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_http_app(self.frontend),
                log_level="critical",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._up = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name)
            for name, target in (
                ("rig-worker", self.worker.run),
                ("rig-detokenizer", self.detokenizer.run),
                ("rig-http", lambda: asyncio.run(self._serve())),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        assert self._up.wait(SETTLE_S), "the server did not start"

    def stop(self) -> None:
        self._server.should_exit = True
        self._threads[2].join(SETTLE_S)
        self.worker.stop()
        self.detokenizer.stop()
        for thread in self._threads:
            thread.join(SETTLE_S)
            assert not thread.is_alive(), f"{thread.name} did not end"
        self._listener.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the server's event loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * SETTLE_S)

    def do(self, work: Callable[[], T]) -> T:
        """Call on the server's event loop."""

        async def run() -> T:
            return work()

        return self.call(run())

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client; close it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0, verify=False, **options)  # no certificates to load

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that other threads do."""

        async def poll() -> None:
            loop = asyncio.get_running_loop()
            horizon_s = loop.time() + SETTLE_S
            while not condition():
                assert loop.time() < horizon_s, f"waited {SETTLE_S:g} s for: {what}"
                await asyncio.sleep(0.005)

        self.call(poll())

    def assert_at_rest(self) -> None:
        """Nothing is left of any request, anywhere, and every request is counted once."""
        self.until(self._rests, "every part at rest")
        self.worker.check_at_rest()
        self.do(self.frontend.check_at_rest)
        assert self.detokenizer.open_streams() == 0
        counts = self.counters()
        assert counts["accepted"] == counts["finished"] + counts["aborted"] + counts["failed"], counts
        assert counts["open"] == 0, counts

    def counters(self) -> dict[str, int]:
        """Requests by what became of them; read in one moment of the event loop."""
        text = self.do(self.frontend.metrics_snapshot)
        totals = dict.fromkeys(("accepted", "rejected", "finished", "aborted", "failed", "open"), 0)
        for name, _, value in samples(text):
            short = name.removeprefix("overlap_requests_").removesuffix("_total")
            short = "open" if name == "overlap_open_requests" else short
            if short in totals:
                totals[short] += int(value)
        return totals

    def _rests(self) -> bool:
        try:
            self.frontend.check_at_rest()
            self.worker.check_at_rest()
        except AssertionError:
            return False
        return self.detokenizer.open_streams() == 0

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.calls.start()
        await self.frontend.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.002)
        self._up.set()
        await serving
        await self.frontend.close()
        self.calls.close()


def samples(exposition: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample."""
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


@contextmanager
def http_rig(fake: FakeModel | None = None, **config: Any) -> Iterator[HttpRig]:
    """A server with a fast fake model, at rest when the block ends."""
    fake = fake or FakeModel(base_ms=1.0, max_model_len=1024, eos_every=0)
    rig = HttpRig(ServeConfig(engine="fake", served_model_name=MODEL, fake=fake, **config))
    rig.start()
    try:
        yield rig
        rig.assert_at_rest()
    finally:
        rig.stop()
