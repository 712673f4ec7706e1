"""`CudaDevice`: torch.cuda streams, events and pinned buffers behind the device protocols.

Work runs at launch in the caller's thread, which only enqueues kernels; the device runs them in the stream's order. The one
idea: nothing here waits for the device but `Event.synchronize` and `Device.synchronize`.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from overlap_serve.device.base import Event, Span, Stream, Watch, Work

MAX_UNREAD_SPANS = 256  # pairs of timing events kept before finished ones are summed


class CudaEvent:
    """A recorded point. `error`: what the stream's work raised while it was enqueued, if it did."""

    def __init__(self, event: torch.cuda.Event, error: BaseException | None) -> None:
        self.event = event
        self.error = error

    def done(self) -> bool:
        self._raise()
        reached: bool = self.event.query()  # type: ignore[no-untyped-call]
        return reached

    def synchronize(self) -> None:
        self._raise()
        self.event.synchronize()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class CudaStream:
    """One torch.cuda.Stream. The first exception poisons it, as it does a `ThreadStream`: later work is skipped and every later
    event raises it, so a failed step is reported by its own event and not by the launch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._error: BaseException | None = None
        self._busy_s = 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._watch: Watch | None = None
        self._origin: tuple[torch.cuda.Event, float] | None = (
            None  # a point of the stream, and its time on the host's clock
        )

    def launch(self, work: Work) -> None:
        if self._error is not None:
            return
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(self._stream)
        try:
            with torch.cuda.stream(self._stream), torch.inference_mode():
                work()
        except BaseException as error:
            self._error = error
        end.record(self._stream)
        self._spans.append((begin, end))
        if len(self._spans) > MAX_UNREAD_SPANS:
            self.busy_s()

    def record(self) -> Event:
        # Blocking: the host thread sleeps in synchronize() and leaves its core and the GIL to others (ADR-0005).
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event, self._error)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "a CUDA stream can only wait for events of CUDA streams"
        self._stream.wait_event(event.event)
        if event.error is not None and self._error is None:
            self._error = event.error

    def busy_s(self) -> float:
        """Device time between the first and the last kernel of each finished work, gaps within it included. No sync."""
        while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._spans.popleft()
            busy_s = begin.elapsed_time(end) / 1e3
            self._busy_s += busy_s
            if self._watch is not None and self._origin is not None:
                point, point_s = self._origin
                begin_s = point_s + point.elapsed_time(begin) / 1e3
                self._watch(Span(begin_s, begin_s + busy_s, busy_s))
        return self._busy_s

    def watch(self, watch: Watch | None) -> None:
        """Waits for the stream, to set its clock by the host's and to leave out what was launched before. Spans come when `busy_s` is
        asked for, or many are unread."""
        origin = None
        if watch is not None:
            point = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            point.record(self._stream)
            point.synchronize()
            origin = (point, time.monotonic())
        self.busy_s()
        self._watch, self._origin = watch, origin

    def close(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """GPU `index` of those that this process sees."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def new_stream(self, name: str) -> Stream:
        return CudaStream(self._device)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free_memory(self) -> int:
        """Free on the device, plus what torch's allocator holds and does not use."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        cached_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free_bytes + cached_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
