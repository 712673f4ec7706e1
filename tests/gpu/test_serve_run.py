"""`serve run` with `device: cuda`: the whole shape on a GPU answers with the same text as on a CPU, in float32.

Stands alone on httpx: the GPU machine has neither the openai client nor HAProxy.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is the capital of France?", "Name three planets.", "Write a line about the sea."]
SERVE = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve_run(folder: Path, args: dict[str, object]) -> Iterator[str]:
    """A server of its own cluster; yields its URL, ends it with Ctrl-C. Its log is printed if it does not get ready."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = free_port()
    document["http_options"]["port"] = port
    document["applications"][0]["args"] = args
    env = document["controller_options"]["runtime_env"]["env_vars"]
    env["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    document["applications"][0]["runtime_env"]["env_vars"] = env
    file = folder / f"{args['device']}.yaml"
    file.write_text(yaml.safe_dump(document))
    log = folder / f"{args['device']}.log"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_folder, log.open("wb") as output:
        process = subprocess.Popen(
            [*SERVE, "run", str(file)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": ray_folder, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)  # another process' start sends no event
    pytest.fail(f"not ready; its log:\n{log.read_text(errors='replace')[-6000:]}")


def answers(url: str) -> list[str]:
    texts = []
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["message"]["content"])
    return texts


def test_cuda_answers_like_cpu_in_float32(tmp_path: Path) -> None:
    texts = {}
    for device in ("cuda", "cpu"):
        begin = time.monotonic()
        with serve_run(tmp_path, {"device": device, "dtype": "float32"}) as url:
            started = time.monotonic()
            texts[device] = answers(url)
            print(f"{device}: ready after {started - begin:.1f} s, answered after {time.monotonic() - started:.1f} s")
            attention = [
                line for line in httpx.get(f"{url}/metrics").text.splitlines() if "overlap_build_info{" in line
            ]
            print(attention)
    assert texts["cuda"][0] == "The capital of France is Paris."
    assert texts["cuda"] == texts["cpu"]
    print(texts["cuda"])
