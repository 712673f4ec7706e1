"""TorchEngine: whatever the plan, the tokens are those of a request computed alone, from scratch, without a cache."""

from __future__ import annotations

import random
import warnings
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor

from overlap_serve.device.base import StreamFactory
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.device.cuda import CudaDevice
from overlap_serve.device.stepped import SteppedStreams
from overlap_serve.engine.engine import MIN_REQUEST_TOKENS, TorchEngine, size_pool, warm_up
from overlap_serve.engine.kv_pool import page_bytes
from overlap_serve.errors import ConfigError
from overlap_serve.messages import pack_ids
from overlap_serve.models.decoder import Decoder
from overlap_serve.sampling import SamplingParams
from overlap_serve.step import Join, StepPlan
from tests.engine.torch_rig import (
    MAX_MODEL_LEN,
    VOCAB,
    Driver,
    EchoDecoder,
    Job,
    make_engine,
    make_spec,
    oracle,
    tiny_decoder,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@cache
def decoder() -> Decoder:
    return tiny_decoder()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def streams_of(kind: str, seed: int) -> StreamFactory | None:
    return {
        "threads": None,
        "lazy": SteppedStreams(),
        "eager_uploads": SteppedStreams(eager=frozenset({"scheduler"})),
        "random": SteppedStreams(rng=random.Random(seed)),
    }[kind]


def make_jobs(rng: random.Random, count: int) -> list[Job]:
    """Greedy and drawn rows, with and without filters and penalties."""
    asks: list[dict[str, float | int]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.8, "top_p": 0.8, "seed": -3, "logprobs": 4, "prompt_logprobs": 2},
        {"temperature": 0.7, "top_k": 7, "seed": 11},
        {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    ]
    return [
        Job(
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
            SamplingParams(max_tokens=rng.randint(1, 14), **asks[index % len(asks)]),  # type: ignore[arg-type]
            choice=index % 3,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["threads", "lazy", "eager_uploads", "random"])
def test_tokens_equal_the_oracle_for_any_plan(kind: str, depth: int, page_size: int) -> None:
    """Whole prefills and chunks, mixed batches, slots and pages used again, preemption, skipped rows; greedy and seeded."""
    for seed, chunk, skip, preempt in ((0, (100, 100), 0.0, 0.0), (1, (1, 9), 0.2, 0.05)):
        rng = random.Random(seed)
        jobs = make_jobs(rng, 10)
        spec = make_spec(depth=depth, page_size=page_size)
        engine = make_engine(spec, decoder(), streams_of(kind, seed))
        outputs = Driver(engine, spec, rng, chunk=chunk, skip=skip, preempt=preempt).run(jobs)
        engine.close()
        assert outputs == [oracle(decoder(), job.prompt, job.sampling, job.choice) for job in jobs]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_hit_starts_in_the_middle(page_size: int) -> None:
    rng = random.Random(2)
    spec = make_spec(page_size=page_size)
    engine = make_engine(spec, decoder())
    prompt = [rng.randrange(VOCAB) for _ in range(21)]
    first = Job(prompt, GREEDY)
    driver = Driver(engine, spec, rng)
    driver.run([first])
    shared = first.pages[: 16 // page_size]
    driver.free_pages = [page for page in driver.free_pages if page not in shared]
    others = [Job([*prompt[:20], tail], GREEDY, shared=shared) for tail in (1, 2, 3)]
    others.append(Job(prompt[:17], GREEDY, shared=shared))  # all but one token: the hit's first step decodes
    outputs = driver.run(others)
    engine.close()
    assert outputs == [oracle(decoder(), job.prompt, job.sampling) for job in others]
    assert len({tuple(output) for output in outputs}) > 1


def test_bf16_runs_and_stays_near_the_oracle() -> None:
    rng = random.Random(3)
    spec = make_spec(dtype="bfloat16")
    low = tiny_decoder(torch.bfloat16)
    engine = make_engine(spec, low)
    jobs = [Job([rng.randrange(VOCAB) for _ in range(20)], greedy(1)) for _ in range(16)]
    outputs = Driver(engine, spec, rng).run(jobs)
    engine.close()
    expected = [oracle(low, job.prompt, job.sampling) for job in jobs]
    assert sum(a == b for a, b in zip(outputs, expected, strict=True)) >= 14  # rounding may flip a near tie


def test_the_longest_request_fits_to_its_last_token() -> None:
    rng = random.Random(4)
    spec = make_spec()
    engine = make_engine(spec, decoder())
    job = Job([5] * (MAX_MODEL_LEN - 3), greedy(3))
    outputs = Driver(engine, spec, rng, chunk=(7, 31)).run([job])
    engine.close()
    assert outputs == [oracle(decoder(), job.prompt, job.sampling)]


@pytest.mark.parametrize("kind", ["threads", "lazy", "eager_uploads", "random"])
def test_a4_penalties_see_the_newest_token_under_overlap(kind: str) -> None:
    """The model always prefers its last token; a presence penalty of 2 must stop that at every single step, also for a row
    that joins rows without penalties, and the reverse (vLLM #27878, #27910)."""
    spec = make_spec(depth=1)
    engine = make_engine(spec, EchoDecoder(), streams_of(kind, 9))
    penalized = SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=2.0)
    jobs = [Job([7], greedy(20)), Job([9], penalized), Job([11, 3], greedy(20)), Job([4], penalized)]
    outputs = Driver(engine, spec, random.Random(1)).run(jobs)
    engine.close()
    assert outputs[0] == [7] * 20
    assert outputs[2] == [3] * 20
    for job, output in ((jobs[1], outputs[1]), (jobs[3], outputs[3])):
        assert len(set(output)) == 20, "a token that was penalized came again"
        assert output == oracle(EchoDecoder(), job.prompt, job.sampling)


def test_a23_a_seeded_row_is_the_same_among_any_neighbours() -> None:
    target = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=123)
    prompt = [3, 1, 4, 1, 5]
    alone = oracle(decoder(), prompt, target)
    for num_neighbours in (0, 1, 7, 31):
        rng = random.Random(num_neighbours)
        spec = make_spec(num_slots=32, num_pages=400)
        engine = make_engine(spec, decoder())
        jobs = make_jobs(rng, num_neighbours)
        job = Job(prompt, target)
        jobs.insert(rng.randint(0, num_neighbours), job)
        Driver(engine, spec, rng, preempt=0.02).run(jobs)
        engine.close()
        assert job.generated == alone


def join(slot: int, prompt: list[int], pages: tuple[int, ...] = (0, 1, 2, 3)) -> Join:
    return Join(slot, pack_ids(prompt), len(prompt), 0, pages, GREEDY, 0)


def test_a_step_without_sampled_rows_gives_an_empty_result() -> None:
    engine = make_engine(make_spec(), decoder())
    for plan in (
        StepPlan(step=7, joins=(join(0, [1] * 9),), chunks=((0, 4),)),
        StepPlan(step=8),  # no rows at all
        StepPlan(step=9, chunks=((0, 4),)),
    ):
        engine.launch_forward(plan)
        result = engine.launch_sample().result()
        assert (result.step, result.token_ids) == (plan.step, ())
    engine.close()


def test_a_third_step_in_flight_is_refused() -> None:
    engine = make_engine(make_spec(depth=1), decoder())
    pending = []
    for step in range(2):
        engine.launch_forward(StepPlan(step=step, joins=(join(0, [1]),) if step == 0 else ()))
        pending.append(engine.launch_sample())
    with pytest.raises(AssertionError, match="2 steps in flight"):
        engine.launch_forward(StepPlan(step=2))
    pending[0].result()
    engine.launch_forward(StepPlan(step=2))
    engine.launch_sample().result()
    engine.close()


class FailingDecoder(EchoDecoder):
    """Fails when it sees token 13."""

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: object) -> Tensor:
        if 13 in tokens_T.tolist():
            raise RuntimeError("the model met token 13")
        return tokens_T


