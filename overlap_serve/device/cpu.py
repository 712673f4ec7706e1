"""`CpuDevice`: torch on the host's cores, with streams that are threads.

Owns how a stream's thread is set up (inference mode, intra-op threads) and what "free memory" means on a host. Knows no model.
Both settings are per thread in torch: `inference_mode` is thread-local, and `set_num_threads` sizes the OpenMP team of the
calling thread and of threads made later, not of threads that already ran. So each stream's thread sets them for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from overlap_serve.device.base import Event, Stream, StreamFactory, Watch, Work
from overlap_serve.device.thread import ThreadStream


class CpuDevice:
    """num_threads: intra-op threads of each stream. Fewer than the cores: an OpenMP team as large as the machine collapses as
    soon as another busy process takes one core, because every operator waits for its slowest thread.

    streams: where streams come from instead of threads (tests pass `SteppedStreams`, whose work runs in the host's thread).
    """

    def __init__(self, num_threads: int, streams: StreamFactory | None = None) -> None:
        assert num_threads >= 1
        self._num_threads = num_threads
        self._factory = streams
        self._open: list[CpuStream] = []

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def new_stream(self, name: str) -> Stream:
        if self._factory is None:
            # The thread's own CPU time: what it spends waiting for the GIL is idle, not work.
            inner: Stream = ThreadStream(name, enter=self._in_stream_thread, clock=time.thread_time)
            stream = CpuStream(inner, self._open.remove)
        else:
            stream = CpuStream(self._factory.new_stream(name), self._open.remove, wrap=in_inference_mode)
        self._open.append(stream)
        return stream

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def free_memory(self) -> int:
        return available_ram()

    def synchronize(self) -> None:
        for stream in self._open:
            stream.record().synchronize()

    @contextmanager
    def _in_stream_thread(self) -> Iterator[None]:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            yield


class CpuStream:
    """A stream of the device's factory; adds what work needs around it, and knows whether it is still open."""

    def __init__(
        self, inner: Stream, on_close: Callable[[CpuStream], None], wrap: Callable[[Work], Work] | None = None
    ) -> None:
        self._inner = inner
        self._on_close: Callable[[CpuStream], None] | None = on_close
        self._wrap = wrap

    def launch(self, work: Work) -> None:
        self._inner.launch(work if self._wrap is None else self._wrap(work))

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event) -> None:
        self._inner.wait(event)

    def busy_s(self) -> float:
        return self._inner.busy_s()

    def watch(self, watch: Watch | None) -> None:
        self._inner.watch(watch)

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None
            self._inner.close()


def in_inference_mode(work: Work) -> Work:
    """`work`, for streams that run it in a thread that is not theirs."""

    def run() -> None:
        with torch.inference_mode():
            work()

    return run


def available_ram(root: Path = Path("/")) -> int:
    """Bytes this process could still take: of the host, and of its control group (a container's limit), whichever is less.

    Page cache counts as available, as the kernel's MemAvailable does. Without /proc (macOS): half of the physical memory.
    root: where /proc and /sys are found; tests pass a folder of their own.
    """
    meminfo = _fields(root / "proc/meminfo")
    if "MemAvailable:" not in meminfo:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    available = meminfo["MemAvailable:"] * 1024
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),  # v1
    ):
        group = root / "sys/fs/cgroup"
        limit_bytes, used_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is not None and used_bytes is not None:
            cache_bytes = _fields((group / usage).parent / "memory.stat").get(reclaimable, 0)
            available = min(available, limit_bytes - used_bytes + cache_bytes)
    return max(0, available)


def _number(file: Path) -> int | None:
    """The file's only number; None if there is no such file or it says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """Lines of `name number ...`; empty if there is no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) >= 2 and w[1].isdigit()}
