"""Philox-4x32-10 and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest

from overlap_serve.engine.philox import philox_4x32, uniforms

# Known answers of Random123 (kat_vectors), Salmon et al., SC'11.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_known_answers_in_one_batch() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN], dtype=np.uint64).T
    keys = np.array([words(key) for _, key, _ in KNOWN], dtype=np.uint64).T
    assert philox_4x32(counters, keys).T.tolist() == [words(answer) for _, _, answer in KNOWN]


def column(seed: int, choice: int, position: int) -> float:
    return float(uniforms(np.array([seed]), np.array([choice]), np.array([position]))[0])


def test_a23_a_rows_noise_depends_on_nothing_but_seed_choice_and_position() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**63), 2**63, size=64, dtype=np.int64)
    choices, positions = rng.integers(0, 128, size=64), rng.integers(0, 200_000, size=64)
    together = uniforms(seeds, choices, positions)
    order = rng.permutation(64)
    assert uniforms(seeds[order], choices[order], positions[order]).tolist() == together[order].tolist()
    alone = [column(*row) for row in zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True)]
    assert alone == together.tolist()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)])
def test_every_part_of_the_key_and_counter_matters(seed: int) -> None:
    base = column(seed, 0, 0)
    others = [column(seed ^ 1, 0, 0), column(seed ^ (1 << 40), 0, 0), column(seed, 1, 0), column(seed, 0, 1)]
    assert len({base, *others}) == 5


def test_noise_is_uniform_and_never_touches_its_ends() -> None:
    num = 200_000
    noise = uniforms(np.full(num, 5), np.zeros(num, dtype=np.int64), np.arange(num))
    assert noise.min() > 0.0
    assert noise.max() < 1.0
    counts = np.bincount((noise * 100).astype(int), minlength=100)
    chi_square = float(((counts - num / 100) ** 2 / (num / 100)).sum())
    assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001; the noise is fixed, so this never flickers
