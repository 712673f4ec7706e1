"""`Ranks`: the rank actors of one scheduler replica. They start together, and when one is lost, all are: no collective ends without it.

Owns start (each in its bundle), the exchange of addresses, and the watch over their lives. Knows no request and no Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.rank import RANK_CONCURRENCY, RankActor, RankPlace
from overlap_serve.config import EngineSpec, ServeConfig

FIRST_RANK_BUNDLE = 1
PROBE_PERIOD_S = 1.0
DOUBT_S = 2.5  # a rank silent for so long is named when another one has failed
GATHER_S = 0.3  # after a rank's end, the ranks that end because of it say so within this time


class Ranks:
    """replica: its name, part of the actors' names in the dashboard. Returns at once; `load` waits for the processes."""

    def __init__(self, config: ServeConfig, spec: EngineSpec, key: bytes, replica: str) -> None:
        group = ray.util.get_current_placement_group()
        if group is None or len(group.bundle_specs) <= spec.tp_size:
            raise RuntimeError(
                "the Scheduler deployment needs placement_group_bundles: one for its control plane, then one for each rank"
            )
        self._replica = replica
        self._timeout_s = spec.rank_timeout_s
        self._node = ray.get_runtime_context().get_node_id()
        self._ranks = [
            start_rank(group, rank, f"{replica}:rank{rank}", spec.num_threads, config, spec, rank, key)
            for rank in range(spec.tp_size)
        ]
        self._places: list[RankPlace] = []
        self._heard_s = [math.inf] * spec.tp_size

    @property
    def first(self) -> Any:
        """The actor of rank 0, which has the loop."""
        return self._ranks[0]

    async def load(self, control: str) -> str:
        """Where the loop receives requests. Raises what the first rank that fails raises, and ends the others."""
        try:
            self._places = await asyncio.gather(*(rank.place.remote() for rank in self._ranks))
            addresses = tuple(place.address for place in self._places)
            loads = [rank.load.remote(addresses, control, self._replica) for rank in self._ranks]
            endpoints: list[str] = await asyncio.gather(*loads)
        except BaseException:
            self.kill()
            raise
        return endpoints[0]

    async def end(self) -> str:
        """Waits for the end of rank 0's loop. -> "" if it ended by itself, else which rank was lost, and how."""
        runs = [asyncio.ensure_future(_completion(rank.run.remote())) for rank in self._ranks]
        probe = asyncio.create_task(self._probe())
        pending = {*runs, probe}
        try:
            while not runs[0].done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if probe in done:
                    return probe.result()
                if any(run.result() for run in done):
                    await asyncio.wait(runs, timeout=GATHER_S)
                    alive = [rank for rank, run in enumerate(runs) if not run.done()]
                    # Who fails first is not who is to blame: ranks that wait for a stopped one in a collective end by its timeout.
                    lines = [
                        _describe([run.result() if run.done() else "" for run in runs]),
                        self.silent(alive, DOUBT_S),
                    ]
                    return "; ".join(filter(None, lines))
            return ""
        finally:
            probe.cancel()

    def silent(self, ranks: Iterable[int], longer_than_s: float) -> str:
        """Those of these ranks that have answered nothing for so long, "" if none."""
        now = time.monotonic()
        lines = (
            f"rank {rank} has not answered for {now - self._heard_s[rank]:.0f} s (rank_timeout {self._timeout_s:g})"
            for rank in ranks
            if now - self._heard_s[rank] > longer_than_s
        )
        return "; ".join(lines)

    def kill(self) -> None:
        """At once, even a rank that hangs in a collective or was stopped: those of this node by signal, as Ray asks first."""
        for place in self._places:
            if place.node == self._node:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        for rank in self._ranks:
            ray.kill(rank)

    async def _probe(self) -> str:
        """Ask every rank again and again. With several ranks, returns when one stays silent for `rank_timeout`. Deaths are the business
        of `run`, and a single rank that stands still that of `live_stall_s`."""
        if len(self._ranks) == 1:
            await asyncio.Event().wait()
        self._heard_s = [time.monotonic()] * len(self._ranks)  # they have loaded, however long that took
        asking = [asyncio.create_task(self._ask(rank)) for rank in range(len(self._ranks))]
        try:
            while not (silent := self.silent(range(len(self._ranks)), self._timeout_s)):
                await asyncio.sleep(PROBE_PERIOD_S)
            return silent
        finally:
            for task in asking:
                task.cancel()

    async def _ask(self, rank: int) -> None:
        while True:
            try:
                await self._ranks[rank].answer.remote()
            except ray.exceptions.RayError:
                return
            self._heard_s[rank] = time.monotonic()
            await asyncio.sleep(PROBE_PERIOD_S)


def _describe(ends: list[str]) -> str:
    return "; ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends) if end)


async def _completion(call: Any) -> str:
    """ "" if the call returned, else what it raised, on one line."""
    try:
        await call
    except ray.exceptions.RayTaskError as error:
        return repr(error.cause).splitlines()[0]
    except Exception as error:  # whatever it is, the engine is gone
        return type(error).__name__
    return ""


def start_rank(group: PlacementGroup, rank: int, name: str, num_threads: int, *arguments: object) -> Any:
    """A rank actor, in its bundle and with all of that bundle's resources. arguments: of `RankActor`. Returns at once."""
    index = FIRST_RANK_BUNDLE + rank
    bundle = group.bundle_specs[index]
    # Explicit index: without it Ray may choose any bundle. Ray itself would set OMP_NUM_THREADS to the bundle's CPUs.
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
    )
    actor = ray.remote(RankActor).options(
        name=name,
        namespace=SERVE_NAMESPACE,  # beside the replica; else that of whoever has deployed
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        max_restarts=0,
        max_concurrency=RANK_CONCURRENCY,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(num_threads)}},
    )
    return actor.remote(*arguments)
