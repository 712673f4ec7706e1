"""`TorchEngine`: executes step plans on a torch device.

Owns the streams, the pools and the batch mirror. Host state moves at launch; device state moves in work functions of the engine
stream, which see device tensors and their own step's inputs. Knows neither requests nor which device it runs on.

    scheduler stream   upload N+1 |............
    engine stream      forward N, sample N | (sync point 1) apply plan N+1, forward N+1, sample N+1, ids to host |
    host               launch N+1, then result of N (sync point 2)

T tokens of the step, R sampled rows, D hidden, V vocab, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overlap_serve.attention.base import Attend, AttentionBackend, AttentionShape
from overlap_serve.attention.select import select
from overlap_serve.config import EngineSpec
from overlap_serve.device.base import Device, Event, Watch
from overlap_serve.engine.base import PendingStep
from overlap_serve.engine.batch import BatchMirror
from overlap_serve.engine.inputs import InputBuilder, PromptScores, SampledScores, Scores, StepBuffer, StepInputs
from overlap_serve.engine.kv_pool import KVPool, page_bytes
from overlap_serve.engine.logprobs import SLICE_ROWS, score, unpack
from overlap_serve.engine.sampler import SampleInputs, sample
from overlap_serve.errors import ConfigError
from overlap_serve.messages import pack_ids
from overlap_serve.models.tp import TP, NoTP
from overlap_serve.sampling import SamplingParams, TokenLogprob
from overlap_serve.step import Join, StepPlan, StepResult

MIN_REQUEST_TOKENS = 256  # a pool that cannot hold one request of this size is not worth starting
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DecoderShape(Protocol):
    """Sizes of the whole model, and what it asks of attention (see `AttentionShape`)."""

    @property
    def num_layers(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def attention_scale(self) -> float | None: ...

    @property
    def attention_soft_cap(self) -> float | None: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    @property
    def vocab_size(self) -> int: ...


class TorchDecoder(Protocol):
    """What the engine needs of a model; heads are those of this rank."""

    @property
    def config(self) -> DecoderShape: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """-> hidden_TD"""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """-> logits_BV, float32; the caller may overwrite it."""


@dataclass
class _Step:
    """A step between its two launches. Hidden states, of sampled rows and of the places A that predict prompt tokens to score, are
    written and read by work of the engine stream."""

    inputs: StepInputs
    hidden_RD: Tensor | None = None
    hidden_AD: Tensor | None = None


class PendingTorchStep:
    """Holds the step's buffer until the result is taken. samples: this rank has made the ids; the others' results are empty."""

    def __init__(self, inputs: StepInputs, copy_done: Event, samples: bool) -> None:
        self._inputs = inputs
        self._copy_done = copy_done
        self._samples = samples

    def result(self) -> StepResult:
        self._copy_done.synchronize()
        inputs = self._inputs
        if not self._samples:
            inputs.buffer.in_flight = False
            return StepResult(inputs.step, ())
        ids = inputs.buffer.ids_host[: inputs.num_sampled].tolist()
        logprobs = () if inputs.sampled_scores is None else self._logprobs(inputs.sampled_scores)
        prompt_logprobs = () if inputs.prompt_scores is None else self._prompt_logprobs(inputs.prompt_scores)
        inputs.buffer.in_flight = False
        return StepResult(inputs.step, tuple(ids), logprobs, prompt_logprobs)

    def _logprobs(self, scores: SampledScores) -> tuple[TokenLogprob | None, ...]:
        entries: list[TokenLogprob | None] = [None] * self._inputs.num_sampled
        for row, entry in zip(scores.rows, self._unpack(scores), strict=True):
            entries[row] = entry
        return tuple(entries)

    def _prompt_logprobs(self, scores: PromptScores) -> tuple[tuple[int, tuple[TokenLogprob, ...]], ...]:
        entries = iter(self._unpack(scores))
        return tuple((slot, tuple(itertools.islice(entries, count))) for slot, count in scores.parts)

    def _unpack(self, scores: Scores) -> list[TokenLogprob]:
        return unpack(scores.host_words(self._inputs.buffer).numpy(), scores.nums)


class TorchEngine:
    """spec.depth steps may be in flight when the next is launched. num_valid_ids: ids that the tokenizer knows, at most V; no
    other id is ever sampled. attention: default is what `spec.attention_backend` selects. tp: with several ranks, each executes the
    same plans; rank 0 alone samples and scores, and the results of the others are empty."""

    def __init__(
        self,
        spec: EngineSpec,
        decoder: TorchDecoder,
        device: Device,
        num_pages: int,
        *,
        num_valid_ids: int | None = None,
        attention: AttentionBackend | None = None,
        tp: TP | None = None,
    ) -> None:
        self._tp: TP = tp or NoTP()
        shape, dtype = decoder.config, DTYPES[spec.dtype]
        self._decoder = decoder
        self._num_valid_ids = shape.vocab_size if num_valid_ids is None else min(num_valid_ids, shape.vocab_size)
        self._attention = attention or select(
            spec.attention_backend,
            device.torch_device,
            dtype,
            AttentionShape(
                decoder.num_heads,
                decoder.num_kv_heads,
                shape.head_dim,
                shape.attention_scale,
                shape.attention_soft_cap,
                shape.windows,
            ),
            spec.page_size,
        )
        self._pool = KVPool(
            num_layers=shape.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=shape.head_dim,
            num_pages=num_pages,
            page_size=spec.page_size,
            num_slots=spec.max_running,
            max_model_len=spec.max_model_len,
            dtype=dtype,
            device=device.torch_device,
        )
        self._mirror = BatchMirror(spec.max_running)
        self._builder = InputBuilder(
            num_slots=spec.max_running,
            pages_per_slot=self._pool.pages_per_slot,
            max_tokens=self._pool.max_tokens,
            num_valid_ids=self._num_valid_ids,
        )
        self._ring = [StepBuffer(device, spec.max_running) for _ in range(spec.depth + 1)]
        self._num_launched = 0
        self._step: _Step | None = None  # launched forward, not yet sampled
        self._scheduler_stream = device.new_stream("scheduler")
        self._engine_stream = device.new_stream("engine")
        device.synchronize()  # pools and weights were made on the default stream

    def launch_forward(self, plan: StepPlan) -> None:
        assert self._step is None, "launch_sample must follow each launch_forward"
        buffer = self._ring[self._num_launched % len(self._ring)]
        assert not buffer.in_flight, f"step {plan.step} launched with {len(self._ring)} steps in flight"
        buffer.in_flight = True
        self._num_launched += 1
        step = self._step = _Step(self._builder.build(plan, self._mirror.apply(plan), buffer))
        self._scheduler_stream.launch(buffer.upload)
        self._engine_stream.wait(self._scheduler_stream.record())  # sync point 1
        self._engine_stream.launch(lambda: self._forward(step))

    def launch_sample(self) -> PendingStep:
        step, self._step = self._step, None
        assert step is not None, "launch_sample without launch_forward"
        if step.inputs.prompt_scores is not None:
            self._engine_stream.launch(lambda: self._score_prompt(step))
        if step.inputs.num_sampled:
            self._engine_stream.launch(lambda: self._sample(step))
        return PendingTorchStep(step.inputs, self._engine_stream.record(), self._tp.rank == 0)

    def device_busy_s(self) -> float:
        return self._engine_stream.busy_s()

    def watch_device(self, watch: Watch | None) -> None:
        self._engine_stream.watch(watch)

    def close(self) -> None:
        self._scheduler_stream.close()  # first: the engine stream may wait for it
        self._engine_stream.close()

    # -- work of the engine stream

    def _forward(self, step: _Step) -> None:
        inputs, view = step.inputs, step.inputs.buffer.view
        delta = inputs.pool_delta()
        if delta is not None:
            self._pool.apply(delta)
        if inputs.num_tokens == 0:
            return
        attend = self._attend(inputs)
        hidden_TD = self._decoder.forward(
            self._pool.read_tokens(view(inputs.places_T)), view(inputs.positions_T), attend
        )
        step.hidden_RD = hidden_TD if inputs.last_R is None else hidden_TD.index_select(0, view(inputs.last_R))
        if inputs.prompt_scores is not None:
            step.hidden_AD = hidden_TD.index_select(0, view(inputs.prompt_scores.at_A))

    def _attend(self, inputs: StepInputs) -> Attend:
        plan = self._attention.plan(inputs.layout, self._pool.page_table_SP)
        k_LCKH, v_LCKH = self._pool.k_LCKH, self._pool.v_LCKH

        def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            return self._attention.run(layer, q_TNH, k_TKH, v_TKH, k_LCKH[layer], v_LCKH[layer], plan)

        return attend

    def _sample(self, step: _Step) -> None:
        inputs, buffer = step.inputs, step.inputs.buffer
        assert step.hidden_RD is not None
        logits_RV = self._decoder.logits(step.hidden_RD)
        if self._tp.rank > 0:
            ids_R = torch.empty(len(logits_RV), dtype=torch.int32, device=logits_RV.device)
            self._pool.write_tokens(buffer.view(inputs.new_places_R), self._tp.broadcast(ids_R))
            return
        scores = inputs.sampled_scores
        # A copy, because the sampler overwrites its logits.
        raw_AV = None if scores is None else logits_RV.index_select(0, buffer.view(scores.at_A))
        groups = SampleInputs.of(inputs.groups.map(buffer.view))
        ids_R = self._tp.broadcast(sample(logits_RV, groups, self._pool.tokens_SM, self._num_valid_ids))
        self._pool.write_tokens(buffer.view(inputs.new_places_R), ids_R)
        buffer.ids_host[: inputs.num_sampled].copy_(ids_R, non_blocking=True)
        if scores is not None and raw_AV is not None:
            targets_A = ids_R.index_select(0, buffer.view(scores.at_A))
            words_AW = score(raw_AV, targets_A, scores.num_top, self._num_valid_ids)
            scores.host_words(buffer).copy_(words_AW, non_blocking=True)

    def _score_prompt(self, step: _Step) -> None:
        """In slices: the logits of a whole chunk of 8,192 tokens would be 5 GB."""
        scores, buffer = step.inputs.prompt_scores, step.inputs.buffer
        assert scores is not None and step.hidden_AD is not None
        targets_A = self._pool.read_tokens(buffer.view(scores.targets_A))
        slices = (torch.split(tensor, SLICE_ROWS) for tensor in (step.hidden_AD, targets_A, scores.host_words(buffer)))
        for hidden_BD, targets_B, words_BW in zip(*slices, strict=True):
            logits_BV = self._decoder.logits(hidden_BD)  # on every rank: they gather
            if self._tp.rank == 0:
                words_BW.copy_(score(logits_BV, targets_B, scores.num_top, self._num_valid_ids), non_blocking=True)


def size_pool(spec: EngineSpec, device: Device) -> int:
    """Number of pages: as configured, else `kv_memory_fraction` of what is free now (the weights are loaded), but no more than
    all slots could use plus as much again for cached prefixes. Raises ConfigError that names the field to change."""
    if spec.num_pages > 0:
        return spec.num_pages
    pages_per_request = -(-(spec.max_model_len + 1) // spec.page_size)
    free_bytes = device.free_memory()
    affordable = int(free_bytes * spec.kv_memory_fraction) // page_bytes(spec)
    least = min(pages_per_request, -(-MIN_REQUEST_TOKENS // spec.page_size) + 1)
    if affordable < least:
        raise ConfigError(
            f"kv_memory_fraction is {spec.kv_memory_fraction} of {free_bytes / 2**20:.0f} MiB free, which holds "
            f"{affordable} pages of {spec.page_size} tokens; at least {least} are needed. "
            "Raise kv_memory_fraction, set kv_cache_tokens, or free memory"
        )
    return min(affordable, 2 * spec.max_running * pages_per_request)


def warm_up(engine: TorchEngine) -> None:
    """One prefill and one decode step in slot 0 and page 0, so that the first request does not pay for first use. Before any
    request: it leaves the batch empty."""
    sampling = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
    join = Join(slot=0, token_ids=pack_ids([0, 0]), prompt_len=2, start=0, pages=(0,), sampling=sampling, choice=0)
    for plan in (StepPlan(step=0, joins=(join,), chunks=((0, 2),)), StepPlan(step=1), StepPlan(step=2, leaves=(0,))):
        engine.launch_forward(plan)
        engine.launch_sample().result()
