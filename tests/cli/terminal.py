"""Runs the command on a real terminal: a pty that is the controlling terminal of its own session, so that Ctrl-C is a key."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WAIT_S = 30.0
CTRL_C = "\x03"
CTRL_D = "\x04"

# The first terminal that a session leader opens becomes its controlling terminal.
_MAIN = (
    "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); from overlap_serve.cli import main; "
    "sys.exit(main(sys.argv[1:]))"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """What a person at the screen does. `screen` is everything that was shown, without escape sequences."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._fd, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"},
        )
        os.close(screen)
        self.screen = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """Wait for something new on the screen; what came before it since the last time."""
        horizon_s = time.monotonic() + WAIT_S
        while (found := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < horizon_s, f"no {text!r} after {WAIT_S:g} s: {self.screen[self._seen :]!r}"
            assert self._read(), f"ended without {text!r}: {self.screen[self._seen :]!r}"
        before = self.screen[self._seen : found]
        self._seen = found + len(text)
        return before

    def wait(self) -> int:
        """The exit status."""
        while self._read():
            pass
        return self._process.wait(WAIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], WAIT_S)
        assert ready, f"nothing new in {WAIT_S:g} s: {self.screen!r}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux says so when the last process has closed the terminal
            return False
        self.screen = _ESCAPES.sub("", self.screen + data.decode(errors="replace")).replace("\r\n", "\n")
        return bool(data)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(arguments)
    try:
        yield opened
    finally:
        opened.close()
