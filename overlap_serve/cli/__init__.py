"""The command `overlap-serve`. Prints results on stdout, progress and errors on stderr.

Exit status: 0, or 1 for what this version cannot do, or 2 for a user's error, or 130 after Ctrl-C. Each subcommand is a module with
`add` (its arguments) and `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from overlap_serve import __version__
from overlap_serve.cli import attention, bench, chat, check, completion, generate, models, trace
from overlap_serve.cli.options import Run, with_examples
from overlap_serve.errors import OverlapServeError

INTERRUPTED = 130  # as shells report SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    run: Run = args.run
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except OverlapServeError as error:
        print(f"overlap-serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough. Without this, the interpreter complains while it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-serve",
        description="LLM inference server with an overlap scheduler. The server itself is started by Ray Serve: `serve run FILE`.",
        **with_examples(
            "overlap-serve chat                              # with the server on this machine",
            "overlap-serve generate 'Once upon a time'       # without a server",
            "overlap-serve config check serve_config.yaml",
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat.add(commands)
    generate.add(commands)
    models.add(commands)
    check.add(commands)
    bench.add(commands)
    trace.add(commands)
    attention.add(commands)
    completion.add(commands, parser)
    version = commands.add_parser(
        "version", help="print the version", description="Print the version.", **with_examples("overlap-serve version")
    )
    version.set_defaults(run=_version)
    return parser


def _version(args: argparse.Namespace) -> int:
    print(__version__)
    return 0
