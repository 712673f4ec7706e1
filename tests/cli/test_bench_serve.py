"""`overlap-serve bench serve` from its command line to its files, against a small server in another thread."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlap_serve.cli import main
from tests.bench.sse_server import Answer, Asked, SseServer, prompt_tokens, sse_server, streamed, whole
from tests.http_rig import http_rig

SMALL = ("--input-len", "8", "--output-len", "4", "--num-requests", "6", "--warmup", "1")


@contextmanager
def running(answer: Callable[[Asked], Answer] = streamed) -> Iterator[SseServer]:
    started: list[SseServer] = []
    ready, end = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with sse_server(answer) as server:
            started.append(server)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.close()


def bench(server: SseServer, *options: str) -> int:
    return main(["bench", "serve", "--url", server.url, *options])


def test_a_sweep_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    options = ("--concurrency", "1", "2", "--request-rate", "500", "inf", "--goodput", "ttft:60000", "--save-requests")
    with running() as server:
        assert bench(server, *SMALL, *options, "--json", str(file)) == 0
    shown = capsys.readouterr()
    assert shown.out.count("requests            6 ok, 0 failed") == 4
    table = shown.out.splitlines()[-5:]
    assert table[0].split()[:4] == ["rate", "conc", "ok", "failed"]
    assert [line.split()[:3] for line in table[1:]] == [
        ["500", "1", "6"], ["500", "2", "6"], ["inf", "1", "6"], ["inf", "2", "6"],
    ]  # fmt: skip
    result = json.loads(file.read_text())
    assert [(point["rate"], point["concurrency"]) for point in result["points"]] == [
        (500, 1), (500, 2), (None, 1), (None, 2),
    ]  # fmt: skip
    for point in result["points"]:
        assert (point["ok"], point["errors"], point["input_tokens"], point["output_tokens"]) == (6, {}, 48, 24)
        assert point["goodput_rps"] == point["requests_per_s"]
        assert point["itl_ms"]["count"] == 18
        assert [len(record["chunks_s"]) for record in point["records"]] == [4] * 6
    assert "api_key" not in result["config"]
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + 1 + 4 * 6  # the test request, the warm-up, four points: none twice


def test_one_point_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as server:
        assert bench(server, *SMALL) == 0
    out = capsys.readouterr().out
    assert "time to first token" in out
    assert "TTFT p50" not in out


def test_a_server_that_takes_no_ids_gets_words(capsys: pytest.CaptureFixture[str]) -> None:
    def text_only(asked: Asked) -> Answer:
        if isinstance(asked.body["prompt"], list):
            return whole(400, {"error": {"message": "prompt must be a string"}})
        return streamed(asked)

    with running(text_only) as server:
        assert bench(server, *SMALL) == 0
    assert "sending words instead" in capsys.readouterr().err
    assert {prompt_tokens(body) for body in server.bodies} == {8}


def test_chats_prompts_of_a_file_and_keys(tmp_path: Path) -> None:
    prompts, key = tmp_path / "p.txt", tmp_path / "key"
    prompts.write_text("hello there\nand you\n")
    key.write_text("secret\n")
    with running() as server:
        options = (
            "--endpoint",
            "chat",
            "--prompts",
            str(prompts),
            "--api-key",
            f"@{key}",
            "--no-ignore-eos",
            "--model",
            "x",
        )
        assert bench(server, *SMALL, *options) == 0
    measured = server.bodies[-6:]
    assert sorted(body["messages"][0]["content"] for body in measured) == ["and you"] * 3 + ["hello there"] * 3  # type: ignore[index]
    assert {str(body["model"]) for body in measured} == {"x"}
    assert not any("ignore_eos" in body for body in measured)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}
    assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": i / 100, "input_length": 5 + i, "output_length": 2, "prefix_hash": "p"} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with running() as server:
        assert bench(server, "--trace", str(trace), "--warmup", "0", "--input-len", "3") == 0
    assert "4 ok, 0 failed" in capsys.readouterr().out
    assert sorted(prompt_tokens(body) for body in server.bodies) == [3, 5, 6, 7, 8]


def test_turns_of_a_session_are_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as server:
        assert bench(server, *SMALL, "--turns", "3", "--prefix-len", "4", "--concurrency", "2") == 0
    assert "18 ok, 0 failed" in capsys.readouterr().out
    assert sorted({prompt_tokens(body) for body in server.bodies}) == [12, 24, 36]


def test_failures_are_counted_and_a_run_without_success_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    def only_the_first(asked: Asked) -> Answer:
        return streamed(asked) if asked.body["max_tokens"] == 1 else whole(429, {"error": {"message": "queue is full"}})

    with running(only_the_first) as server:
        assert bench(server, *SMALL, "--warmup", "0") == 1
    out = capsys.readouterr().out
    assert "0 ok, 6 failed" in out
    assert "  http_429          6   queue is full" in out


def test_what_cannot_work_is_said_before_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival_s": 0, "input_length": 1, "output_length": 1}')
    for options, said in (
        (("--goodput", "itl:5"), "METRIC:MILLISECONDS"),
        (("--trace", str(trace), "--request-rate", "2"), "arrival times of its own"),
        (("--trace", str(trace), "--turns", "2"), "--turns is for random prompts"),
        (("--token-ids", "9", "9"), "LOW < HIGH"),
        (("--save-requests",), "--json FILE"),
        (("--json", str(tmp_path / "none" / "x.json")), "there is no folder"),
        (("--plot", str(tmp_path / "x.gif")), "must end with one of .png"),
        (("--warmup", "-1"), "must not be negative"),
        (("--prompts", str(tmp_path / "none")), "cannot be read"),
    ):
        assert main(["bench", "serve", "--url", "http://127.0.0.1:1", *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 2
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_test_request_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with running(lambda asked: whole(404, {"error": {"message": "no such model"}})) as server:
        assert bench(server, *SMALL) == 2
    assert "the test request failed: http_404: no such model" in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_pictures_without_matplotlib_are_an_error_that_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "overlap_serve.bench.plots", raising=False)
    for module in ("matplotlib", "matplotlib.axes"):  # another test may have loaded them
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["bench", "serve", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'overlap-serve[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--token-ids", "33", "127"), ("--endpoint", "chat"), ("--text",)], ids=" ".join)
def test_our_own_server_gives_what_is_asked(options: tuple[str, ...], tmp_path: Path) -> None:
    """The whole path with the fake engine: usage, ids of turns, lengths and chunks as the definitions want them."""
    file = tmp_path / "result.json"
    with http_rig() as rig:
        shape = ("--input-len", "20", "--output-len", "6", "--num-requests", "8", "--concurrency", "4", "--turns", "2")
        assert main(["bench", "serve", "--url", rig.url, *shape, *options, "--json", str(file)]) == 0
    [point] = json.loads(file.read_text())["points"]
    assert (point["ok"], point["errors"], point["output_tokens"]) == (16, {}, 16 * 6)
    assert point["tpot_ms"]["count"] == 16
    if options[0] == "--token-ids":
        assert point["input_tokens"] == 8 * (20 + 20 + 6 + 20)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'overlap-serve[bench]'")
    file = tmp_path / f"result.{suffix}"
    with running() as server:
        assert bench(server, *SMALL, "--concurrency", "1", "2", "--plot", str(file)) == 0
    assert file.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])
