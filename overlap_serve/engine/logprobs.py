"""Log-probabilities of sampled and of prompt tokens: scored on the device, sent as words, unpacked on the host.

Owns no state and knows no step. Values are of the raw distribution, before everything that `sampler` does to logits. The one
idea is the sampler's: a row's words depend on that row's logits alone. What is summed are integers, and a logprob is rounded to
float32 once, at the end; ids are ordered by what is reported, equal values by id.

    words of a row, int32:  | target id | its logprob | K top ids | their K logprobs |      logprobs as the bits of a float32

B rows, V vocab, K top tokens, W = 2 + 2 K words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from overlap_serve.engine.sampler import MAX_LOGIT, ONE, token_weights, top_ids
from overlap_serve.sampling import TokenLogprob

FLOOR = -9999.0  # no value is below: JSON knows no -Infinity (pains A21)
MAX_TOP = 20  # top tokens that the API lets a request ask for; more would work
SLICE_ROWS = 64  # rows scored at once on an accelerator: 64 rows of 151,936 logits take 190 MB on the way (H200)


def num_words(num_top: int) -> int:
    """W of rows that report `num_top` tokens."""
    return 2 + 2 * num_top


def score(logits_BV: Tensor, targets_B: Tensor, num_top: int, num_valid_ids: int) -> Tensor:
    """-> words_BW on the device. Overwrites logits_BV (float32). targets_B: int32.

    Probabilities are shares of all V, as the model gives them; ids from num_valid_ids on, which have no text, are not among the top.
    On a CPU row by row, so that a row's float64 and int64 copies stay in the cache.
    """
    rows = 1 if logits_BV.device.type == "cpu" else SLICE_ROWS
    parts = zip(torch.split(logits_BV, rows), torch.split(targets_B, rows), strict=True)
    return torch.cat([_score(logits, targets, num_top, num_valid_ids) for logits, targets in parts])


def _score(logits_BV: Tensor, targets_B: Tensor, num_top: int, num_valid_ids: int) -> Tensor:
    logprobs_BV = log_softmax(logits_BV)
    words = [targets_B[:, None], logprobs_BV.gather(1, targets_B[:, None].long()).view(torch.int32)]
    if num_top > 0:
        logprobs_BV[:, num_valid_ids:] = float("-inf")  # below the floor: behind every valid id
        ids_BK = top_ids(logprobs_BV, num_top)
        words += [ids_BK.int(), logprobs_BV.gather(1, ids_BK).view(torch.int32)]
    return torch.cat(words, dim=1)


def log_softmax(logits_BV: Tensor) -> Tensor:
    """Natural logs, float32, FLOOR at least. NaN counts as -inf. Overwrites logits_BV."""
    torch.nan_to_num_(logits_BV, nan=float("-inf"), posinf=MAX_LOGIT, neginf=float("-inf"))
    ones_B = torch.ones(len(logits_BV), dtype=torch.float64, device=logits_BV.device)
    total_B1 = token_weights(logits_BV, ones_B).sum(dim=1, keepdim=True).double() / ONE
    peak_B1 = logits_BV.amax(dim=1, keepdim=True).clamp_(min=-MAX_LOGIT).double()
    logprobs_BV = logits_BV.double().sub_(peak_B1).sub_(total_B1.log_())
    # A row with nothing but -inf has no distribution: -inf minus log(0).
    return logprobs_BV.clamp_(min=FLOOR).nan_to_num_(nan=FLOOR).float()


def unpack(words_BW: np.ndarray, nums: Sequence[int]) -> list[TokenLogprob]:
    """What the rows say. nums: how many of the likeliest tokens each row asks for, at most K are there."""
    num_top = words_BW.shape[1] // 2 - 1
    values_BW = words_BW.view(np.float32)
    rows = zip(
        words_BW[:, 0].tolist(),
        values_BW[:, 1].tolist(),
        words_BW[:, 2 : 2 + num_top].tolist(),
        values_BW[:, 2 + num_top :].tolist(),
        nums,
        strict=True,
    )
    return [
        TokenLogprob(target, logprob, tuple(zip(ids[:num], values[:num], strict=True)))
        for target, logprob, ids, values, num in rows
    ]
