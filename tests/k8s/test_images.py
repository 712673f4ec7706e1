"""The Dockerfiles, as far as they can be read without building them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from overlap_serve.cli import build_parser

ROOT = Path(__file__).parents[2]
KINDS = ("cpu", "gpu")
# Ray's scheme: version, Python, platform (ray-images.json of Ray's repository).
TAG = r"rayproject/ray:(?P<ray>[\d.]+)-py(?P<python>3\d+)-(?P<platform>cpu|cu\d+)"


def instructions(kind: str) -> list[tuple[str, str]]:
    """(word, rest) of each, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "k8s" / f"Dockerfile.{kind}").read_text())
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def base_image(kind: str) -> re.Match[str]:
    assert instructions(kind)[1] == ("FROM", "${RAY_IMAGE}")
    word, rest = instructions(kind)[0]
    match = re.fullmatch(f"RAY_IMAGE={TAG}", rest)
    assert word == "ARG" and match is not None
    return match


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_rays_official_image_of_the_ray_that_we_pin(kind: str) -> None:
    image = base_image(kind)
    assert image["ray"] == importlib.metadata.version("ray")
    assert f"ray=={image['ray']}" in (ROOT / "constraints.txt").read_text().split()
    assert (image["platform"] == "cpu") == (kind == "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_its_python_is_one_that_the_constraints_were_tested_with(kind: str) -> None:
    assert "Python 3.11." in (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert base_image(kind)["python"] == "311"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_is_there_and_not_ignored(kind: str) -> None:
    ignored = (ROOT / "k8s" / f"Dockerfile.{kind}.dockerignore").read_text().split("\n")
    copied = [part for word, rest in instructions(kind) if word == "COPY" for part in rest.split()[1:-1]]
    needed = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "overlap_serve", "deployments"}
    assert set(copied) == needed
    assert all((ROOT / part).exists() and f"!{part}" in ignored for part in copied)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_are_shell_and_ours_exist(kind: str) -> None:
    commands = [rest for word, rest in instructions(kind) if word == "RUN"]
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True, timeout=20)
        for arguments in re.findall(r"overlap-serve ([\w -]+)", command):
            build_parser().parse_args(arguments.split())
    assert sum("-c constraints.txt" in command for command in commands) == 1


def run_attention_line(flag: str, folder: Path) -> int:
    """The GPU image's line, with a command that fails as ours does."""
    [command] = [rest for word, rest in instructions("gpu") if word == "RUN" and "install-attention" in rest]
    stand_in = folder / "overlap-serve"
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    stand_in.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "INSTALL_ATTENTION": flag}
    return subprocess.run(["/bin/sh", "-c", command], env=env, timeout=20).returncode


def test_attention_is_off_unless_asked_for_and_then_its_failure_ends_the_build(tmp_path: Path) -> None:
    assert ("ARG", "INSTALL_ATTENTION=0") in instructions("gpu")
    assert run_attention_line("0", tmp_path) == 0
    assert run_attention_line("1", tmp_path) == 1


@pytest.mark.parametrize(("overlay", "kind"), [("cpu", "cpu"), ("gpu", "gpu")])
def test_the_overlays_name_the_image_that_the_dockerfile_says_to_build(overlay: str, kind: str) -> None:
    [image] = yaml.safe_load((ROOT / "k8s" / "overlays" / overlay / "kustomization.yaml").read_text())["images"]
    text = (ROOT / "k8s" / f"Dockerfile.{kind}").read_text()
    assert f"docker build -f k8s/Dockerfile.{kind} -t {image['newName']}:{image['newTag']} ." in text
    assert image["newTag"].startswith(importlib.metadata.version("overlap-serve"))
