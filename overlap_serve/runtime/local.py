"""`LocalEngine`: one engine in this process, without sockets and without Ray. Offline, it stands for the whole path of a request.

    caller --GenerateRequest, AbortRequest--> LocalInbox -> OverlapLoop, in a thread of its own
    caller <--TextDelta-- Detokenizer <-- Switchboard <--TokenOutput--'

Owns mailboxes, the loop's thread and its end. The loop is the server's own, and so is the text state machine, which runs in the
caller's thread while the device computes. A thread, not rounds in the caller: callers in several threads share the steps, and
Ctrl-C reaches a caller that waits, never the loop in the middle of a step.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import weakref
from queue import Empty, SimpleQueue
from types import TracebackType

import msgspec

from overlap_serve.config import EngineSpec, HostFacts, ServeConfig
from overlap_serve.engine.base import Engine
from overlap_serve.errors import ConfigError, ServerUnavailable
from overlap_serve.messages import AbortRequest, GenerateRequest, Message, Route, Stop, TextDelta, TokenOutput
from overlap_serve.runtime.inflight import error_of
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.model import cpu_has_bf16
from overlap_serve.runtime.worker import build_cache, build_engine, scheduler_limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.text.detokenizer import Detokenizer
from overlap_serve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE = "local"  # the "endpoint" of the loop


class LocalInbox:
    """A `Receiver` that any thread may write to."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message] = SimpleQueue()

    def put(self, messages: list[Message]) -> None:
        for message in messages:
            self._queue.put(message)

    def drain(self, timeout_s: float | None = 0.0) -> list[Message]:
        """All that has arrived. Waits up to timeout_s for the first (None: for ever)."""
        messages: list[Message] = []
        try:
            if timeout_s != 0.0:
                messages.append(self._queue.get(timeout=timeout_s))
            while True:
                messages.append(self._queue.get_nowait())
        except Empty:
            return messages


class Switchboard:
    """A `Sender` whose endpoints are the mailboxes of callers. A mailbox gets None when nothing more can come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._mailboxes: dict[str, SimpleQueue[list[Message] | None]] = {}
        self._ended: str | None = None

    def connect(self) -> tuple[str, SimpleQueue[list[Message] | None]]:
        """A new endpoint and its mailbox. Raises ServerUnavailable after the end."""
        with self._lock:
            if self._ended is not None:
                raise ServerUnavailable(self._ended)
            endpoint = f"caller-{next(self._numbers)}"
            mailbox = self._mailboxes[endpoint] = SimpleQueue()
        return endpoint, mailbox

    def disconnect(self, endpoint: str) -> None:
        with self._lock:
            self._mailboxes.pop(endpoint, None)

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        """False for a caller that has left: nobody reads the end of what it aborted."""
        with self._lock:
            mailbox = self._mailboxes.get(endpoint)
        if mailbox is None:
            return False
        mailbox.put(messages)
        return True

    def end(self, reason: str) -> None:
        """Nothing more will be sent; the first reason is the one that counts."""
        with self._lock:
            self._ended = self._ended or reason
            for mailbox in self._mailboxes.values():
                mailbox.put(None)

    def failure(self) -> ServerUnavailable:
        return ServerUnavailable(self._ended or "the engine has ended")


class Call:
    """What one caller has open: requests in, text out. For one thread; leaving the block aborts what has not ended."""

    def __init__(self, inbox: LocalInbox, board: Switchboard, tokenizer: Tokenizer) -> None:
        self._inbox = inbox
        self._board = board
        self._detokenizer = Detokenizer(tokenizer)
        self._open: dict[str, int] = {}  # rid -> choices that have not ended
        endpoint, self._mailbox = board.connect()
        self.route = Route(endpoint, endpoint)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.disconnect(self.route.ingress)
        self._inbox.put([AbortRequest(rid, "client") for rid in self._open])
        self._open.clear()

    def start(self, requests: list[GenerateRequest]) -> None:
        """Their `route` is this call's."""
        for request in requests:
            self._open[request.rid] = request.n
        self._inbox.put([*requests])

    def receive(self) -> list[TextDelta]:
        """Wait for the next output; what it made certain, which may be nothing. Only while something is open.

        Raises the RequestError of a request that failed, and ServerUnavailable when the engine is gone.
        """
        outputs = self._mailbox.get()
        if outputs is None:
            raise self._board.failure()
        deltas = []
        for output in outputs:
            assert isinstance(output, TokenOutput), "the loop sends callers nothing else"
            made = self._detokenizer.handle(output)
            if made is not None:
                deltas.append(self._settle(made[1]))
        return deltas

    def _settle(self, delta: TextDelta) -> TextDelta:
        if delta.finish is None:
            return delta
        if delta.finish == "error" or delta.failure is not None:
            raise error_of(delta.failure)
        if delta.finish == "stop" and isinstance(delta.stop_reason, str):
            # Only the detokenizer knows of a stop string; the scheduler still runs the choice.
            self._inbox.put([AbortRequest(delta.rid, "stop", delta.choice)])
        self._open[delta.rid] -= 1
        if not self._open[delta.rid]:
            del self._open[delta.rid]
        return delta


