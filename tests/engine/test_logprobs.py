"""Logprobs of the torch engine: the scoring alone against a float64 reference, and whole runs against a dense recompute."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import deque
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from overlap_serve.cache.radix import RadixCache
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.device.cuda import CudaDevice
from overlap_serve.engine.base import PendingStep
from overlap_serve.engine.batch import BatchMirror
from overlap_serve.engine.engine import TorchDecoder, TorchEngine
from overlap_serve.engine.inputs import InputBuilder, StepBuffer
from overlap_serve.engine.logprobs import FLOOR, SLICE_ROWS, num_words, score, unpack
from overlap_serve.messages import GenerateRequest, TokenOutput, pack_ids
from overlap_serve.models.decoder import Decoder
from overlap_serve.sampling import SamplingParams, TokenLogprob
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import Join, StepPlan
from tests.engine.torch_rig import (
    VOCAB,
    Driver,
    EchoDecoder,
    Job,
    dense_attend,
    make_engine,
    make_spec,
    oracle,
    tiny_decoder,
)
from tests.scheduler_rig import make_limits, make_request

INF, NAN = float("inf"), float("nan")


@cache
def decoder() -> Decoder:
    return tiny_decoder()


def run(
    rows: list[np.ndarray], targets: list[int], num_top: int, num_valid: int | None = None, device: str = "cpu"
) -> list[TokenLogprob]:
    logits_BV = torch.from_numpy(np.stack(rows).astype(np.float32)).to(device)
    targets_B = torch.tensor(targets, dtype=torch.int32, device=device)
    words_BW = score(logits_BV, targets_B, num_top, num_valid or logits_BV.shape[1])
    assert words_BW.shape == (len(rows), num_words(num_top)) and words_BW.dtype == torch.int32
    return unpack(words_BW.cpu().numpy(), [num_top] * len(rows))


def reference(logits: np.ndarray) -> list[float]:
    """Natural log of the softmax, written out for one row in float64."""
    x = [-INF if math.isnan(v) else min(v, 3.4e38) for v in logits.astype(np.float32).astype(float).tolist()]
    best = max(x)
    if best == -INF:
        return [FLOOR] * len(x)
    log_total = best + math.log(math.fsum(math.exp(v - best) for v in x))
    return [max(v - log_total, FLOOR) for v in x]


def spread(seed: int, vocab: int = 211, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(vocab) * scale


# -- scoring alone


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 50.0])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_scores_equal_a_float64_reference(scale: float, num_top: int) -> None:
    rows = [spread(seed, scale=scale) for seed in range(10)]
    targets = [seed * 20 for seed in range(10)]
    for row, target, entry in zip(rows, targets, run(rows, targets, num_top), strict=True):
        expected = reference(row)
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(expected[target], abs=1e-5)
        best = sorted(range(len(row)), key=lambda i: (-np.float32(row[i]), i))[:num_top]
        assert [token for token, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx([expected[i] for i in best], abs=1e-5)


def test_equal_values_are_ordered_by_id_and_values_fall() -> None:
    tied = np.array([1.0, 3.0, 2.0, 3.0, -0.0, 0.0, 3.0])
    [entry] = run([tied], [4], 7)
    assert [token for token, _ in entry.top] == [1, 3, 6, 2, 0, 4, 5]
    rounded = np.array([100.0, 1.0000001, 1.0])  # two logits, but one value after rounding
    [entry] = run([rounded], [0], 3)
    assert entry.top[1][1] == entry.top[2][1] and [token for token, _ in entry.top] == [0, 1, 2]
    swapped = np.array([100.0, 1.0, 1.0000001])
    assert [token for token, _ in run([swapped], [0], 3)[0].top] == [0, 1, 2]


def test_a21_nothing_is_below_the_floor_and_json_stays_strict() -> None:
    only = np.full(50, -INF)
    only[7] = 2.0
    some = spread(1, 50)
    some[[0, 9]] = -INF, NAN
    peak = spread(2, 50)
    peak[11] = INF
    deep = spread(3, 50)
    deep[5] = -50_000.0
    nothing = np.full(50, -INF)
    rows = [only, some, peak, deep, nothing, np.full(50, NAN)]
    targets = [3, 9, 11, 5, 0, 49]
    entries = run(rows, targets, 20)
    json.dumps([[e.logprob, e.top] for e in entries], allow_nan=False)
    assert [e.logprob for e in entries] == [FLOOR, FLOOR, 0.0, FLOOR, FLOOR, FLOOR]
    assert entries[0].top[:3] == ((7, 0.0), (0, FLOOR), (1, FLOOR))
    assert entries[1].top[0][1] == pytest.approx(max(reference(some)), abs=1e-5)
    assert all(len(e.top) == 20 for e in entries)
    for entry in entries:
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)


def test_ids_without_text_count_in_the_distribution_but_are_not_reported() -> None:
    row = spread(4, 20)
    row[15:] += 10
    [entry] = run([row], [2], 15, num_valid=15)
    assert sorted(token for token, _ in entry.top) == list(range(15))
    assert entry.logprob == pytest.approx(reference(row)[2], abs=1e-5)


def test_a_row_has_the_same_words_alone_and_among_any_neighbours() -> None:
    rows = [spread(seed, 1009) for seed in range(3 * SLICE_ROWS // 2)]
    targets = [seed % 1009 for seed in range(len(rows))]
    alone = [run([row], [target], 5)[0] for row, target in zip(rows, targets, strict=True)]
    assert run(rows, targets, 5) == alone
    assert run(rows[::-1], targets[::-1], 5)[::-1] == alone
    assert run(rows[7:12], targets[7:12], 5) == alone[7:12]


# -- whole runs


def make_jobs(rng: random.Random, count: int) -> list[Job]:
    """Rows that ask for logprobs of all kinds among rows that ask for none; what changes logits must not change them."""
    asks: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.0, "logprobs": 0, "logit_bias": {3: 50.0}},
        {"temperature": 0.7, "top_k": 7, "seed": 11, "prompt_logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 20},
        {"temperature": 1.3, "top_p": 0.7, "seed": 2, "logprobs": 1, "prompt_logprobs": 20},
    ]
    jobs = []
    for index in range(count):
        max_tokens = rng.randint(1, 10)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=max_tokens // 2,
            eos_token_ids=(1, 2),
            **asks[index % len(asks)],  # type: ignore[arg-type]
        )
        jobs.append(Job([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], sampling, choice=index % 3))
    return jobs


@torch.inference_mode()
def raw_logprobs(model: TorchDecoder, tokens: list[int]) -> np.ndarray:
    """Of all tokens at once, with dense attention: row i is the distribution of token i + 1."""
    hidden_TD = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend)
    return model.logits(hidden_TD).double().log_softmax(dim=1).numpy()


def check_entries(entries: list[TokenLogprob], logprobs_TV: np.ndarray, tokens: list[int], num_top: int) -> None:
    assert [entry.token_id for entry in entries] == tokens
    for entry, row in zip(entries, logprobs_TV, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:num_top], abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx([row[token] for token, _ in entry.top], abs=1e-4)


def check_job(model: TorchDecoder, job: Job) -> None:
    tokens = [*job.prompt, *job.generated]
    logprobs_TV = raw_logprobs(model, tokens)
    asks, length = job.sampling, len(job.prompt)
    if asks.logprobs < 0:
        assert job.logprobs == []
    else:
        check_entries(job.logprobs, logprobs_TV[length - 1 : -1], job.generated, asks.logprobs)
    if asks.prompt_logprobs < 0:
        assert job.prompt_logprobs == []
    else:
        check_entries(job.prompt_logprobs, logprobs_TV[: length - 1], job.prompt[1:], asks.prompt_logprobs)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_values_equal_a_dense_recompute_for_any_plan(depth: int, page_size: int) -> None:
    """Whole prefills and chunks, mixed batches, slots used again, preemption in the middle of prompt and output."""
    for seed, chunk, skip, preempt in ((0, (100, 100), 0.0, 0.0), (1, (1, 9), 0.2, 0.08), (2, (1, 3), 0.0, 0.0)):
        rng = random.Random(seed)
        jobs = make_jobs(rng, 18)
        spec = make_spec(depth=depth, page_size=page_size)
        engine = make_engine(spec, decoder())
        outputs = Driver(engine, spec, rng, chunk=chunk, skip=skip, preempt=preempt).run(jobs)
        engine.close()
        assert outputs == [oracle(decoder(), job.prompt, job.sampling, job.choice) for job in jobs]
        for job in jobs:
            check_job(decoder(), job)


def test_a_prompt_longer_than_a_slice_is_scored_to_its_end() -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(SLICE_ROWS + 20)]
    spec = make_spec()
    engine = make_engine(spec, decoder())
    job = Job(prompt, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=4, logprobs=4))
    Driver(engine, spec, rng).run([job, *make_jobs(rng, 5)])
    engine.close()
    check_job(decoder(), job)


def serve(scheduler: Scheduler, engine: TorchEngine, request: GenerateRequest, depth: int) -> list[TokenOutput]:
    """Run one request to its end and return its outputs."""
    outputs = scheduler.handle(request, 0.0).tokens
    pending: deque[PendingStep] = deque()
    while not scheduler.at_rest:
        plan = scheduler.plan(0.0)
        if plan is not None:
            engine.launch_forward(plan)
            pending.append(engine.launch_sample())
        while pending and (len(pending) > depth or plan is None):
            outputs += scheduler.apply(pending.popleft().result(), 0.0).tokens
    return [output for _, output in outputs]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a22_a_warm_cache_changes_no_value_of_the_real_engine(depth: int, chunk: int) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB) for _ in range(45)]
    spec = make_spec(depth=depth)
    engine = make_engine(spec, decoder())
    limits = make_limits(
        page_size=4, num_slots=4, num_pages=200, max_model_len=96, vocab_size=VOCAB, max_step_tokens=chunk
    )
    scheduler = Scheduler(limits, RadixCache(4))
    asking = [make_request(rid, prompt, 5, prompt_logprobs=3, logprobs=2) for rid in ("cold", "warm", "warmer")]
    quiet = [make_request("half", [*prompt[:22], *prompt[:9]], 5), make_request("same", prompt, 5)]
    order = [asking[0], quiet[0], asking[1], quiet[1], asking[2]]
    answers = {request.rid: serve(scheduler, engine, request, depth) for request in order}
    engine.close()
    assert scheduler.counters.hit_tokens == 20 + 44
    cold, warm, warmer = (
        [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in answers[request.rid]] for request in asking
    )
    assert cold == warm == warmer
    tokens = [token for ids, _, _ in cold for token in ids]
    logprobs_TV = raw_logprobs(decoder(), [*prompt, *tokens])
    first = cold[0][2]
    assert first is not None and first[0] == TokenLogprob(prompt[0], None)
    check_entries(list(first[1:]), logprobs_TV[:44], prompt[1:], 3)
    check_entries([entry for _, entries, _ in cold for entry in entries], logprobs_TV[44:-1], tokens, 2)
    assert not any(o.logprobs or o.prompt_logprobs for request in quiet for o in answers[request.rid])


class DeadEnds(EchoDecoder):
    """Allows the token it was given and id 1, nothing else; after token 9 nothing at all."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = torch.full((len(hidden_BD), VOCAB), -INF)
        logits_BV[:, 1] = 0.0
        logits_BV[torch.arange(len(hidden_BD)), hidden_BD.long()] = 1.0
        logits_BV[hidden_BD == 9] = NAN
        return logits_BV


