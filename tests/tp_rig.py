"""Tensor-parallel ranks as threads of one process: real gloo, real zmq, real followers; only the processes are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from overlap_serve.config import EngineSpec
from overlap_serve.device.base import Device
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.engine.engine import TorchEngine
from overlap_serve.models.tp import TP
from overlap_serve.models.weights import build_decoder
from overlap_serve.runtime.ranks import FollowerLoop, LeadingEngine, Seat
from overlap_serve.transport import Outbox

KEY = b"k" * 16
HOST = "127.0.0.1"


def build_rank(
    spec: EngineSpec, folder: Path, tp: TP, device: Device | None = None, dtype: torch.dtype = torch.float32
) -> TorchEngine:
    device = device or CpuDevice(1)
    decoder = build_decoder(
        folder,
        load_format="auto",
        dtype=dtype,
        device=device.torch_device,
        tp=tp,
        max_model_len=spec.max_model_len,
    )
    return TorchEngine(spec, decoder, device, spec.num_pages, tp=tp)


@contextmanager
def tp_engine(
    spec: EngineSpec, folder: Path, size: int, device: Callable[[int], Device] = lambda rank: CpuDevice(1)
) -> Iterator[LeadingEngine]:
    """Rank 0 of an engine whose other ranks follow. At the end all have ended without an error. device: of a rank."""
    spec = msgspec.structs.replace(spec, tp_size=size)
    seats = [Seat(spec, rank, HOST, KEY) for rank in range(size)]
    addresses = tuple(seat.address for seat in seats)

    def build(seat: Seat) -> TorchEngine:
        own = device(seat.rank)
        return build_rank(spec, folder, seat.join(addresses, own.torch_device), own)

    with ThreadPoolExecutor(size) as pool:
        engines = list(pool.map(build, seats))
        inboxes = [seat.inbox for seat in seats if seat.inbox is not None]
        loops = [
            FollowerLoop(engine, inbox, depth=spec.depth) for engine, inbox in zip(engines[1:], inboxes, strict=True)
        ]
        followers = [pool.submit(loop.run) for loop in loops]
        leading = LeadingEngine(engines[0], Outbox(KEY, "plan"), addresses[1:])
        try:
            yield leading
        finally:
            leading.close()
        for follower in followers:
            follower.result(30)
    for engine in engines[1:]:
        engine.close()
    for inbox in inboxes:
        inbox.close()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each id, so that a tiny checkpoint is a whole model."""
    words = Tokenizer(models.WordLevel({f"w{id_}": id_ for id_ in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
