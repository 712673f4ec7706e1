"""Time limits of preparing: work counts from its begin, waiting in line has a limit and an answer of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from overlap_serve.config import ServeConfig, fake_facts
from overlap_serve.errors import InvalidRequest, QueueFull
from overlap_serve.runtime import prepare
from overlap_serve.runtime.prepare import POOL_THREADS, Preparer
from overlap_serve.text.template import fake_text

CONFIG = ServeConfig(engine="fake")


def test_waiting_in_line_does_not_count_as_work_and_ends_with_queue_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        preparer = Preparer(CONFIG, fake_text(), fake_facts(CONFIG.fake))
        free, begun = threading.Event(), threading.Semaphore(0)
        late = InvalidRequest("too slow")

        def hold() -> None:
            begun.release()
            free.wait()

        async def fill() -> list[asyncio.Task[None]]:
            tasks = [asyncio.create_task(preparer._run(True, hold, 60.0, late)) for _ in range(POOL_THREADS)]
            for _ in tasks:
                await asyncio.to_thread(begun.acquire)
            return tasks

        busy = await fill()
        waiting = asyncio.create_task(preparer._run(True, lambda: "done", 0.05, late))
        await asyncio.sleep(0.2)  # longer than the work's own limit
        assert not waiting.done()
        free.set()
        assert await waiting == "done"
        await asyncio.gather(*busy)

        free.clear()
        monkeypatch.setattr(prepare, "QUEUE_LIMIT_S", 0.05)
        busy = await fill()
        with pytest.raises(QueueFull):
            await preparer._run(True, lambda: "done", 60.0, late)
        with pytest.raises(QueueFull):
            await preparer._run(True, lambda: "done", 60.0, late)
        free.set()
        await asyncio.gather(*busy)
        with pytest.raises(InvalidRequest):
            await preparer._run(True, lambda: threading.Event().wait(0.5), 0.05, late)
        preparer.close()

    asyncio.run(run())
