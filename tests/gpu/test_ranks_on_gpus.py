"""Ranks on GPUs of their own, over NCCL: tokens of one rank in float32, logits near them in bfloat16. Ranks are threads here; as
actors of Ray they are in `test_serve_ranks`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from overlap_serve.device.cuda import CudaDevice
from overlap_serve.engine.base import Engine
from overlap_serve.errors import ModelLoadError
from overlap_serve.models.tp import TP, NoTP
from overlap_serve.models.weights import build_decoder
from overlap_serve.runtime.ranks import Seat
from overlap_serve.runtime.torch_engine import build_on
from tests.engine.test_tensor_parallel import run, tp_spec
from tests.models.checkpoints import CONFIGS, DenseAttend, make_checkpoint
from tests.runtime.test_ranks import SEEDS, greedy, spec_of
from tests.runtime.test_ranks import run as run_loop
from tests.scheduler_rig import VOCAB, random_case
from tests.tp_rig import HOST, KEY, build_rank, tp_engine, write_tokenizer

NUM_GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 4, 8) if size <= NUM_GPUS]
BF16_TOLERANCE = 0.05  # of the largest logit: sums of bfloat16 products in another order

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, has {NUM_GPUS}")]


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_of_a_group_equal_those_of_one_gpu(tmp_path: Path, architecture: str, depth: int, size: int) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 8} if size == 8 else {}
    make_checkpoint(tmp_path, architecture, **heads)
    spec = tp_spec(depth)
    alone = build_rank(spec, tmp_path, NoTP(), CudaDevice())
    wanted = run(alone, spec)
    alone.close()
    with tp_engine(spec, tmp_path, size, CudaDevice) as engine:
        jobs = run(engine, spec)
    assert [job.generated for job in jobs] == [job.generated for job in wanted]


@pytest.mark.parametrize("depth", [0, 1])
def test_random_load_with_aborts_and_preemption_gives_the_tokens_of_one_gpu(
    tmp_path: Path, depth: int, size: int
) -> None:
    make_checkpoint(tmp_path, vocab_size=VOCAB, max_position_embeddings=128)

    def tokens(engine: Engine, seed: int) -> tuple[object, int]:
        ledger, scheduler = run_loop(greedy(random_case(seed)), engine, depth)
        return ledger.tokens, scheduler.counters.preemptions

    preemptions = 0
    for seed in SEEDS[2]:
        spec = spec_of(random_case(seed).limits, depth)
        alone = build_rank(spec, tmp_path, NoTP(), CudaDevice())
        wanted = tokens(alone, seed)
        alone.close()
        with tp_engine(spec, tmp_path, size, CudaDevice) as engine:
            assert tokens(engine, seed) == wanted
        preemptions += wanted[1]
    assert preemptions > 0


@torch.inference_mode()
def logits(folder: Path, tp: TP, rank: int) -> Tensor:
    device = torch.device("cuda", rank)
    decoder = build_decoder(folder, load_format="auto", dtype=torch.bfloat16, device=device, tp=tp)
    tokens_T = torch.arange(0, 100, 4, device=device)
    positions_T = torch.arange(25, device=device)
    return decoder.logits(decoder.forward(tokens_T, positions_T, DenseAttend(decoder.config))).cpu()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_bfloat16_logits_of_a_group_are_near_those_of_one_gpu(tmp_path: Path, architecture: str, size: int) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 8} if size == 8 else {}
    make_checkpoint(tmp_path, architecture, **heads)
    spec = msgspec.structs.replace(tp_spec(1), tp_size=size)
    wanted_TV = logits(tmp_path, NoTP(), 0)
    seats = [Seat(spec, rank, HOST, KEY) for rank in range(size)]
    addresses = tuple(seat.address for seat in seats)

    def on_rank(seat: Seat) -> Tensor:
        torch.cuda.set_device(seat.rank)
        return logits(tmp_path, seat.join(addresses, torch.device("cuda", seat.rank)), seat.rank)

    with ThreadPoolExecutor(size) as pool:
        for got_TV in pool.map(on_rank, seats):
            error = float((got_TV - wanted_TV).abs().max() / wanted_TV.abs().max())
            print(f"BF16 {architecture} tp {size}: largest error {error:.4f} of the largest logit")
            assert error < BF16_TOLERANCE


class FullDevice(CudaDevice):
    """A GPU of which another process has taken all but this much."""

    def __init__(self, index: int, free_mib: int) -> None:
        super().__init__(index)
        self._free_bytes = free_mib * 2**20

    def free_memory(self) -> int:
        return self._free_bytes


def test_a15_gpus_with_unequal_memory_get_the_same_number_of_pages(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=VOCAB, max_position_embeddings=128)
    write_tokenizer(tmp_path, VOCAB)
    spec = msgspec.structs.replace(
        tp_spec(1), vocab_size=VOCAB, model_path=str(tmp_path), num_pages=0, tp_size=2, kv_memory_fraction=0.001
    )
    spec = msgspec.structs.replace(spec, device="cuda", max_running=4096)
    seats = [Seat(spec, rank, HOST, KEY) for rank in range(2)]
    addresses = tuple(seat.address for seat in seats)

    def num_pages(seat: Seat) -> int:
        device = FullDevice(seat.rank, (8000, 2000)[seat.rank])
        engine, pages = build_on(spec, device, seat.join(addresses, device.torch_device))
        engine.close()
        return pages

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(num_pages, seats)
    alone, pages_alone = build_on(msgspec.structs.replace(spec, tp_size=1), FullDevice(0, 2000), NoTP())
    alone.close()
    assert first == second == pages_alone


def test_heads_that_do_not_divide_are_an_error_that_says_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=36)

    class Second:
        rank, size = 1, 2

    with pytest.raises(ModelLoadError, match="9 attention heads cannot be split over 2 ranks"):
        build_decoder(
            tmp_path,
            load_format="auto",
            dtype=torch.float32,
            device=torch.device("cuda"),
            tp=Second(),  # type: ignore[arg-type]
        )
