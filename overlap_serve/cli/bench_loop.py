"""`overlap-serve bench loop`: host time of a step, without a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from overlap_serve.bench import loop
from overlap_serve.cli.bench_options import count, seconds_of_ms, write_text
from overlap_serve.cli.options import Commands, completes_files, with_examples

EXAMPLES = (
    "overlap-serve bench loop",
    "overlap-serve bench loop --rows 256 1024 --steps 500 --repeats 5 --json loop.json",
)


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "loop",
        help="host time of a step, without a model",
        description="Run the real loop and scheduler over a device that only waits, and report what the host spends on a step: "
        "plan, launch, process, send and in total, at depth 0 and 1.",
        **with_examples(*EXAMPLES),
    )
    parser.add_argument(
        "--rows", type=count, nargs="+", default=list(loop.NUM_ROWS), metavar="N", help="default: 1 16 64 256 1024"
    )
    parser.add_argument(
        "--device-ms", type=seconds_of_ms, dest="device_s", default=0.005, metavar="MS", help="of a step (default: 5)"
    )
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="of a run (default: 200)")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="of both depths (default: 1)")
    completes_files(parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    costs = []
    for rows in args.rows:
        print(f"{rows} rows", file=sys.stderr)
        costs += loop.measure(rows, device_s=args.device_s, steps=args.steps, repeats=args.repeats)
    print(loop.table(costs))
    if args.json is not None:
        write_text(args.json, json.dumps([cost.fields() for cost in costs], indent=1) + "\n")
    return 0
