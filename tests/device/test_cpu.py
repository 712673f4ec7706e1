"""CpuDevice: what a work function finds around it, and how much memory it is told there is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from overlap_serve.device.cpu import CpuDevice, available_ram
from overlap_serve.device.stepped import SteppedStreams

MIB = 2**20


def test_work_runs_in_order_in_the_streams_thread_in_inference_mode_with_its_own_thread_count() -> None:
    """Intra-op threads are a property of the calling thread: the host's own number must not change."""
    host_threads = torch.get_num_threads()
    device = CpuDevice(num_threads=host_threads + 1)
    stream = device.new_stream("engine")
    seen: list[tuple[bool, int, bool]] = []
    for _ in range(3):
        stream.launch(
            lambda: seen.append(
                (
                    torch.is_inference_mode_enabled(),
                    torch.get_num_threads(),
                    threading.current_thread() is threading.main_thread(),
                )
            )
        )
    stream.record().synchronize()
    stream.close()
    assert seen == [(True, host_threads + 1, False)] * 3
    assert not torch.is_inference_mode_enabled()
    assert torch.get_num_threads() == host_threads


def test_stepped_streams_run_work_in_inference_mode_too() -> None:
    device = CpuDevice(1, SteppedStreams())
    stream = device.new_stream("engine")
    seen: list[bool] = []
    stream.launch(lambda: seen.append(torch.is_inference_mode_enabled()))
    event = stream.record()
    assert not event.done()
    event.synchronize()
    assert seen == [True]
    assert not torch.is_inference_mode_enabled()


def test_synchronize_waits_for_every_open_stream_and_ignores_closed_ones() -> None:
    device = CpuDevice(1)
    gate, done = threading.Event(), []
    first, second, closed = (device.new_stream(name) for name in ("a", "b", "c"))
    closed.close()
    closed.close()
    second.wait(first.record())
    first.launch(lambda: done.append(gate.wait(30)))
    second.wait(first.record())
    second.launch(lambda: done.append(True))
    gate.set()
    device.synchronize()
    assert done == [True, True]
    first.close()
    second.close()
    device.synchronize()


def test_an_error_in_work_surfaces_at_its_event() -> None:
    device = CpuDevice(1)
    stream = device.new_stream("engine")
    fine = stream.record()

    def fail() -> None:
        raise ValueError("from the work")

    stream.launch(fail)
    broken = stream.record()
    fine.synchronize()
    with pytest.raises(ValueError, match="from the work"):
        broken.synchronize()
    stream.close()


def test_busy_time_counts_work_and_not_waiting() -> None:
    device = CpuDevice(1)
    stream = device.new_stream("engine")
    gate = threading.Event()
    a = torch.randn(400, 400)

    def work() -> None:
        for _ in range(20):
            torch.mm(a, a)

    def wait_for_host() -> None:
        gate.wait(30)

    stream.launch(wait_for_host)
    work()  # on the host, while the stream waits
    gate.set()
    stream.record().synchronize()
    waited_s = stream.busy_s()
    stream.launch(work)
    stream.record().synchronize()
    assert stream.busy_s() - waited_s > 5 * waited_s
    stream.close()


def test_host_buffers_are_plain_host_tensors() -> None:
    buffer = CpuDevice(1).host_buffer((3, 2), torch.int32)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((3, 2), torch.int32, "cpu")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       8388608 kB\nMemFree:         10 kB\nMemAvailable:    4194304 kB\n"}


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert available_ram(write(tmp_path, MEMINFO)) == 4096 * MIB
    assert CpuDevice(1).free_memory() > 0


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({"memory.max": "max\n", "memory.current": "1"}, 4096),
        ({"memory.max": str(1024 * MIB), "memory.current": str(300 * MIB)}, 724),
        (
            {
                "memory.max": str(1024 * MIB),
                "memory.current": str(300 * MIB),
                "memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
            },
            824,
        ),
        ({"memory.max": str(100 * MIB), "memory.current": str(300 * MIB)}, 0),
        (
            {
                "memory/memory.limit_in_bytes": str(512 * MIB),
                "memory/memory.usage_in_bytes": str(12 * MIB),
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            500,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}, 4096),
    ],
)
def test_a_containers_limit_bounds_free_memory(tmp_path: Path, files: dict[str, str], expected_mib: int) -> None:
    """Else a pool sized by the host's memory gets its pod killed at the first long prompt."""
    write(tmp_path, {**MEMINFO, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    assert available_ram(tmp_path) == expected_mib * MIB


def test_free_memory_without_proc(tmp_path: Path) -> None:
    assert available_ram(tmp_path) > 0
