"""What following costs: rank 0 sends each plan to the other ranks before it launches it itself; they launch it when it has arrived.

    python -m benchmarks.follower_hop

Real loop, scheduler, zmq and follower processes; the device is a wait of 5 ms. One engine each of 1, 2 and 4 ranks, kept for all runs,
which take turns. Two kinds of steps: steady decode of 64 rows (plans are nearly empty), and steps in which prompts of 1,000 tokens join
(4 KB of ids and 63 pages each). send: time of rank 0's launch, less that of a single rank. hop: from the moment before rank 0 sends a plan
until the last follower has launched it (CLOCK_MONOTONIC, one for all processes). The followers share the machine with rank 0. Their
devices wait for nothing: real ones wait for each other in every layer, and pretended ones would drift apart.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.results import write
from deployments.rank import SWITCH_INTERVAL_S
from overlap_serve.bench.loop import WaitingEngine
from overlap_serve.cache.prefix import NoPrefixCache
from overlap_serve.config import EngineSpec, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.device.base import Watch
from overlap_serve.engine.base import Engine, PendingStep
from overlap_serve.messages import GenerateRequest, Message, Route, Stop, TokenOutput, pack_ids
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.ranks import FollowerLoop, LeadingEngine, Seat
from overlap_serve.runtime.worker import scheduler_limits
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan
from overlap_serve.transport import Inbox, Outbox

KEY = b"benchmark"
HOST = "127.0.0.1"
SIZES = (1, 2, 4)
REPEATS = 7
NUM_ROWS = 64
DEVICE_S = 0.005
TOKEN = 65
PROMPT_LEN = 1000
LOADS = {"decode": (NUM_ROWS, 16, 300), "join": (128, PROMPT_LEN, 8)}  # requests, prompt tokens, new tokens


def make_spec(size: int) -> EngineSpec:
    """A step takes all decode rows and at least one whole prompt."""
    config = ServeConfig.model_validate(
        {
            "engine": "fake",
            "tensor_parallel_size": size,
            "kv_cache_tokens": 2 * NUM_ROWS * PROMPT_LEN,
            "max_running_requests": NUM_ROWS,
            "max_step_tokens": NUM_ROWS + 2 * PROMPT_LEN,
        }
    )
    return resolve(config, fake_facts(config.fake), HostFacts(num_cpus=2, bf16=False, cuda=False), "")


class NotedEngine(WaitingEngine):
    """launched: (step, ns) after each launch of a forward."""

    def __init__(self, spec: EngineSpec, device_s: float) -> None:
        super().__init__(spec, device_s)
        self.launched: list[tuple[int, int]] = []

    def launch_forward(self, plan: StepPlan) -> None:
        super().launch_forward(plan)
        self.launched.append((plan.step, time.monotonic_ns()))


@dataclass
class Step:
    """begin, end: of rank 0's launch, ns."""

    kind: str
    begin: int
    end: int


@dataclass
class Timed:
    """An engine, and when it launched which step."""

    engine: Engine
    steps: dict[int, Step] = field(default_factory=dict)

    def launch_forward(self, plan: StepPlan) -> None:
        begin = time.monotonic_ns()
        self.engine.launch_forward(plan)
        kind = "join" if plan.joins else "other" if plan.chunks or plan.leaves else "decode"
        self.steps[plan.step] = Step(kind, begin, time.monotonic_ns())

    def launch_sample(self) -> PendingStep:
        return self.engine.launch_sample()

    def device_busy_s(self) -> float:
        return self.engine.device_busy_s()

    def watch_device(self, watch: Watch | None) -> None:
        self.engine.watch_device(watch)

    def close(self) -> None:
        self.engine.close()


def follow(size: int, rank: int) -> None:
    """A follower process: says its address, follows until a Stop, says when it launched what."""
    spec = make_spec(size)
    seat = Seat(spec, rank, HOST, KEY)
    assert seat.inbox is not None
    print(seat.address, flush=True)
    engine = NotedEngine(spec, 0.0)
    FollowerLoop(engine, seat.inbox, depth=spec.depth).run()
    print(json.dumps(engine.launched))


