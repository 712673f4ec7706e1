"""`ThreadStream`: a stream that is a worker thread with a FIFO. No torch; the CPU device adds `inference_mode` through `enter`.

After MLX's scheduler.h (`enqueue(Stream, function)`, `StreamThread`): prior art for CPU streams as threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from overlap_serve.device.base import Event, Span, Watch, Work


class ThreadEvent:
    """Set by the stream's thread when it reaches the recorded point."""

    def __init__(self) -> None:
        # A lock that is held until then: a fifth of the cost of threading.Event, and made twice a step.
        self._ahead = threading.Lock()
        self._ahead.acquire()
        self._reached = False  # apart from the lock, which waiters hold for a moment
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """Called once, by the stream's thread."""
        self._error = error
        self._reached = True
        self._ahead.release()

    def done(self) -> bool:
        if not self._reached:
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        if not self._reached:
            with self._ahead:
                pass
        self.done()


class ThreadStream:
    """Runs launched work in order in its own daemon thread.

    The first exception poisons the stream: later work is skipped and every later event raises it, so a failed step is
    reported by its own event and cannot be overlooked.
    `enter` makes a context that the thread holds for its whole life (torch's inference_mode is thread-local).
    `clock` is read in the thread, in seconds; `time.thread_time` keeps waits for the GIL out of `busy_s`.
    """

    def __init__(
        self,
        name: str,
        enter: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._queue: SimpleQueue[tuple[Work, bool] | ThreadEvent | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._busy_s = 0.0
        self._enter = enter
        self._clock = clock
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def launch(self, work: Work) -> None:
        self._queue.put((work, True))

    def record(self) -> Event:
        event = ThreadEvent()
        self._queue.put(event)
        return event

    def wait(self, event: Event) -> None:
        self._queue.put((event.synchronize, False))  # waiting for another stream is idle time, not work

    def busy_s(self) -> float:
        return self._busy_s

    def watch(self, watch: Watch | None) -> None:
        self._watch = watch

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        with self._enter():
            while (item := self._queue.get()) is not None:
                if isinstance(item, ThreadEvent):
                    item.reach(self._error)
                elif self._error is None:
                    self._work(*item)

    def _work(self, work: Work, counts: bool) -> None:
        began, begin = time.monotonic(), self._clock()
        try:
            work()
        except BaseException as error:
            self._error = error
        if counts:
            busy_s = self._clock() - begin
            self._busy_s += busy_s
            if self._watch is not None:
                end = time.monotonic()
                self._watch(Span(began, end, min(busy_s, end - began)))


class ThreadStreams:
    """A `StreamFactory` of plain threads."""

    def new_stream(self, name: str) -> ThreadStream:
        return ThreadStream(name)
