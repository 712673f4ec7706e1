"""`overlap-serve bench serve`: load against a server with an OpenAI API, and what came of it as table, JSON and pictures."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import itertools
import math
import platform
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
from tqdm import tqdm

from overlap_serve import __version__
from overlap_serve.bench.api import Api
from overlap_serve.bench.client import Client, Reply
from overlap_serve.bench.load import Load, run_load, settled_heap
from overlap_serve.bench.report import Point, as_json, point_text, sweep_table
from overlap_serve.bench.stats import SLO_METRICS, Record, parse_slo, summarize
from overlap_serve.bench.workload import RandomShape, Session, random_sessions, read_prompts, read_trace
from overlap_serve.cli.bench_options import count, write_text
from overlap_serve.cli.chat import DEFAULT_URL
from overlap_serve.cli.options import Commands, assignment, completes_files, read_key, with_examples
from overlap_serve.cli.talkers import base_url
from overlap_serve.errors import ConfigError, InvalidRequest, RequestError, ServerUnavailable

ALL_FAILED = 1
REFUSED = ("http_400", "http_422")  # what servers answer to a prompt of token ids that they do not take
WARM_SEED = -1
PICTURES = (".png", ".svg", ".pdf")
EXAMPLES = (
    "overlap-serve bench serve --concurrency 1 4 16 64 --num-requests 200",
    "overlap-serve bench serve --url http://gpu:8000 --request-rate 2 4 8 --goodput ttft:200 tpot:50",
    "overlap-serve bench serve --turns 4 --prefix-len 512 --num-prefixes 8 --concurrency 16",
    "overlap-serve bench serve --trace trace.jsonl --json result.json --plot result.png",
    "overlap-serve bench serve --prompts prompts.txt --endpoint chat --no-ignore-eos",
)


def add(kinds: Commands) -> None:
    """kinds: subcommands of `bench`."""
    parser = kinds.add_parser(
        "serve",
        help="load against a server with an OpenAI API",
        description="Send load to a server with an OpenAI API (this one, vLLM, SGLang, llama.cpp) and report latencies, throughput, "
        "goodput and errors. Several rates or concurrencies are a sweep: one point for each combination.",
        **with_examples(*EXAMPLES),
    )
    _add_server(parser)
    _add_load(parser)
    _add_content(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, help="default: %(default)s")
    group.add_argument("--model", help="name in requests (default: the first that the server has)")
    group.add_argument("--api-key", metavar="KEY", help="@FILE reads it from a file, where no `ps` shows it")
    group.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of a request (default: 600)")
    group.add_argument(
        "--param",
        dest="params",
        action="append",
        default=[],
        type=assignment,
        metavar="NAME=VALUE",
        help="any other field of a request's body, as in --param top_k=40; may be repeated",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=_positive,
        nargs="+",
        default=[math.inf],
        metavar="R",
        help="sessions per second; inf: all at once, or as slots of --concurrency come free (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="1: a Poisson process, less: bursts, more: even, inf: a fixed gap (default: 1)",
    )
    group.add_argument(
        "--concurrency", type=count, nargs="+", metavar="N", help="most sessions at a time (default: no limit)"
    )
    group.add_argument("--num-requests", type=count, default=100, metavar="N", help="sessions (default: 100)")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before, not measured (default: 2)")
    group.add_argument("--seed", type=int, default=0, help="same seed, same load; points of a sweep differ")


def _add_content(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    sources = group.add_mutually_exclusive_group()
    completes_files(
        sources.add_argument(
            "--prompts",
            type=Path,
            metavar="FILE",
            help="a prompt per line, or *.jsonl with `prompt` or `messages`; over and over (default: random tokens)",
        )
    )
    completes_files(
        sources.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="JSON lines with arrival_s, input_length, output_length, prefix_hash, or Mooncake's",
        )
    )
    group.add_argument("--trace-speed", type=_positive, default=1.0, metavar="X", help="2: twice as fast (default: 1)")
    group.add_argument("--input-len", type=count, default=256, metavar="N", help="tokens (default: 256)")
    group.add_argument("--output-len", type=count, default=128, metavar="N", help="tokens (default: 128)")
    group.add_argument(
        "--length-spread", type=_share, default=0.0, metavar="X", help="lengths are N * (1 +- X), 0 to 1 (default: 0)"
    )
    group.add_argument("--prefix-len", type=int, default=0, metavar="N", help="shared tokens before the input's own")
    group.add_argument("--num-prefixes", type=count, default=1, metavar="N", help="different ones (default: 1)")
    group.add_argument("--turns", type=count, default=1, metavar="N", help="of a session (default: 1)")
    group.add_argument("--think-time", type=float, default=0.0, metavar="S", help="before each further turn")
    group.add_argument(
        "--token-ids", type=int, nargs=2, default=[1000, 20000], metavar=("LOW", "HIGH"), help="default: 1000 20000"
    )
    group.add_argument(
        "--text", action="store_true", help="send words, not token ids (as for chats and servers that take no ids)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the full output length (default: yes)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"limits for {', '.join(SLO_METRICS)} in ms"
    )
    completes_files(group.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON"))
    group.add_argument("--save-requests", action="store_true", help="with every request's times in the JSON")
    completes_files(
        group.add_argument(
            "--plot", type=Path, metavar="FILE", help="picture (png, svg, pdf); needs overlap-serve[bench]"
        )
    )
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")


def run(args: argparse.Namespace) -> int:
    """Everything is read and understood before the first request."""
    slo_ms = parse_slo(args.goodput)
    _check(args)
    sweep = [sessions_of(args, index) for index in range(len(loads_of(args)))]
    points = asyncio.run(measure(args, sweep, slo_ms))
    if len(points) > 1:
        print(sweep_table(points))
    if args.json is not None:
        _write_json(args, points)
    if args.plot is not None:
        importlib.import_module("overlap_serve.bench.plots").save(points, args.plot)
    return 0 if any(point.summary.ok for point in points) else ALL_FAILED


def loads_of(args: argparse.Namespace) -> list[Load]:
    limits = args.concurrency or [None]
    return [Load(rate, args.burstiness, limit) for rate, limit in itertools.product(args.request_rate, limits)]


def sessions_of(args: argparse.Namespace, point: int) -> list[Session]:
    """What one point of the sweep sends. Raises InvalidRequest."""
    seed = args.seed * 1000 + point
    if args.trace is not None:
        return read_trace(args.trace, seed, tuple(args.token_ids), args.trace_speed)
    if args.prompts is not None:
        return read_prompts(args.prompts, args.num_requests, args.output_len, args.endpoint == "chat")
    return random_sessions(_shape(args), args.num_requests, seed)


async def measure(
    args: argparse.Namespace, sweep: Sequence[Sequence[Session]], slo_ms: dict[str, float]
) -> list[Point]:
    """Every point, after a test request and the warm-up. Prints each as it is done. Raises RequestError if the test fails."""
    key = read_key(args.api_key)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    points = []
    with closing(Client(base_url(args.url), headers, args.timeout)) as client:
        api = await _test(client, await _api(client, args), args)
        if args.warmup > 0:
            warm = [Session(session.turns[:1]) for session in random_sessions(_shape(args), args.warmup, WARM_SEED)]
            await run_load(client, api, warm, Load(concurrency=args.warmup), WARM_SEED)
        for index, (load, sessions) in enumerate(zip(loads_of(args), sweep, strict=True)):
            records, duration_s = await _point(client, api, sessions, load, args.seed * 1000 + index, args.progress)
            points.append(Point(load, summarize(records, duration_s, slo_ms), records))
            print(point_text(points[-1]), flush=True)
    return points


async def _point(
    client: Client, api: Api, sessions: Sequence[Session], load: Load, seed: int, progress: bool
) -> tuple[list[Record], float]:
    total = sum(len(session.turns) for session in sessions)
    disable = None if progress else True  # None: shown on terminals only
    with settled_heap(), tqdm(total=total, unit="req", disable=disable, leave=False) as bar:
        outcome = await run_load(client, api, sessions, load, seed, lambda record: bar.update())
    return outcome.records, outcome.duration_s


async def _api(client: Client, args: argparse.Namespace) -> Api:
    chat = args.endpoint == "chat"
    model = args.model or await _first_model(client, args.url)
    return Api(model, chat, not args.text and not chat, args.ignore_eos, dict(args.params))


async def _first_model(client: Client, url: str) -> str:
    reply = await client.get("/models")
    _raise_for(reply, url)
    try:
        return msgspec.json.decode(reply.body, type=_Models).data[0].id
    except (msgspec.MsgspecError, IndexError):
        raise RequestError(f"{url} lists no models; is the address right? If so, name one with --model") from None


async def _test(client: Client, api: Api, args: argparse.Namespace) -> Api:
    """One request as the load will send them. Falls back to words where token ids are refused. Raises RequestError."""
    [session] = random_sessions(replace(_shape(args), output_len=1, num_turns=1), 1, WARM_SEED - 1)
    [record] = (await run_load(client, api, [session], Load(), WARM_SEED)).records
    if record.error in REFUSED and api.ids:
        print(f"token ids are refused ({record.detail}); sending words instead", file=sys.stderr)
        api = replace(api, ids=False)
        [record] = (await run_load(client, api, [session], Load(), WARM_SEED)).records
    if not record.ok:
        raise RequestError(f"the test request failed: {record.error}: {record.detail}")
    return api


class _Named(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Named]


def _raise_for(reply: Reply, url: str) -> None:
    if reply.error == "connect":
        raise ServerUnavailable(
            f"nothing answers at {url}: {reply.detail}; start a server or give its address with --url"
        )
    if reply.error:
        raise RequestError(f"{url}/models: {reply.error}: {reply.detail}")


def _shape(args: argparse.Namespace) -> RandomShape:
    return RandomShape(
        input_len=args.input_len,
        output_len=args.output_len,
        spread=args.length_spread,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        num_turns=args.turns,
        think_s=args.think_time,
        ids=(args.token_ids[0], args.token_ids[1]),
    )


def _check(args: argparse.Namespace) -> None:
    """Options that contradict each other. Raises InvalidRequest, ConfigError."""
    if args.trace is not None and args.request_rate != [math.inf]:
        raise InvalidRequest("--trace has arrival times of its own; leave --request-rate out, or use --trace-speed")
    if args.turns > 1 and (args.trace is not None or args.prompts is not None):
        raise InvalidRequest("--turns is for random prompts; leave --trace and --prompts out")
    low, high = args.token_ids
    if not 0 <= low < high:
        raise InvalidRequest(f"--token-ids {low} {high}: needs 0 <= LOW < HIGH")
    if args.prefix_len < 0 or args.think_time < 0 or args.warmup < 0:
        raise InvalidRequest("--prefix-len, --think-time and --warmup must not be negative")
    if args.save_requests and args.json is None:
        raise InvalidRequest("--save-requests is for --json FILE")
    for option, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if args.plot is not None:
        if args.plot.suffix not in PICTURES:
            raise ConfigError(f"--plot {args.plot}: the name must end with one of {', '.join(PICTURES)}")
        try:
            importlib.import_module("overlap_serve.bench.plots")
        except ImportError as error:
            raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'overlap-serve[bench]'") from None


def _write_json(args: argparse.Namespace, points: Sequence[Point]) -> None:
    config = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("run", "api_key", "command", "bench_command")
    }
    config["request_rate"] = [None if math.isinf(rate) else rate for rate in args.request_rate]
    versions = {"overlap_serve": __version__, "python": platform.python_version()}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    result = as_json(config, points, versions, date, args.save_requests)
    write_text(args.json, msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 (given: {text})")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1 (given: {text})")
    return value
