"""Commands that start a Ray of their own: configuration files, environment, and sessions of which no process may be left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ray.conftest import ROOT, fake_args, free_port

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


def config_file(folder: Path, haproxy: bool, **args: object) -> tuple[Path, int]:
    """serve_config.yaml with the fake engine, `args` and free ports."""
    document: Any = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = free_port()
    document["http_options"]["port"] = port
    document["applications"][0]["args"] = fake_args(**args)
    env = document["controller_options"]["runtime_env"]["env_vars"]
    env |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    if not haproxy:
        env |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
    document["applications"][0]["runtime_env"]["env_vars"] = env
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file, port


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": path,
        **more,
    }


def tool(name: str) -> str:
    """A command that was installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


@contextmanager
def running(command: list[str], cwd: Path, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own; every process of that session is gone at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        for member in session(process.pid):
            member.kill()
        process.wait(END_TIMEOUT_S)


def session(leader: int) -> list[psutil.Process]:
    """Living processes of a session."""
    return [process for process in psutil.process_iter() if is_member(process, leader)]


def is_member(process: psutil.Process, leader: int) -> bool:
    try:
        return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # gone meanwhile
        return False
