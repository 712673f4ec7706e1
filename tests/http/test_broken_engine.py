"""A30 over HTTP: an engine that does not come back from a step, or raises in each. What health says, and what every client gets.

Time is the test's own clock where a limit of minutes is meant. What Serve and the scheduler replica do about it is tested in
tests/ray/test_faults.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from overlap_serve.config import FakeModel, ServeConfig
from overlap_serve.engine.fake import FakeEngine
from overlap_serve.runtime import inflight
from tests.broken_engines import SETTLE_S, Clock, StuckEngine, give_to_workers, raising_engine, stuck_engine
from tests.http.raw import COMPLETIONS, completion_body
from tests.http_rig import MODEL, HttpRig, http_rig

FAKE = FakeModel(base_ms=2.0, max_model_len=65_536)
LONG = 20_000  # tokens; 40 s
STALL_S = 15.0  # ready_stall_s, by default


@contextmanager
def rig_with(patch: pytest.MonkeyPatch, engine: type[FakeEngine], clock: Clock, **config: object) -> Iterator[HttpRig]:
    give_to_workers(patch, engine, clock)
    with http_rig(FAKE, **config) as rig:
        yield rig


@contextmanager
def let_go_at_the_end(engine: type[StuckEngine]) -> Iterator[None]:
    """Also when the test fails: the rig waits for its threads."""
    try:
        yield
    finally:
        engine.let_go.set()


def post(rig: HttpRig, **fields: object) -> httpx.Response:
    with rig.http() as http:
        return http.post(COMPLETIONS, json=completion_body(**fields))


def health(rig: HttpRig) -> dict[str, tuple[int, str]]:
    with rig.http() as http:
        answers = {name: http.get(f"/health/{name}") for name in ("ready", "live")}
    return {name: (answer.status_code, answer.json()["status"]) for name, answer in answers.items()}


def load(pool: ThreadPoolExecutor, rig: HttpRig) -> tuple[list[Future[httpx.Response]], list[Future[httpx.Response]]]:
    """Four requests that run, two of them streams, and two that wait for a slot."""
    running = [pool.submit(post, rig, max_tokens=LONG, stream=i % 2 == 0, n=1 + i // 2) for i in range(4)]
    rig.until(lambda: rig.detokenizer.open_streams() == 6, "all slots stream")
    # Short: nobody ends what a lost call leaves in a scheduler that lives on, here; in earnest the call is lost because it died.
    waiting = [pool.submit(post, rig, max_tokens=5, stream=i == 0) for i in range(2)]
    rig.until(lambda: rig.frontend.num_open == 6, "two more wait")
    return running, waiting


def check_failed_in_order(answer: httpx.Response, stream: bool) -> None:
    """Text was sent: an error event, then [DONE], and no finish. Nothing was sent: 503 with Retry-After."""
    if stream:
        assert answer.status_code == 200
        *_, error, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert '"finish_reason":"' not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed"), answer.text
        assert int(answer.headers["retry-after"]) >= 1


def check_all_failed(running: list[Future[httpx.Response]], waiting: list[Future[httpx.Response]]) -> None:
    for i, future in enumerate(running):
        check_failed_in_order(future.result(SETTLE_S), stream=i % 2 == 0)
    for future in waiting:
        check_failed_in_order(future.result(SETTLE_S), stream=False)


def test_a30_a_step_that_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready goes by the clock and live stays; newcomers are refused; nobody gets an end that is none; all ends come with the
    supervisor's verdict, here `lose`; and an engine that comes back after all serves again."""
    engine, clock = stuck_engine(armed=False), Clock()
    with (
        rig_with(monkeypatch, engine, clock, max_running_requests=6) as rig,
        let_go_at_the_end(engine),
        ThreadPoolExecutor(6) as pool,
    ):
        assert health(rig)["ready"] == (200, "ready")
        running, waiting = load(pool, rig)
        engine.armed.set()
        assert engine.stuck.wait(SETTLE_S)
        clock.advance(STALL_S - 0.5)
        assert health(rig) == {"ready": (200, "ready"), "live": (200, "ready")}
        clock.advance(1.0)
        assert health(rig) == {"ready": (503, "stalled"), "live": (200, "ready")}
        check_failed_in_order(post(rig, max_tokens=1), stream=False)
        assert not any(future.done() for future in (*running, *waiting))
        rig.do(rig.calls.lose)
        check_all_failed(running, waiting)
        assert rig.counters()["failed"] == 6
        engine.let_go.set()
        rig.assert_at_rest()
        assert health(rig)["ready"] == (200, "ready")
        assert post(rig, max_tokens=3).status_code == 200


def test_a30_a_deadline_holds_although_the_engine_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler keeps deadlines, but cannot while it waits for the device; the ingress does then."""
    monkeypatch.setattr(inflight, "GRACE_S", 0.05)
    engine = stuck_engine(armed=False)
    with rig_with(monkeypatch, engine, Clock()) as rig, let_go_at_the_end(engine), ThreadPoolExecutor(2) as pool:
        late = [pool.submit(post, rig, max_tokens=LONG, timeout_s=0.3, stream=stream) for stream in (True, False)]
        rig.until(lambda: rig.detokenizer.open_streams() == 2, "both stream")
        engine.armed.set()
        assert engine.stuck.wait(SETTLE_S)
        stream, whole = (future.result(SETTLE_S) for future in late)
        assert stream.text.count('"finish_reason":"abort","stop_reason":"deadline"') == 1
        assert stream.text.endswith("data: [DONE]\n\n")
        [choice] = whole.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
        engine.let_go.set()


def test_a30_idle_for_ten_minutes_stays_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with rig_with(monkeypatch, FakeEngine, clock) as rig:
        for _ in range(3):
            clock.advance(600.0)
            assert health(rig) == {"ready": (200, "ready"), "live": (200, "ready")}
            assert post(rig, max_tokens=3).status_code == 200
            rig.assert_at_rest()


# The worker's thread ends with the engine's error, as the rank's process does.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a30_an_engine_that_raises_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = raising_engine(armed=False)
    give_to_workers(monkeypatch, engine)
    rig = HttpRig(ServeConfig(engine="fake", served_model_name=MODEL, fake=FAKE, max_running_requests=6))
    rig.start()  # not `http_rig`: of a scheduler that has failed, accounts are of no interest
    try:
        with ThreadPoolExecutor(6) as pool:
            running, waiting = load(pool, rig)
            engine.armed.set()
            rig.until(lambda: rig.worker.status().status == "dead", "the loop has ended")
            rig.do(rig.calls.lose)  # its process ends with it, and so do calls of which the loop never heard
            check_all_failed(running, waiting)
        assert health(rig) == {"ready": (503, "dead"), "live": (200, "ready")}
        check_failed_in_order(post(rig, max_tokens=1), stream=False)
        counts = rig.counters()
        assert (counts["accepted"], counts["failed"], counts["rejected"], counts["open"]) == (6, 6, 1, 0)
        assert rig.detokenizer.open_streams() == 0
    finally:
        rig.stop()
