"""Throughput of `LLM` on prompts of token ids: no sockets, no server, text made as for any user of `LLM`.

`MINI_SGLANG` is the benchmark of Mini-SGLang's README (benchmark/offline/bench.py there): 256 sequences, prompts of 100 to 1,024 random
ids, 100 to 1,024 tokens out, each length drawn evenly, temperature 0.6, end tokens ignored.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from overlap_serve.errors import ConfigError
from overlap_serve.llm import LLM, SamplingParams
from overlap_serve.runtime.model import model_facts

MAX_ID = 10_000  # of random prompts; as Mini-SGLang's
WARM_PROMPTS, WARM_TOKENS = 2, 4
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Lengths are drawn evenly from closed ranges; the same seed draws the same."""

    num_prompts: int
    input_len: Lengths
    output_len: Lengths
    temperature: float
    seed: int = 0

    def draw(self, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
        rng = random.Random(self.seed)
        high = min(vocab_size, MAX_ID)
        prompts = [[rng.randrange(high) for _ in range(rng.randint(*self.input_len))] for _ in range(self.num_prompts)]
        return prompts, [self._sampling(rng.randint(*self.output_len), i) for i in range(self.num_prompts)]

    def _sampling(self, max_tokens: int, index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            ignore_eos=True,
            seed=self.seed * self.num_prompts + index,
        )


MINI_SGLANG = Shape(num_prompts=256, input_len=(100, 1024), output_len=(100, 1024), temperature=0.6)
PRESETS = {"mini-sglang": MINI_SGLANG}


@dataclass(frozen=True)
class OfflineRun:
    """seconds: from the call to the last result."""

    prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds

    def fields(self) -> dict[str, object]:
        return {
            **asdict(self),
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }


def measure(llm: LLM, shape: Shape, repeats: int = 1, *, progress: bool = True) -> list[OfflineRun]:
    """After a small warm-up. Later repeats draw other ids, so that no prefix cache helps them. Raises ConfigError when the engine cuts
    answers short, as it does when a prompt and its answer do not fit."""
    vocab_size = model_facts(llm.config).vocab_size
    prompts, _ = shape.draw(vocab_size)
    llm.generate(prompts[:WARM_PROMPTS], SamplingParams(max_tokens=WARM_TOKENS, ignore_eos=True), progress=False)
    return [
        _run(
            llm,
            Shape(shape.num_prompts, shape.input_len, shape.output_len, shape.temperature, seed),
            vocab_size,
            progress,
        )
        for seed in range(shape.seed + 1, shape.seed + 1 + repeats)
    ]


def _run(llm: LLM, shape: Shape, vocab_size: int, progress: bool) -> OfflineRun:
    prompts, sampling = shape.draw(vocab_size)
    begin = time.perf_counter()
    done = llm.generate(prompts, sampling, progress=progress)
    seconds = time.perf_counter() - begin
    made = sum(completion.usage.completion_tokens for completion in done)
    wanted = sum(one.max_tokens or 0 for one in sampling)
    if made < wanted:
        raise ConfigError(
            f"{made} of {wanted} tokens were made: prompts of up to {shape.input_len[1]} and answers of up to {shape.output_len[1]} "
            "tokens do not fit; raise max_model_len or kv_cache_tokens, or choose shorter ones"
        )
    return OfflineRun(len(prompts), sum(map(len, prompts)), made, seconds)


def report(runs: Sequence[OfflineRun]) -> str:
    lines = ["run  prompts  input tok  output tok  seconds  output tok/s  total tok/s"]
    lines += [
        f"{i:3}  {r.prompts:7}  {r.input_tokens:9}  {r.output_tokens:10}  {r.seconds:7.2f}  {r.output_tokens_per_s:12.1f}"
        f"  {r.total_tokens_per_s:11.1f}"
        for i, r in enumerate(runs, 1)
    ]
    if len(runs) > 1:
        lines.append(f"median: {statistics.median(r.output_tokens_per_s for r in runs):.1f} output tok/s")
    return "\n".join(lines)
