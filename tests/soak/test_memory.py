"""Many requests: nothing of any is left, and memory stays where it was (pains A37); an idle server is idle (A9)."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from overlap_serve.config import FakeModel
from overlap_serve.runtime.inflight import GRACE_S
from tests.http_rig import MODEL, http_rig
from tests.ray.conftest import App, cluster_url, deployed, eventually, fake_args, processes  # noqa: F401  # a fixture
from tests.soak.load import LEAVE_EVERY, send

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

NUM_WARM_UP = 5_000
NUM_REQUESTS = 50_000
NUM_CLIENTS = 64
GROWTH_MIB = 20
FAKE = {"base_ms": 0.0, "max_model_len": 4096}
# Few pages: the prefix cache is full, and evicts, before the first look at memory.
LIMITS = {"kv_cache_tokens": 16_384, "max_running_requests": 64, "max_waiting_requests": 512}

WARM_UP = range(NUM_WARM_UP)
MEASURED = range(NUM_WARM_UP, NUM_WARM_UP + NUM_REQUESTS)


def rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def check_ends(ends: Counter[str], num_requests: int) -> None:
    if reconnected := ends.pop("reconnected", 0):
        print(f"{reconnected} kept connections were closed by the server")
    left = num_requests // LEAVE_EVERY
    assert ends == {"left": left, "200": num_requests - left}


def our_objects() -> Counter[str]:
    """Living objects of our classes, cache nodes aside."""
    gc.collect()
    # str: some types of extension modules have a descriptor for their module's name.
    names = (f"{type(thing).__module__!s}.{type(thing).__name__}" for thing in gc.get_objects())
    return Counter(
        name for name in names if name.startswith(("overlap_serve.", "deployments.")) and ".cache." not in name
    )


def test_a37_nothing_of_50000_requests_is_left_in_one_process() -> None:
    """Server and client in one process, so that all objects can be counted."""
    with http_rig(FakeModel(**FAKE), **LIMITS) as rig:

        def settled() -> Counter[str]:
            rig.assert_at_rest()
            threading.Event().wait(GRACE_S + 1)  # timers that stood by for late ends
            return our_objects()

        check_ends(asyncio.run(send(rig.url, MODEL, WARM_UP, NUM_CLIENTS)), NUM_WARM_UP)
        objects, memory = settled(), rss_mib(psutil.Process())
        begin_s = time.monotonic()
        check_ends(asyncio.run(send(rig.url, MODEL, MEASURED, NUM_CLIENTS)), NUM_REQUESTS)
        taken_s = time.monotonic() - begin_s
        left, growth = settled() - objects, rss_mib(psutil.Process()) - memory
        print(
            f"one process: {NUM_REQUESTS} requests in {taken_s:.0f} s, grew {growth:.1f} MiB from {memory:.0f}, left {left}"
        )
    assert not left
    assert growth < GROWTH_MIB


@pytest.fixture
def app(cluster_url: str) -> Iterator[App]:  # noqa: F811  # a fixture
    # A step of 1 ms: at 0 the rank would make tokens for those who leave faster than two cores can carry them away.
    with deployed(cluster_url, **fake_args(fake={**FAKE, "base_ms": 1.0}, **LIMITS)) as app:
        yield app


@pytest.mark.ray
def test_a37_no_process_grows_with_50000_requests(app: App) -> None:
    def memory() -> dict[str, float]:
        return {title: rss_mib(process) for title in TITLES for process in processes(title)}

    check_ends(asyncio.run(send(app.url, app.model, WARM_UP, NUM_CLIENTS)), NUM_WARM_UP)
    app.wait_idle()
    before = memory()
    begin_s = time.monotonic()
    check_ends(asyncio.run(send(app.url, app.model, MEASURED, NUM_CLIENTS)), NUM_REQUESTS)
    taken_s = time.monotonic() - begin_s
    app.wait_idle()
    after = memory()
    grown = {title: round(after[title] - before[title], 1) for title in before}
    print(f"Ray: {NUM_REQUESTS} requests in {taken_s:.0f} s, grew (MiB) {grown} from {before}")
    assert set(before) == set(TITLES)

    def adds_up() -> bool:
        counted = app.metrics()
        ended = sum(counted.get(f"overlap_requests_{end}_total", 0) for end in ("finished", "aborted", "failed"))
        open_ones = counted["overlap_open_requests"] + counted["overlap_detokenizer_open_streams"]
        return counted["overlap_requests_accepted_total"] == ended and open_ones == 0

    eventually(adds_up, 10, "accepted = finished + aborted + failed, and nothing is open")
    assert max(grown.values()) < GROWTH_MIB, grown


TITLES = ("ray::RankActor", *(f"ray::ServeReplica:test:{name}" for name in ("Ingress", "Scheduler", "Detokenizer")))


def test_a9_an_idle_server_with_a_full_cache_uses_no_cpu() -> None:
    """A million cached tokens; SGLang #26796 checked them all at every idle tick."""
    num_tokens, length, idle_s = 1_000_000, 8_000, 10.0
    fake = FakeModel(base_ms=0.0, max_model_len=8192)
    with http_rig(fake, kv_cache_tokens=num_tokens, max_step_tokens=8192, max_running_requests=16) as rig:

        def fill(i: int) -> int:
            body = {"model": MODEL, "prompt": f"{i:04d}" * (length // 4), "max_tokens": 1}
            return http.post("/v1/completions", json=body).status_code

        with rig.http() as http, ThreadPoolExecutor(8) as pool:
            assert set(pool.map(fill, range(num_tokens // length))) == {200}
            lines = http.get("/metrics").text.splitlines()
        (cached,) = (
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("overlap_kv_pages{") and '"cached"' in line
        )
        assert cached * rig.config.page_size > 0.95 * num_tokens
        begin_s = time.process_time()
        threading.Event().wait(idle_s)
        share = (time.process_time() - begin_s) / idle_s
        print(f"idle with {cached * rig.config.page_size:.0f} cached tokens: {share:.2%} of a CPU")
    assert share < 0.05
