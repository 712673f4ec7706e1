"""Help, completion scripts, and the commands that the README shows."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_serve.cli import build_parser, main
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import ModelLoadError
from overlap_serve.models.source import resolve_model
from tests.http_rig import http_rig

ROOT = Path(__file__).parent.parent.parent
COMMANDS = [
    ("chat",), ("generate",), ("models",), ("models", "prepare"), ("config",), ("config", "check"), ("completion",), ("version",),
    ("install-attention",), ("bench",), ("bench", "serve"), ("bench", "offline"), ("bench", "loop"), ("trace",),
]  # fmt: skip


def readme_commands() -> list[list[str]]:
    """Arguments of the commands in the README's section on the command line."""
    section = (ROOT / "README.md").read_text().split("\n## Command line\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_every_command_has_help_with_examples_that_parse(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    examples = capsys.readouterr().out.split("examples:\n")[1]
    for line in examples.splitlines():
        example = re.search(r"overlap-serve (.*?)(?:\s[|>].*)?$", line)
        assert example is not None
        build_parser().parse_args(shlex.split(example[1], comments=True))


def test_python_m_works_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overlap_serve.cli", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("overlap-serve", "chat", "generate", "max-tokens", "temperature"):
        assert word in script


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> set[str]:
        quoted = " ".join(map(shlex.quote, words))
        code = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE={shlex.quote(' '.join(words))}; "
            'COMP_POINT=${#COMP_LINE}; _shtab_overlap_serve overlap-serve "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run([bash, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        return set(done.stdout.split())

    assert complete("overlap-serve", "ge") == {"generate"}
    assert complete("overlap-serve", "generate", "--temp") == {"--temperature"}
    assert complete("overlap-serve", "chat", "--engine", "") == {"torch", "fake"}


def test_the_readmes_commands_parse_and_the_light_ones_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    commands = readme_commands()
    assert {command[0] for command in commands} >= {"chat", "generate", "config", "models", "completion"}
    for command in commands:
        build_parser().parse_args(command)
        if command[0] in ("config", "completion"):
            assert main(command) == 0
    assert "application overlap" in capsys.readouterr().out


def test_the_readmes_chat_talks_to_a_server() -> None:
    [command] = [command for command in readme_commands() if command == ["chat"]]
    with http_rig() as rig:
        done = subprocess.run(
            [sys.executable, "-m", "overlap_serve.cli", *command, "--url", rig.url, "--max-tokens", "5"],
            input="hi\n", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, len(done.stdout)) == (0, 6)


@pytest.fixture
def _prepared() -> Iterator[None]:
    try:
        resolve_model(DEFAULT_MODEL)
    except ModelLoadError as error:
        pytest.skip(f"needs the embedded model: {error}")
    yield


@pytest.mark.model
@pytest.mark.usefixtures("_prepared")
def test_the_readmes_commands_for_a_real_model_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "--temperature 0 --max-tokens 24 --device cpu --set kv_cache_tokens=4096 --set max_model_len=1024".split()
    heavy = [command for command in readme_commands() if command[0] in ("generate", "chat") and command != ["chat"]]
    assert len(heavy) == 3
    for command in heavy:
        monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
        assert main([*command, *small]) == 0
        shown = capsys.readouterr()
        assert "Paris" in shown.out
        assert "error" not in shown.err
