"""Mailboxes over real zmq: order, keys, garbage, a full queue, threads."""

from __future__ import annotations

import threading
import uuid

import msgspec
import pytest
import zmq

from overlap_serve.messages import AbortRequest, Ended, Message
from overlap_serve.transport import Inbox, Outbox

KEY = b"k" * 16


@pytest.fixture(params=["tcp", "inproc"])
def inbox(request: pytest.FixtureRequest) -> Inbox:
    # A closed inproc name is given up later, in zmq's own thread: take a new one each time.
    box = Inbox("tcp://127.0.0.1" if request.param == "tcp" else f"inproc://{uuid.uuid4()}", KEY)
    request.addfinalizer(box.close)
    return box


def receive(inbox: Inbox, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        arrived = inbox.drain(5.0)
        assert arrived, f"{count - len(messages)} messages are missing"
        messages += arrived
    return messages


def test_messages_arrive_whole_and_in_order(inbox: Inbox) -> None:
    outbox = Outbox(KEY, "test")
    sent: list[Message] = [Ended(f"r{i}", i) for i in range(500)]
    for begin in range(0, 500, 7):
        assert outbox.send(inbox.endpoint, sent[begin : begin + 7])
    assert receive(inbox, 500) == sent
    outbox.close()


def test_drain_without_a_timeout_does_not_wait(inbox: Inbox) -> None:
    assert inbox.drain() == []


@pytest.mark.parametrize(
    "frames",
    [
        [b"wrong key 123456", b"\x90"],
        [KEY, b"\xc1 not msgpack"],
        [KEY, b"\x81\xa1a\x01"],
        [KEY, b"\x91\x93\xa5bogus\x01\x02"],
        [KEY],
        [KEY, b"\x90", b"more"],
        [
            KEY,
            msgspec.msgpack.encode(
                [["generate", "r", 0, b"\0" * 4, 1, {"max_tokens": 1, "temperature": 9.0}, {}, ["d", "i"]]]
            ),
        ],
        [KEY, msgspec.msgpack.encode([["generate", "r", 0, b"\0" * 3, 1, {"max_tokens": 1}, {}, ["d", "i"]]])],
        [KEY, msgspec.msgpack.encode([["generate", "r", 0, b"\0" * 4, 0, {"max_tokens": 1}, {}, ["d", "i"]]])],
        [
            KEY,
            msgspec.msgpack.encode(
                [["generate", "r", 0, b"", 2, {"max_tokens": 1}, {}, ["d", "i"], 0, None, "", [b""]]]
            ),
        ],
        [b""],
    ],
)
def test_foreign_and_malformed_messages_are_refused_and_do_no_harm(inbox: Inbox, frames: list[bytes]) -> None:
    intruder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    intruder.setsockopt(zmq.LINGER, 1000)
    intruder.connect(inbox.endpoint)
    intruder.send_multipart(frames)
    assert inbox.drain(5.0) == []
    outbox = Outbox(KEY, "test")
    outbox.send(inbox.endpoint, [AbortRequest("r", "client")])
    assert receive(inbox, 1) == [AbortRequest("r", "client")]
    assert inbox.num_refused == 1
    intruder.close()
    outbox.close()


def test_send_to_a_dead_peer_never_blocks_and_counts_what_it_drops() -> None:
    counts = {"sent": 0, "dropped": 0}

    def count(kind: str, number: int) -> None:
        counts[kind] += number

    outbox = Outbox(
        KEY, "hop", sent=lambda hop, n: count("sent", n), dropped=lambda hop, n: count("dropped", n), send_hwm=10
    )
    dead = "tcp://127.0.0.1:1"  # nobody listens there
    results = [outbox.send(dead, [Ended("r", 0), Ended("s", 0)]) for _ in range(15)]
    outbox.close()
    assert results[:10] == [True] * 10 and results[-1] is False
    assert counts == {"sent": sum(results), "dropped": 2 * results.count(False)}


def test_endpoint_that_cannot_be_is_a_dropped_message_and_no_error() -> None:
    outbox = Outbox(KEY, "hop")
    assert outbox.send("nowhere", [Ended("r", 0)]) is False
    outbox.close()


def test_threads_with_their_own_outboxes_share_an_inbox(inbox: Inbox) -> None:
    def work(name: str) -> None:
        outbox = Outbox(KEY, "test")
        for i in range(100):
            outbox.send(inbox.endpoint, [Ended(name, i)])
        outbox.close()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    messages = receive(inbox, 300)
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [m.attempt for m in messages if isinstance(m, Ended) and m.rid == name] == list(range(100))


def test_idle_peers_are_forgotten() -> None:
    outbox = Outbox(KEY, "test", idle_s=0.0)
    for port in range(1, 20):
        outbox.send(f"tcp://127.0.0.1:{port}", [Ended("r", 0)])
    assert len(outbox._sockets) <= 2
    outbox.close()
