"""Builds a `TorchEngine` from an `EngineSpec`: device, weights, KV pool. Apart from `worker`, because importing it loads torch."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from overlap_serve.config import EngineSpec
from overlap_serve.device.base import Device
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.device.cuda import CudaDevice
from overlap_serve.engine.base import Engine
from overlap_serve.engine.engine import TorchEngine, size_pool, warm_up
from overlap_serve.engine.kv_pool import page_bytes
from overlap_serve.errors import ConfigError, ModelLoadError
from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import read_config
from overlap_serve.models.packed import can_pack
from overlap_serve.models.tp import TP, NoTP
from overlap_serve.models.weights import build_decoder
from overlap_serve.runtime.ranks import Seat
from overlap_serve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


# Beside weights and KV pages: torch itself, a step's activations, the page table.
HEADROOM_BYTES = 128 * 2**20
MIB = 2**20


def build_torch_engine(
    spec: EngineSpec, seat: Seat | None = None, addresses: tuple[str, ...] = ()
) -> tuple[Engine, int, str]:
    """Load the weights, size the pool with what is left, run one warm-up step. -> engine, KV pages, torch version. All ranks of an
    engine must do this at once; they get the same number of pages.

    Memory is counted before it is taken: on a CPU the kernel would end the process without a word. Raises ModelLoadError
    (checkpoint) and ConfigError (not enough memory; names the field to change).
    """
    device: Device = CudaDevice() if spec.device == "cuda" else CpuDevice(spec.num_threads)
    tp: TP = NoTP() if seat is None else seat.join(addresses, device.torch_device)
    check_weights(spec, weight_bytes(spec, tp), free_memory(spec, device))
    try:
        engine, num_pages = build_on(spec, device, tp)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{spec.device} memory ran out while starting {spec.model_name} ({str(error).splitlines()[0]}); lower "
            "kv_memory_fraction or kv_cache_tokens, max_step_tokens or max_running_requests, or free memory"
        ) from None
    log.info(
        "%s on %s, %s: %d KV pages of %d tokens", spec.model_name, spec.device, spec.dtype, num_pages, spec.page_size
    )
    return engine, num_pages, torch.__version__


def build_on(spec: EngineSpec, device: Device, tp: TP) -> tuple[TorchEngine, int]:
    """This rank's engine, warmed up, and the number of KV pages that all ranks can hold."""
    folder = Path(spec.model_path)
    tokenizer = Tokenizer.from_folder(folder)  # first: it is small, and may be broken
    decoder = build_decoder(
        folder,
        load_format=spec.load_format,
        dtype=getattr(torch, spec.dtype),
        device=device.torch_device,
        tp=tp,
        max_model_len=spec.max_model_len,
        seed=spec.seed,
    )
    if packs(spec):
        decoder.pack()
    tp.minimum(0)  # before memory is measured, all ranks have loaded
    check_pages(spec, free_memory(spec, device) - HEADROOM_BYTES)  # others may have taken some meanwhile
    num_pages = tp.minimum(size_pool(spec, device))
    engine = TorchEngine(spec, decoder, device, num_pages, num_valid_ids=len(tokenizer), tp=tp)
    warm_up(engine)
    return engine, num_pages


def free_memory(spec: EngineSpec, device: Device) -> int:
    """Bytes that this rank may count on: the ranks of a CPU engine share one memory."""
    return device.free_memory() // (spec.tp_size if spec.device == "cpu" else 1)


def weight_bytes(spec: EngineSpec, tp: TP) -> int:
    """What this rank's parameters and tables will take. Raises ModelLoadError for a config.json that describes no possible model."""
    folder = Path(spec.model_path)
    config = read_config(folder)
    meta = torch.device("meta")  # shapes without memory
    try:
        shapes = Decoder(config, tp, dtype=getattr(torch, spec.dtype), device=meta, max_model_len=spec.max_model_len)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"{folder / 'config.json'}: no tensor can have these sizes ({reason})") from None
    packed_copy = shapes.embed.weight.nbytes if packs(spec) and config.tie_word_embeddings else 0
    return packed_copy + sum(tensor.nbytes for tensor in (*shapes.parameters(), *shapes.buffers()))


def packs(spec: EngineSpec) -> bool:
    """Whether weights are packed after loading."""
    return can_pack(getattr(torch, spec.dtype), torch.device(spec.device))


def check_weights(spec: EngineSpec, weights: int, free_bytes: int) -> None:
    """Raises ConfigError unless the weights, not yet loaded, and then the configured KV pages fit into what is free."""
    room = free_bytes - HEADROOM_BYTES - weights
    if room < 0:
        halve = "set dtype: bfloat16 (half as much), " if spec.dtype == "float32" else ""
        more = "give the process more memory" if spec.device == "cpu" else "free the GPU or take a larger one"
        raise ConfigError(
            f"the weights of {spec.model_name} take {weights / MIB:.0f} MiB as {spec.dtype}, and {free_bytes / MIB:.0f} MiB are free on "
            f"{spec.device} ({HEADROOM_BYTES // MIB} MiB are kept for the rest); {halve}choose a smaller `model`, or {more}"
        )
    check_pages(spec, room)


def check_pages(spec: EngineSpec, room: int) -> None:
    """Raises ConfigError unless the configured number of KV pages, if there is one, fits into `room` bytes beside the weights."""
    pages = spec.num_pages * page_bytes(spec)
    if pages > max(0, room):
        fitting = max(0, room) // page_bytes(spec)
        lower = f"set kv_cache_tokens to at most {fitting * spec.page_size}" if fitting >= 2 else "free memory"
        raise ConfigError(
            f"kv_cache_tokens is {spec.capacity_tokens(spec.num_pages)}, which takes {pages / MIB:.0f} MiB, and "
            f"{max(0, room) / MIB:.0f} MiB are left on {spec.device} beside the weights; {lower}, or leave it out"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of the device, or of the host: for the latter torch has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
