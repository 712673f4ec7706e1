"""Rank 0 plans and the others follow: over real gloo and zmq, with aborts, deadlines and preemption; and what each rank may decide."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch

from overlap_serve.cache.radix import RadixCache
from overlap_serve.config import EngineSpec
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.device.thread import ThreadStreams
from overlap_serve.engine.base import Engine
from overlap_serve.engine.fake import FakeEngine
from overlap_serve.errors import ConfigError
from overlap_serve.messages import GenerateRequest, Message
from overlap_serve.models.tp import NoTP
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.ranks import LeadingEngine, Seat
from overlap_serve.runtime.torch_engine import build_on
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan
from overlap_serve.transport import Outbox
from tests.engine.torch_rig import make_spec
from tests.models.checkpoints import make_checkpoint
from tests.scheduler_rig import VOCAB, Case, Ledger, ScriptedInbox, make_limits, random_case
from tests.tp_rig import HOST, KEY, build_rank, tp_engine, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, vocab_size=VOCAB, max_position_embeddings=128)
    write_tokenizer(folder, VOCAB)
    return folder


def spec_of(limits: Limits, depth: int) -> EngineSpec:
    spec = make_spec(depth=depth, page_size=limits.page_size, num_slots=limits.num_slots, num_pages=limits.num_pages)
    return msgspec.structs.replace(spec, vocab_size=VOCAB, max_model_len=limits.max_model_len)


def run(case: Case, engine: Engine, depth: int) -> tuple[Ledger, Scheduler]:
    """The scheduler's whole story on this engine, in scripted time."""
    scheduler = Scheduler(case.limits, RadixCache(case.limits.page_size))
    inbox = ScriptedInbox(case.script, scheduler.check_accounting, case.round_limit)
    ledger = Ledger()
    OverlapLoop(
        scheduler, engine, inbox, ledger, LoopMeter(clock=inbox.clock), depth=depth, control="detokenizer"
    ).run()
    assert scheduler.at_rest
    return ledger, scheduler


def greedy(case: Case) -> Case:
    """Ranks sum in another order: a drawn id flips when the draw falls within a rounding error of the border between two."""
    script: list[tuple[int, Message]] = []
    for at, message in case.script:
        if isinstance(message, GenerateRequest):
            sampling = msgspec.structs.replace(message.sampling, temperature=0.0)
            message = msgspec.structs.replace(message, sampling=sampling)
        script.append((at, message))
    return Case(case.limits, script, seed=case.seed)


SEEDS = {2: (2, 32, 43), 4: (46,)}  # those that preempt and abort


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_random_load_on_several_ranks_gives_the_tokens_of_one(folder: Path, depth: int, size: int) -> None:
    preemptions = aborts = 0
    for seed in SEEDS[size]:
        case = greedy(random_case(seed))
        spec = spec_of(case.limits, depth)
        alone = build_rank(spec, folder, NoTP())
        wanted, _ = run(case, alone, depth)
        alone.close()
        with tp_engine(spec, folder, size) as engine:
            ledger, scheduler = run(case, engine, depth)
        assert ledger.tokens == wanted.tokens
        assert {key: end.finish for key, end in ledger.finish.items()} == {
            key: end.finish for key, end in wanted.finish.items()
        }
        preemptions += scheduler.counters.preemptions
        aborts += sum(end.finish == "abort" for end in ledger.finish.values())
    assert preemptions > 0 and aborts > 0


class SmallDevice(CpuDevice):
    """A device with this much memory left."""

    def __init__(self, free_mib: int) -> None:
        super().__init__(1)
        self._free_bytes = free_mib * 2**20

    def free_memory(self) -> int:
        return self._free_bytes


