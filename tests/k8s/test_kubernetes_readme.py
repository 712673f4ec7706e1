"""The commands of k8s/README.md, as far as they can be checked without a cluster: they parse, what they name exists, kubectl has the
flags, and the request is one that the server answers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from overlap_serve.cli import build_parser
from overlap_serve.config import FakeModel
from tests.http_rig import MODEL, http_rig
from tests.k8s.kustomize import render
from tests.k8s.view import View

ROOT = Path(__file__).parents[2]
README = ROOT / "k8s" / "README.md"
PROGRAMS = {"kubectl", "helm", "docker", "overlap-serve", "curl", "git"}


def commands() -> list[str]:
    """Each command line of the README, continued lines joined; also those in the text that are whole commands."""
    text = README.read_text()
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"`(kubectl [^`]+ [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return re.sub(r"\\\n\s*", " ", blocks).splitlines() + inline


def words(command: str) -> list[str]:
    """Without the assignment around it, and what follows in the pipe."""
    inner = re.fullmatch(r'\w+="\$\((.*)\)"', command)
    parts = shlex.split(inner[1] if inner else command)
    return parts[: parts.index("|")] if "|" in parts else parts


def of(program: str) -> list[list[str]]:
    return [words(command) for command in commands() if words(command)[0] == program]


def test_every_command_is_shell_and_of_a_known_program() -> None:
    assert len(commands()) > 30
    for command in commands():
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True, timeout=20)
        assert words(command)[0] in PROGRAMS, command


def test_files_and_folders_exist() -> None:
    named = {word for command in commands() for word in words(command) if word.startswith("k8s/")}
    named |= {f"k8s/{path}" for path in re.findall(r"`((?:overlays|components|base)/[\w./-]+)`", README.read_text())}
    assert len(named) > 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_our_own_commands_parse() -> None:
    assert of("overlap-serve")
    for parts in of("overlap-serve"):
        build_parser().parse_args(parts[1:])


@cache
def kubectl_help(command: tuple[str, ...]) -> str:
    """`kubectl options` prints what all commands take, and has no help of its own."""
    arguments = command if command == ("options",) else (*command, "--help")
    return subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def verb(parts: list[str]) -> tuple[str, ...]:
    """`create secret generic`, `config set-context`, or one word."""
    long = {"create": 3 if parts[2] == "secret" else 2, "config": 2}
    return tuple(parts[1 : 1 + long.get(parts[1], 1)])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for its help")
def test_kubectl_has_these_commands_and_flags() -> None:
    everywhere = kubectl_help(("options",))
    for parts in of("kubectl"):
        known = kubectl_help(verb(parts))
        for flag in (part.split("=")[0] for part in parts if part.startswith("-")):
            shown = rf"(^|\s){re.escape(flag)}[=,:\s]"
            assert re.search(shown, known) or re.search(shown, everywhere), (parts, flag)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_makes_the_secrets() -> None:
    made = [parts for parts in of("kubectl") if parts[1:4] == ["create", "secret", "generic"]]
    assert {parts[4] for parts in made} == {"overlap-serve-redis", "overlap-serve-keys", "overlap-serve-hub"}
    for parts in made:
        subprocess.run([*parts, "--dry-run=client", "-o", "yaml"], capture_output=True, timeout=60, check=True)


def test_names_are_those_of_the_manifests() -> None:
    text = README.read_text()
    view = View(render(ROOT / "k8s" / "overlays" / "cpu"))
    [service] = view.kind("RayService")
    name = service["metadata"]["name"]
    assert f"rayservice/{name} " in text and f"service/{name}-serve-svc" in text  # KubeRay's names
    for label, value in re.findall(r"([\w./-]+)=([\w-]+)", re.findall(r"kubectl logs -l (\S+)", text)[0]):
        assert view.workers[0].labels[label] == value
    assert f"-c {view.workers[0].container['name']} " in text
    assert "--version 1.7.0" in text  # of the CRD in ../shared/kuberay


def test_the_request_is_answered_with_the_key_and_not_without() -> None:
    [parts] = of("curl")
    body = json.loads(parts[parts.index("-d") + 1])
    assert body["model"] == View(render(ROOT / "k8s" / "overlays" / "cpu")).config.model_name
    [key_header] = [part for part in parts if part.startswith("Authorization: ")]
    name, value = key_header.replace("$KEY", "sk-1").split(": ")
    with http_rig(FakeModel(base_ms=0.2, max_model_len=512), api_keys=("sk-1",)) as rig, rig.http() as http:
        asked = {**body, "model": MODEL}
        assert http.post("/v1/chat/completions", json=asked).status_code == 401
        answer = http.post("/v1/chat/completions", json=asked, headers={name: value})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
