"""The cache of prepared models: a folder appears by one rename, under a lock between processes, so whoever sees it sees all of it.

Owns scratch folders, the lock, and the process that converts. Knows no format. The one idea: what is being written has a name that
nobody else ever writes to or reads, so a process killed at any point leaves only rubbish, which the next one clears away.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

import overlap_serve
from overlap_serve.errors import ModelLoadError

log = logging.getLogger(__name__)


def say(text: str, progress: bool) -> None:
    """What someone at a terminal is told (progress), and what else goes to the log."""
    if progress:
        print(text, file=sys.stderr, flush=True)
    else:
        log.info(text)


def prepared(cache: Path, name: str, make: Callable[[Path], None], progress: bool) -> Path:
    """The folder `name` of the cache; where it is missing, `make` fills a scratch folder that then takes its place. Blocks while
    another process does the same. Raises ModelLoadError that says what to do."""
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{name}.lock", progress):
            if not folder.is_dir():
                _make_whole(folder, make)
    except OSError as error:
        todo = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make room or give write access"
        raise ModelLoadError(f"{cache}: {name} cannot be prepared ({error.strerror or error}); {todo}") from error
    return folder


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    prefix = f"{folder.name}.partial"
    for remains in folder.parent.iterdir():  # of a killed process: only the holder of the lock gets here
        if remains.name.startswith(prefix):
            shutil.rmtree(remains, ignore_errors=True)
    scratch = folder.with_name(f"{prefix}-{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        make(scratch)
        for file in scratch.iterdir():
            _flush(file)  # a rename may reach the disk before the data does
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(file: Path, progress: bool) -> AcquireReturnProxy[FileLock]:
    """Take the lock between processes, to be released by `with`; the system frees it when its holder dies."""
    lock = FileLock(file)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process prepares this model, waiting for {file}", progress)
        return lock.acquire()


def convert(file: Path, out: Path, progress: bool) -> None:
    """Run `models.gguf` in a process of its own. It ends with this one: its stdin closes. Raises ModelLoadError."""
    package = str(Path(overlap_serve.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    stdin, held = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "overlap_serve.models.gguf", "--watch-stdin", str(file), str(out)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=None if progress else subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(held)
        os.close(stdin)
    if done.returncode:
        raise ModelLoadError(_failure(file, done))
    for line in done.stdout.splitlines():
        log.warning("%s: %s", file.name, line)


def _failure(file: Path, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 2 and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1]
    if done.returncode < 0:
        hint = "; perhaps memory ran out: free some" if done.returncode == -signal.SIGKILL else ""
        return f"{file}: the conversion was killed by {signal.Signals(-done.returncode).name}{hint}; start again"
    lines = (done.stderr or "").strip().splitlines()
    return f"{file}: the conversion ended with status {done.returncode} ({lines[-1] if lines else 'see above'})"
