"""transformers' side of `cpu_decode`: `generate` on the same folder, in bfloat16.

python -m benchmarks.decode_sides.transformers_generate THREADS
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.decode_sides.side import Job, answer_jobs
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.models.source import resolve_model


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    model = AutoModelForCausalLM.from_pretrained(resolve_model(DEFAULT_MODEL), dtype=torch.bfloat16).eval()

    def run(job: Job) -> float:
        model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=job.num_tokens, pad_token_id=2)
        begin = time.perf_counter()
        ids = torch.tensor(job.prompts())
        made = model.generate(ids, attention_mask=torch.ones_like(ids))
        seconds = time.perf_counter() - begin
        assert made.shape == (job.streams, job.prompt_len + job.num_tokens)
        return seconds

    answer_jobs(run)


if __name__ == "__main__":
    main()
