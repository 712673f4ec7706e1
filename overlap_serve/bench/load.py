"""Runs a load: sessions begin at their arrival times or as slots come free, the turns of each follow one another.

The one idea: an open load (rate, trace) never waits for answers; a closed one (rate inf with a concurrency) sends a session as another
ends. Both are one schedule and one semaphore. Every turn of every session gives exactly one record.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from overlap_serve.bench.api import Api, Dialogue, count_tokens
from overlap_serve.bench.client import Client, Reply
from overlap_serve.bench.stats import Record
from overlap_serve.bench.workload import Session, Turn, arrivals


@dataclass(frozen=True)
class Load:
    """rate: sessions per second, inf: all at once. concurrency: most sessions at a time, None: no limit."""

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None


@dataclass(frozen=True)
class Outcome:
    records: list[Record]
    duration_s: float


@contextmanager
def settled_heap() -> Iterator[None]:
    """Nothing that exists now is looked at by the garbage collector, whose long passes would delay time stamps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def run_load(
    client: Client,
    api: Api,
    sessions: Sequence[Session],
    load: Load,
    seed: int,
    on_record: Callable[[Record], object] = lambda record: None,
) -> Outcome:
    """All sessions to their end; records in the order in which requests ended. Sessions with times of their own keep them."""
    drawn = arrivals(load.rate, load.burstiness, len(sessions), seed)
    traced = [session.arrival_s for session in sessions]
    records: list[Record] = []
    slots = None if load.concurrency is None else asyncio.Semaphore(load.concurrency)

    def keep(record: Record) -> None:
        records.append(record)
        on_record(record)

    begin_s = time.perf_counter()
    tasks = []
    for session, own, other in zip(sessions, traced, drawn, strict=True):
        wait_s = other if own is None else own
        due_s = begin_s + wait_s
        if (ahead_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(ahead_s)
        # In a closed loop a session is due when its slot comes free.
        due = None if own is None and math.isinf(load.rate) else due_s
        tasks.append(asyncio.create_task(_run_session(client, api, session, due, slots, keep)))
    await asyncio.gather(*tasks)
    return Outcome(records, time.perf_counter() - begin_s)


async def _run_session(
    client: Client,
    api: Api,
    session: Session,
    due_s: float | None,
    slots: asyncio.Semaphore | None,
    keep: Callable[[Record], None],
) -> None:
    dialogue = Dialogue(api)
    broken = False
    async with AsyncExitStack() as stack:
        if slots is not None:
            await stack.enter_async_context(slots)
        for number, turn in enumerate(session.turns):
            if number or due_s is None:
                due_s = time.perf_counter() + (0.0 if broken else turn.think_s)
            if broken:
                keep(Record(due_s, due_s, due_s, (), 0, 0, "skipped", "an earlier turn of the session failed"))
                continue
            if number and turn.think_s:
                await asyncio.sleep(turn.think_s)
            more = number + 1 < len(session.turns)
            record = await _run_turn(client, api, dialogue, turn, more, due_s)
            keep(record)
            broken = not record.ok


async def _run_turn(client: Client, api: Api, dialogue: Dialogue, turn: Turn, more: bool, due_s: float) -> Record:
    reply = await client.post(api.path, dialogue.body(turn, more), keep=more)
    num_input = num_output = 0
    if not reply.error:
        try:
            num_input, num_output = count_tokens(reply, turn)
            if more:
                dialogue.hear(reply)
        except msgspec.MsgspecError as error:
            reply.error, reply.detail = "protocol", f"an event is no chunk of OpenAI's API: {error}"
    return _record(reply, due_s, num_input, num_output)


def _record(reply: Reply, due_s: float, num_input: int, num_output: int) -> Record:
    return Record(due_s, reply.start_s, reply.end_s, reply.chunks_s, num_input, num_output, reply.error, reply.detail)
