"""What a sum over the ranks costs in a decode step: NCCL as `RankGroup` calls it, and torch's symmetric memory, inside CUDA graphs.

    python -m benchmarks.gpu_all_reduce          # on a machine with 2 or more GPUs, one process for each

A step sums twice a layer. Each graph holds CALLS sums of [rows, 5120] bfloat16 (Qwen3-14B's hidden states), and the methods take turns.
NVLink multicast stays off. Figures: microseconds for one sum (medians), and NCCL's bus bandwidth with 256 MiB to compare with.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from benchmarks.results import write
from overlap_serve.models.group import RankGroup, address_of, join_store, open_store

HIDDEN = 5120
ROWS = (1, 32, 256)
CALLS = 80
REPLAYS = 20
REPEATS = 7
LARGE_BYTES = 256 * 2**20
HOST = "127.0.0.1"
METHODS = ("nccl", "one_shot", "two_shot")


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    return graph


def microseconds(replay: Callable[[], object], num_calls: int) -> float:
    """Of one call, by device events around REPLAYS replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    dist.barrier()
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (REPLAYS * num_calls)


def check_sums(group: RankGroup, name: str, t: Tensor) -> None:
    """All methods give the same sum; of small whole numbers, which bfloat16 holds exactly."""
    expected = sum(range(1, group.size + 1))
    for method in METHODS:
        t.fill_(group.rank + 1)
        dist.barrier()
        assert float(summed(method, group, name, t).float().mean()) == expected, method
        dist.barrier()


def summed(method: str, group: RankGroup, name: str, t: Tensor) -> Tensor:
    if method == "nccl":
        return group.all_reduce(t)
    if method == "one_shot":
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(t, "sum", name)
        return result
    torch.ops.symm_mem.two_shot_all_reduce_(t, "sum", name)
    return t


def measure(rank: int, size: int, address: str, results: mp.SimpleQueue[list[dict[str, object]]]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = join_store(address)
    dist.init_process_group("nccl", store=PrefixStore("world", store), rank=rank, world_size=size)
    group = RankGroup(store, rank, size, device=device, host=HOST, timeout_s=60.0)
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    runs: list[dict[str, object]] = []
    with torch.inference_mode():
        graphs = {}
        for rows in ROWS:
            t = symm_mem.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
            symm_mem.rendezvous(t, name)
            check_sums(group, name, t)
            t.zero_()
            for method in METHODS:
                graphs[rows, method] = (t, captured(partial(summed, method, group, name, t)))
        large = torch.zeros(LARGE_BYTES // 2, dtype=torch.bfloat16, device=device)
        for repeat in range(REPEATS):
            for (rows, method), (_, graph) in graphs.items():
                us = microseconds(graph.replay, CALLS)
                runs.append({"repeat": repeat, "rows": rows, "method": method, "ranks": size, "us": us})
            us = microseconds(lambda: group.all_reduce(large), 1)
            runs.append({"repeat": repeat, "rows": 0, "method": "nccl_256_mib", "ranks": size, "us": us})
    if rank == 0:
        results.put(runs)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold the communicator


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    def median(rows: int, method: str) -> float:
        return statistics.median(float(str(r["us"])) for r in runs if r["rows"] == rows and r["method"] == method)

    size = int(str(runs[0]["ranks"]))
    made = {f"{method}_us_{rows}": median(rows, method) for rows in ROWS for method in METHODS}
    made["nccl_256_mib_bus_gb_s"] = LARGE_BYTES * 2 * (size - 1) / size / median(0, "nccl_256_mib") / 1e3
    return made


def main() -> None:
    size = torch.cuda.device_count()
    if size < 2:
        print(f"needs 2 GPUs, has {size}: left out")
        return
    store = open_store(HOST)
    context = mp.get_context("spawn")
    results: mp.SimpleQueue[list[dict[str, object]]] = context.SimpleQueue()
    ranks = [context.Process(target=measure, args=(rank, size, address_of(store), results)) for rank in range(size)]
    for process in ranks:
        process.start()
    runs = results.get()
    for process in ranks:
        process.join(30)
    made = figures(runs)
    print(made)
    print(write("gpu_all_reduce", "python -m benchmarks.gpu_all_reduce", runs, made))


if __name__ == "__main__":
    main()
