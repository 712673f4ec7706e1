"""CPU speed on the embedded model in bfloat16, against llama.cpp and transformers: one stream, 16 streams, a prompt of 1,024 tokens.

    python -m benchmarks.cpu_decode --llama FOLDER --gguf FILE

FOLDER: where `pip install --target` put llama_cpp, built for this machine. FILE: the embedded model's GGUF; a bfloat16 copy is made
of it. Each side is a process for each number of threads and is kept for all runs, which take turns: ours (`LLM.generate`),
transformers (`generate`), llama.cpp (C API, one batch for all streams). All do the same jobs and are timed whole. Decode rate:
streams * 64 tokens by the time of a job of 65 tokens less that of a job of one. Each side counts with its better number of threads;
ratios are of medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.decode_sides.side import MAX_PROMPT, MAX_STREAMS, Job
from benchmarks.results import write

REPEATS = 5
THREADS = (1, 2)
PROMPT, STEPS = 64, 64
OURS, LLAMA, TRANSFORMERS = "overlap", "llama", "transformers_generate"


class Side:
    """A process that does jobs."""

    def __init__(self, name: str, threads: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.threads = name, threads
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.decode_sides.{name}", str(threads), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "OMP_NUM_THREADS": str(threads)},
        )
        self._read()

    def seconds(self, job: Job) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(job.line() + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side {self.name} ended with status {self._process.wait()}; see its messages above")
        return line.strip()


def measure(side: Side, seed: int) -> dict[str, object]:
    """Tokens per second of one repeat."""

    def decode(streams: int) -> float:
        whole, first = (side.seconds(Job(streams, PROMPT, num_tokens, seed)) for num_tokens in (STEPS + 1, 1))
        return streams * STEPS / (whole - first)

    prefill = MAX_PROMPT / side.seconds(Job(1, MAX_PROMPT, 1, seed))
    return {
        "side": side.name,
        "threads": side.threads,
        "decode_1": decode(1),
        "decode_16": decode(MAX_STREAMS),
        "prefill": prefill,
    }


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """From raw runs to the figures of the README."""

    def best(side: str, key: str) -> float:
        return max(
            statistics.median(float(str(run[key])) for run in runs if (run["side"], run["threads"]) == (side, threads))
            for threads in THREADS
        )

    made = {
        f"{name}_{key}_tok_s": best(side, key)
        for side, name in ((OURS, "ours"), (LLAMA, "llamacpp"), (TRANSFORMERS, "transformers"))
        for key in ("decode_1", "decode_16", "prefill")
    }
    for peer in ("llamacpp", "transformers"):
        for streams in (1, MAX_STREAMS):
            key = f"decode_{streams}_tok_s"
            made[f"vs_{peer}_{streams}"] = made[f"ours_{key}"] / made[f"{peer}_{key}"]
    made["prefill_vs_llamacpp"] = made["ours_prefill_tok_s"] / made["llamacpp_prefill_tok_s"]
    return made


def interleaved(llama: Path, gguf: Path, repeats: int) -> list[dict[str, object]]:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(llama), os.environ.get("PYTHONPATH"))))}
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "bf16.gguf")
        subprocess.run(
            [sys.executable, "-m", "benchmarks.decode_sides.llama", "--quantize", str(gguf), model],
            env={**os.environ, **path},
            check=True,
        )
        sides = [
            Side(name, threads, [model] if name == LLAMA else [], path if name == LLAMA else {})
            for threads, name in itertools.product(THREADS, (OURS, LLAMA, TRANSFORMERS))
        ]
        for side in sides:
            side.seconds(Job(2, PROMPT, 3, 0))  # warm
        runs = [measure(side, seed) for seed in range(1, repeats + 1) for side in sides]
        for side in sides:
            side.close()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama", type=Path, help="folder that holds llama_cpp")
    parser.add_argument("--gguf", type=Path, help="the embedded model's GGUF file")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    if given.llama is None or given.gguf is None:
        print("cpu_decode is left out: it needs --llama and --gguf")
        return
    runs = interleaved(given.llama, given.gguf, given.repeats)
    file = write("cpu_decode", "python -m benchmarks.cpu_decode --llama FOLDER --gguf FILE", runs, figures(runs))
    for key, value in figures(runs).items():
        print(f"{key:32} {value:8.3f}")
    print(file)


if __name__ == "__main__":
    main()
