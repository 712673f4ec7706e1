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
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from overlap_serve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def build_torch_engine(spec: EngineSpec) -> tuple[Engine, int, str]:
    """Load the weights, size the pool with what is left, run one warm-up step. -> engine, KV pages, torch version.

    Raises ModelLoadError (checkpoint) and ConfigError (not enough memory; names the field to change).
    """
    device: Device = CudaDevice() if spec.device == "cuda" else CpuDevice(spec.num_threads)
    folder = Path(spec.model_path)
    decoder = build_decoder(
        folder,
        load_format=spec.load_format,
        dtype=getattr(torch, spec.dtype),
        device=device.torch_device,
        tp=NoTP(),
        seed=spec.seed,
    )
    num_pages = size_pool(spec, device)
    engine = TorchEngine(spec, decoder, device, num_pages, num_valid_ids=len(Tokenizer.from_folder(folder)))
    warm_up(engine)
    log.info(
        "%s on %s, %s: %d KV pages of %d tokens", spec.model_name, spec.device, spec.dtype, num_pages, spec.page_size
    )
    return engine, num_pages, torch.__version__
