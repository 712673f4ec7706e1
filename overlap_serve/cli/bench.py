"""`overlap-serve bench`: the measuring commands, each a module of its own."""

from __future__ import annotations

from overlap_serve.cli import bench_loop, bench_offline, bench_serve
from overlap_serve.cli.options import Commands, with_examples


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed",
        description="Measure speed: of a server, of the engine in this process, or of the loop alone.",
        **with_examples(
            "overlap-serve bench serve --concurrency 1 4 16 64 --num-requests 200",
            "overlap-serve bench offline",
            "overlap-serve bench loop",
        ),
    )
    kinds = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    bench_serve.add(kinds)
    bench_offline.add(kinds)
    bench_loop.add(kinds)