@pytest.mark.parametrize("kind", ["threads", "lazy"])
def test_an_error_on_the_device_surfaces_from_the_steps_result(kind: str) -> None:
    engine = make_engine(make_spec(), FailingDecoder(), streams_of(kind, 0))
    engine.launch_forward(StepPlan(step=0, joins=(join(0, [1]),)))
    first = engine.launch_sample()
    engine.launch_forward(StepPlan(step=1, joins=(join(1, [13], (4,)),)))
    second = engine.launch_sample()
    assert first.result().token_ids == (1,)
    with pytest.raises(RuntimeError, match="token 13"):
        second.result()
    engine.close()


def test_close_waits_for_what_is_in_flight_and_may_be_called_twice() -> None:
    engine = make_engine(make_spec(), decoder())
    engine.launch_forward(StepPlan(step=0, joins=(join(0, [1, 2]),), chunks=((0, 2),)))
    pending = engine.launch_sample()
    engine.close()
    engine.close()
    assert len(pending.result().token_ids) == 1


def test_warm_up_leaves_no_trace_in_the_batch_or_the_answers() -> None:
    for page_size in (1, 16):
        spec = make_spec(page_size=page_size)
        engine = make_engine(spec, decoder())
        warm_up(engine)
        assert engine.device_busy_s() > 0
        job = Job([1, 2, 3], GREEDY)
        assert Driver(engine, spec, random.Random(0)).run([job]) == [oracle(decoder(), job.prompt, GREEDY)]
        engine.close()


