"""Rank actors: the processes that run the overlap loop. A child of the scheduler replica, pinned to one bundle of its placement group.

The process that owns the device. It knows a `Worker` and nothing of Serve; its parent learns of its death from `run`, a call
that never returns while all is well. Ray ends it when the parent dies, because the parent owns it.
"""

from __future__ import annotations

import sys

from deployments.logs import configure_logging
from overlap_serve.config import EngineSpec
from overlap_serve.messages import ReplicaStatus
from overlap_serve.runtime.worker import Worker

# A thread that wants the GIL waits at most about this long for one that computes in Python. Python's 5 ms are half of a 10 ms step;
# shorter costs nothing measurable: embedded model, 2 cores, batch 1 / 16: 46 / 74 ms a step at 5 ms, 47 / 74 at 0.5, 46 / 75 at 0.1.
SWITCH_INTERVAL_S = 0.0005

# Threads of the actor: `run` takes one for its whole life, status, metrics and stop need the others.
RANK_CONCURRENCY = 8


class RankActor:
    """Builds the worker in the constructor (weights are loaded when it returns) and runs it in `run`."""

    def __init__(self, spec: EngineSpec, bind: str, key: bytes, control: str, replica: str, stall_s: float) -> None:
        configure_logging()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._worker = Worker(spec, bind, key, control=control, replica=replica, stall_s=stall_s)

    def endpoint(self) -> str:
        """Where the loop receives requests and aborts."""
        return self._worker.endpoint

    def run(self) -> None:
        """The loop. Returns after `stop`; raises what broke it."""
        self._worker.run()

    def stop(self, drain_s: float) -> None:
        """Ask the loop to end; requests still running after drain_s end with abort/shutdown."""
        self._worker.stop(drain_s)

    def status(self) -> ReplicaStatus:
        return self._worker.status()

    def metrics_snapshot(self) -> bytes:
        return self._worker.metrics_snapshot()
