"""The command `overlap-serve`. Prints results on stdout, progress and errors on stderr; a user's error is exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from overlap_serve import __version__
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import ConfigError, ModelLoadError
from overlap_serve.models.source import resolve_model


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.command == "models":
            print(resolve_model(args.model, revision=args.revision, cache_dir=args.cache_dir, progress=True))
        else:
            print(__version__)
    except (ConfigError, ModelLoadError) as error:
        print(f"overlap-serve: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="overlap-serve", description="LLM inference server with an overlap scheduler")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    models = commands.add_parser("models", help="work with models").add_subparsers(dest="models_command", required=True)
    prepare = models.add_parser("prepare", help="fetch and convert a model once, print its folder")
    prepare.add_argument(
        "--model", default=DEFAULT_MODEL, help="as `model` of serve_config.yaml (default: %(default)s)"
    )
    prepare.add_argument("--revision", help="Hugging Face revision")
    prepare.add_argument("--cache-dir", type=Path, help="default: ~/.cache/overlap_serve/models")
    return parser


if __name__ == "__main__":
    sys.exit(main())
