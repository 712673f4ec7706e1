"""Families through the real engine and paged attention: greedy tokens of mixed batches equal `transformers.generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from overlap_serve.device.cpu import CpuDevice
from overlap_serve.engine.engine import TorchEngine
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from overlap_serve.sampling import SamplingParams
from tests.engine.torch_rig import Driver, Job, make_spec
from tests.models.checkpoints import make_checkpoint

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window_in_every_layer": ("MistralForCausalLM", {}),
    "windows_from_the_second_layer_on": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "alternating_windows_and_soft_caps": (
        "Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.2},  # scores so large that the cap decides
    ),
    "local_and_global_rope": ("Gemma3ForCausalLM", {"max_position_embeddings": 96}),
    "fused_checkpoint_partial_rotary": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "sliding_window": 20}),
    "projection_norm": ("Olmo2ForCausalLM", {}),
    "routed_experts": ("Qwen3MoeForCausalLM", {}),
}


@torch.inference_mode()
def generated(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """By transformers, one request at a time, with its cache."""
    reference.generation_config.eos_token_id = None
    ids = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=num_tokens
    )
    return [int(id_) for id_ in ids[0, len(prompt) :]]


@pytest.mark.parametrize(("architecture", "changes"), MODELS.values(), ids=MODELS)
def test_greedy_tokens_equal_transformers(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    """Whole prefills and chunks, mixed with decode rows of other lengths, some preempted; contexts well beyond the windows."""
    reference = make_checkpoint(tmp_path, architecture, **changes)
    decoder = build_decoder(
        tmp_path, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP(), max_model_len=64
    )
    rng = random.Random(5)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    jobs = [Job([rng.randrange(101) for _ in range(length)], sampling) for length in (3, 40, 11, 26)]
    wanted = [generated(reference, job.prompt, 8) for job in jobs]
    for page_size, chunk in ((1, (1, 7)), (16, (4, 100))):
        spec = msgspec.structs.replace(make_spec(page_size=page_size), vocab_size=101, max_model_len=64)
        engine = TorchEngine(spec, decoder, CpuDevice(1), spec.num_pages)
        again = [Job(job.prompt, sampling) for job in jobs]
        outputs = Driver(engine, spec, rng, chunk=chunk, skip=0.1, preempt=0.03).run(again)
        engine.close()
        assert outputs == wanted
    assert len({tuple(output) for output in wanted}) == len(jobs)
