"""Schedulers whose engine breaks, in the real application: each sets up its own process and changes nothing anywhere else.

`deployments.app.SchedulerReplica` is replaced in the test's process; Serve carries the class to the replica by its name, which makes
rank actors of its own, which make engines of their own.
"""

from __future__ import annotations

import threading
from typing import Any

from deployments import ranks
from deployments.rank import RankActor
from deployments.scheduler import SchedulerReplica
from overlap_serve.config import ServeConfig
from overlap_serve.engine.fake import FakeEngine, StepInputs
from overlap_serve.runtime import worker

GOOD_STEPS = 400  # 4 s at 10 ms: time to load it


class RaisingEngine(FakeEngine):
    """Every step after GOOD_STEPS raises."""

    num_steps = 0

    def sample(self, inputs: StepInputs) -> None:
        self.num_steps += 1
        if self.num_steps > GOOD_STEPS:
            raise RuntimeError("illegal memory access")
        super().sample(inputs)


class StuckEngine(FakeEngine):
    """The step after GOOD_STEPS never comes back."""

    num_steps = 0

    def sample(self, inputs: StepInputs) -> None:
        self.num_steps += 1
        if self.num_steps > GOOD_STEPS:
            threading.Event().wait()
        super().sample(inputs)


class RankActorThatRaises(RankActor):
    def __init__(self, *arguments: Any) -> None:
        vars(worker)["FakeEngine"] = RaisingEngine
        super().__init__(*arguments)


class RankActorThatSticks(RankActor):
    def __init__(self, *arguments: Any) -> None:
        vars(worker)["FakeEngine"] = StuckEngine
        super().__init__(*arguments)


class RaisingScheduler(SchedulerReplica):
    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        vars(ranks)["RankActor"] = RankActorThatRaises
        await super().__init__(config)


class StuckScheduler(SchedulerReplica):
    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        vars(ranks)["RankActor"] = RankActorThatSticks
        await super().__init__(config)


class RankActorWithoutMemory(RankActor):
    """Rank 1 finds no memory on its device."""

    def load(self, addresses: tuple[str, ...], control: str, replica: str) -> str:
        if self._seat.rank == 1:
            # Not at the top: the other schedulers' processes never load torch.
            from overlap_serve.runtime import torch_engine

            torch_engine.free_memory = lambda spec, device: 0
        return super().load(addresses, control, replica)


class LowMemoryScheduler(SchedulerReplica):
    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        vars(ranks)["RankActor"] = RankActorWithoutMemory
        await super().__init__(config)


class RankActorThatLoadsLong(RankActor):
    """Ready some time later than `rank_timeout` would allow a step to take."""

    def load(self, addresses: tuple[str, ...], control: str, replica: str) -> str:
        threading.Event().wait(self._config.rank_timeout + 1)
        return super().load(addresses, control, replica)


class LongLoadingScheduler(SchedulerReplica):
    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        vars(ranks)["RankActor"] = RankActorThatLoadsLong
        await super().__init__(config)
