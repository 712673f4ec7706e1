"""Which backend is chosen, and how a refusal reads."""

from __future__ import annotations

import pytest
import torch

from overlap_serve.attention.base import AttentionShape, Limits
from overlap_serve.attention.reference import ReferenceAttention
from overlap_serve.attention.select import select, why_not
from overlap_serve.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_reference_serves_every_model(name: str) -> None:
    shape = AttentionShape(9, 3, 72, scale=0.5, soft_cap=30.0, windows=(None, 7))
    backend = select(name, CPU, torch.bfloat16, shape, page_size=3)
    assert isinstance(backend, ReferenceAttention)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="attention_backend is fast, known are auto, reference"):
        select("fast", CPU, torch.float32, AttentionShape(1, 1, 8), page_size=1)


def test_a_refusal_names_every_broken_limit() -> None:
    limits = Limits(
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        head_dims=(64, 128),
        page_sizes=(16,),
        soft_cap=False,
        windows=False,
    )
    capped = AttentionShape(1, 1, 80, soft_cap=50.0, windows=(None, 9))
    assert why_not(limits, CPU, torch.float32, capped, 1) == [
        "device is cpu, it can do cuda",
        "dtype is torch.float32, it can do torch.bfloat16",
        "head_dim of the model is 80, it can do 64, 128",
        "page_size is 1, it can do 16",
        "the model caps attention scores, which it cannot do",
        "the model has sliding windows, which it cannot do",
    ]
    plain = AttentionShape(1, 1, 64, windows=(None, None))
    assert why_not(limits, torch.device("cuda"), torch.bfloat16, plain, 16) == []
    assert why_not(Limits(), CPU, torch.float64, capped, 3) == []
