"""`overlap-serve config check FILE`: every problem of a configuration at once, else what each field comes out as, and why.

Checked for the machine it runs on. The model is only read where it is a local folder, or with --fetch: a check must not download
gigabytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import ValidationError

from overlap_serve.cli.files import read_applications
from overlap_serve.cli.options import Commands, completes_files, with_examples
from overlap_serve.config import (
    EngineSpec,
    GenerationDefaults,
    HostFacts,
    ModelFacts,
    ServeConfig,
    decided,
    explain_each,
    fake_facts,
    resolve,
)
from overlap_serve.errors import ConfigError
from overlap_serve.models.families import read_facts
from overlap_serve.runtime.local import this_host
from overlap_serve.runtime.model import model_folder

ENDLESS = 1 << 30  # positions of a model that was not read: no length contradicts it
UNREAD = "the model's own; not read (--fetch)"
SECRET = frozenset({"api_keys", "admin_api_keys"})


def add(commands: Commands) -> None:
    examples = with_examples(
        "overlap-serve config check serve_config.yaml", "overlap-serve config check --fetch serve_config.yaml"
    )
    config = commands.add_parser(
        "config", help="work with configurations", description="Work with configurations.", **examples
    )
    check = config.add_subparsers(dest="config_command", required=True, metavar="COMMAND").add_parser(
        "check",
        help="name every mistake in a configuration, or show what it comes out as",
        description="Name every mistake in a serve_config.yaml (or a file with its `args` alone), or show what every field comes out as "
        "on this machine, and why. Exit status 2 if there are mistakes.",
        **examples,
    )
    completes_files(check.add_argument("file", type=Path, metavar="FILE"))
    check.add_argument("--fetch", action="store_true", help="fetch the model if need be, and check against it")
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    status = 0
    for name, fields in read_applications(args.file):
        title = f"{args.file}: application {name}" if name else str(args.file)
        if problems := problems_of(fields):
            status = 2
            for problem in problems:
                print(f"{title}: {problem}", file=sys.stderr)
        else:
            status = max(status, _report(title, ServeConfig.model_validate(fields), frozenset(fields), args.fetch))
    return status


def problems_of(fields: dict[str, object]) -> list[str]:
    """Wrong and unknown fields, and contradictions among the others; in a file with both, both."""
    try:
        ServeConfig.model_validate(fields)
    except ValidationError as error:
        problems = explain_each(error)
        wrong = {str(item["loc"][0]) for item in error.errors(include_url=False) if item["loc"]}
        rest = {name: value for name, value in fields.items() if name not in wrong}
        return problems + (problems_of(rest) if wrong else [])
    return []


def notes_on(config: ServeConfig, given: frozenset[str], spec: EngineSpec) -> Iterator[str]:
    """Fields that were given and do nothing beside the others."""
    if {"kv_cache_tokens", "kv_memory_fraction"} <= given:
        yield "kv_memory_fraction has no effect beside kv_cache_tokens"
    if config.protect_metrics and not config.api_keys and config.api_keys_file is None:
        yield "protect_metrics has no effect without api_keys"
    if "fake" in given and config.engine != "fake":
        yield "fake has no effect without engine: fake"
    if config.engine == "fake":
        for name in sorted(
            given
            & {"model", "revision", "load_format", "chat_template", "dtype", "device", "num_threads", "profile_dir"}
        ):
            yield f"{name} has no effect with engine: fake"
    elif "num_threads" in given and spec.device == "cuda":
        yield "num_threads has no effect on device cuda"
    if config.default_max_tokens is not None and config.default_max_tokens >= spec.max_model_len:
        yield f"default_max_tokens has no effect: max_model_len is {spec.max_model_len}"


def _report(title: str, config: ServeConfig, given: frozenset[str], fetch: bool) -> int:
    host = this_host(config)
    facts = _facts(config, fetch)
    try:
        spec = resolve(config, facts or _unread(), host, "")
    except ConfigError as error:
        print(f"{title}: {error}", file=sys.stderr)
        return 2
    print(title)
    for line in _table(config, given, _choices(config, host, spec, facts)):
        print(f"  {line}".rstrip())
    for note in notes_on(config, given, spec):
        print(f"note: {note}")
    return 0


def _facts(config: ServeConfig, fetch: bool) -> ModelFacts | None:
    """None: not looked at. Raises ModelLoadError."""
    if config.engine == "fake":
        return fake_facts(config.fake)
    if fetch:
        return read_facts(model_folder(config, progress=True, weights=False))
    folder = Path(config.model).expanduser()
    return read_facts(folder) if (folder / "config.json").is_file() else None


def _unread() -> ModelFacts:
    return ModelFacts(
        max_position_embeddings=ENDLESS,
        vocab_size=1,
        kv_elements_per_token=1,
        eos_token_ids=(),
        generation=GenerationDefaults(),
    )


def _choices(
    config: ServeConfig, host: HostFacts, spec: EngineSpec, facts: ModelFacts | None
) -> dict[str, tuple[object, str]]:
    choices = decided(config, host, spec)
    if facts is None and "max_model_len" in choices:
        choices["max_model_len"] = ("later", UNREAD)
    return choices


def _table(config: ServeConfig, given: frozenset[str], choices: dict[str, tuple[object, str]]) -> Iterator[str]:
    """One line per field: name, value, and where it comes from."""
    rows = []
    for name in ServeConfig.model_fields:
        value, why = choices.get(name, (vars(config)[name], ""))
        if name in choices:
            why = f"{'auto' if name in given else 'default'}: {why}"
        else:
            why = "given" if name in given else "default"
        rows.append((name, _shown(name, value), why))
    width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, text, why in rows:
        yield f"{name:<{width}}  {text:<{min(value_width, 40)}}  {why}"


def _shown(name: str, value: object) -> str:
    if name in SECRET and isinstance(value, tuple):
        return f"({len(value)} keys)" if value else "none"
    if value is None or value == ():
        return "none"
    if name == "fake":
        return " ".join(f"{key}={item}" for key, item in vars(value).items())
    return msgspec.json.encode(value).decode() if isinstance(value, bool) else str(value)
