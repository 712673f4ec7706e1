"""A driver that plans steps for a `TorchEngine` at random, a tiny decoder, and the oracle that recomputes everything.

The driver knows of tokens only what a scheduler may know: at depth 1 it plans a step before the ids of the one before.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overlap_serve.config import EngineSpec, HostFacts, ModelFacts, ServeConfig, resolve
from overlap_serve.device.base import StreamFactory
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.engine.base import Engine, PendingStep
from overlap_serve.engine.engine import TorchDecoder, TorchEngine
from overlap_serve.engine.params import SlotParams
from overlap_serve.engine.sampler import SampleInputs, sample
from overlap_serve.messages import pack_ids
from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import ModelConfig
from overlap_serve.models.tp import NoTP
from overlap_serve.sampling import SamplingParams, TokenLogprob
from overlap_serve.step import Join, StepPlan, StepResult

VOCAB = 64
MAX_MODEL_LEN = 96
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=MAX_MODEL_LEN,
    tie_word_embeddings=True,
)


def make_spec(
    *, depth: int = 1, page_size: int = 4, num_slots: int = 4, num_pages: int = 200, dtype: str = "float32"
) -> EngineSpec:
    config = ServeConfig.model_validate(
        {
            "device": "cpu",
            "dtype": dtype,
            "overlap_depth": depth,
            "page_size": page_size,
            "max_running_requests": num_slots,
            "kv_cache_tokens": num_pages * page_size,
        }
    )
    facts = ModelFacts(
        max_position_embeddings=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        kv_elements_per_token=CONFIG.kv_elements_per_token,
        eos_token_ids=(0,),
    )
    return resolve(config, facts, HostFacts(num_cpus=2, bf16=False, cuda=False), "unused")


def tiny_decoder(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Random, with attention strong enough that every token of the context matters. The same on every device."""
    decoder = Decoder(CONFIG, NoTP(), dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.4, generator=generator)
    return decoder.to(device).eval()


class EchoDecoder:
    """Prefers the token it was just given by 1.0 over each of the others, among which lower ids come first."""

    config = CONFIG
    num_heads = CONFIG.num_heads
    num_kv_heads = CONFIG.num_kv_heads

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: object) -> Tensor:
        return tokens_T

    def logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = torch.arange(VOCAB, 0, -1).repeat(len(hidden_BD), 1) / 1000.0
        logits_BV[torch.arange(len(hidden_BD)), hidden_BD] = 1.0
        return logits_BV


def make_engine(spec: EngineSpec, decoder: TorchDecoder, streams: StreamFactory | None = None) -> TorchEngine:
    return TorchEngine(spec, decoder, CpuDevice(1, streams), spec.num_pages)


@torch.inference_mode()
def oracle(decoder: TorchDecoder, prompt: list[int], sampling: SamplingParams, choice: int = 0) -> list[int]:
    """Generate alone: the whole sequence is computed anew for each token, with dense attention and no cache."""
    params = SlotParams(1, VOCAB)
    params.join(Join(0, pack_ids(prompt), len(prompt), 0, (), sampling, choice))
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        hidden_TD = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend)
        logits_1V = decoder.logits(hidden_TD[-1:])
        groups = params.groups(torch.zeros(1, dtype=torch.int64).numpy(), torch.tensor([len(tokens)]).numpy())
        inputs = SampleInputs.of(groups.map(torch.from_numpy))
        tokens += sample(logits_1V, inputs, torch.tensor([tokens], dtype=torch.int32), VOCAB).tolist()
    return tokens[len(prompt) :]


def dense_attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
    group = q_TNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = k_TKH.repeat_interleave(group, 1), v_TKH.repeat_interleave(group, 1)
    scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * q_TNH.shape[2] ** -0.5
    later_TT = torch.ones(scores_NTT.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("nts,snh->tnh", scores_NTT.masked_fill(later_TT, float("-inf")).softmax(-1), v_TNH)


@dataclass
class Job:
    """A request as the driver sees it. num_planned: generated tokens, those in flight included."""

    prompt: list[int]
    sampling: SamplingParams
    choice: int = 0
    generated: list[int] = field(default_factory=list)
    num_planned: int = 0
    slot: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)  # leading pages of another job, filled before this one starts
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on

    @property
    def known(self) -> int:
        return len(self.prompt) + self.num_planned

    @property
    def complete(self) -> bool:
        return self.num_planned == self.sampling.max_tokens


@dataclass
class Flight:
    pending: PendingStep
    sampled: list[Job]
    chunks: dict[int, tuple[Job, int]]  # slot -> job and start of its chunk
    released: list[Job]  # left with this step's plan: pages and slot return when the step before it is processed


