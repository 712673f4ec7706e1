"""What the host does in a step: the real loop, scheduler and sends over a device that only waits.

Knows no model and no text. The one idea: everything that is not the host's is taken out. The device sleeps (and holds neither core nor
GIL), its tokens cost nothing, and nobody reads what is sent (see `drive`). What is left is planning, launching, processing and sending,
read from the loop's own marks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from overlap_serve.bench.drive import Clock, Driver, Load, Recording
from overlap_serve.config import EngineSpec, FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.device.base import Span, Watch
from overlap_serve.device.thread import ThreadStreams
from overlap_serve.engine.fake import FakeEngine, StepInputs

TOKEN = 65
PROMPT_LEN = 16
NUM_ROWS = (1, 16, 64, 256, 1024)
DEPTHS = (0, 1)


@dataclass(frozen=True)
class HostCost:
    """Means over the steady decode steps of one run, in ms. total: of the round without the wait for the device, thus with receiving
    and the meter's own counting. process: tokens, ends, outputs; without send, which is msgpack and zmq. step: from one to the next."""

    rows: int
    depth: int
    steps: int
    plan_ms: float
    launch_ms: float
    process_ms: float
    send_ms: float
    total_ms: float
    max_ms: float
    step_ms: float

    @property
    def row_us(self) -> float:
        """Of host time for each row and step."""
        return self.total_ms * 1e3 / self.rows

    def fields(self) -> dict[str, object]:
        return asdict(self)


class WaitingEngine(FakeEngine):
    """Its device only waits: what is measured is the host's. Its spans are busy for that wait alone, not for the time in which its
    thread waits for the GIL after it."""

    def __init__(self, spec: EngineSpec, device_s: float) -> None:
        super().__init__(
            ThreadStreams(),
            num_slots=spec.max_running,
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            max_model_len=spec.max_model_len,
        )
        self._device_s = device_s
        self._watch: Watch | None = None

    def watch_device(self, watch: Watch | None) -> None:
        self._watch = watch

    def forward(self, inputs: StepInputs, entries: Sequence[tuple[int, int, int]]) -> None:
        begin = time.monotonic()
        if self._device_s:
            time.sleep(self._device_s)
        if self._watch is not None:
            self._watch(Span(begin, time.monotonic(), self._device_s))

    def sample(self, inputs: StepInputs) -> None:
        inputs.token_ids = [TOKEN] * int(inputs.rows.samples_B.sum())


def measure(
    rows: int, *, device_s: float, steps: int, repeats: int = 1, clock: Clock = time.monotonic
) -> list[HostCost]:
    """Both depths, `repeats` times, interleaved."""
    load = Load(rows, PROMPT_LEN, steps)
    spec = make_spec(load)
    with Driver(spec, WaitingEngine(spec, device_s), spec.num_pages, clock=clock) as driver:
        return [cost_of(driver.run(load, depth), rows) for _ in range(repeats) for depth in DEPTHS]


def make_spec(load: Load) -> EngineSpec:
    """Room for all rows at once, and for all prompts in one step."""
    config = ServeConfig(
        engine="fake",
        fake=FakeModel(base_ms=0, max_model_len=load.longest + 1),
        kv_cache_tokens=(load.rows + 1) * (load.longest + 4 * load.spread),
        max_running_requests=load.rows,
        max_waiting_requests=load.rows,
        max_step_tokens=max(512, load.rows * (load.prompt_len + load.spread)),
    )
    return resolve(config, fake_facts(config.fake), HostFacts(num_cpus=1, bf16=False, cuda=False), "")


def cost_of(run: Recording, rows: int) -> HostCost:
    rounds = run.steady(rows)
    begin, end = rounds[0].begin, rounds[-1].end
    send_s = sum(seconds for at, seconds in run.sends if begin <= at <= end)

    def mean_ms(total_s: float) -> float:
        return total_s * 1e3 / len(rounds)

    return HostCost(
        rows=rows,
        depth=run.depth,
        steps=len(rounds),
        plan_ms=mean_ms(sum(r.planned - r.planning for r in rounds)),
        launch_ms=mean_ms(sum(r.launched - r.planned for r in rounds)),
        process_ms=mean_ms(sum(r.end - r.wait_end for r in rounds) - send_s),
        send_ms=mean_ms(send_s),
        total_ms=mean_ms(sum(r.host_s for r in rounds)),
        max_ms=max(r.host_s for r in rounds) * 1e3,
        step_ms=mean_ms(end - begin),
    )


def table(costs: Sequence[HostCost]) -> str:
    lines = ["rows  depth  steps   plan  launch  process   send   total  max ms   us/row"]
    lines += [
        f"{c.rows:4}  {c.depth:5}  {c.steps:5}  {c.plan_ms:5.3f}   {c.launch_ms:5.3f}    {c.process_ms:5.3f}  {c.send_ms:5.3f}"
        f"   {c.total_ms:5.3f}  {c.max_ms:6.2f}  {c.row_us:7.2f}"
        for c in costs
    ]
    return "\n".join(lines)