def test_a15_the_rank_with_the_least_memory_decides_how_many_pages_all_have(folder: Path) -> None:
    spec = msgspec.structs.replace(
        make_spec(), vocab_size=VOCAB, max_model_len=128, model_path=str(folder), num_pages=0, tp_size=2
    )
    spec = msgspec.structs.replace(spec, kv_memory_fraction=0.001, max_running=4096)
    seats = [Seat(spec, rank, HOST, KEY) for rank in range(2)]
    addresses = tuple(seat.address for seat in seats)

    def build(seat: Seat) -> int:
        tp = seat.join(addresses, torch.device("cpu"))
        engine, num_pages = build_on(spec, SmallDevice((4000, 1000)[seat.rank]), tp)
        engine.close()
        return num_pages

    with ThreadPoolExecutor(2) as pool:
        pages = list(pool.map(build, seats))
    engine, other = build_on(msgspec.structs.replace(spec, tp_size=1), SmallDevice(1000), NoTP())
    engine.close()
    assert pages[0] == pages[1] == other > 100
    for seat in seats[1:]:
        assert seat.inbox is not None
        seat.inbox.close()


def test_a_rank_that_cannot_hold_the_pages_says_so(folder: Path) -> None:
    spec = msgspec.structs.replace(make_spec(num_pages=10_000_000), model_path=str(folder), vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        build_on(spec, SmallDevice(1000), NoTP())


class Digest(FakeEngine):
    """The fake engine, and a hash of every row it has executed."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            ThreadStreams(),
            num_slots=limits.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_model_len=limits.max_model_len,
            eos_every=20,
        )
        self.rows = hashlib.sha256()
        self.num_steps = 0

    def launch_forward(self, plan: StepPlan) -> None:
        super().launch_forward(plan)
        assert self._launched is not None
        rows = self._launched.rows
        for array in (rows.slots_B, rows.starts_B, rows.lengths_B, rows.samples_B):
            self.rows.update(array.tobytes())
        self.num_steps += 1

    def digest(self) -> str:
        """Of all rows, and of what the device holds now."""
        for array in (self.state.kv, self.state.page_table_SP, self.state.token_pool_SL):
            self.rows.update(array.tobytes())
        return f"{self.num_steps} {self.rows.hexdigest()}"


FOLLOWER = """
import sys, time
skew = float(sys.argv[1])
for name in ("monotonic", "time", "perf_counter"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real: skew + real() * (1 + skew / 1e6))
import msgspec
from overlap_serve.runtime.ranks import FollowerLoop, Seat
from tests.runtime.test_ranks import Digest, spec_of
from tests.scheduler_rig import make_limits
from tests.tp_rig import HOST, KEY
limits = make_limits(num_pages=26, page_size=4, num_slots=6, max_model_len=128, growth_tokens=0)
seat = Seat(spec_of(limits, 1), 1, HOST, KEY)
print(seat.address, flush=True)
engine = Digest(limits)
FollowerLoop(engine, seat.inbox, depth=1).run()
print(engine.digest())
"""


def test_a14_followers_with_other_clocks_and_hash_seeds_have_the_same_batch_after_10_000_steps() -> None:
    """Real processes, over real zmq: rows, pages and tokens of every step, whatever the follower's clock and hashes say."""
    limits = make_limits(num_pages=26, page_size=4, num_slots=6, max_model_len=128, growth_tokens=0)
    with ExitStack() as stack:
        followers = []
        for hash_seed, skew_s in (("1", 0.0), ("2", 86_400.0), ("77", -5_000.0)):
            command = [sys.executable, "-c", FOLLOWER, str(skew_s)]
            env = {**os.environ, "PYTHONHASHSEED": hash_seed}
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            followers.append(stack.enter_context(process))
        addresses = []
        for process in followers:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        own = Digest(limits)
        engine = LeadingEngine(own, Outbox(KEY, "plan"), tuple(addresses))
        scheduler = Scheduler(limits, RadixCache(limits.page_size))
        seed = 0
        while own.num_steps < 10_000:
            drive(scheduler, engine, random_case(seed), limits)
            seed += 1
        engine.close()
        digests = [process.communicate(timeout=60)[0].strip() for process in followers]
    assert digests == [own.digest()] * 3
    assert scheduler.counters.preemptions > 0


def drive(scheduler: Scheduler, engine: Engine, case: Case, limits: Limits) -> None:
    """One more random case for a scheduler and an engine that go on living."""
    scheduler.draining = False
    inbox = ScriptedInbox(case.script, lambda: None, case.round_limit)
    meter = LoopMeter(clock=inbox.clock)
    OverlapLoop(scheduler, engine, inbox, Ledger(), meter, depth=1, control="detokenizer").run()
