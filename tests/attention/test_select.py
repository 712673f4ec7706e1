"""Which backend is chosen, and how a refusal reads."""

from __future__ import annotations

import pytest
import torch

from overlap_serve.attention.base import Limits
from overlap_serve.attention.reference import ReferenceAttention
from overlap_serve.attention.select import select, why_not
from overlap_serve.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_reference_serves_every_model(name: str) -> None:
    backend = select(name, CPU, torch.bfloat16, num_heads=9, num_kv_heads=3, head_dim=72, page_size=3)
    assert isinstance(backend, ReferenceAttention)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="attention_backend is fast, known are auto, reference"):
        select("fast", CPU, torch.float32, num_heads=1, num_kv_heads=1, head_dim=8, page_size=1)


def test_a_refusal_names_every_broken_limit() -> None:
    limits = Limits(devices=("cuda",), dtypes=(torch.bfloat16,), head_dims=(64, 128), page_sizes=(16,))
    assert why_not(limits, CPU, torch.float32, 80, 1) == [
        "device is cpu, it can do cuda",
        "dtype is torch.float32, it can do torch.bfloat16",
        "head_dim of the model is 80, it can do 64, 128",
        "page_size is 1, it can do 16",
    ]
    assert why_not(limits, torch.device("cuda"), torch.bfloat16, 64, 16) == []
    assert why_not(Limits(), CPU, torch.float64, 7, 3) == []
