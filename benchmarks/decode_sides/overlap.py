"""Our side of `cpu_decode`: `LLM.generate`, the whole loop without sockets.

python -m benchmarks.decode_sides.overlap THREADS
"""

from __future__ import annotations

import sys
import time

from benchmarks.decode_sides.side import MAX_PROMPT, MAX_STREAMS, Job, answer_jobs
from overlap_serve.config import ServeConfig
from overlap_serve.llm import LLM


def main() -> None:
    config = ServeConfig(
        device="cpu",
        dtype="bfloat16",
        num_threads=int(sys.argv[1]),
        max_running_requests=MAX_STREAMS,
        max_step_tokens=MAX_PROMPT,
        kv_cache_tokens=8192,
        prefix_cache="none",
    )
    with LLM(config) as llm:

        def run(job: Job) -> float:
            sampling = {"max_tokens": job.num_tokens, "temperature": 0.0, "ignore_eos": True}
            begin = time.perf_counter()
            done = llm.generate(job.prompts(), sampling, progress=False)
            seconds = time.perf_counter() - begin
            assert [len(one.choices[0].token_ids) for one in done] == [job.num_tokens] * job.streams
            return seconds

        answer_jobs(run)


if __name__ == "__main__":
    main()
