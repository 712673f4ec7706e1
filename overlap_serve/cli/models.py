"""`overlap-serve models prepare`: fetch and convert a model once, before a server or a test needs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlap_serve.cli.options import Commands, completes_files, with_examples
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.models.source import resolve_model


def add(commands: Commands) -> None:
    examples = with_examples(
        "overlap-serve models prepare",
        "overlap-serve models prepare --model Qwen/Qwen3-0.6B",
        "overlap-serve models prepare --model ./model-q8_0.gguf",
    )
    models = commands.add_parser("models", help="work with models", description="Work with models.", **examples)
    prepare = models.add_subparsers(dest="models_command", required=True, metavar="COMMAND").add_parser(
        "prepare",
        help="fetch and convert a model once, print its folder",
        description="Fetch and convert a model once and print its folder. A second time it only prints the folder.",
        **examples,
    )
    completes_files(
        prepare.add_argument(
            "--model", default=DEFAULT_MODEL, help="as `model` of serve_config.yaml (default: %(default)s)"
        )
    )
    prepare.add_argument("--revision", help="Hugging Face revision")
    prepare.add_argument("--cache-dir", type=Path, help="default: ~/.cache/overlap_serve/models")
    prepare.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(resolve_model(args.model, revision=args.revision, cache_dir=args.cache_dir, progress=True))
    return 0
