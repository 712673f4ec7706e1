"""`python -m deployments.prepare serve_config.yaml`: check the file and fetch its models with a progress bar, before Ray starts.

Serve would do both, but later and in another process, whose errors and progress arrive in the terminal between its log lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from deployments.key_files import with_key_files
from overlap_serve.config import ServeConfig, check_model, parse_config
from overlap_serve.errors import ConfigError, ModelLoadError
from overlap_serve.runtime.model import model_facts, model_folder, text_model

IMPORT_PATH = "deployments.app:build"


def serve_configs(file: Path) -> Iterator[ServeConfig]:
    """The checked `args` of every application in a Serve config file that is ours. Raises ConfigError naming the field."""
    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        raise ConfigError(f"{file}: has no list of `applications`")
    for application in applications:
        if application.get("import_path") == IMPORT_PATH:
            yield parse_config(application.get("args") or {})


def prepare(file: Path) -> None:
    """Read the key files of a file, fetch and convert its models, read all of them but the weights, and hold the configuration
    against them.

    Raises ConfigError, ModelLoadError.
    """
    for config in serve_configs(file):
        with_key_files(config)
        if config.engine != "fake":
            print(f"{config.model}: {model_folder(config, progress=True)}")
        check_model(config, model_facts(config))
        text_model(config)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"usage: python -m deployments.prepare FILE, given: {arguments}", file=sys.stderr)
        return 2
    try:
        prepare(Path(arguments[0]))
    except (ConfigError, ModelLoadError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
