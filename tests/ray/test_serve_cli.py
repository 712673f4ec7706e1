"""Ray's own command line, as the README says it: `serve run`, Ctrl-C, `serve deploy`; HAProxy on and off; from another directory."""

from __future__ import annotations

import secrets
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from overlap_serve.config import parse_config
from tests.ray.commands import END_TIMEOUT_S, START_TIMEOUT_S, config_file, environment, running, session, tool
from tests.ray.conftest import App, eventually, fake_args, free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


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
