"""Reads configuration files: a Serve config file with our application in it, or the bare `args` of one."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import yaml

from overlap_serve.errors import ConfigError

IMPORT_PATH = "deployments.app:build"


class _OnceLoader(yaml.SafeLoader):
    """A key that is written twice is an error; YAML itself takes the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value} is written twice; keep one of them")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_applications(file: Path) -> list[tuple[str, dict[str, object]]]:
    """(name, args) of each of our applications in the file; name "" where the file holds nothing but args.

    Raises ConfigError naming file and line.
    """
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), _OnceLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: holds no fields")
    if "applications" not in document:
        return [("", _fields(file, document))]
    ours = [
        app for app in document["applications"] or [] if isinstance(app, dict) and app.get("import_path") == IMPORT_PATH
    ]
    if not ours:
        raise ConfigError(f"{file}: no application with import_path {IMPORT_PATH}")
    return [(str(app.get("name", "default")), _fields(file, app.get("args") or {})) for app in ours]


def only_args(file: Path) -> dict[str, object]:
    """The args of the one application in the file. Raises ConfigError."""
    applications = read_applications(file)
    if len(applications) != 1:
        names = ", ".join(name for name, _ in applications)
        raise ConfigError(f"{file}: has the applications {names}; one is needed")
    return applications[0][1]


def _fields(file: Path, args: object) -> dict[str, object]:
    if not isinstance(args, dict):
        raise ConfigError(f"{file}: `args` must hold fields, not {args!r}")
    return {str(name): value for name, value in args.items()}
