"""The ranks of one engine: how they find each other, and how the others follow rank 0.

    rank 0      loop -> LeadingEngine: each plan to the followers first, then to its own engine
    rank 1..    inbox -> FollowerLoop -> engine, which mirrors the batch from the plans (invariant: nothing else decides)

Addresses are known only once the processes live, so ranks are made in two steps: each takes a `Seat` and says its address; with all
addresses, each builds its engine. A plan lost or doubled on the way ends the follower: the ranks would diverge.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from overlap_serve.config import EngineSpec
from overlap_serve.device.base import Watch
from overlap_serve.engine.base import Engine, PendingStep
from overlap_serve.errors import InternalError
from overlap_serve.messages import Stop
from overlap_serve.step import StepPlan
from overlap_serve.transport import Inbox, Outbox, Receiver

if TYPE_CHECKING:
    import torch

    from overlap_serve.models.tp import TP


QUIET_S = 0.1  # after so long without a plan, a follower looks whether its last step has failed


class Seat:
    """One rank's place, taken before its engine exists. host: this process's address towards the other ranks.

    address: where this rank is met, that is the store of rank 0 ("" if the engine needs none), the inbox for plans of the others.
    """

    def __init__(self, spec: EngineSpec, rank: int, host: str, key: bytes) -> None:
        self.rank = rank
        self.inbox: Inbox | None = None
        self.address = ""
        self._spec = spec
        self._host = host
        self._store = None
        if rank > 0:
            self.inbox = Inbox(f"tcp://{host}", key)
            self.address = self.inbox.endpoint
        elif spec.tp_size > 1 and spec.engine == "torch":
            # Not at the top: a process of the fake engine never loads torch.
            from overlap_serve.models.group import address_of, open_store

            self._store = open_store(host)
            self.address = address_of(self._store)

    def join(self, addresses: tuple[str, ...], device: torch.device) -> TP:
        """The group, once all ranks have called this. addresses: of all ranks, in order."""
        from overlap_serve.models.group import RankGroup, join_store
        from overlap_serve.models.tp import NoTP

        if self._spec.tp_size == 1:
            return NoTP()
        store = self._store or join_store(addresses[0])
        return RankGroup(
            store,
            self.rank,
            self._spec.tp_size,
            device=device,
            host=self._host,
            timeout_s=self._spec.rank_timeout_s,
        )


class LeadingEngine:
    """Rank 0's engine, and the followers'. outbox is closed with it."""

    def __init__(self, engine: Engine, outbox: Outbox, followers: tuple[str, ...]) -> None:
        self._engine = engine
        self._outbox = outbox
        self._followers = followers

    def launch_forward(self, plan: StepPlan) -> None:
        for follower in self._followers:
            if not self._outbox.send(follower, [plan]):
                raise InternalError(f"the rank at {follower} takes no plans")
        self._engine.launch_forward(plan)

    def launch_sample(self) -> PendingStep:
        return self._engine.launch_sample()

    def device_busy_s(self) -> float:
        return self._engine.device_busy_s()

    def watch_device(self, watch: Watch | None) -> None:
        self._engine.watch_device(watch)

    def close(self) -> None:
        for follower in self._followers:
            self._outbox.send(follower, [Stop()])
        self._engine.close()
        self._outbox.close()


class FollowerLoop:
    """Executes rank 0's plans in order, as far ahead of the device as rank 0 is. depth: as rank 0's."""

    def __init__(self, engine: Engine, inbox: Receiver, *, depth: int) -> None:
        self._engine = engine
        self._inbox = inbox
        self._depth = depth
        self._inflight: deque[PendingStep] = deque()
        self._last_step: int | None = None

    def run(self) -> None:
        """Until a Stop. Raises what the engine raised, and InternalError when a plan is missing."""
        while True:
            messages = self._inbox.drain(QUIET_S if self._inflight else None)
            for message in messages:
                if isinstance(message, StepPlan):
                    self._execute(message)
                elif isinstance(message, Stop):
                    self._settle(0)
                    return
            if not messages:
                self._settle(0)

    def _execute(self, plan: StepPlan) -> None:
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise InternalError(f"plan {plan.step} came after plan {self._last_step}: one was lost on the way")
        self._last_step = plan.step
        self._engine.launch_forward(plan)
        self._inflight.append(self._engine.launch_sample())
        self._settle(self._depth)

    def _settle(self, num_inflight: int) -> None:
        """Wait for all steps but the last `num_inflight`."""
        while len(self._inflight) > num_inflight:
            self._inflight.popleft().result()