def test_a21_a_model_with_infinite_logits_gives_finite_logprobs() -> None:
    spec = make_spec()
    engine = make_engine(spec, DeadEnds())
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, prompt_logprobs=2)
    jobs = [Job([5, 5, 6, 6], sampling), Job([4, 9, 3, 9], sampling)]
    Driver(engine, spec, random.Random(0)).run(jobs)
    engine.close()
    stay, leave = math.log(math.e / (math.e + 1)), math.log(1 / (math.e + 1))
    assert [e.logprob for e in jobs[0].prompt_logprobs] == pytest.approx([stay, FLOOR, stay])
    assert [token for token, _ in jobs[0].logprobs[0].top] == [6, 1, 0]
    assert [value for _, value in jobs[0].logprobs[0].top] == pytest.approx([stay, leave, FLOOR])
    assert [e.logprob for e in jobs[1].prompt_logprobs] == [FLOOR, FLOOR, FLOOR]
    assert jobs[1].logprobs[0].logprob == FLOOR


# -- those who do not ask


def test_a_step_without_askers_carries_nothing_for_them() -> None:
    builder = InputBuilder(num_slots=4, pages_per_slot=4, max_tokens=64, num_valid_ids=VOCAB)
    mirror, buffer = BatchMirror(4), StepBuffer(CpuDevice(1), 4)

    def inputs_of(plan: StepPlan) -> tuple[int, int]:
        built = builder.build(plan, mirror.apply(plan), buffer)
        return tuple(0 if s is None else len(s.nums) for s in (built.prompt_scores, built.sampled_scores))  # type: ignore[return-value]

    def join(slot: int, **asks: int) -> Join:
        sampling = SamplingParams(max_tokens=5, temperature=0.0, **asks)  # type: ignore[arg-type]
        return Join(slot, pack_ids([1, 2, 3]), 3, 0, (slot,), sampling, 0)

    steps = itertools.count()
    assert inputs_of(StepPlan(step=next(steps), joins=(join(0),), chunks=((0, 3),))) == (0, 0)
    asking = join(1, logprobs=4, prompt_logprobs=2)
    assert inputs_of(StepPlan(step=next(steps), joins=(asking,), chunks=((1, 1),))) == (1, 0)
    assert inputs_of(StepPlan(step=next(steps), chunks=((1, 2),))) == (1, 1)
    assert inputs_of(StepPlan(step=next(steps))) == (0, 1)
    assert inputs_of(StepPlan(step=next(steps), leaves=(1,))) == (0, 0)
    assert inputs_of(StepPlan(step=next(steps), joins=(join(1),), chunks=((1, 3),))) == (0, 0)


