"""`Control`: what administrators may do to the whole application: flush, pause, resume, profile. Without HTTP and without Ray.

Decides what an order means when there are several schedulers, and what is answered; how they are reached is `Schedulers`' business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from overlap_serve.config import ServeConfig
from overlap_serve.errors import Conflict, InternalError, InvalidRequest, ServerUnavailable
from overlap_serve.messages import LoopAnswer

T = TypeVar("T")

PROFILE_LIMIT_S = 60.0  # events pile up in memory: a recording that nobody ends, ends by itself


class ProfileAnswer(msgspec.Struct, frozen=True):
    """Of one scheduler replica. none: start found a recording, stop found none. failed: `text` says why; else it is the file's name."""

    replica: str
    outcome: Literal["done", "none", "failed"]
    text: str = ""


@dataclass(frozen=True)
class Heard(Generic[T]):
    """What the scheduler replicas answered. silent: number of those that did not, or failed."""

    answers: Sequence[T]
    silent: int = 0


class Schedulers(Protocol):
    """All scheduler replicas of the application."""

    def paused(self) -> bool:
        """What was ordered last; schedulers that started since may not know it yet."""

    async def set_paused(self, paused: bool) -> Heard[LoopAnswer]:
        """Tell all ingress and scheduler replicas, and those that start later."""

    async def flush(self, force: bool) -> Heard[LoopAnswer]: ...

    async def start_profile(self) -> Heard[ProfileAnswer]: ...

    async def stop_profile(self) -> Heard[ProfileAnswer]: ...


class Control:
    """abort_all: ends the open requests of all ingress replicas, returns their number. Answers are bodies of HTTP answers."""

    def __init__(self, config: ServeConfig, schedulers: Schedulers, abort_all: Callable[[], Awaitable[int]]) -> None:
        self._config = config
        self._schedulers = schedulers
        self._abort_all = abort_all

    async def flush(self, force: bool) -> dict[str, object]:
        """Drop all prefix caches. force: end open requests first. Raises Conflict while requests are open, ServerUnavailable."""
        aborted = await self._abort_all() if force else 0
        heard = await self._schedulers.flush(force)
        answers = complete(heard)
        freed = sum(answer.freed_pages for answer in answers)
        if busy := sum(answer.busy for answer in answers):
            raise Conflict(
                f"{busy} of {len(answers)} scheduler(s) have open requests and keep their prefix caches, {freed} pages of the others "
                'are free; send {"force": true} to abort what is open'
            )
        return {
            "schedulers": len(answers),
            "freed_pages": freed,
            "freed_tokens": freed * self._config.page_size,
            "aborted": aborted,
        }

    async def pause(self, abort: bool) -> dict[str, object]:
        """Take no new requests. abort: end the open ones too. Raises ServerUnavailable; whoever did not answer will be told again."""
        heard = await self._schedulers.set_paused(True)
        aborted = await self._abort_all() if abort else 0
        return {"paused": True, "schedulers": len(complete(heard)), "aborted": aborted}

    async def resume(self) -> dict[str, object]:
        """Raises ServerUnavailable; whoever did not answer will be told again."""
        heard = await self._schedulers.set_paused(False)
        return {"paused": False, "schedulers": len(complete(heard))}

    async def start_profile(self) -> dict[str, object]:
        """Record rank 0 of every scheduler. Raises InvalidRequest where that cannot be, Conflict when all record already."""
        self._check_profiling()
        answers = complete(await self._schedulers.start_profile())
        started = succeeded(answers)
        if not started:
            raise Conflict("a profile is being recorded; end it with /stop_profile", code="profile_running")
        return {"replicas": [answer.replica for answer in started], "limit_s": PROFILE_LIMIT_S}

    async def stop_profile(self) -> dict[str, object]:
        """End it and write the files. Raises as `start_profile`; Conflict when nothing records."""
        self._check_profiling()
        answers = complete(await self._schedulers.stop_profile())
        stopped = succeeded(answers)
        if not stopped:
            raise Conflict("no profile is being recorded; begin one with /start_profile", code="profile_not_running")
        return {"profiles": [{"replica": answer.replica, "file": answer.text} for answer in stopped]}

    def _check_profiling(self) -> None:
        reason = None
        if self._config.engine == "fake":
            reason = "the fake engine runs no torch: there is nothing to profile"
        elif self._config.profile_dir is None:
            reason = "profiling is off; set profile_dir in the server's configuration"
        if reason is not None:
            raise InvalidRequest(reason, code="unsupported_operation")


def complete(heard: Heard[T]) -> Sequence[T]:
    """Raises ServerUnavailable if a replica is missing: what it did is not known."""
    if heard.silent:
        raise ServerUnavailable(
            f"{heard.silent} of {len(heard.answers) + heard.silent} scheduler(s) did not answer; try again"
        )
    return heard.answers


def succeeded(answers: Sequence[ProfileAnswer]) -> list[ProfileAnswer]:
    """Raises InternalError if one has failed."""
    if failed := [answer for answer in answers if answer.outcome == "failed"]:
        raise InternalError(f"{len(failed)} of {len(answers)} scheduler(s) could not record: {failed[0].text}")
    return [answer for answer in answers if answer.outcome == "done"]
