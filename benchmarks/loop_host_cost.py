"""What the host spends on a step, planning, launching, processing and sending, at 1 to 1,024 decode rows; depth 0 and 1, interleaved.

    python -m benchmarks.loop_host_cost

The device only waits, 5 ms a step (`overlap_serve.bench.loop` says what is left out). A run is the mean of its steady steps, by the wall
clock; `clock: cpu` repeats it by the CPU time of the loop's thread, which other processes of the machine do not touch. Figures are
medians of the runs: ms_per_step_N of both depths together, by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from benchmarks.results import write
from overlap_serve.bench.loop import DEPTHS, NUM_ROWS, measure, table

REPEATS = 7
DEVICE_S = 0.005
STEPS = 200
CLOCKS = {"wall": time.monotonic, "cpu": time.thread_time}


def figures(runs: Sequence[Mapping[str, object]]) -> dict[str, float]:
    def median(key: str, rows: int, clock: str, depths: Sequence[int] = DEPTHS) -> float:
        chosen = (run for run in runs if (run["rows"], run["clock"]) == (rows, clock) and run["depth"] in depths)
        return statistics.median(float(str(run[key])) for run in chosen)

    made: dict[str, float] = {}
    for rows in NUM_ROWS:
        made[f"ms_per_step_{rows}"] = median("total_ms", rows, "wall")
        made[f"us_per_row_{rows}"] = made[f"ms_per_step_{rows}"] * 1e3 / rows
        for depth in DEPTHS:
            made[f"ms_per_step_{rows}_depth{depth}"] = median("total_ms", rows, "wall", [depth])
        made[f"cpu_ms_per_step_{rows}"] = median("total_ms", rows, "cpu")
    for part in ("plan", "launch", "process", "send"):
        made[f"{part}_ms_256"] = median(f"{part}_ms", 256, "wall")
        made[f"{part}_ms_1024"] = median(f"{part}_ms", 1024, "wall")
    return made


def main() -> None:
    runs: list[dict[str, object]] = []
    for _ in range(REPEATS):
        for rows in NUM_ROWS:
            for name, clock in CLOCKS.items():
                costs = measure(rows, device_s=DEVICE_S, steps=STEPS, clock=clock)
                runs += [{"clock": name, **cost.fields()} for cost in costs]
                print(name, table(costs), sep="\n", flush=True)
    file = write("loop_host_cost", "python -m benchmarks.loop_host_cost", runs, figures(runs))
    for key, value in figures(runs).items():
        print(f"{key:32} {value:8.3f}")
    print(file)


if __name__ == "__main__":
    main()
