"""What is sent: exact lengths, shared prefixes, arrival times, traces, files of prompts."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from overlap_serve.bench.workload import (
    RandomShape,
    arrivals,
    as_text,
    random_sessions,
    read_prompts,
    read_trace,
)
from overlap_serve.errors import InvalidRequest

IDS = (1000, 2000)


def test_random_prompts_have_their_exact_length_and_ids_in_range() -> None:
    sessions = random_sessions(RandomShape(input_len=77, output_len=9, ids=IDS), 20, seed=3)
    prompts = [session.turns[0].ids for session in sessions]
    assert {len(prompt) for prompt in prompts} == {77}
    assert {session.turns[0].output_tokens for session in sessions} == {9}
    assert all(IDS[0] <= token < IDS[1] for prompt in prompts for token in prompt)
    assert len(set(prompts)) == 20
    assert len(as_text(prompts[0]).split()) == 77


def test_same_seed_same_load_and_another_seed_another() -> None:
    shape = RandomShape(spread=0.5, prefix_len=5, num_turns=2)
    assert random_sessions(shape, 5, 1) == random_sessions(shape, 5, 1)
    assert random_sessions(shape, 5, 1)[0].turns[0].ids[:5] != random_sessions(shape, 5, 2)[0].turns[0].ids[:5]


def test_spread_lengths_stay_within_and_reach_both_ends() -> None:
    sessions = random_sessions(RandomShape(input_len=10, output_len=4, spread=0.5), 300, seed=1)
    assert {len(session.turns[0].ids) for session in sessions} == set(range(5, 16))
    assert {session.turns[0].output_tokens for session in sessions} == {2, 3, 4, 5, 6}


def test_sessions_share_as_many_prefixes_as_asked_and_turns_add_to_them() -> None:
    shape = RandomShape(input_len=6, prefix_len=32, num_prefixes=3, num_turns=3, think_s=0.5)
    sessions = random_sessions(shape, 9, seed=1)
    prefixes = [session.turns[0].ids[:32] for session in sessions]
    assert len(set(prefixes)) == 3
    assert prefixes[0] == prefixes[3] == prefixes[6]
    assert [len(turn.ids) for turn in sessions[0].turns] == [38, 6, 6]
    assert [turn.think_s for turn in sessions[0].turns] == [0.0, 0.5, 0.5]
    assert len({turn.ids for session in sessions for turn in session.turns}) == 27


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    """Coefficient of variation of gamma gaps is 1 / sqrt(shape)."""
    for burstiness, variation in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5)):
        times = arrivals(8.0, burstiness, 20_000, seed=5)
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(20_000 / 8)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_infinite_rate_is_all_at_once_and_infinite_burstiness_is_even() -> None:
    assert arrivals(math.inf, 1.0, 3, 1) == [0.0, 0.0, 0.0]
    assert arrivals(4.0, math.inf, 3, 1) == [0.25, 0.5, 0.75]
    assert arrivals(4.0, 1.0, 0, 1) == []


def write(file: Path, *lines: object) -> Path:
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_trace_gives_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        {"arrival_s": 12.0, "input_length": 30, "output_length": 4, "prefix_hash": "a", "prefix_length": 20},
        {"arrival_s": 10.0, "input_length": 50, "output_length": 5, "prefix_hash": "a", "prefix_length": 20},
        {"arrival_s": 11.0, "input_length": 30, "output_length": 6, "prefix_hash": "b"},
        {"arrival_s": 13.0, "input_length": 40, "output_length": 7, "prefix_hash": "b"},
        {"arrival_s": 14.0, "input_length": 8, "output_length": 8},
    )
    sessions = read_trace(file, 1, IDS, speed=2.0)
    assert [session.arrival_s for session in sessions] == [0.0, 0.5, 1.0, 1.5, 2.0]
    turns = [session.turns[0] for session in sessions]
    assert [len(turn.ids) for turn in turns] == [50, 30, 30, 40, 8]
    assert [turn.output_tokens for turn in turns] == [5, 6, 4, 7, 8]
    long, first_b, short, second_b, _ = (turn.ids for turn in turns)
    assert long[:20] == short[:20]
    assert long[20:30] != short[20:30]
    assert first_b == second_b[:30]


def test_mooncakes_traces_are_read_too(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 27482, "input_length": 10, "output_length": 3, "hash_ids": [46, 47, 48]},
        {"timestamp": 30535, "input_length": 9, "output_length": 2, "hash_ids": [46, 47, 99]},
    )
    first, second = read_trace(file, 1, IDS, block=4)
    assert first.arrival_s == 0.0
    assert second.arrival_s == pytest.approx(3.053)
    assert (len(first.turns[0].ids), len(second.turns[0].ids)) == (10, 9)
    assert first.turns[0].ids[:8] == second.turns[0].ids[:8]
    assert first.turns[0].ids[8] != second.turns[0].ids[8]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ({"input_length": 1, "output_length": 1}, "line 2: needs `arrival_s`"),
        ({"arrival_s": 1, "output_length": 1}, "line 2: .*input_length"),
        ({"arrival_s": 1, "input_length": 0, "output_length": 1}, "line 2: .*at least 1"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: object, said: str, tmp_path: Path) -> None:
    good = {"arrival_s": 0, "input_length": 1, "output_length": 1}
    with pytest.raises(InvalidRequest, match=said):
        read_trace(write(tmp_path / "trace.jsonl", good, line), 1, IDS)


def test_prompts_of_a_file_come_over_and_over(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.txt", "one", "", "two words")
    turns = [session.turns[0] for session in read_prompts(file, 5, 7, chat=False)]
    assert [turn.text for turn in turns] == ["one", "two words", "one", "two words", "one"]
    assert {turn.output_tokens for turn in turns} == {7}


def test_prompts_as_json_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "one", "max_tokens": 3}, {"prompt": [5, 6]})
    text, ids = (session.turns[0] for session in read_prompts(file, 2, 7, chat=False))
    assert (text.text, text.output_tokens, ids.ids, ids.output_tokens) == ("one", 3, (5, 6), 7)
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    chats = read_prompts(write(tmp_path / "m.jsonl", {"messages": messages}, {"prompt": "z"}), 2, 7, chat=True)
    assert chats[0].turns[0].messages == tuple(messages)
    assert chats[1].turns[0].text == "z"


@pytest.mark.parametrize(
    ("line", "chat", "said"),
    [
        ({"prompt": [1]}, True, "line 1: this endpoint takes a text or messages"),
        ({"messages": []}, False, "line 1: this endpoint takes a text or token ids"),
        ({"prompt": "a", "messages": []}, True, "line 1: needs either"),
        ({"prompt": []}, False, "line 1: needs either"),
        ({"prompt": 4}, False, "line 1: .*prompt"),
    ],
)
def test_a_wrong_prompt_is_named(line: object, chat: bool, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_prompts(write(tmp_path / "p.jsonl", line), 1, 1, chat)


def test_files_that_cannot_be_read_or_are_empty_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", 1, 1, False)
    with pytest.raises(InvalidRequest, match="holds no lines"):
        read_trace(write(tmp_path / "empty.jsonl", " "), 1, IDS)
