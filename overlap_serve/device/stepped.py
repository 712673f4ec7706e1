"""`SteppedStreams`: streams for tests, with no threads and no timing luck. Work runs at the last legal moment.

Nothing runs until the host synchronizes with an event; then exactly what that event needs runs, on every stream it depends
on. Streams named in `eager` do the opposite: they run their work as soon as it is launched and its waits allow. A lazy engine
stream beside an eager side stream is the worst case for a buffer that two streams share; with `rng`, ready work of any stream
also runs at random points in between.
"""

from __future__ import annotations

import random
from collections import deque

from overlap_serve.device.base import Event, Watch, Work


class SteppedEvent:
    def __init__(self, stream: SteppedStream) -> None:
        self._stream = stream
        self.reached = False

    def done(self) -> bool:
        self._stream.raise_if_failed(self.reached)
        return self.reached

    def synchronize(self) -> None:
        self._stream.run_until(self)
        self._stream.raise_if_failed(self.reached)


class SteppedStream:
    def __init__(self, owner: SteppedStreams, name: str, eager: bool) -> None:
        self._owner = owner
        self._name = name
        self._eager = eager
        self._queue: deque[Work | SteppedEvent] = deque()
        self._error: BaseException | None = None

    def launch(self, work: Work) -> None:
        self._put(work)

    def record(self) -> Event:
        event = SteppedEvent(self)
        self._put(event)
        return event

    def wait(self, event: Event) -> None:
        self._put(event.synchronize)

    def busy_s(self) -> float:
        return 0.0

    def watch(self, watch: Watch | None) -> None:
        """Nothing to tell: here work has an order and no time."""

    def close(self) -> None:
        while self._queue:
            self.run_one()

    def run_one(self) -> bool:
        """Run the next queued item; False if there is none."""
        if not self._queue:
            return False
        item = self._queue.popleft()
        if isinstance(item, SteppedEvent):
            item.reached = True
        elif self._error is None:
            caller, self._owner.running = self._owner.running, self._name
            try:
                item()
            except BaseException as error:
                self._error = error
            self._owner.running = caller
        return True

    def run_until(self, event: SteppedEvent) -> None:
        while not event.reached and self.run_one():
            pass

    def raise_if_failed(self, reached: bool) -> None:
        if reached and self._error is not None:
            raise self._error

    def _put(self, item: Work | SteppedEvent) -> None:
        self._queue.append(item)
        if self._eager:
            self.close()
        self._owner.shuffle()


class SteppedStreams:
    """A `StreamFactory`; `eager` holds names of streams that run their work at launch."""

    def __init__(self, eager: frozenset[str] = frozenset(), rng: random.Random | None = None) -> None:
        self._eager = eager
        self._rng = rng
        self._streams: list[SteppedStream] = []
        self.running = ""  # name of the stream whose work runs now; "" is the host

    def new_stream(self, name: str) -> SteppedStream:
        stream = SteppedStream(self, name, name in self._eager)
        self._streams.append(stream)
        return stream

    def shuffle(self) -> None:
        """Run a random amount of queued work of a random stream (a wait inside it pulls in what it needs)."""
        if self._rng is not None and self._rng.random() < 0.3:
            stream = self._rng.choice(self._streams)
            for _ in range(self._rng.randrange(4)):
                stream.run_one()
