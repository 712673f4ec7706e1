"""The command line: results on stdout, errors in one line on stderr with exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_serve import __version__
from overlap_serve.cli import main


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_models_prepare_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["models", "prepare", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{tmp_path}\n", "")


def test_a_users_error_is_one_line_on_stderr_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "prepare", "--model", str(tmp_path / "none.gguf"), "--cache-dir", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("overlap-serve: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["models"], ["nonsense"]])
def test_an_incomplete_command_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: overlap-serve" in capsys.readouterr().err