def test_results_hold_none_for_rows_that_do_not_ask() -> None:
    engine = make_engine(make_spec(), EchoDecoder())
    quiet, asking = (
        SamplingParams(max_tokens=5, temperature=0.0),
        SamplingParams(max_tokens=5, temperature=0.0, logprobs=0),
    )
    plan = StepPlan(
        step=0, joins=tuple(Join(i, pack_ids([i]), 1, 0, (i,), s, 0) for i, s in enumerate((quiet, asking, quiet)))
    )
    engine.launch_forward(plan)
    result = engine.launch_sample().result()
    assert [entry and entry.token_id for entry in result.logprobs] == [None, 1, None]
    assert result.prompt_logprobs == ()
    engine.launch_forward(StepPlan(step=1, leaves=(1,)))
    assert engine.launch_sample().result().logprobs == ()
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reports_the_values_of_a_cpu() -> None:
    rows = [spread(seed, 5003) for seed in range(2 * SLICE_ROWS + 3)]
    targets = list(range(len(rows)))
    for here, there in zip(run(rows, targets, 20), run(rows, targets, 20, device="cuda"), strict=True):
        assert [token for token, _ in here.top] == [token for token, _ in there.top]
        assert there.logprob == pytest.approx(here.logprob)
        assert [value for _, value in there.top] == pytest.approx([value for _, value in here.top])
    rng = random.Random(1)
    jobs = make_jobs(rng, 30)
    spec = make_spec(depth=1)
    engine = TorchEngine(spec, tiny_decoder(device="cuda"), CudaDevice(), spec.num_pages)
    Driver(engine, spec, rng, chunk=(1, 9), skip=0.2, preempt=0.05).run(jobs)
    engine.close()
    for job in jobs:
        check_job(decoder(), job)
