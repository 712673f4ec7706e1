"""The service over real zmq: batching, faults, stop and drain."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from overlap_serve.messages import AbortRequest, Ended, Message, Stop, TextDelta, TokenOutput
from overlap_serve.runtime.detokenizer import DetokenizerService, Expected
from overlap_serve.sampling import TextParams
from overlap_serve.text.tokenizer import Tokenizer
from overlap_serve.transport import Inbox, Outbox
from tests.text.built import joined, opening, outputs

KEY = b"key"


class Rig:
    """A running service, a scheduler's outbox and two ingress inboxes."""

    def __init__(self, bind: str) -> None:
        self.service = DetokenizerService(Tokenizer.bytes(), bind, KEY, "detokenizer-1")
        self.outbox = Outbox(KEY, "scheduler_detokenizer")
        self.inboxes = {name: Inbox(f"inproc://{name}-{uuid.uuid4()}", KEY) for name in ("a", "b")}
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()

    def send(self, *messages: Message) -> None:
        assert self.outbox.send(self.service.endpoint, list(messages))

    def open(
        self, rid: str, ids: bytes, ingress: str = "a", choice: int = 0, text: TextParams | None = None
    ) -> TokenOutput:
        return TokenOutput(rid, 0, choice, 0, tuple(ids), open=opening(text, ingress=self.inboxes[ingress].endpoint))

    def receive(self, ingress: str, count: int) -> list[TextDelta]:
        """Exactly this many deltas."""
        deltas: list[TextDelta] = []
        while len(deltas) < count:
            messages = self.inboxes[ingress].drain(5.0)
            assert messages, f"{len(deltas)} of {count} deltas came"
            deltas.extend(m for m in messages if isinstance(m, TextDelta))
        assert len(deltas) == count
        return deltas

    def join(self) -> None:
        self.thread.join(10.0)
        assert not self.thread.is_alive()

    def close(self) -> None:
        self.service.stop()
        self.join()
        self.outbox.close()
        for inbox in self.inboxes.values():
            inbox.close()


@pytest.fixture(params=["inproc", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(f"inproc://{uuid.uuid4()}" if request.param == "inproc" else "tcp://127.0.0.1")
    yield made
    made.close()


def test_tokens_come_out_as_text_and_the_state_goes_with_the_end(rig: Rig) -> None:
    for output in outputs([[104], [0xC3], [0xA9], [33]]):
        rig.send(output if output.open is None else rig.open("r", b"h"))
    deltas = rig.receive("a", 3)
    assert joined(deltas) == "hé!"
    assert deltas[-1].finish == "length" and deltas[-1].num_tokens == 4
    assert rig.service.open_streams() == 0


def test_a_batch_goes_to_each_ingress_as_one_payload_in_order(rig: Rig) -> None:
    rig.send(
        rig.open("r1", b"a", "a"),
        rig.open("r2", b"b", "b"),
        TokenOutput("r1", 0, 0, 1, (99,)),
        TokenOutput("r2", 0, 0, 1, (100,)),
        rig.open("r3", b"e", "a"),
    )
    assert [(d.rid, d.text) for d in rig.receive("a", 3)] == [("r1", "a"), ("r1", "c"), ("r3", "e")]
    assert [(d.rid, d.text) for d in rig.receive("b", 2)] == [("r2", "b"), ("r2", "d")]
    rig.service.stop()
    rig.join()  # a payload is counted after it was sent
    metrics = rig.service.metrics_snapshot().decode()
    assert 'overlap_detokenizer_open_streams{replica="detokenizer-1"} 3.0' in metrics
    assert 'overlap_transport_messages_total{hop="detokenizer_ingress",replica="detokenizer-1"} 2.0' in metrics


def test_an_abort_drops_the_state_and_later_tokens(rig: Rig) -> None:
    rig.send(rig.open("r", b"a"), rig.open("r", b"b", choice=1), rig.open("other", b"c"))
    rig.receive("a", 3)
    rig.send(AbortRequest("r", "client"), TokenOutput("r", 0, 0, 1, (97,)), TokenOutput("other", 0, 0, 1, (100,)))
    assert [(d.rid, d.text) for d in rig.receive("a", 1)] == [("other", "d")]
    assert rig.service.open_streams() == 1


def test_a_bad_output_ends_its_own_request_with_an_error_and_no_other(rig: Rig) -> None:
    rig.send(
        rig.open("bad", b"a"),
        rig.open("good", b"b"),
        TokenOutput("bad", 0, 0, 1, (-5,)),
        TokenOutput("good", 0, 0, 1, (99,)),
        TokenOutput("gap", 0, 0, 7, (97,), open=opening(ingress=rig.inboxes["a"].endpoint)),
    )
    deltas = rig.receive("a", 5)
    bad = [delta for delta in deltas if delta.rid == "bad"]
    assert [delta.finish for delta in bad] == [None, "error"]
    assert bad[1].failure is not None and bad[1].failure.code == "internal_error"
    assert joined([delta for delta in deltas if delta.rid == "good"]) == "bc"
    assert [(d.finish, d.first_index) for d in deltas if d.rid == "gap"] == [("error", 0)]
    assert rig.service.open_streams() == 1


def test_an_ingress_address_that_no_socket_takes_does_not_stop_the_service(rig: Rig) -> None:
    rig.send(TokenOutput("r", 0, 0, 0, (97,), open=opening(ingress="nonsense")), Ended("r", 0), rig.open("good", b"b"))
    assert rig.receive("a", 1)[0].text == "b"
    assert rig.service.open_streams() == 1


def test_stop_ends_run_after_what_came_before(rig: Rig) -> None:
    rig.send(rig.open("r", b"a"))
    rig.receive("a", 1)
    rig.send(TokenOutput("r", 0, 0, 1, (98,)), Stop())
    rig.join()
    assert rig.receive("a", 1)[0].text == "b"
    rig.service.stop()  # a second time does nothing


def test_a_stop_with_drain_waits_for_open_streams(rig: Rig) -> None:
    rig.send(rig.open("r", b"a"), Stop(drain_s=30.0))
    rig.receive("a", 1)
    rig.send(TokenOutput("r", 0, 0, 1, (98,), "length"))
    assert rig.receive("a", 1)[0].finish == "length"
    rig.join()


def test_a_stop_with_drain_ends_when_its_time_is_over(rig: Rig) -> None:
    rig.send(rig.open("r", b"a"), Stop(drain_s=0.05))
    rig.receive("a", 1)
    rig.join()


def test_stop_may_come_from_any_thread_and_before_run() -> None:
    service = DetokenizerService(Tokenizer.bytes(), f"inproc://{uuid.uuid4()}", KEY, "r")
    stopper = threading.Thread(target=service.stop)
    stopper.start()
    stopper.join()
    service.run()
    assert service.open_streams() == 0


def test_announced_requests_count_until_they_have_opened_or_are_dropped() -> None:
    expected = Expected()
    expected.announced("a", 2)
    expected.opened("b")  # its output came before its announcement
    assert expected.count() == 2
    expected.announced("b", 1)
    expected.opened("a")
    assert expected.count() == 1
    expected.announced("c", 5)
    expected.dropped("c")
    expected.opened("a")
    assert expected.count() == 0 and not expected._missing and not expected._idle


def test_announcement_whose_request_was_lost_is_forgotten_in_time() -> None:
    expected = Expected()
    expected.announced("lost", 1)
    expected.drop_idle()
    assert expected.count() == 1
    expected.drop_idle()
    assert expected.count() == 0
