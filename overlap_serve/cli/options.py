"""Arguments that subcommands share: which engine, which sampling parameters; and how values are read from a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypedDict

import shtab
import yaml

from overlap_serve.cli.files import only_args
from overlap_serve.config import DEFAULT_MODEL, ServeConfig, parse_config
from overlap_serve.errors import ConfigError
from overlap_serve.llm import LLM
from overlap_serve.llm.arguments import offline_config

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # a text: generic for type checkers only
Run = Callable[[argparse.Namespace], int]

# Option -> parameter of the API; what has no option of its own is `--param`.
SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")


class Epilog(TypedDict):
    """Keyword arguments of a parser."""

    epilog: str
    formatter_class: type[argparse.HelpFormatter]


def with_examples(*lines: str) -> Epilog:
    return Epilog(
        epilog="examples:\n" + "\n".join(f"  {line}" for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def completes_files(action: argparse.Action) -> None:
    """Let shells complete this argument with file names."""
    vars(action)["complete"] = shtab.FILE


def add_engine_options(parser: argparse.ArgumentParser, model_help: str) -> None:
    group = parser.add_argument_group("offline engine")
    completes_files(group.add_argument("--model", help=model_help))
    completes_files(
        group.add_argument(
            "--config", type=Path, metavar="FILE", help="take the engine's settings from a serve_config.yaml"
        )
    )
    group.add_argument(
        "--engine", choices=["torch", "fake"], help="fake: no model, made-up tokens, for trying things out"
    )
    group.add_argument("--device", choices=["auto", "cpu", "cuda"])
    group.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=assignment,
        metavar="FIELD=VALUE",
        help="any other field of the configuration, as in serve_config.yaml; may be repeated",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens_default: str) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"default: {max_tokens_default}")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, help="same seed, same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument(
        "--param",
        dest="params",
        action="append",
        default=[],
        type=assignment,
        metavar="NAME=VALUE",
        help="any other parameter of the API, as in --param top_k=40; may be repeated",
    )


def assignment(text: str) -> tuple[str, object]:
    """NAME=VALUE, the value as YAML reads it: 4, 0.5, true, null, [1, 2], text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value of {name} is not YAML: {error}") from None


def sampling_of(args: argparse.Namespace) -> dict[str, object]:
    """The sampling parameters that were given."""
    given = {name: value for name in SAMPLING_OPTIONS if (value := vars(args)[name]) is not None}
    return given | dict(args.params)


def read_key(given: str | None) -> str | None:
    """What --api-key names: a key, or with @ the file that holds it. Raises ConfigError."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key: {error}") from None


def open_llm(args: argparse.Namespace) -> LLM:
    """The offline engine that the options describe. Raises ConfigError, ModelLoadError."""
    return LLM(engine_config(args))


def engine_config(args: argparse.Namespace) -> ServeConfig:
    """Of the offline engine that the options describe. Raises ConfigError."""
    fields = {name: value for name in ("model", "engine", "device") if (value := vars(args)[name]) is not None}
    fields |= dict(args.settings)
    if args.config is None:
        model = fields.pop("model", DEFAULT_MODEL)
        if not isinstance(model, str):
            raise ConfigError(f"model: must be a text (given: {model!r})")
        return offline_config(model, fields)
    return parse_config({**only_args(args.config), **fields})
