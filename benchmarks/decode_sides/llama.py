"""llama.cpp's side of `cpu_decode`: its C API with batches of all streams and its own greedy sampler.

python -m benchmarks.decode_sides.llama THREADS FILE.gguf

FILE.gguf is of type bfloat16. `--quantize SOURCE FILE.gguf` makes it. Needs llama_cpp, which no environment of this project has: its
folder comes first in PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api  # type: ignore[import-not-found]

from benchmarks.decode_sides.side import MAX_PROMPT, MAX_STREAMS, Job, answer_jobs

CONTEXT = 256  # of each of several streams


class Context:
    """Room for some sequences, with its own cache. Its steps put one batch through the model."""

    def __init__(self, model: Any, streams: int, length: int, threads: int) -> None:
        settings = api.llama_context_default_params()
        settings.n_seq_max, settings.n_ctx = streams, streams * length
        settings.n_threads = settings.n_threads_batch = threads
        settings.n_batch = streams * length
        self.context = api.llama_init_from_model(model, settings)
        assert self.context, "llama.cpp made no context"
        self.batch = api.llama_batch_init(streams * length, 0, 1)
        self.sampler = api.llama_sampler_init_greedy()

    def step(self, rows: list[tuple[int, list[int]]], position: int) -> list[int]:
        """rows: (sequence, its next tokens), the first at `position`. -> the next id of each."""
        last, place = [], 0
        for sequence, tokens in rows:
            for offset, token in enumerate(tokens):
                self.batch.token[place], self.batch.pos[place] = token, position + offset
                self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, sequence
                self.batch.logits[place] = offset == len(tokens) - 1
                place += 1
            last.append(place - 1)
        self.batch.n_tokens = place
        status = api.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode: {status}"
        return [api.llama_sampler_sample(self.sampler, self.context, place) for place in last]

    def run(self, job: Job) -> float:
        prompts = job.prompts()
        begin = time.perf_counter()
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        ids = self.step(list(enumerate(prompts)), 0)
        for index in range(job.num_tokens - 1):
            ids = self.step([(sequence, [token]) for sequence, token in enumerate(ids)], job.prompt_len + index)
        return time.perf_counter() - begin


def quantize(source: Path, target: Path) -> None:
    """Raises RuntimeError."""
    settings = api.llama_model_quantize_default_params()
    settings.allow_requantize, settings.ftype = True, api.LLAMA_FTYPE_MOSTLY_BF16
    if api.llama_model_quantize(bytes(source), bytes(target), settings):
        raise RuntimeError(f"{source}: llama.cpp cannot make a bfloat16 GGUF of it")


@api.llama_log_callback  # type: ignore[untyped-decorator]
def silent(level: int, text: bytes, user: object) -> None:
    pass


def main() -> None:
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    if sys.argv[1] == "--quantize":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    model = api.llama_model_load_from_file(bytes(Path(sys.argv[2])), api.llama_model_default_params())
    single = Context(model, 1, MAX_PROMPT + CONTEXT, int(sys.argv[1]))
    several = Context(model, MAX_STREAMS, CONTEXT, int(sys.argv[1]))
    answer_jobs(lambda job: (single if job.streams == 1 else several).run(job))


if __name__ == "__main__":
    main()
