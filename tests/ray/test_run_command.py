"""`python -m deployments.run`: drains on SIGTERM, and says on the terminal what is wrong with a file, a model or a port."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from overlap_serve.config import parse_config
from tests.embedded import embedded_folder
from tests.ray.commands import END_TIMEOUT_S, config_file, environment, running, session
from tests.ray.conftest import App, eventually, fake_args
from tests.ray.test_life_cycle import end_of, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "deployments.run"]


@contextmanager
def served(ray_folder: Path, tmp_path: Path, **args: object) -> Iterator[tuple[App, subprocess.Popen[bytes]]]:
    file, port = config_file(tmp_path, True, **args)
    with running([*COMMAND, str(file)], tmp_path, environment(ray_folder), tmp_path / "log") as process:
        app = App(f"http://127.0.0.1:{port}", parse_config(fake_args(**args)))
        try:
            app.wait_ready()
            yield app, process
        finally:
            app.close()


def open_streams(
    pool: ThreadPoolExecutor, app: App, num_short: int
) -> tuple[list[Future[list[str]]], Future[list[str]]]:
    """Short ones of 2 s, and one that would take 80 s."""
    return [open_stream(pool, app, 200) for _ in range(num_short)], open_stream(pool, app, 8000)


def check_refuses_while(app: App, stream: Future[list[str]]) -> None:
    """From here to the end of the stream, every new request is told to come back; Serve's own 404 would tell it never to."""
    refusals: list[httpx.Response] = []

    def ended() -> bool:
        answer = app.http.post("/v1/completions", json=app.completion(max_tokens=4))
        refusals.append(answer)
        return stream.done()

    eventually(ended, 20, "the stream ends")
    for answer in refusals[:-1]:  # after the stream the application goes, and the last may have come too late
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_draining"), answer.text
        assert int(answer.headers["retry-after"]) >= 1
    assert len(refusals) > 10


def test_a32_sigterm_drains_and_leaves_no_process(ray_folder: Path, tmp_path: Path) -> None:
    """20 streams, one endless: all get a proper end, newcomers are refused, exit 0."""
    drain_s = 5.0
    with served(ray_folder, tmp_path, drain_timeout=drain_s) as (app, process), ThreadPoolExecutor(20) as pool:
        short, endless = open_streams(pool, app, 19)
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        refused_s = eventually(
            lambda: app.http.get("/health/ready").json()["status"] == "draining", drain_s, "it is not ready any more"
        )
        check_refuses_while(app, endless)
        ends = [end_of(stream.result(drain_s + 10)) for stream in short]
        assert end_of(endless.result(drain_s + 10)) == ("abort", "shutdown")
        drained_s = time.monotonic() - begin_s
        assert process.wait(drain_s + END_TIMEOUT_S) == 0
        print(f"FAULT SIGTERM: refuses after {refused_s:.1f} s, last stream after {drained_s:.1f} s, ", end="")
        print(f"exit after {time.monotonic() - begin_s:.1f} s")
        assert ends == [("length", None)] * 19
        assert drain_s - 1 < drained_s < drain_s + 5
        eventually(lambda: not session(process.pid), 5, "every process has ended")


def test_a32_a_second_sigterm_does_not_wait(ray_folder: Path, tmp_path: Path) -> None:
    with served(ray_folder, tmp_path, drain_timeout=60.0) as (app, process), ThreadPoolExecutor(1) as pool:
        _, endless = open_streams(pool, app, 0)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: app.http.get("/health").json()["status"] == "draining", 10, "the drain has begun")
        assert not endless.done()
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_TIMEOUT_S) == 0
        print(f"FAULT second SIGTERM: exit after {time.monotonic() - begin_s:.1f} s")
        eventually(lambda: not session(process.pid), 5, "every process has ended")
        assert endless.exception(5) is not None or endless.result()[-1] != "[DONE]"


# -- what is wrong is said, and nothing is left


def failed(ray_folder: Path, tmp_path: Path, file: Path) -> tuple[int, str]:
    """Exit status and output of a run that is to end by itself."""
    log = tmp_path / "log"
    with running([*COMMAND, str(file)], tmp_path, environment(ray_folder), log) as process:
        status = process.wait(90)
        eventually(lambda: not session(process.pid), 10, "every process has ended")
    return status, log.read_text(errors="replace")


def changed(file: Path, change: dict[str, object]) -> Path:
    """The file with some `args` of its application set."""
    document: Any = yaml.safe_load(file.read_text())
    document["applications"][0]["args"] |= change
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_misspelt_field_is_named(ray_folder: Path, tmp_path: Path) -> None:
    file, _ = config_file(tmp_path, False)
    status, output = failed(ray_folder, tmp_path, changed(file, {"max_runing_requests": 3}))
    assert status == 2
    assert "max_runing_requests: unknown field" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_misspelt_serve_field_is_named(ray_folder: Path, tmp_path: Path) -> None:
    file, _ = config_file(tmp_path, False)
    document: Any = yaml.safe_load(file.read_text())
    document["http_options"]["port"] = "eight thousand"
    file.write_text(yaml.safe_dump(document))
    status, output = failed(ray_folder, tmp_path, file)
    assert status == 2
    assert "http_options.port" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_missing_model_is_named_and_nothing_is_written(ray_folder: Path, tmp_path: Path) -> None:
    file, _ = config_file(tmp_path, False)
    before = {path.name for path in tmp_path.iterdir()}
    missing = str(tmp_path / "no-such-model")
    status, output = failed(ray_folder, tmp_path, changed(file, {"engine": "torch", "model": missing}))
    assert status == 2
    assert missing in output.splitlines()[-1]
    assert "Traceback" not in output
    assert {path.name for path in tmp_path.iterdir()} == before | {"log"}


def test_a_port_in_use_is_named(ray_folder: Path, tmp_path: Path) -> None:
    file, port = config_file(tmp_path, False)
    with socket.create_server(("127.0.0.1", port)):
        status, output = failed(ray_folder, tmp_path, file)
    assert status == 2
    assert f"port {port} of 127.0.0.1 is in use" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "change", [{"chat_template": "no-such-file.jinja"}, {"model": "FOLDER"}], ids=["template", "model"]
)
def test_what_cannot_be_read_is_named_before_ray_starts(
    ray_folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    """FOLDER: a model of a kind that nobody knows."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    file, _ = config_file(tmp_path, False)
    change = {"engine": "torch", **{k: str(tmp_path) if v == "FOLDER" else v for k, v in change.items()}}
    status, output = failed(ray_folder, tmp_path, changed(file, change))
    assert status == 2
    assert "no-such-file.jinja" in output or "NobodyForCausalLM" in output
    assert "Traceback" not in output and "Ray instance" not in output


@pytest.mark.model
def test_weights_that_cannot_be_loaded_end_the_run_with_the_reason(ray_folder: Path, tmp_path: Path) -> None:
    """Only the rank reads them, in a process far from the terminal."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_folder(), folder)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    config, _ = config_file(tmp_path, False)
    change: dict[str, object] = {"engine": "torch", "device": "cpu", "model": str(folder)}
    status, output = failed(ray_folder, tmp_path, changed(config, change))
    assert status == 1
    reason = next(line for line in output.splitlines() if "cannot be deployed" in line)
    assert "model.safetensors" in reason