class Bench:
    """The engine of `size` ranks, kept for all runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        spec = make_spec(size)
        self._followers = [start_follower(size, rank) for rank in range(1, size)]
        engine: Engine = NotedEngine(spec, DEVICE_S)
        if size > 1:
            addresses = tuple(first_line(follower) for follower in self._followers)
            engine = LeadingEngine(engine, Outbox(KEY, "plan", idle_s=math.inf), addresses)
        self._engine = Timed(engine)
        name = uuid.uuid4()
        self._sink = Inbox(f"inproc://sink-{name}", KEY)
        self._requests = Inbox(f"inproc://requests-{name}", KEY)
        self._to_loop = Outbox(KEY, "bench")
        scheduler = Scheduler(scheduler_limits(spec, spec.num_pages), NoPrefixCache())
        self._loop = OverlapLoop(
            scheduler, self._engine, self._requests, Outbox(KEY, "loop"), LoopMeter(), depth=spec.depth
        )
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def run(self, kind: str) -> range:
        """The steps that a load of this kind took."""
        first = len(self._engine.steps)
        num_requests, prompt_len, max_tokens = LOADS[kind]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        route = Route(self._sink.endpoint, "")
        prompt = pack_ids([TOKEN] * prompt_len)
        requests: list[Message] = [
            GenerateRequest(uuid.uuid4().hex, 0, prompt, 1, sampling, TextParams(), route) for _ in range(num_requests)
        ]
        self._to_loop.send(self._requests.endpoint, requests)
        while num_requests:
            num_requests -= sum(isinstance(m, TokenOutput) and m.finish is not None for m in self._sink.drain(60.0))
        return range(first, len(self._engine.steps))

    def close(self) -> list[dict[int, int]]:
        """When each follower launched each step, ns."""
        self._to_loop.send(self._requests.endpoint, [Stop()])
        self._thread.join()
        self._engine.close()
        for box in (self._sink, self._requests, self._to_loop):
            box.close()
        return [dict(json.loads(follower.communicate(timeout=60)[0])) for follower in self._followers]

    def describe(self, kind: str, steps: range, launched: Sequence[Mapping[int, int]]) -> dict[str, object]:
        """One run: percentiles over its steps of that kind, in ms."""
        own = list(self._engine.steps.items())[steps.start : steps.stop]
        chosen = {number: step for number, step in own if step.kind == kind}
        gaps = [(b.begin - a.begin) / 1e6 for (_, a), (_, b) in itertools.pairwise(own)]
        run: dict[str, object] = {"ranks": self.size, "kind": kind, "steps": len(chosen)}
        run["step_ms"] = statistics.median(gaps)
        run |= percentiles("launch", [(step.end - step.begin) / 1e6 for step in chosen.values()])
        if launched:
            last = {number: max(follower[number] for follower in launched) for number in chosen}
            run |= percentiles("hop", [(last[number] - step.begin) / 1e6 for number, step in chosen.items()])
        return run


def percentiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p50_ms": statistics.median(values), f"{name}_p99_ms": sorted(values)[int(len(values) * 0.99)]}


def start_follower(size: int, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.follower_hop", str(size), str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Medians over the runs. send: launch with followers, less launch without."""

    def median(ranks: int, kind: str, key: str) -> float:
        return statistics.median(float(str(run[key])) for run in runs if (run["ranks"], run["kind"]) == (ranks, kind))

    made: dict[str, float] = {}
    for ranks, kind, p in itertools.product(SIZES[1:], LOADS, ("p50", "p99")):
        key = f"launch_{p}_ms"
        made[f"{kind}_send_{p}_ms_tp{ranks}"] = median(ranks, kind, key) - median(1, kind, key)
        made[f"{kind}_hop_{p}_ms_tp{ranks}"] = median(ranks, kind, f"hop_{p}_ms")
    for ranks in SIZES:
        made[f"decode_step_ms_tp{ranks}"] = median(ranks, "decode", "step_ms")
    return made


def measure() -> list[dict[str, object]]:
    benches = [Bench(size) for size in SIZES]
    for bench in benches:
        bench.run("join")  # warm
    spans = [(bench, kind, bench.run(kind)) for _ in range(REPEATS) for kind in LOADS for bench in benches]
    launched = {bench.size: bench.close() for bench in benches}
    return [bench.describe(kind, span, launched[bench.size]) for bench, kind, span in spans]


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if len(sys.argv) == 3:
        follow(int(sys.argv[1]), int(sys.argv[2]))
        return
    runs = measure()
    file = write("follower_hop", "python -m benchmarks.follower_hop", runs, figures(runs))
    for key, value in figures(runs).items():
        print(f"{key:32} {value:8.3f}")
    print(file)


if __name__ == "__main__":
    main()
