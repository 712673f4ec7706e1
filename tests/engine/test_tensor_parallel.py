"""Several ranks give the tokens of one: every family, whatever the plan, at both depths."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import msgspec
import pytest

from overlap_serve.config import EngineSpec
from overlap_serve.engine.base import Engine
from overlap_serve.errors import InternalError
from overlap_serve.models.tp import NoTP
from overlap_serve.runtime.ranks import FollowerLoop
from overlap_serve.sampling import SamplingParams
from overlap_serve.step import StepPlan
from tests.engine.torch_rig import Driver, Job, make_spec
from tests.models.checkpoints import CONFIGS, make_checkpoint
from tests.tp_rig import build_rank, tp_engine

VOCAB = 101
ASKS: tuple[dict[str, float | int], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "seed": 3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "top_k": 7, "seed": 11},
    {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
)


@cache
def checkpoint(root: Path, architecture: str) -> Path:
    folder = root / architecture
    make_checkpoint(folder, architecture)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def tp_spec(depth: int, num_pages: int = 200) -> EngineSpec:
    spec = make_spec(depth=depth, num_pages=num_pages)
    return msgspec.structs.replace(spec, vocab_size=VOCAB, max_model_len=64)


def run(engine: Engine, spec: EngineSpec) -> list[Job]:
    """Random load: chunks, rows that sit out, slots and pages used again, requests that leave in the middle and come back."""
    rng = random.Random(4)
    jobs = [
        Job(
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=rng.randint(1, 10), **ASKS[index % len(ASKS)]),  # type: ignore[arg-type]
        )
        for index in range(8)
    ]
    Driver(engine, spec, rng, chunk=(1, 12), skip=0.1, preempt=0.05).run(jobs)
    return jobs


def logprobs(job: Job) -> list[float]:
    return [e.logprob for e in (*job.prompt_logprobs, *job.logprobs) if e.logprob is not None]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_of_2_and_4_ranks_equal_those_of_one(root: Path, architecture: str, depth: int) -> None:
    """In float32. 101 ids and 2 kv heads: the vocabulary is padded, and four ranks hold copies of kv heads."""
    spec, folder = tp_spec(depth), checkpoint(root, architecture)
    alone = build_rank(spec, folder, NoTP())
    wanted = run(alone, spec)
    alone.close()
    for size in (2, 4):
        with tp_engine(spec, folder, size) as engine:
            jobs = run(engine, spec)
        assert [job.generated for job in jobs] == [job.generated for job in wanted]
        for job, other in zip(jobs, wanted, strict=True):
            assert logprobs(job) == pytest.approx(logprobs(other), abs=1e-4)


class OnlyPlan:
    """An inbox that brings these plans."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def drain(self, timeout_s: float | None = 0.0) -> list[StepPlan]:
        return [StepPlan(step) for step in self._steps]


def test_a_follower_that_misses_a_plan_ends_instead_of_diverging(root: Path) -> None:
    spec = tp_spec(1)
    engine = build_rank(spec, checkpoint(root, "LlamaForCausalLM"), NoTP())
    with pytest.raises(InternalError, match="plan 2 came after plan 0"):
        FollowerLoop(engine, OnlyPlan(0, 2), depth=1).run()  # type: ignore[arg-type]
    engine.close()
