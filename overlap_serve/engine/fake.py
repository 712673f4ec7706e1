"""`FakeEngine` (config `engine: fake`): the engine's data flow on numpy, with a step-cost model and no model.

It keeps what the real one keeps: KV pages, page table and token pool that only the engine stream touches, step-private
inputs, ids fed back on the "device". A KV place holds the token id that was computed there; the next token is a hash of the
ids that the row's *pages* hold, and so are logprobs. So any page mix-up, late write or reuse becomes a wrong token or value at
once (rig S of the tests).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from overlap_serve.config import FAKE_EOS_ID
from overlap_serve.device.base import Event, StreamFactory, Watch
from overlap_serve.engine.batch import BatchMirror, StepRows
from overlap_serve.sampling import SamplingParams, TokenLogprob
from overlap_serve.step import Join, StepPlan, StepResult

_MASK = (1 << 64) - 1
_WEIGHTS = np.random.default_rng(1).integers(0, 1 << 62, size=1 << 17, dtype=np.uint64) | np.uint64(1)
FIRST_PRINTABLE, NUM_PRINTABLE = 32, 95


def next_token(token_ids: np.ndarray, prompt_len: int, sampling: SamplingParams, choice: int, eos_every: int) -> int:
    """The model: a pure function of the visible ids, and of (seed, choice, position) unless greedy. Printable, or the end id."""
    n = len(token_ids)
    h = context_hash(token_ids)
    if not sampling.greedy:
        h ^= _mix((sampling.seed & _MASK) ^ _mix(choice * 0x9E3779B97F4A7C15 + n))
    h = _mix(h)
    masked = frozenset(sampling.end_token_ids()) if n - prompt_len < sampling.min_tokens else frozenset()
    if eos_every and (h >> 32) % eos_every == 0 and FAKE_EOS_ID not in masked:
        return FAKE_EOS_ID
    for shift in range(NUM_PRINTABLE):
        token = FIRST_PRINTABLE + (h + shift) % NUM_PRINTABLE
        if token not in masked:
            return token
    return FAKE_EOS_ID


def context_hash(token_ids: np.ndarray) -> int:
    """All that the model knows of the visible ids."""
    n = len(token_ids)
    return int((token_ids.astype(np.uint64) * _WEIGHTS[:n]).sum(dtype=np.uint64)) ^ n


def prefix_hashes(token_ids: np.ndarray) -> list[int]:
    """`context_hash` of every prefix, from the first token alone to all of them."""
    n = len(token_ids)
    sums = (token_ids.astype(np.uint64) * _WEIGHTS[:n]).cumsum(dtype=np.uint64)
    hashes: list[int] = (sums ^ np.arange(1, n + 1, dtype=np.uint64)).tolist()
    return hashes


def token_logprob(context: int, token: int, num_top: int, eos_every: int) -> TokenLogprob:
    """Of a geometric distribution whose likeliest token is the greedy one: the end id if it is that, then the printable ids
    from the greedy one on, round, then all others. How steep it falls is a matter of the context, too."""
    h = _mix(context)
    ends = bool(eos_every) and (h >> 32) % eos_every == 0
    ratio = 0.25 + (h >> 48) / 2**17

    def logprob(rank: int) -> float:
        return math.log1p(-ratio) + rank * math.log(ratio)

    def rank_of(token: int) -> int:
        if ends and token == FAKE_EOS_ID:
            return 0
        index = token - FIRST_PRINTABLE
        return ends + ((index - h) % NUM_PRINTABLE if 0 <= index < NUM_PRINTABLE else NUM_PRINTABLE + token)

    printable = (FIRST_PRINTABLE + (h + shift) % NUM_PRINTABLE for shift in range(NUM_PRINTABLE))
    likeliest = itertools.islice(itertools.chain((FAKE_EOS_ID,) * ends, printable), num_top)
    return TokenLogprob(token, logprob(rank_of(token)), tuple((top, logprob(i)) for i, top in enumerate(likeliest)))


def _mix(x: int) -> int:
    """Finalizer of MurmurHash3 (public domain), 64 bits."""
    x &= _MASK
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ (x >> 33)


@dataclass
class DeviceState:
    """Shared device state; only work of the engine stream may touch it (invariant 2)."""

    kv: np.ndarray  # [pages * page_size], token id computed at each place
    page_table_SP: np.ndarray
    token_pool_SL: np.ndarray


@dataclass
class StepInputs:
    """Private to one step."""

    plan: StepPlan
    rows: StepRows
    batch: dict[int, Join]  # by slot, when the step was launched
    asks: list[tuple[Join, int, int]]  # positions [begin, end) predict prompt tokens whose logprobs are asked for
    # Written by the sampler:
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by sampled row
    prompt_logprobs: list[tuple[int, tuple[TokenLogprob, ...]]] = field(default_factory=list)

    @property
    def joins(self) -> list[Join]:
        """Of the sampled rows; asked for by the sampler, so that launching costs the host nothing for a row."""
        return [self.batch[slot] for slot in self.rows.slots_B[self.rows.samples_B].tolist()]


class FakePending:
    def __init__(self, inputs: StepInputs, copy_done: Event) -> None:
        self._inputs = inputs
        self._copy_done = copy_done

    def result(self) -> StepResult:
        self._copy_done.synchronize()
        inputs = self._inputs
        logprobs = tuple(inputs.logprobs.get(row) for row in range(len(inputs.token_ids))) if inputs.logprobs else ()
        return StepResult(inputs.plan.step, tuple(inputs.token_ids), logprobs, tuple(inputs.prompt_logprobs))


class FakeEngine:
    """See `engine.base.Engine`. step_s: device time of a step by its number of tokens (0: none, as in most tests)."""

    def __init__(
        self,
        streams: StreamFactory,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        eos_every: int = 0,
        step_s: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        self._scheduler_stream = streams.new_stream("scheduler")
        self._engine_stream = streams.new_stream("engine")
        self._batch = BatchMirror(num_slots)
        self._page_size = page_size
        self._eos_every = eos_every
        self._step_s = step_s
        self._launched: StepInputs | None = None
        pages_per_slot = -(-max_model_len // page_size) + 1
        self.state = DeviceState(
            kv=np.full(num_pages * page_size, -1, dtype=np.int64),
            page_table_SP=np.zeros((num_slots, pages_per_slot), dtype=np.int64),
            token_pool_SL=np.zeros((num_slots, max_model_len + 1), dtype=np.int64),
        )
        self._num_pages_S = np.zeros(num_slots, dtype=np.int64)  # host: where new_pages are appended

    def launch_forward(self, plan: StepPlan) -> None:
        rows = self._batch.apply(plan)
        inputs = StepInputs(plan, rows, self._batch.joins, self._prompt_asks(plan, rows))
        entries = self._page_entries(plan)
        self._scheduler_stream.launch(lambda: self.prepare(inputs, entries))
        self._engine_stream.wait(self._scheduler_stream.record())  # sync point 1
        self._engine_stream.launch(lambda: self.forward(inputs, entries))
        self._launched = inputs

    def launch_sample(self) -> FakePending:
        inputs = self._launched
        assert inputs is not None
        self._engine_stream.launch(lambda: self.sample(inputs))
        return FakePending(inputs, self._engine_stream.record())

    def device_busy_s(self) -> float:
        return self._engine_stream.busy_s()

    def watch_device(self, watch: Watch | None) -> None:
        self._engine_stream.watch(watch)

    def close(self) -> None:
        self._engine_stream.close()
        self._scheduler_stream.close()

    def prepare(self, inputs: StepInputs, entries: Sequence[tuple[int, int, int]]) -> None:
        """Scheduler stream: step-private buffers only. Nothing to copy here; tests plant faults by overriding it."""

    def forward(self, inputs: StepInputs, entries: Sequence[tuple[int, int, int]]) -> None:
        """Engine stream: joins and pages, then every row's ids from the token pool into its KV places."""
        state, rows = self.state, inputs.rows
        self.upload(inputs.plan.joins)
        self.write_pages(entries)
        for slot, start, length in zip(
            rows.slots_B.tolist(), rows.starts_B.tolist(), rows.lengths_B.tolist(), strict=True
        ):
            state.kv[self._places(slot, start, start + length)] = state.token_pool_SL[slot, start : start + length]
        device_s = self._step_s(rows.num_tokens)
        if device_s > 0:
            time.sleep(device_s)  # stands for device compute: the stream is busy, the host is free

    def sample(self, inputs: StepInputs) -> None:
        """Engine stream: next ids from what the pages hold, fed back through the token pool, copied to the host."""
        rows = inputs.rows
        slots = rows.slots_B[rows.samples_B].tolist()
        ends = (rows.starts_B + rows.lengths_B)[rows.samples_B].tolist()
        for row, (join, slot, end) in enumerate(zip(inputs.joins, slots, ends, strict=True)):
            seen = self.state.kv[self._places(slot, 0, end)]
            token = next_token(seen, join.prompt_len, join.sampling, join.choice, self._eos_every)
            self.state.token_pool_SL[slot, end] = token
            inputs.token_ids.append(token)
            if join.sampling.logprobs >= 0:
                num_top = join.sampling.logprobs
                inputs.logprobs[row] = token_logprob(context_hash(seen), token, num_top, self._eos_every)
        for join, begin, end in inputs.asks:
            inputs.prompt_logprobs.append((join.slot, self._score_prompt(join, begin, end)))

    def _score_prompt(self, join: Join, begin: int, end: int) -> tuple[TokenLogprob, ...]:
        """Of the prompt tokens at begin + 1 to end, from what the pages hold before each."""
        contexts = prefix_hashes(self.state.kv[self._places(join.slot, 0, end)])[begin:]
        tokens = self.state.token_pool_SL[join.slot, begin + 1 : end + 1].tolist()
        num_top = join.sampling.prompt_logprobs
        return tuple(token_logprob(c, t, num_top, self._eos_every) for c, t in zip(contexts, tokens, strict=True))

    def _prompt_asks(self, plan: StepPlan, rows: StepRows) -> list[tuple[Join, int, int]]:
        asks = []
        starts = rows.starts_B[: len(plan.chunks)].tolist()  # chunks are the first rows
        for (slot, length), start in zip(plan.chunks, starts, strict=True):
            join = self._batch.joins[slot]
            end = min(start + length, join.prompt_len - 1)
            if join.sampling.prompt_logprobs >= 0 and end > start:
                asks.append((join, start, end))
        return asks

    def upload(self, joins: Sequence[Join]) -> None:
        for join in joins:
            ids = np.frombuffer(join.token_ids, dtype=np.int32)
            self.state.token_pool_SL[join.slot, : len(ids)] = ids

    def write_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        for slot, index, page in entries:
            self.state.page_table_SP[slot, index] = page

    def _page_entries(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """(slot, index, page) of every page table write of a plan."""
        entries = [(join.slot, i, page) for join in plan.joins for i, page in enumerate(join.pages)]
        for join in plan.joins:
            self._num_pages_S[join.slot] = len(join.pages)
        for slot, page in plan.new_pages:
            entries.append((slot, int(self._num_pages_S[slot]), page))
            self._num_pages_S[slot] += 1
        return entries

    def _places(self, slot: int, begin: int, end: int) -> np.ndarray:
        positions = np.arange(begin, end)
        places: np.ndarray = self.state.page_table_SP[slot, positions // self._page_size] * self._page_size
        return places + positions % self._page_size
