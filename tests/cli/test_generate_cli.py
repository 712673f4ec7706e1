"""`overlap-serve generate`: prompts from everywhere, answers in their order, as text or JSON lines."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_serve.cli import main
from overlap_serve.llm import LLM
from tests.cli.terminal import terminal

FAKE = ("--engine", "fake", "--set", "fake={base_ms: 0.2, max_model_len: 512}")
SEEDED = ("--seed", "1", "--max-tokens", "6")


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What the fake engine says to some prompts with SEEDED."""
    prompts = ["one", "two", "three", "one\ntwo\n"]
    with LLM(engine="fake", fake={"base_ms": 0.0, "max_model_len": 512}) as llm:
        return {
            prompt: result.text
            for prompt, result in zip(prompts, llm.generate(prompts, {"seed": 1, "max_tokens": 6}), strict=True)
        }


def stdin(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def test_one_prompt_prints_its_text_alone(answers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", *FAKE, *SEEDED]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (answers["one"] + "\n", "")


def test_several_have_headings(answers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "two", *FAKE, *SEEDED]) == 0
    assert capsys.readouterr().out == f"=== prompt 0\n{answers['one']}\n=== prompt 1\n{answers['two']}\n"


def test_choices_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "--n", "2", *FAKE, *SEEDED]) == 0
    assert capsys.readouterr().out.count("=== prompt 0 choice ") == 2


@pytest.mark.parametrize("source", ["stdin", "dash", "file"])
def test_lines_are_prompts(
    source: str,
    answers: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b"one\n\ntwo\nthree"
    (tmp_path / "prompts.txt").write_bytes(text)
    stdin(text, monkeypatch)
    named = {"stdin": [], "dash": ["--file", "-"], "file": ["--file", str(tmp_path / "prompts.txt")]}[source]
    assert main(["generate", *named, "--jsonl", *FAKE, *SEEDED]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two", "three"]
    assert [line["choices"][0]["text"] for line in lines] == [answers[line["prompt"]] for line in lines]


def test_a_whole_text_is_one_prompt(
    answers: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(b"one\ntwo\n", monkeypatch)
    assert main(["generate", "--input", "text", *FAKE, *SEEDED]) == 0
    assert capsys.readouterr().out == answers["one\ntwo\n"] + "\n"


def test_json_lines_have_their_own_parameters_and_say_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [104, 105], "max_tokens": 2}\n{"prompt": "one", "n": 2, "seed": 9}\n')
    assert main(["generate", "--file", str(file), "--jsonl", *FAKE, *SEEDED]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["index"] == 0 and first["prompt"] == first["prompt_token_ids"] == [104, 105]
    assert len(first["choices"][0].pop("token_ids")) == 2
    assert first["choices"] == [
        {"index": 0, "text": first["choices"][0]["text"], "finish_reason": "length", "stop_reason": None}
    ]
    assert first["usage"]["total_tokens"] == 4
    assert [choice["index"] for choice in second["choices"]] == [0, 1]


def test_conversations_come_as_json_lines_or_with_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(b'{"messages": [{"role": "user", "content": "one"}]}\n', monkeypatch)
    assert main(["generate", "--input", "jsonl", *FAKE, *SEEDED]) == 0
    from_file = capsys.readouterr().out
    assert main(["generate", "--chat", "one", *FAKE, *SEEDED]) == 0
    assert capsys.readouterr().out == from_file


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (b"", (), "stdin: holds no prompts"),
        (b"\xff", (), "stdin: cannot be read"),
        (b"{", ("--input", "jsonl"), "stdin, line 1: not a JSON object"),
        (b'{"prompt": "a"}\n[]', ("--input", "jsonl"), "stdin, line 2: not a JSON object"),
        (b'{"text": "a"}', ("--input", "jsonl"), "stdin, line 1: needs either `prompt` or `messages`"),
        (b'{"prompt": "a"}\n{"messages": []}', ("--input", "jsonl"), "some lines have `prompt`, others `messages`"),
        (b'{"prompt": "a"}', ("--input", "jsonl", "--chat"), "--chat is for plain prompts"),
        (b'{"prompt": "a"}\n{"prompt": "b", "tmp": 1}', ("--input", "jsonl"), "prompt [1]: tmp is not a known field"),
        (b"", ("--file", "/no/such/file"), "/no/such/file: cannot be read"),
        (b"", ("a", "--file", "b"), "leave --file and --input out"),
        (b"a", ("--temperature", "9"), "temperature is 9.0"),
        (b"a", ("--param", "top_kk=1"), "top_kk is not a known field"),
        (b"a", ("--set", "api_keys=[a]"), "api_keys: only a server has a use for that"),
        (b"a", ("--set", "pagesize=3"), "did you mean page_size?"),
        (b"a", ("--config", "/no/such.yaml"), "/no/such.yaml"),
    ],
)
def test_mistakes_are_named_on_one_line(
    text: bytes,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin(text, monkeypatch)
    assert main(["generate", *FAKE, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.startswith("overlap-serve: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("argument", ["top_k", "=1", "top_k=[1"])
def test_an_assignment_must_be_one(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "a", "--param", argument])
    assert "--param" in capsys.readouterr().err


def test_the_engine_can_be_a_servers(
    tmp_path: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's own fields in the file do no harm; what is given beside it wins."""
    file = tmp_path / "serve_config.yaml"
    file.write_text("engine: fake\napi_keys: [k]\nfake: {base_ms: 0.2, max_model_len: 4}\n")
    assert main(["generate", "one", "--config", str(file), "--set", "fake={max_model_len: 512}", *SEEDED]) == 0
    assert capsys.readouterr().out == answers["one"] + "\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "overlap_serve.cli", "generate", "a", "--engine", "fake", "--max-tokens", "1"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)


def test_progress_and_ctrl_c_on_a_terminal() -> None:
    many = ["--param", "timeout_s=60", "--max-tokens", "400", "--n", "64"]
    with terminal("generate", "a", "b", *FAKE, "--max-tokens", "2") as screen:
        screen.until("2/2")
        assert screen.wait() == 0
    with terminal("generate", "a", "--engine", "fake", *many) as screen:
        screen.until("0/1")
        screen.type("\x03")
        assert screen.wait() == 130
        assert "Traceback" not in screen.screen