class Driver:
    """Random joins, chunk lengths, skips and preemptions, each with its probability."""

    def __init__(
        self,
        engine: Engine,
        spec: EngineSpec,
        rng: random.Random,
        *,
        chunk: tuple[int, int] = (100, 100),
        skip: float = 0.0,
        preempt: float = 0.0,
    ) -> None:
        self.engine, self.spec, self.rng = engine, spec, rng
        self.chunk, self.skip, self.preempt = chunk, skip, preempt
        self.free_pages = list(range(spec.num_pages))
        rng.shuffle(self.free_pages)
        self.free_slots = list(range(spec.max_running))
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # in join order
        self.flights: deque[Flight] = deque()
        self.step = 0

    def run(self, jobs: list[Job]) -> list[list[int]]:
        self.waiting.extend(jobs)
        while self.waiting or self.running or self.flights:
            if self.waiting or self.running:
                self.launch()
            while len(self.flights) > self.spec.depth or (self.flights and not (self.waiting or self.running)):
                self.process()
            assert self.step < 5000
        return [job.generated for job in jobs]

    def launch(self) -> None:
        leaving = [job for job in self.running if job.complete]
        preempted = [job for job in self.running if not job.complete and self.rng.random() < self.preempt]
        for job in leaving + preempted:
            self.running.remove(job)
        joins = self._join()
        chunks, skips, new_pages, decoding = [], [], [], []
        for job in self.running:
            short = job.known - job.computed
            if short == 1 and self.rng.random() < self.skip:
                skips.append(job.slot)
            elif short == 1:
                decoding.append(job)
            elif self.rng.random() >= self.skip:
                chunks.append((job, min(short, self.rng.randint(*self.chunk))))
        self.rng.shuffle(chunks)
        sampled = []
        starts = {job.slot: (job, job.computed) for job, _ in chunks}
        for job, length in [*chunks, *((job, 1) for job in decoding)]:
            job.computed += length
            while len(job.pages) * self.spec.page_size < job.computed:
                job.pages.append(self.free_pages.pop())
                new_pages.append((job.slot, job.pages[-1]))
            if job.computed == job.known:
                sampled.append(job)
                job.num_planned += 1
        plan = StepPlan(
            step=self.step,
            leaves=tuple(job.slot for job in leaving + preempted),
            joins=joins,
            new_pages=tuple(new_pages),
            chunks=tuple((job.slot, length) for job, length in chunks),
            skips=tuple(skips),
        )
        self.engine.launch_forward(plan)
        self.flights.append(Flight(self.engine.launch_sample(), sampled, starts, leaving + preempted))
        self.step += 1

    def process(self) -> None:
        flight = self.flights.popleft()
        result = flight.pending.result()
        assert len(result.token_ids) == len(flight.sampled)
        for job, token in zip(flight.sampled, result.token_ids, strict=True):
            job.generated.append(token)
        self._keep_logprobs(flight, result)
        for job in flight.released:
            self.free_slots.append(job.slot)
            self.free_pages += job.pages[len(job.shared) :]
            if not job.complete:
                assert len(job.generated) == job.num_planned
                job.pages, job.computed = [], 0
                self.waiting.append(job)

    def _keep_logprobs(self, flight: Flight, result: StepResult) -> None:
        for job, entry in zip(flight.sampled, result.logprobs, strict=bool(result.logprobs)):
            assert (entry is None) == (job.sampling.logprobs < 0)
            job.logprobs += [entry] if entry is not None else []
        assert bool(result.logprobs) == any(job.sampling.logprobs >= 0 for job in flight.sampled)
        for slot, entries in result.prompt_logprobs:
            job, start = flight.chunks[slot]
            assert job.sampling.prompt_logprobs >= 0 and start <= len(job.prompt_logprobs)
            job.prompt_logprobs += entries[len(job.prompt_logprobs) - start :]  # a resumed job's are known already

    def _join(self) -> tuple[Join, ...]:
        joins = []
        while self.waiting and self.free_slots and self.rng.random() < 0.8:
            job = self.waiting.popleft()
            job.slot = self.free_slots.pop(0)
            job.pages = list(job.shared)
            job.computed = len(job.shared) * self.spec.page_size
            for _ in range(self.rng.randint(0, 2)):
                if len(job.pages) * self.spec.page_size < job.known:
                    job.pages.append(self.free_pages.pop())
            joins.append(
                Join(
                    job.slot,
                    pack_ids(job.prompt + job.generated),
                    len(job.prompt),
                    job.computed,
                    tuple(job.pages),
                    job.sampling,
                    job.choice,
                )
            )
            self.running.append(job)
        return tuple(joins)