class LocalEngine:
    """Loads the model in the constructor. Thread-safe. Ends with `close`, when it is collected, or with the interpreter.

    The queue has no limit here: a caller decides how much it hands in.
    Raises ModelLoadError and ConfigError as `build_engine` does.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tp_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {spec.tp_size}: the ranks of one engine are actors of a Ray cluster, and this engine "
                "runs in one process; set it to 1, or serve the model (serve run serve_config.yaml)"
            )
        engine, num_pages, _ = build_engine(spec)
        limits = scheduler_limits(msgspec.structs.replace(spec, max_waiting=sys.maxsize), num_pages)
        self.capacity_tokens = spec.capacity_tokens(num_pages)
        self._scheduler = Scheduler(limits, build_cache(spec), ENGINE)
        self._inbox = LocalInbox()
        self._board = Switchboard()
        meter = LoopMeter(device_busy_s=engine.device_busy_s)
        loop = OverlapLoop(self._scheduler, engine, self._inbox, self._board, meter, depth=spec.depth)
        # A daemon, as the interpreter waits for others before it runs `finalize`; that in turn waits for the thread.
        thread = threading.Thread(target=_run, args=(loop, engine, self._board), name="overlap-loop", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self._inbox, thread)

    def call(self, tokenizer: Tokenizer) -> Call:
        """Raises ServerUnavailable when the engine has ended."""
        return Call(self._inbox, self._board, tokenizer)

    def close(self) -> None:
        """End running requests with abort/shutdown, then give the device back."""
        self._end()

    def check_at_rest(self) -> None:
        """AssertionError unless nothing is open and all pages and slots are accounted for; for tests, while the loop is idle."""
        assert self._scheduler.at_rest, "requests are open"
        self._scheduler.check_accounting()


def this_host(config: ServeConfig) -> HostFacts:
    """What the engine of this configuration can use here. Imports torch unless the answer is clear without."""
    cuda = False
    if config.engine == "torch" and config.device != "cpu":
        # Not at the top: with the fake engine this process never loads torch.
        import torch

        cuda = torch.cuda.is_available()
    return HostFacts(num_cpus=usable_cpus(), bf16=cpu_has_bf16(), cuda=cuda)


def usable_cpus() -> int:
    """Cores that this process may run on, where the system says; else all."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def _run(loop: OverlapLoop, engine: Engine, board: Switchboard) -> None:
    """The loop's thread. Knows no LocalEngine, so that one nobody uses any more can be collected."""
    try:
        loop.run()
    except BaseException as error:
        log.exception("the engine failed")
        board.end(f"the engine failed: {type(error).__name__}: {error}")
    finally:
        board.end("the engine is closed")
        engine.close()


def _stop(inbox: LocalInbox, thread: threading.Thread) -> None:
    inbox.put([Stop()])
    if thread is not threading.current_thread():  # the collector runs in any thread
        thread.join()
