"""Ray's own command line, as the README says it: `serve run`, Ctrl-C, `serve deploy`; HAProxy on and off; from another directory."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from overlap_serve.config import parse_config
from tests.ray.conftest import ROOT, App, eventually, fake_args, free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """RAY_TMPDIR; short, because Ray puts sockets there."""
    folder = Path(tempfile.mkdtemp(prefix="overlap-cli-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def config_file(folder: Path, haproxy: bool) -> tuple[Path, int]:
    """serve_config.yaml with the fake engine and free ports."""
    document: Any = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = free_port()
    document["http_options"]["port"] = port
    document["applications"][0]["args"] = fake_args()
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


def check_answers(app: App) -> None:
    app.wait_ready()
    answer = app.openai.completions.create(model=app.model, prompt="hello", max_tokens=8, temperature=0)
    chunks = app.openai.completions.create(model=app.model, prompt="hello", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text


@pytest.mark.parametrize("haproxy", [True, False], ids=["haproxy", "python-proxy"])
def test_serve_run_answers_and_ctrl_c_leaves_no_process(ray_folder: Path, tmp_path: Path, haproxy: bool) -> None:
    """From a directory that is not the repository."""
    file, port = config_file(tmp_path, haproxy)
    log = tmp_path / "log"
    with running([tool("serve"), "run", str(file)], tmp_path, environment(ray_folder), log) as process:
        app = App(f"http://127.0.0.1:{port}", parse_config(fake_args()))
        check_answers(app)
        app.close()
        assert any("haproxy -" in " ".join(p.cmdline()) for p in session(process.pid)) == haproxy
        process.send_signal(signal.SIGINT)
        assert process.wait(END_TIMEOUT_S) == 0
        eventually(lambda: not session(process.pid), 5, "every process has ended")
    text = log.read_text(errors="replace")
    assert f"RAY_SERVE_ENABLE_HA_PROXY={int(haproxy)}" in text
    assert ("slow above some" in text) == (not haproxy)


def test_serve_run_names_an_unknown_field(ray_folder: Path, tmp_path: Path) -> None:
    file, _ = config_file(tmp_path, False)
    document = yaml.safe_load(file.read_text())
    document["applications"][0]["args"]["max_runing_requests"] = 3
    file.write_text(yaml.safe_dump(document))
    log = tmp_path / "log"
    with running([tool("serve"), "run", str(file)], tmp_path, environment(ray_folder), log):
        eventually(
            lambda: "max_runing_requests" in log.read_text(errors="replace").split("ValidationError", 1)[-1],
            START_TIMEOUT_S,
            "the log names the field",
        )


def test_serve_deploy_onto_a_running_cluster(ray_folder: Path, tmp_path: Path) -> None:
    file, port = config_file(tmp_path, True)
    dashboard = free_port()
    # A cluster has a token by default in Ray 2.60, and `serve deploy` must show it; this one belongs to this test alone.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = environment(ray_folder, RAY_DASHBOARD_ADDRESS=f"http://127.0.0.1:{dashboard}", **token)
    del env["RAY_ADDRESS"]
    head = [
        *(tool("ray"), "start", "--head", "--block", "--port=0", "--num-cpus=4"),
        *(f"--dashboard-port={dashboard}", f"--temp-dir={ray_folder}"),
    ]
    with running(head, tmp_path, env, tmp_path / "log"):

        def deploy() -> bool:
            done = subprocess.run(
                [tool("serve"), "deploy", str(file)], cwd=tmp_path, env=env, capture_output=True, timeout=60
            )
            return done.returncode == 0

        eventually(deploy, START_TIMEOUT_S, "serve deploy is accepted")
        app = App(f"http://127.0.0.1:{port}", parse_config(fake_args()))
        check_answers(app)
        app.close()
