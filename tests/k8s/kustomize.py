"""What of kustomize our overlays use, so that the tests render them on any machine: resources, components, JSON patches, images, a
ConfigMap made from files, and its text put into a field. Anything else is an error, not ignored.

test_kustomize.py compares the result with `kubectl kustomize` where that is installed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Document = Any  # what a YAML file holds
LOCAL = "config.kubernetes.io/local-config"  # an annotation: such documents are for kustomize only
KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "configMapGenerator", "replacements"}


class Unknown(Exception):
    """A kustomization asks for what is not done here."""


def render(folder: Path) -> list[Document]:
    """The documents that `kubectl kustomize FOLDER` prints, in no particular order."""
    return [document for document in accumulate(folder, []) if LOCAL not in annotations_of(document)]


def accumulate(folder: Path, documents: list[Document]) -> list[Document]:
    """Kustomize's order: resources, generators, components, then patches, images, replacements. Patches change in place."""
    file = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(file) - KNOWN:
        raise Unknown(f"{folder}: {', '.join(sorted(unknown))}")
    for entry in file.get("resources", []):
        path = folder / entry
        documents = documents + (accumulate(path, []) if path.is_dir() else load_all(path))
    documents = documents + [config_map(folder, entry) for entry in file.get("configMapGenerator", [])]
    for entry in file.get("components", []):
        documents = accumulate(folder / entry, documents)
    for entry in file.get("patches", []):
        apply_patch(entry, documents)
    for entry in file.get("images", []):
        set_image(entry, documents)
    for entry in file.get("replacements", []):
        replace(entry, documents)
    return documents


def load_all(file: Path) -> list[Document]:
    """Copies where the file has aliases: a patch of one place must not change the other."""
    return [
        copy_aliases(document) for document in yaml.load_all(file.read_text(), yaml.CSafeLoader) if document is not None
    ]


def copy_aliases(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copy_aliases(item) for key, item in value.items()}
    return [copy_aliases(item) for item in value] if isinstance(value, list) else value


def annotations_of(document: Document) -> dict[str, str]:
    found: dict[str, str] = document["metadata"].get("annotations", {})
    return found


def select(target: dict[str, str], documents: list[Document]) -> list[Document]:
    if unknown := set(target) - {"kind", "name"}:
        raise Unknown(f"target {', '.join(sorted(unknown))}")
    found = [
        document
        for document in documents
        if target.get("kind") in (None, document["kind"]) and target.get("name") in (None, document["metadata"]["name"])
    ]
    if not found:
        raise LookupError(f"nothing is {target}")
    return found


def config_map(folder: Path, entry: dict[str, Any]) -> Document:
    options = entry["options"]
    if set(entry) != {"name", "files", "options"} or not options.pop("disableNameSuffixHash"):
        raise Unknown(f"configMapGenerator {entry}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": entry["name"], "annotations": options["annotations"]},
        "data": {name: (folder / name).read_text() for name in entry["files"]},
    }


def apply_patch(entry: dict[str, Any], documents: list[Document]) -> None:
    operations = yaml.safe_load(entry["patch"])
    if set(entry) != {"target", "patch"} or not isinstance(operations, list):
        raise Unknown(f"patch {entry}")
    for document in select(entry["target"], documents):
        for operation in operations:
            json_patch(document, operation)


def json_patch(document: Document, operation: dict[str, Any]) -> None:
    """RFC 6902: add, remove, replace. Raises KeyError, IndexError where the path leads nowhere."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place = document
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    action = operation["op"]
    if action not in ("add", "remove", "replace"):
        raise Unknown(f"operation {action}")
    if action == "add" and isinstance(place, list):
        place.insert(len(place) if last == "-" else int(last), copy.deepcopy(operation["value"]))
        return
    key = int(last) if isinstance(place, list) else last
    if action != "add":
        place[key]  # must be there
    if action == "remove":
        del place[key]
    else:
        place[key] = copy.deepcopy(operation["value"])


def set_image(entry: dict[str, str], documents: list[Document]) -> None:
    if set(entry) != {"name", "newName", "newTag"}:
        raise Unknown(f"image {entry}")
    for container in containers(documents):
        if re.split(r"[:@]", container["image"])[0] == entry["name"]:
            container["image"] = f"{entry['newName']}:{entry['newTag']}"


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Wherever they are."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("containers", "initContainers"):
                yield from item
            else:
                yield from containers(item)
    elif isinstance(value, list):
        for item in value:
            yield from containers(item)


def replace(entry: dict[str, Any], documents: list[Document]) -> None:
    source = dict(entry["source"])
    path = re.fullmatch(r"data\.\[(.+)\]", source.pop("fieldPath"))
    if path is None:
        raise Unknown(f"replacement {entry}")
    [found] = select(source, documents)
    for target in entry["targets"]:
        for document in select(target["select"], documents):
            for field in target["fieldPaths"]:
                *parents, last = field.split(".")
                place = document
                for part in parents:
                    place = place[part]
                place[last] = found["data"][path[1]]
