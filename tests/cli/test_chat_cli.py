"""`overlap-serve chat`: on a real terminal and in a pipe, with a real server and with an engine of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlap_serve.cli import main
from overlap_serve.cli.chat import Chat, Console
from overlap_serve.cli.talkers import Message, Said, base_url
from overlap_serve.config import FakeModel
from overlap_serve.errors import InvalidRequest, RequestError
from overlap_serve.llm import LLM
from tests.cli.terminal import CTRL_C, CTRL_D, terminal
from tests.http_rig import HttpRig, http_rig

OFFLINE = ("chat", "--engine", "fake", "--set", "fake={base_ms: 0.2, max_model_len: 4096}")
GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.fixture(scope="module")
def module_rig() -> Iterator[HttpRig]:
    with http_rig(FakeModel(base_ms=1.0, max_model_len=4096), api_keys=("secret",)) as rig:
        yield rig


@pytest.fixture
def rig(module_rig: HttpRig) -> Iterator[HttpRig]:
    yield module_rig
    module_rig.assert_at_rest()


def expected(*turns: str, system: str | None = None) -> list[str]:
    """What the fake engine answers to each turn of a conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    with LLM(engine="fake", fake={"base_ms": 0.0, "max_model_len": 4096}) as llm:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            [result] = llm.chat(messages, {"temperature": 0, "max_tokens": 12})
            messages.append({"role": "assistant", "content": result.text})
            answers.append(result.text)
    return answers


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs the command in this process with a text on stdin."""

    def run(text: str, *arguments: str) -> Ended:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(arguments)
        return Ended(status, *capsys.readouterr())

    return run


# -- in a pipe


def test_a_conversation_in_a_pipe_with_a_server(rig: HttpRig) -> None:
    command = [sys.executable, "-m", "overlap_serve.cli", "chat", "--url", rig.url, "--api-key", "secret", *GREEDY]
    done = subprocess.run(command, input="hi\nand then?\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == expected("hi", "and then?")
    assert done.returncode == 0


def test_a_conversation_in_a_pipe_without_a_server(pipe: Callable[..., Ended]) -> None:
    done = pipe("/system be short\nhi\n/reset\nho", *OFFLINE, *GREEDY)
    assert done.stdout.splitlines() == expected("hi", system="be short") + expected("ho", system="be short")
    assert "[system message: be short]" in done.stderr
    assert done.returncode == 0


def test_several_lines_between_quotes_are_one_message(pipe: Callable[..., Ended]) -> None:
    done = pipe('"""\ntwo\nlines\n"""\n/exit\nnever\n', *OFFLINE, *GREEDY)
    assert done.stdout.splitlines() == expected("two\nlines")


def test_a_failure_in_a_pipe_is_the_end_with_the_servers_words(rig: HttpRig, pipe: Callable[..., Ended]) -> None:
    done = pipe("hi\nho\n", "chat", "--url", rig.url, "--api-key", "secret", "--param", "top_p=7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "overlap-serve: the server refused (400): top_p is 7, must be at most 1.0\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--api-key", "wrong"), "the server refused (401)"),
        (("--api-key", "@/no/such/file"), "--api-key: "),
        (("--engine", "fake"), "--url asks for a server, --engine for an engine here"),
        (("--set", "page_size=8"), "--url asks for a server, --set for an engine here"),
        (("--api-key", "secret", "--model", "other"), "does not exist; this server has 'fake'"),
    ],
)
def test_what_a_server_refuses_and_what_contradicts_itself(
    rig: HttpRig,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", rig.url, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_key_can_come_from_a_file(
    rig: HttpRig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", rig.url, "--api-key", f"@{tmp_path / 'key'}", *GREEDY]) == 0
    assert capsys.readouterr().out.splitlines() == expected("hi")


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--timeout", "5"]) == 2
    shown = capsys.readouterr().err
    assert "nothing answers at http://127.0.0.1:9/v1" in shown and "--model" in shown


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h:1/v1/", "https://h:1/v1"),
        ("https://h/openai/v1", "https://h/openai/v1"),
    ],
)
def test_addresses_are_completed(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h", "http://"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is no address of a server"):
        base_url(url)


# -- on a terminal


def test_a_person_chats_with_a_server(rig: HttpRig) -> None:
    first, second = expected("hi", "and then?")
    with terminal("chat", "--url", rig.url, "--api-key", "secret", *GREEDY) as screen:
        screen.until(f"fake at {rig.url}/v1. /help shows the commands.")
        screen.until("> ")
        screen.type("hi\n")
        screen.until(first)
        screen.until("[cut at the token limit]")
        screen.until("> ")
        screen.type("and then?\n")
        screen.until(second)
        screen.until("> ")
        screen.type("/reset\n")
        screen.until("forgotten")
        screen.until("> ")
        screen.type("hi\n")
        screen.until(first)
        screen.until("> ")
        screen.type("/nonsense\n")
        screen.until("/nonsense is no command")
        screen.until("> ")
        screen.type("/exit\n")
        assert screen.wait() == 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on_a_second_one_leaves(rig: HttpRig) -> None:
    with terminal("chat", "--url", rig.url, "--api-key", "secret", "--temperature", "0") as screen:
        screen.until("> ")
        screen.type("/system x\n")
        screen.until("> ")
        screen.type("long\n")
        [start] = expected("long", system="x")
        screen.until(start)
        screen.type(CTRL_C)
        screen.until("[stopped; Ctrl-C again or /exit leaves]")
        rig.assert_at_rest()  # the server has stopped too
        screen.until("> ")
        screen.type("/help\n")
        screen.until("/system TEXT")
        screen.until("> ")
        screen.type(CTRL_C)
        screen.until("[stopped")
        screen.until("> ")
        screen.type(CTRL_C)
        assert screen.wait() == 130


def test_ctrl_c_offline_and_end_of_input(tmp_path: Path) -> None:
    [start] = expected("long")
    with terminal(*OFFLINE, "--temperature", "0") as screen:
        screen.until("in this process. /help")
        screen.until("> ")
        screen.type("long\n")
        screen.until(start)
        screen.type(CTRL_C)
        screen.until("[stopped")
        screen.until("> ")
        screen.type("/reset\n")
        screen.until("> ")
        screen.type("long\n")
        screen.until(start)
        screen.type(CTRL_C)
        screen.until("[stopped")
        screen.until("> ")
        screen.type(CTRL_D)
        assert screen.wait() == 0


def test_an_error_on_a_terminal_is_shown_and_the_chat_goes_on(rig: HttpRig) -> None:
    with terminal("chat", "--url", rig.url, "--api-key", "secret", *GREEDY) as screen:
        screen.until("> ")
        screen.type("x" * 4000 + "\n")
        screen.until("> ")
        screen.type("x" * 4000 + "\n")
        screen.until("error: the server refused (400)")
        screen.until("> ")
        screen.type("/exit\n")
        assert screen.wait() == 0


# -- what stays in the conversation


class Scripted:
    """Answers, or fails, as it is told; remembers what it was asked."""

    title = "scripted"

    def __init__(self, *answers: str | BaseException) -> None:
        self.asked: list[list[Message]] = []
        self._answers = list(answers)

    def answer(self, messages: Sequence[Message]) -> Generator[Said, None, None]:
        self.asked.append(list(messages))
        answer = self._answers.pop(0)
        if isinstance(answer, str):
            yield Said(answer, None)
            yield Said("", "stop")
        else:
            yield Said("half", None)
            raise answer

    def close(self) -> None:
        return None


class Screen(Console):
    """A person who types fixed lines."""

    def __init__(self, *lines: str) -> None:
        self.interactive = True
        self.notes: list[str] = []
        self._lines = list(lines)

    def read(self, prompt: str) -> str | None:
        return self._lines.pop(0) if self._lines else None

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_half_an_answer_stays_in_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    talker = Scripted(KeyboardInterrupt(), RequestError("broken"), "fine")
    screen = Screen("a", "b", "c")
    assert Chat(talker, screen, None).run() == 0
    assert [message["content"] for message in talker.asked[2]] == ["a", "half", "b", "half", "c"]
    assert "error: broken" in screen.notes


def test_answers_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Chat(Scripted("a\x1b[2Jb\x07\x9b1mc\td\ne"), Screen("x"), None).run()
    assert capsys.readouterr().out == "a[2Jb1mc\td\ne\n"


def test_a_path_is_a_message_and_no_command() -> None:
    talker = Scripted("x")
    Chat(talker, Screen("/etc/passwd is what?", "   ", "/system s", "/system -", "/system"), None).run()
    assert [message["content"] for message in talker.asked[0]] == ["/etc/passwd is what?"]
