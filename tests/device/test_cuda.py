"""CudaDevice on a real device (`make test-gpu`)."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from overlap_serve.device.base import Span
from overlap_serve.device.cuda import MAX_UNREAD_SPANS, CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPIN_CYCLES = 200_000_000  # about 0.1 s


def spin() -> None:
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]


def test_streams_are_ordered_by_events_and_the_host_does_not_wait() -> None:
    device = CudaDevice()
    upload, engine = device.new_stream("scheduler"), device.new_stream("engine")
    host = device.host_buffer((1000,), torch.int64)
    host.copy_(torch.arange(1000))
    staged = torch.zeros(1000, dtype=torch.int64, device=device.torch_device)
    result = device.host_buffer((1000,), torch.int64)
    result.zero_()
    device.synchronize()

    def copy_in() -> None:
        spin()
        staged.copy_(host, non_blocking=True)

    def copy_out() -> None:
        result.copy_(staged * 2, non_blocking=True)

    engine.launch(copy_out)  # loads the kernels, which does wait
    engine.record().synchronize()
    upload.launch(copy_in)
    engine.wait(upload.record())
    engine.launch(copy_out)
    done = engine.record()
    assert not done.done()
    done.synchronize()
    assert done.done()
    assert result.tolist() == [2 * i for i in range(1000)]


def test_work_runs_in_inference_mode_and_host_buffers_are_pinned() -> None:
    device = CudaDevice()
    stream = device.new_stream("engine")
    seen: list[bool] = []
    stream.launch(lambda: seen.append(torch.is_inference_mode_enabled()))
    stream.record().synchronize()
    assert seen == [True]
    assert device.host_buffer((4,), torch.int32).is_pinned()
    assert device.free_memory() > 0


def test_an_error_surfaces_at_its_event_and_poisons_the_stream() -> None:
    device = CudaDevice()
    stream, other = device.new_stream("engine"), device.new_stream("other")
    fine = stream.record()

    def fail() -> None:
        raise ValueError("from the work")

    ran: list[int] = []
    stream.launch(fail)
    stream.launch(lambda: ran.append(1))
    broken = stream.record()
    other.wait(broken)
    fine.synchronize()
    for event in (broken, other.record()):
        with pytest.raises(ValueError, match="from the work"):
            event.synchronize()
    assert ran == []
    stream.close()


def test_busy_time_is_device_time_and_old_spans_are_summed() -> None:
    device = CudaDevice()
    stream = device.new_stream("engine")
    stream.launch(spin)
    stream.record().synchronize()
    one = stream.busy_s()
    assert one > 1e-3
    for _ in range(2 * MAX_UNREAD_SPANS):
        stream.launch(lambda: None)
    stream.record().synchronize()
    assert one <= stream.busy_s() < 20 * one
    stream.close()


def test_a_watched_stream_tells_where_on_the_hosts_clock_its_work_ran() -> None:
    device = CudaDevice()
    stream = device.new_stream("engine")
    stream.launch(spin)  # not watched yet
    spans: list[Span] = []
    stream.watch(spans.append)
    begin = time.monotonic()
    for _ in range(3):
        stream.launch(spin)
    stream.record().synchronize()
    end = time.monotonic()
    stream.busy_s()
    stream.watch(None)
    stream.launch(spin)
    stream.record().synchronize()
    stream.busy_s()
    stream.close()
    assert len(spans) == 3
    slack_s = 0.005  # of clocks that run apart
    assert begin - slack_s < spans[0].begin and spans[-1].end < end + slack_s
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))
    assert all(span.busy_s == pytest.approx(span.end - span.begin) for span in spans)
    assert sum(span.busy_s for span in spans) > 0.8 * (end - begin)