def test_ids_the_tokenizer_lacks_are_never_sampled() -> None:
    spec = make_spec()
    engine = TorchEngine(spec, EchoDecoder(), CpuDevice(1), spec.num_pages, num_valid_ids=50)
    output = Driver(engine, spec, random.Random(0)).run([Job([60], greedy(3))])
    engine.close()
    assert output == [[0, 0, 0]]


def test_more_tokens_than_a_step_buffer_first_holds() -> None:
    """The buffer grows while the other one of the ring is in flight."""
    spec = make_spec(num_slots=4)
    engine = make_engine(spec, decoder())
    engine._ring[0]._grow(1)
    engine._ring[1]._grow(1)
    jobs = make_jobs(random.Random(8), 6)
    outputs = Driver(engine, spec, random.Random(0)).run(jobs)
    engine.close()
    assert outputs == [oracle(decoder(), job.prompt, job.sampling, job.choice) for job in jobs]


class MemoryDevice(CpuDevice):
    def __init__(self, free_bytes: int) -> None:
        super().__init__(1)
        self.free_bytes = free_bytes

    def free_memory(self) -> int:
        return self.free_bytes


def test_the_pool_is_sized_by_memory_and_capped_by_what_slots_could_use() -> None:
    spec = msgspec.structs.replace(make_spec(page_size=16, num_slots=4), num_pages=0, max_model_len=1000)
    one = page_bytes(spec)
    assert one == 16 * spec.kv_elements_per_token * 4
    assert size_pool(spec, MemoryDevice(int(100 * one / spec.kv_memory_fraction) + 1)) == 100
    assert size_pool(spec, MemoryDevice(10**12)) == 2 * 4 * 63
    assert size_pool(msgspec.structs.replace(spec, num_pages=77), MemoryDevice(0)) == 77
    too_little = int((MIN_REQUEST_TOKENS // 16) * one / spec.kv_memory_fraction)
    with pytest.raises(ConfigError, match=r"kv_memory_fraction is 0\.3 of .* holds 15 pages .* at least 17"):
        size_pool(spec, MemoryDevice(too_little))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_equal_the_cpu_oracle_on_a_gpu(depth: int) -> None:
    rng = random.Random(1)
    jobs = make_jobs(rng, 30)
    spec = make_spec(depth=depth)
    engine = TorchEngine(spec, tiny_decoder(device="cuda"), CudaDevice(), spec.num_pages)
    warm_up(engine)
    outputs = Driver(engine, spec, rng, chunk=(1, 9), skip=0.2, preempt=0.05).run(jobs)
    assert engine.device_busy_s() > 0
    engine.close()
    assert outputs == [oracle(decoder(), job.prompt, job.sampling, job.choice) for job in jobs]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_launches_do_not_wait_for_the_gpu() -> None:
    """torch raises at any operation that would synchronize; sync point 2 is an event and no such operation."""
    spec = make_spec(depth=1, num_slots=8)
    engine = TorchEngine(spec, tiny_decoder(device="cuda"), CudaDevice(), spec.num_pages)
    warm_up(engine)
    jobs = make_jobs(random.Random(5), 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        Driver(engine, spec, random.Random(5), chunk=(1, 9)).run(jobs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
