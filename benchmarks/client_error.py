"""How late the time stamps of `overlap-serve bench serve` are, against a server in another process that knows when it sent each event.

    python -m benchmarks.client_error

64 streams of 100 tokens a second, sent as an engine sends (`burst`: one event to every stream, then the next step) and evenly
(`spread`). Both processes read one monotonic clock, so lateness = stamp of the client - clock just before the server's `send`: socket,
scheduling and the client's own work together. Runs hold all events, as counts of lateness in bins of 10 us.

The claim is about the client on a quiet machine, so a run in which the sleeping server itself woke late is repeated: it is kept, but left
out of the figures. Which runs those are depends on nothing that the client does.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection

from benchmarks.results import write
from overlap_serve.bench.api import Api, Dialogue
from overlap_serve.bench.client import Client
from overlap_serve.bench.load import settled_heap
from overlap_serve.bench.stats import percentile
from overlap_serve.bench.workload import Turn

STREAMS, TOKENS, GAP_S, REPEATS = 64, 500, 0.010, 3
PATTERNS = ("burst", "spread")
BIN_US = 10
QUIET_US = 1000  # the server's own p99, at most
MAX_RUNS = 12  # of a pattern, to get REPEATS quiet ones
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1764446400,"model":"fake","choices":[{"index":0,'
    b'"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def read_request(connection: socket.socket) -> int:
    """The first token id of the prompt: which stream this is."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65536)
    return int(json.loads(body)["prompt"][0])


def serve(pipe: Connection) -> None:
    """Told a pattern, serve STREAMS streams by it and answer with the clock at each `send`, [stream][event]. None ends it."""
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        pipe.send(listener.getsockname()[1])
        while (pattern := pipe.recv()) is not None:
            pipe.send(send_streams(listener, pattern))


def send_streams(listener: socket.socket, pattern: str) -> list[list[float]]:
    streams: list[socket.socket | None] = [None] * STREAMS
    for _ in range(STREAMS):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams[read_request(connection)] = connection
    opened = [stream for stream in streams if stream is not None]
    for stream in opened:
        stream.sendall(HEAD)
    sent: list[list[float]] = [[] for _ in opened]
    begin = time.perf_counter() + 0.1
    event = chunk(EVENT)
    offset = GAP_S / STREAMS if pattern == "spread" else 0.0
    for step in range(TOKENS):
        for index, stream in enumerate(opened):
            if (wait := begin + step * GAP_S + index * offset - time.perf_counter()) > 0:
                time.sleep(wait)
            sent[index].append(time.perf_counter())
            stream.sendall(event)
    for stream in opened:
        stream.sendall(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        stream.close()
    return sent


async def receive(port: int) -> list[list[float]]:
    """Stamps of the client, [stream][event]."""
    bodies = [Dialogue(Api("fake")).body(Turn(ids=(index,), output_tokens=TOKENS), False) for index in range(STREAMS)]
    with closing(Client(f"http://127.0.0.1:{port}/v1", {}, 60.0)) as client, settled_heap():
        replies = await asyncio.gather(*(client.post("/completions", body) for body in bodies))
    failed = [f"{reply.error}: {reply.detail}" for reply in replies if reply.error]
    if failed:
        raise RuntimeError(f"{len(failed)} streams failed, the first with {failed[0]}")
    return [reply.chunks_s for reply in replies]


def one_run(pattern: str, sent: Sequence[Sequence[float]], seen: Sequence[Sequence[float]]) -> dict[str, object]:
    late_us = [
        (stamp - clock) * 1e6
        for stamps, clocks in zip(seen, sent, strict=True)
        for stamp, clock in zip(stamps, clocks, strict=True)
    ]
    bins = Counter(int(late // BIN_US) for late in late_us)
    first, last = min(map(min, sent)), max(map(max, sent))
    # How late the server woke for its first stream: what the machine does to any process, a measure of how quiet it was.
    woke_s = sorted(clock - step * GAP_S for step, clock in enumerate(sent[0]))
    return {
        "pattern": pattern,
        "streams": STREAMS,
        "events": len(late_us),
        "events_per_s": len(late_us) / (last - first),
        "server_woke_late_p99_us": (percentile(woke_s, 99) - woke_s[0]) * 1e6,
        "max_us": max(late_us),
        "late_bins": {str(number): count for number, count in sorted(bins.items())},
    }


def num_quiet(runs: Sequence[Mapping[str, object]], pattern: str) -> int:
    return sum(run["pattern"] == pattern and is_quiet(run) for run in runs)


def is_quiet(run: Mapping[str, object]) -> bool:
    return float(str(run["server_woke_late_p99_us"])) <= QUIET_US


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Of the quiet runs: medians of their percentiles, and the largest lateness. all_p99: the median over all runs, the busy ones too."""
    made: dict[str, float] = {"runs": len(runs), "quiet_runs": sum(map(is_quiet, runs))}
    for pattern in PATTERNS:
        own = [run for run in runs if run["pattern"] == pattern]
        quiet = [run for run in own if is_quiet(run)]
        for name, percent in (("p50", 50.0), ("p99", 99.0), ("p999", 99.9)):
            made[f"{pattern}_{name}_ms"] = _median_ms(quiet, percent)
        made[f"{pattern}_max_ms"] = max(float(str(run["max_us"])) for run in quiet) / 1e3
        made[f"{pattern}_all_p99_ms"] = _median_ms(own, 99.0)
    return made


def _median_ms(runs: Sequence[Mapping[str, object]], percent: float) -> float:
    """Each event is taken at the upper end of its bin."""
    return statistics.median(percentile(_unbinned_ms(run["late_bins"]), percent) for run in runs)


def _unbinned_ms(bins: object) -> list[float]:
    """Ascending."""
    assert isinstance(bins, dict)
    return sorted((int(number) + 1) * BIN_US / 1e3 for number, count in bins.items() for _ in range(count))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    runs: list[dict[str, object]] = []
    for _ in range(MAX_RUNS):
        for pattern in PATTERNS:
            if num_quiet(runs, pattern) < REPEATS:
                ours.send(pattern)
                seen = asyncio.run(receive(port))
                runs.append(one_run(pattern, ours.recv(), seen))
                print({key: value for key, value in runs[-1].items() if key != "late_bins"})
    ours.send(None)
    server.join()
    if any(num_quiet(runs, pattern) < REPEATS for pattern in PATTERNS):
        raise SystemExit("this machine is not quiet enough; nothing was written")
    print(figures(runs), write("client_error", "python -m benchmarks.client_error", runs, figures(runs)))


if __name__ == "__main__":
    main()
