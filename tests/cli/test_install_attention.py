"""`overlap-serve install-attention` must not look as if it had installed something."""

from __future__ import annotations

import pytest

from overlap_serve.cli import main


def test_install_attention_fails_and_says_what_there_is_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-attention"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    for words in ("only the reference attention", "nothing was installed", "INSTALL_ATTENTION=0"):
        assert words in shown.err
