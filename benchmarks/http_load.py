"""Latency that the whole path adds to a token: 64 streams, 500 requests, a fifth of the clients leaving, on the fake engine (5 ms).

    python -m benchmarks.http_load

The server runs as `serve run` starts it, HAProxy in front. Added latency of a token = gap between two chunks of a stream at the client's
socket, less the step. The client shares the machine with the server; it only counts `data:` lines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from benchmarks.results import write
from benchmarks.server import serve_run

STREAMS, REQUESTS, LEAVING_SHARE, STEP_MS = 64, 500, 0.2, 5.0
TOKENS = (20, 120)


async def stream(url: str, rng: random.Random) -> dict[str, object]:
    """One request on a bare connection: how it ended, time to its first chunk and the gaps between chunks, in ms."""
    num_tokens = rng.randint(*TOKENS)
    leaves_after = rng.randint(0, num_tokens - 1) if rng.random() < LEAVING_SHARE else None
    body = json.dumps(
        {"prompt": "hello", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    )
    address = urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write((head + body).encode())
    stamps: list[float] = []
    data = tail = b""
    while b"data: [DONE]" not in tail + data and (leaves_after is None or len(stamps) <= leaves_after):
        tail = (tail + data)[-16:]
        data = await reader.read(65536)
        if not data:
            break
        stamps += [time.perf_counter()] * data.count(b'data: {"id"')
    writer.close()
    whole = b"data: [DONE]" in tail + data
    end = "done" if whole else "left" if leaves_after is not None else "error"
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    return {"end": end, "first_ms": (stamps[0] - begin) * 1e3 if stamps else None, "gaps_ms": gaps}


async def load(url: str) -> list[dict[str, object]]:
    rng = random.Random(1)
    numbers = iter(range(REQUESTS))
    results: list[dict[str, object]] = []

    async def client() -> None:
        results.extend([await stream(url, rng) for _ in numbers])

    await asyncio.gather(*(client() for _ in range(STREAMS)))
    return results


def summarize(results: Sequence[Mapping[str, object]], wall_s: float) -> dict[str, object]:
    """One run: counts by end, and percentiles of what was added to a step."""
    gaps = sorted(gap for r in results for gap in r["gaps_ms"])  # type: ignore[attr-defined]
    first = [float(str(r["first_ms"])) for r in results if r["first_ms"] is not None]
    ends = [str(r["end"]) for r in results]
    return {
        "streams": STREAMS,
        "requests": len(results),
        "done": ends.count("done"),
        "left": ends.count("left"),
        "errors": ends.count("error"),
        "tokens_per_s": len(gaps) / wall_s,
        "gap_p50_ms": statistics.median(gaps),
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)],
        "first_p50_ms": statistics.median(first),
    }


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    def median(key: str) -> float:
        return statistics.median(float(str(run[key])) for run in runs)

    return {
        "added_p50_ms": median("gap_p50_ms") - STEP_MS,
        "added_p99_ms": median("gap_p99_ms") - STEP_MS,
        "first_p50_ms": median("first_p50_ms"),
        "tokens_per_s": median("tokens_per_s"),
        "errors": sum(float(str(run["errors"])) for run in runs),
    }


def main() -> None:
    runs = []
    args = {"engine": "fake", "fake": {"base_ms": STEP_MS}, "max_running_requests": STREAMS}
    with serve_run(args) as server:
        server.wait_ready()
        asyncio.run(load(server.url))  # warm
        for _ in range(3):
            begin = time.perf_counter()
            results = asyncio.run(load(server.url))
            runs.append(summarize(results, time.perf_counter() - begin))
            print(runs[-1])
    print(figures(runs), write("http_load", "python -m benchmarks.http_load", runs, figures(runs)))


if __name__ == "__main__":
    main()
