"""Rank actors: the processes that own the devices. Children of the scheduler replica, each pinned to one bundle of its placement group.

Rank 0 runs the overlap loop, the others follow it. An actor knows a `Worker` or a `Follower` and nothing of Serve; its parent learns
of its death from `run`, a call that never returns while all is well. Ray ends it when the parent dies, because the parent owns it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import ray

from deployments.logs import configure_logging
from overlap_serve.config import EngineSpec, ServeConfig
from overlap_serve.messages import ReplicaStatus
from overlap_serve.runtime.control import ProfileAnswer
from overlap_serve.runtime.model import on_this_node
from overlap_serve.runtime.ranks import Seat
from overlap_serve.runtime.worker import Follower, Worker

# A thread that wants the GIL waits at most about this long for one that computes in Python. Python's 5 ms are half of a 10 ms step;
# shorter costs nothing measurable: embedded model, 2 cores, batch 1 / 16: 46 / 74 ms a step at 5 ms, 47 / 74 at 0.5, 46 / 75 at 0.1.
SWITCH_INTERVAL_S = 0.0005

# Threads of the actor: `run` takes one for its whole life, status, metrics and stop need the others.
RANK_CONCURRENCY = 8


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank lives. address: where the other ranks meet it."""

    address: str
    node: str
    pid: int


class RankActor:
    """Takes its seat in the constructor, builds its engine in `load` (weights are loaded when that returns), runs it in `run`."""

    def __init__(self, config: ServeConfig, spec: EngineSpec, rank: int, key: bytes) -> None:
        configure_logging()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._config = config
        self._spec = spec
        self._key = key
        self._host = ray.util.get_node_ip_address()
        self._seat = Seat(spec, rank, self._host, key)
        self._worker: Worker | None = None
        self._follower: Follower | None = None

    def place(self) -> RankPlace:
        return RankPlace(self._seat.address, ray.get_runtime_context().get_node_id(), os.getpid())

    def load(self, addresses: tuple[str, ...], control: str, replica: str) -> str:
        """Build the engine; waits for the other ranks. addresses: of all ranks, in order. -> where the loop receives requests and
        aborts, "" unless rank 0. Raises ModelLoadError, ConfigError."""
        spec = on_this_node(self._config, self._spec)
        if self._seat.rank > 0:
            self._follower = Follower(spec, self._seat, addresses)
            return ""
        self._worker = Worker(
            spec,
            f"tcp://{self._host}",
            self._key,
            control=control,
            replica=replica,
            stall_s=self._config.ready_stall_s,
            seat=self._seat,
            addresses=addresses,
        )
        return self._worker.endpoint

    def run(self) -> None:
        """The loop. Returns after `stop`; raises what broke it."""
        if self._follower is not None:
            self._follower.run()
        else:
            self._loaded.run()

    def answer(self) -> None:
        """Nothing; that it comes back says that the process is alive."""

    def stop(self, drain_s: float) -> None:
        """Ask the loop of rank 0 to end, and with it the followers; requests still running after drain_s end with abort/shutdown."""
        self._loaded.stop(drain_s)

    def status(self) -> ReplicaStatus:
        return self._loaded.status()

    def metrics_snapshot(self) -> bytes:
        return self._loaded.metrics_snapshot()

    def start_profile(self, folder: str) -> ProfileAnswer:
        """Record what the threads of this process do, for a file in this folder of its node. Only rank 0."""
        return self._loaded.start_profile(Path(folder))

    def stop_profile(self) -> ProfileAnswer:
        return self._loaded.stop_profile()

    @property
    def _loaded(self) -> Worker:
        assert self._worker is not None, "only rank 0, after load"
        return self._worker
