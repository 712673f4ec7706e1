"""`Probe`: makes one token, all the way from this ingress through scheduler and detokenizer and back (GET /health/generate).

The one idea: it is a second `InFlight` with counters that nobody reads, so the way is exactly that of a request, and no metric of
requests or tokens knows of it; the scheduler leaves requests marked `probe` out of its own. Callers that come while a probe runs share it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from overlap_serve.errors import RequestError, ServerUnavailable
from overlap_serve.messages import GenerateRequest, Route, pack_ids
from overlap_serve.metrics import IngressMetrics, TransportMetrics
from overlap_serve.runtime.inflight import InFlight, Submit
from overlap_serve.runtime.streams import Answer
from overlap_serve.sampling import SamplingParams, TextParams

FIRST = -(2**31)  # before every request that waits; running ones are not held up
PROMPT = pack_ids([0])  # every vocabulary has it


class Probe:
    """limit_s: within which the token must be there. bind, key, submit: as of `Frontend`."""

    def __init__(self, bind: str, key: bytes, submit: Submit, limit_s: float) -> None:
        uncounted = CollectorRegistry()
        metrics, hops = IngressMetrics(uncounted, "", ""), TransportMetrics(uncounted, "")
        self._inflight = InFlight(bind, key, submit, metrics, hops, limit_s)
        self._limit_s = limit_s
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Receive on the running event loop."""
        self._inflight.start()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._inflight.close()

    async def run(self, detokenizers: Sequence[str]) -> float:
        """Seconds until the token was there. detokenizers: not empty. Raises RequestError when it does not come, or not in time."""
        begin_s = asyncio.get_running_loop().time()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._one_token(self._inflight.choose_detokenizer(detokenizers)))
        await asyncio.shield(self._running)
        return asyncio.get_running_loop().time() - begin_s

    async def _one_token(self, detokenizer: str) -> None:
        answer = Answer("", [1], 1, asyncio.get_running_loop().time())
        request = GenerateRequest(
            rid=uuid.uuid4().hex,
            attempt=0,
            prompt=PROMPT,
            n=1,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            text=TextParams(),
            route=Route(detokenizer, self._inflight.endpoint),
            priority=FIRST,
            probe=True,
        )
        self._inflight.accept(answer, [request], None)
        try:
            await asyncio.wait_for(self._read(answer), self._limit_s)
        except asyncio.TimeoutError:
            raise ServerUnavailable(f"no token within {self._limit_s:g} s") from None
        finally:
            self._inflight.leave(answer)

    async def _read(self, answer: Answer) -> None:
        async for _ in answer.batches():
            pass
        if not answer.num_tokens:
            raise RequestError("the probe was ended from outside")
