"""Sampling noise: a pure function of (seed, choice, position), so it depends on no neighbour, no batch and no history.

Counter-based random numbers, Philox-4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
On the host in numpy: one number a sampled row and step, which travels with the step's inputs. Knows no torch.
"""

from __future__ import annotations

import numpy as np

MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
KEY_STEP_0 = np.uint64(0x9E3779B9)
KEY_STEP_1 = np.uint64(0xBB67AE85)
LOW_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)
ROUNDS = 10


def philox_4x32(counter_4X: np.ndarray, key_2X: np.ndarray) -> np.ndarray:
    """Four random words of 32 bits for each of X counters and keys; words in and out are uint64 below 2**32. -> [4, X]"""
    c0, c1, c2, c3 = counter_4X
    k0, k1 = key_2X
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2  # 64 bits: cannot overflow
        c0, c1, c2, c3 = (
            (product_1 >> SHIFT_32) ^ c1 ^ k0,
            product_1 & LOW_32,
            (product_0 >> SHIFT_32) ^ c3 ^ k1,
            product_0 & LOW_32,
        )
        k0, k1 = (k0 + KEY_STEP_0) & LOW_32, (k1 + KEY_STEP_1) & LOW_32
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds_X: np.ndarray, choices_X: np.ndarray, positions_X: np.ndarray) -> np.ndarray:
    """One float64 in (0, 1), both ends excluded, per row. seeds: int64, the key. choice and absolute token position: the counter."""
    seeds = seeds_X.astype(np.int64).view(np.uint64)
    counter_4X = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter_4X[0] = positions_X
    counter_4X[1] = choices_X
    words = philox_4x32(counter_4X, np.stack((seeds & LOW_32, seeds >> SHIFT_32)))
    # 52 bits and a half: the largest value is still below 1 in float64, the smallest above 0.
    bits_52 = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    noise: np.ndarray = (bits_52.astype(np.float64) + 0.5) * 2.0**-52
    return noise
