"""What the overlap hides on a CPU: step time at depth 0 and 1, interleaved, on the fake engine and on the embedded model.

    python -m benchmarks.loop_overlap_cpu

Fake engine: 5 ms of device time and 4 ms of host work a step (busy Python, holding the GIL as real host work does). Embedded model: the
host work that there is. host_hidden_ratio = (step at depth 0 - step at depth 1) / host time of a step.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import uuid
from collections.abc import Mapping, Sequence

from benchmarks.results import write
from overlap_serve.cache.prefix import NoPrefixCache
from overlap_serve.config import EngineSpec, FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.messages import GenerateRequest, Message, Route, Stop, TokenOutput, pack_ids
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.model import cpu_has_bf16, engine_spec
from overlap_serve.runtime.worker import build_engine, scheduler_limits
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.scheduler.outputs import Outputs
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan, StepResult
from overlap_serve.transport import Inbox, Outbox

KEY = b"benchmark"
REPEATS = 7
NUM_ROWS = 8
NUM_TOKENS = 64
DEVICE_MS, PLAN_MS, PROCESS_MS = 5.0, 1.5, 2.5
HOST = HostFacts(num_cpus=2, bf16=cpu_has_bf16(), cuda=False)


def burn(milliseconds: float) -> None:
    until = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until:
        pass


class BusyScheduler(Scheduler):
    """Spends PLAN_MS and PROCESS_MS of host time a step on top of its own."""

    def plan(self, now: float) -> StepPlan | None:
        if self._running or self._waiting:
            burn(PLAN_MS)
        return super().plan(now)

    def apply(self, result: StepResult, now: float) -> Outputs:
        burn(PROCESS_MS)
        return super().apply(result, now)


class Bench:
    """One engine and one loop, kept for all runs of both depths."""

    def __init__(self, spec: EngineSpec, scheduler: type[Scheduler]) -> None:
        name = uuid.uuid4()
        self.engine, num_pages, _ = build_engine(spec)
        self.meter = LoopMeter(device_busy_s=self.engine.device_busy_s)
        self.sink = Inbox(f"inproc://sink-{name}", KEY)
        self.requests = Inbox(f"inproc://requests-{name}", KEY)
        self.to_loop = Outbox(KEY, "bench")
        self.loop = OverlapLoop(
            scheduler(scheduler_limits(spec, num_pages), NoPrefixCache()),
            self.engine,
            self.requests,
            Outbox(KEY, "loop"),
            self.meter,
            depth=1,
        )
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def send(self, message: Message) -> None:
        self.to_loop.send(self.requests.endpoint, [message])

    def run(self, depth: int) -> dict[str, float]:
        """NUM_ROWS requests side by side; median time between steps and mean host time of a step, in ms."""
        self.loop.depth = depth
        before = self.meter.totals.host_s
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        for i in range(NUM_ROWS):
            prompt = pack_ids([(7 * i + k) % 200 for k in range(16)])
            route = Route(self.sink.endpoint, "")
            self.send(GenerateRequest(uuid.uuid4().hex, 0, prompt, 1, sampling, TextParams(), route))
        stamps: list[float] = []
        num_ended = 0
        while num_ended < NUM_ROWS:
            ended = [m for m in self.sink.drain(60.0) if isinstance(m, TokenOutput) and m.finish]
            stamps.append(time.perf_counter())
            num_ended += len(ended)
        gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
        host_ms = (self.meter.totals.host_s - before) * 1e3 / len(stamps)
        return {"depth": depth, "step_ms": statistics.median(gaps), "host_ms": host_ms}

    def close(self) -> None:
        self.send(Stop())
        self.thread.join()
        self.engine.close()
        for box in (self.sink, self.requests, self.to_loop):
            box.close()


def interleaved(name: str, spec: EngineSpec, scheduler: type[Scheduler]) -> list[dict[str, object]]:
    bench = Bench(spec, scheduler)
    bench.run(1)  # warm
    runs: list[dict[str, object]] = [{"engine": name, **bench.run(depth)} for _ in range(REPEATS) for depth in (0, 1)]
    bench.close()
    return runs


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """From raw runs to the figures of the README."""

    def median(engine: str, depth: int, key: str) -> float:
        return statistics.median(float(str(r[key])) for r in runs if (r["engine"], r["depth"]) == (engine, depth))

    made: dict[str, float] = {}
    for engine, prefix in (("fake", ""), ("embedded", "embedded_")):
        serial, overlapped = median(engine, 0, "step_ms"), median(engine, 1, "step_ms")
        made[f"{prefix}step_ms_depth0"] = serial
        made[f"{prefix}step_ms_depth1"] = overlapped
        made[f"{prefix}host_hidden_ratio"] = (serial - overlapped) / median(engine, 0, "host_ms")
    return made


def main() -> None:
    fake = ServeConfig(engine="fake", fake=FakeModel(base_ms=DEVICE_MS))
    runs = interleaved("fake", resolve(fake, fake_facts(fake.fake), HOST, ""), BusyScheduler)
    embedded = engine_spec(ServeConfig(device="cpu", kv_cache_tokens=4096), HOST)
    runs += interleaved("embedded", embedded, Scheduler)
    file = write("loop_overlap_cpu", "python -m benchmarks.loop_overlap_cpu", runs, figures(runs))
    for key, value in figures(runs).items():
        print(f"{key:32} {value:8.3f}")
    print(file)


if __name__ == "__main__":
    main()
