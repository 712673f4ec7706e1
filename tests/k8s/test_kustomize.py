"""Our small renderer gives what kustomize gives, and refuses what it does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.kustomize import Unknown, json_patch, render

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu", "gpu-tp2")
COMPONENTS = ((), ("monitoring",), ("incremental-upgrade",), ("monitoring", "incremental-upgrade"))


def with_components(folder: Path, overlay: str, components: tuple[str, ...]) -> Path:
    """A kustomization in `folder` as it would be with these components uncommented in the overlay."""
    k8s = Path(os.path.relpath(ROOT / "k8s", folder))  # kustomize takes no absolute paths
    file = {
        "resources": [str(k8s / "overlays" / overlay)],
        "components": [str(k8s / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(file))
    return folder


def in_order(documents: list[Any]) -> list[Any]:
    return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to compare with")
@pytest.mark.parametrize("components", COMPONENTS, ids="+".join)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_renders_what_kubectl_kustomize_renders(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    folder = with_components(tmp_path, overlay, components)
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert in_order(render(folder)) == in_order(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to compare with")
def test_the_base_renders_too() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s" / "base")], capture_output=True, text=True, timeout=60, check=True
    )
    assert in_order(render(ROOT / "k8s" / "base")) == in_order(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.parametrize(
    "text",
    [
        "namePrefix: x-",
        "patches: [{path: p.yaml}]",
        "resources: [r.yaml]\npatches: [{target: {kind: A}, patch: 'spec: {a: 1}'}]",
        "resources: [r.yaml]\npatches: [{target: {kind: A}, patch: '[{op: move, path: /spec/a, from: /spec/b}]'}]",
        "resources: [r.yaml]\npatches: [{target: {labelSelector: a=b}, patch: '[]'}]",
        "configMapGenerator: [{name: a, literals: [a=b], options: {disableNameSuffixHash: true}}]",
        "images: [{name: a, digest: b}]",
    ],
)
def test_what_it_does_not_know_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("kind: A\nmetadata: {name: a}\nspec: {a: 0}")
    (tmp_path / "p.yaml").write_text("[]")
    (tmp_path / "kustomization.yaml").write_text(text)
    with pytest.raises((Unknown, KeyError)):
        render(tmp_path)


def test_a_patch_for_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("patches: [{target: {kind: A}, patch: '[]'}]")
    with pytest.raises(LookupError, match="nothing is"):
        render(tmp_path)


@pytest.mark.parametrize(
    ("operation", "after"),
    [
        ({"op": "add", "path": "/a/-", "value": 3}, {"a": [1, 2, 3], "b/c": {"d": 4}}),
        ({"op": "add", "path": "/a/0", "value": 0}, {"a": [0, 1, 2], "b/c": {"d": 4}}),
        ({"op": "add", "path": "/e", "value": 5}, {"a": [1, 2], "b/c": {"d": 4}, "e": 5}),
        ({"op": "remove", "path": "/a/1"}, {"a": [1], "b/c": {"d": 4}}),
        ({"op": "replace", "path": "/b~1c/d", "value": 6}, {"a": [1, 2], "b/c": {"d": 6}}),
    ],
)
def test_json_patches(operation: dict[str, Any], after: dict[str, Any]) -> None:
    document = {"a": [1, 2], "b/c": {"d": 4}}
    json_patch(document, operation)
    assert document == after


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "replace", "path": "/x", "value": 1},
        {"op": "remove", "path": "/a/7"},
        {"op": "add", "path": "/x/y", "value": 1},
    ],
)
def test_json_patches_that_lead_nowhere(operation: dict[str, Any]) -> None:
    with pytest.raises((KeyError, IndexError)):
        json_patch({"a": [1]}, operation)


def test_a_patch_of_one_place_leaves_its_yaml_alias_alone(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("kind: A\nmetadata: {name: a}\none: &x {v: 1}\ntwo: *x")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [r.yaml]\npatches: [{target: {kind: A}, patch: '[{op: replace, path: /one/v, value: 2}]'}]"
    )
    [document] = render(tmp_path)
    assert (document["one"], document["two"]) == ({"v": 2}, {"v": 1})
