"""Protocols of streams, events and devices.

Work is a *function* handed to a stream, not a `with` block: a CPU stream is a thread that runs functions in order, a CUDA
stream enqueues them at once (ADR-0005). A work function sees device tensors and its own step's buffers, never a `Req`;
host state moves at launch, not inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    # The fake engine's process uses streams and never loads torch (1-3 s and 250 MB per rank).
    import torch

Work = Callable[[], None]


class Span(NamedTuple):
    """One work of a stream, seen from the stream: begin and end by `time.monotonic`, and the seconds of these that it was busy
    (what a stream's thread waits for the GIL is idle time)."""

    begin: float
    end: float
    busy_s: float


Watch = Callable[[Span], object]


class Event(Protocol):
    """A point in a stream's order."""

    def done(self) -> bool:
        """True once the stream has passed the point. Never blocks. Raises what the stream's work raised."""

    def synchronize(self) -> None:
        """Block the host until the stream has passed the point. Raises what the stream's work raised."""


class Stream(Protocol):
    """An ordered queue of work."""

    def launch(self, work: Work) -> None:
        """Run `work` after everything launched before. Does not wait for it."""

    def record(self) -> Event:
        """An event after everything launched so far."""

    def wait(self, event: Event) -> None:
        """Work launched later runs after `event`; the host does not wait."""

    def busy_s(self) -> float:
        """Seconds that this stream has spent running work since it was made; idle and GIL waits excluded where measurable."""

    def watch(self, watch: Watch | None) -> None:
        """From now on tell `watch` of every work that ends, in order, from any thread, perhaps some works late; None: of none."""

    def close(self) -> None:
        """Finish or drop what is queued and release the thread. Idempotent."""


class StreamFactory(Protocol):
    """All that a torch-free engine needs of a device."""

    def new_stream(self, name: str) -> Stream: ...


class Device(StreamFactory, Protocol):
    """A torch device with its streams and buffers."""

    @property
    def torch_device(self) -> torch.device: ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A host tensor that copies asynchronously to and from the device (pinned where that exists)."""

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    def synchronize(self) -> None:
        """Wait for all streams of the device; start-up and shutdown only."""
