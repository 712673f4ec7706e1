"""Pains A18, A20, A37: stop strings, text deltas and state of the detokenizer, against an independent oracle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_serve.messages import Failure, TextDelta, TokenOutput
from overlap_serve.sampling import FinishReason, TextParams
from overlap_serve.text.detokenizer import Detokenizer
from overlap_serve.text.tokenizer import Tokenizer
from tests.text.built import (
    byte_fallback,
    byte_level,
    joined,
    joined_ids,
    metaspace,
    opening,
    outputs,
    pieces_tokenizer,
    random_groups,
    run,
    word_piece,
    wrapped,
)

BYTES = Tokenizer.bytes()
FINISHES: tuple[FinishReason, ...] = ("length", "abort", "error")
EOS = 257


# -- oracle: one character at a time, straight from http-api section 5


@dataclass
class Expected:
    text: str
    stop: str | None
    num_ids: int  # ids whose text starts before the cut (all, without a stop)
    num_tokens: int  # up to the token that completes the stop


def oracle(pieces: Sequence[str], params: TextParams) -> Expected:
    """What the choice must give when it generates these pieces, one token each, and then runs into the limit."""
    text = ""
    starts = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
    for index, piece in enumerate(pieces):
        for char in piece:
            text += char
            allowed = starts[params.min_tokens] if params.min_tokens <= index else len(text)
            hits = [s for s in params.stop if text.endswith(s) and len(text) - len(s) >= allowed]
            if not hits:
                continue
            stop = max(hits, key=len)
            cut = len(text) if params.include_stop_str_in_output else len(text) - len(stop)
            return Expected(text[:cut], stop, sum(start < cut for start in starts[: index + 1]), index + 1)
    return Expected(text, None, len(pieces), len(pieces))


def oracle_sent(pieces: Sequence[str], params: TextParams) -> str:
    """What must have been sent after these pieces if no stop string is complete: all but the hold-back k."""
    text = "".join(pieces)
    boundary = len("".join(pieces[: params.min_tokens]))
    if len(pieces) < params.min_tokens:
        return text
    k = max((n for s in params.stop for n in range(len(s)) if text[boundary:].endswith(s[:n])), default=0)
    return text[: len(text) - k]


def every_cut(text: str) -> Iterator[list[str]]:
    """All ways of cutting a text into pieces."""
    for cuts in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for index, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:index])
                start = index
        yield [*pieces, text[start:]]


def check(pieces: Sequence[str], params: TextParams, groups: Sequence[int] | None = None) -> None:
    """Run the pieces as tokens (groups: cuts into outputs; None: one output a token) and compare with the oracle."""
    tokenizer, ids = pieces_tokenizer(pieces)
    detokenizer = Detokenizer(tokenizer)
    grouped = [[i] for i in ids] if groups is None else random_groups(ids, groups)
    deltas = run(detokenizer, outputs(grouped, params))
    expected = oracle(pieces, params)
    assert joined(deltas) == expected.text
    assert deltas[-1].finish == ("length" if expected.stop is None else "stop")
    assert deltas[-1].stop_reason == expected.stop
    assert joined_ids(deltas) == tuple(ids[: expected.num_ids])
    assert deltas[-1].num_tokens == expected.num_tokens
    assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert all(d.text for d in deltas[1:-1])
    totals = [delta.num_tokens for delta in deltas]
    assert totals == sorted(totals)
    assert [d.text_offset for d in deltas] == [len(joined(deltas[:i])) for i in range(len(deltas))]
    assert len(detokenizer) == 0


VECTORS: list[tuple[tuple[str, ...], list[str], str, str | None]] = [
    (("END",), ["a E", "N", "D b"], "a ", "END"),
    (("END",), ["a E", "N", "X"], "a ENX", None),
    (("\n\n",), ["x\n", "y"], "x\ny", None),
    (("\n<e>",), ["a\n", "b"], "a\nb", None),
    (("b", "ab"), ["ab"], "", "ab"),
    (("ab", "xabc"), ["xab"], "x", "ab"),
    (("aab",), ["a", "a", "a", "b"], "a", "aab"),
    (("STOP",), ["ST"], "ST", None),
]


@pytest.mark.parametrize(("stops", "pieces", "text", "stop"), VECTORS)
def test_a18_stop_strings_give_the_vectors_for_every_cut_of_the_text(
    stops: tuple[str, ...], pieces: list[str], text: str, stop: str | None
) -> None:
    params = TextParams(stop=stops)
    assert oracle(pieces, params).text == text and oracle(pieces, params).stop == stop
    for cut in every_cut("".join(pieces)):
        check(cut, params)
        check(cut, params, groups=())  # all tokens in one output


def test_a18_stop_string_is_kept_when_asked_for() -> None:
    params = TextParams(stop=("x",), include_stop_str_in_output=True)
    for cut in every_cut("abxcd"):
        assert oracle(cut, params).text == "abx"
        check(cut, params)


@pytest.mark.parametrize("groups", [None, (), (1,), (2,), (3,), (1, 2)])
def test_a18_stop_strings_do_not_start_before_min_tokens(groups: tuple[int, ...] | None) -> None:
    params = TextParams(stop=("x",), min_tokens=3)
    pieces = ["x", "x", "a", "x"]
    assert oracle(pieces, params).text == "xxa"
    check(pieces, params, groups)


def test_a18_hold_back_does_not_reach_before_min_tokens() -> None:
    params = TextParams(stop=("xy",), min_tokens=2)
    deltas = run(Detokenizer(BYTES), outputs([[b] for b in b"axyxy"], params))
    # "x" of the first two tokens cannot begin a stop string, so it is sent at once; the third cannot end one.
    assert [delta.text for delta in deltas] == ["a", "x", "y", ""]
    assert deltas[-1].stop_reason == "xy"


def test_a18_stop_string_matches_only_complete_characters() -> None:
    detokenizer = Detokenizer(BYTES)
    deltas = run(detokenizer, outputs([[97], [0xC3], [0xA9], [98]], TextParams(stop=("é",))))
    assert (joined(deltas), deltas[-1].stop_reason, deltas[-1].num_tokens) == ("a", "é", 3)
    assert joined_ids(deltas) == (97,)
    assert detokenizer.num_late == 1


def test_a18_held_text_is_sent_with_the_end() -> None:
    for finish in FINISHES:
        made = outputs([[83], [84]], TextParams(stop=("STOP",)), finish=finish, stop_reason="why")
        deltas = run(Detokenizer(BYTES), made)
        assert [delta.text for delta in deltas] == ["", "ST"]
        assert [delta.token_ids for delta in deltas] == [(), (83, 84)]
        assert (deltas[-1].finish, deltas[-1].stop_reason) == (finish, "why")


def test_a18_stop_string_on_the_last_allowed_token_is_a_stop() -> None:
    deltas = run(Detokenizer(BYTES), outputs([list(b"abST")], TextParams(stop=("ST",)), finish="length"))
    assert [(d.text, d.finish, d.stop_reason) for d in deltas] == [("ab", "stop", "ST")]


ALPHABET = st.text(alphabet="abx", min_size=1, max_size=3)


@settings(max_examples=700, deadline=None)
@given(
    pieces=st.lists(ALPHABET, min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
    groups=st.none() | st.lists(st.integers(1, 9), max_size=4),
)
def test_a18_random_texts_stops_and_cuts_equal_one_character_at_a_time(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool, groups: list[int] | None
) -> None:
    check(pieces, TextParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include), groups)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(ALPHABET, min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=5), min_size=1, max_size=3),
    min_tokens=st.integers(0, 4),
)
def test_a18_exactly_the_possible_beginning_of_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    params = TextParams(stop=tuple(stops), min_tokens=min_tokens)
    tokenizer, ids = pieces_tokenizer(pieces)
    detokenizer = Detokenizer(tokenizer)
    sent = ""
    for count, output in enumerate(outputs([[i] for i in ids], params, finish=None), 1):
        result = detokenizer.handle(output)
        sent += "" if result is None else result[1].text
        if oracle(pieces[:count], params).stop is not None:
            break
        assert sent == oracle_sent(pieces[:count], params)


# -- text and ids


def test_the_first_output_always_says_something_and_carries_the_opening() -> None:
    detokenizer = Detokenizer(BYTES)
    made = outputs([[0xC3], [0xA9], [104], [0xE4], [105]], finish=None)
    first, second, third, fourth, fifth = (detokenizer.handle(output) for output in made)
    assert first is not None and second is not None and third is not None and fourth is None and fifth is not None
    assert first[0] == "ingress"
    assert first[1] == TextDelta("r", 0, 0, 0, (), "", 1, None, None, None, "scheduler", 7, 3, 0)
    assert second[1] == TextDelta("r", 0, 0, 0, (0xC3, 0xA9), "é", 2, text_offset=0)
    assert third[1] == TextDelta("r", 0, 0, 2, (104,), "h", 3, text_offset=1)
    assert fifth[1] == TextDelta("r", 0, 0, 3, (0xE4, 105), "\ufffdi", 5, text_offset=2)


def test_ids_are_released_with_their_text_and_never_earlier() -> None:
    made = outputs([list(b"a<"), list(b"b"), list(b"/"), list(b"z")], TextParams(stop=("<b/c>",)), finish=None)
    deltas = run(Detokenizer(BYTES), made)
    assert [(bytes(d.token_ids), d.text, d.num_tokens) for d in deltas] == [(b"a", "a", 2), (b"<b/z", "<b/z", 5)]


def test_ids_without_text_come_with_the_next_text_or_with_the_end() -> None:
    made = outputs([[256], [256], [97], [256], [256]], finish="length")
    deltas = run(Detokenizer(BYTES), made)
    assert [(d.token_ids, d.text) for d in deltas] == [((), ""), ((256, 256, 97), "a"), ((256, 256), "")]


@pytest.mark.parametrize("finish", [*FINISHES, "stop"])
def test_an_incomplete_character_at_the_end_becomes_what_the_full_decode_gives(finish: FinishReason) -> None:
    made = outputs([[97], [0xF0, 0x9F], [0x91]], finish=finish)
    full = BYTES.decode([97, 0xF0, 0x9F, 0x91], skip_special_tokens=True)
    assert joined(run(Detokenizer(BYTES), made)) == full == "a\ufffd"


TOKENIZERS = {
    "byte_level": wrapped(byte_level()),
    "byte_fallback": wrapped(byte_fallback()),
    "no_strip": wrapped(byte_fallback(strip=False)),
    "word_piece": wrapped(word_piece()),
    "metaspace": wrapped(metaspace()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a20_joined_deltas_equal_the_full_decode_in_context(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(name)
    for _ in range(1000):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 20))]
        context = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(0, 17))]
        skip = rng.random() < 0.5
        before = tokenizer.decode(context, skip_special_tokens=skip)
        if before.endswith("\ufffd"):
            continue
        groups = random_groups(ids, [rng.randrange(20) for _ in range(rng.randrange(8))])
        params = TextParams(skip_special_tokens=skip, stop=("no such text",))
        deltas = run(Detokenizer(tokenizer), outputs(groups, params, context=context))
        full = tokenizer.decode([*context, *ids], skip_special_tokens=skip)
        assert joined(deltas) == full[len(before) :]
        assert joined_ids(deltas) == tuple(ids)
        assert deltas[-1].num_tokens == len(ids)


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_the_space_of_the_first_token_is_neither_lost_nor_added(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    word = tokenizer.token_id("▁the") or tokenizer.token_id("▁t")
    assert word is not None
    text = tokenizer.decode([word], skip_special_tokens=True)
    assert not text.startswith(" ")
    assert joined(run(Detokenizer(tokenizer), outputs([[word]], context=[word]))) == " " + text
    assert joined(run(Detokenizer(tokenizer), outputs([[word]], context=[]))) == text


def test_a_character_begun_in_the_prompt_is_completed_in_the_answer() -> None:
    assert joined(run(Detokenizer(BYTES), outputs([[0xBD], [0xA0]], context=[97, 0xE4]))) == "你"


def test_a20_20000_tokens_that_each_decode_to_a_replacement_character_stay_linear() -> None:
    detokenizer = Detokenizer(BYTES)
    params = TextParams(stop=("\ufffdx",))
    deltas = run(detokenizer, outputs([[0xFF]] * 20_000, params))
    assert joined(deltas) == "\ufffd" * 20_000
    assert max(len(delta.text) for delta in deltas) <= 2
    assert max(len(delta.token_ids) for delta in deltas) <= 2


# -- special and stop tokens


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_end_token_adds_text_only_if_visible_and_asked_for(skip: bool, include: bool) -> None:
    params = TextParams(skip_special_tokens=skip, include_stop_str_in_output=include, eos_token_ids=(EOS,))
    deltas = run(Detokenizer(BYTES), outputs([[97], [98, EOS]], params, finish="stop"))
    assert joined(deltas) == ("ab<|eos|>" if include and not skip else "ab")
    assert joined_ids(deltas) == (97, 98, EOS)
    assert (deltas[-1].finish, deltas[-1].stop_reason, deltas[-1].num_tokens) == ("stop", None, 3)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a.")])
def test_a_visible_stop_token_is_cut_unless_asked_for(include: bool, text: str) -> None:
    params = TextParams(stop_token_ids=(46,), include_stop_str_in_output=include)
    deltas = run(Detokenizer(BYTES), outputs([[97], [46]], params, finish="stop", stop_reason=46))
    assert joined(deltas) == text
    assert (deltas[-1].stop_reason, deltas[-1].num_tokens, joined_ids(deltas)) == (46, 2, (97, 46))


def test_only_the_last_token_of_a_stop_is_a_stop_token() -> None:
    params = TextParams(stop_token_ids=(46,), eos_token_ids=(EOS,), skip_special_tokens=False)
    # 46 in the middle came below min_tokens or under ignore_eos; the end came from elsewhere (a complete grammar).
    assert joined(run(Detokenizer(BYTES), outputs([[46, 97, 46]], params, finish="stop"))) == ".a"
    assert joined(run(Detokenizer(BYTES), outputs([[46, EOS, 97]], params, finish="stop"))) == ".<|eos|>a"
    assert joined(run(Detokenizer(BYTES), outputs([[97, 46]], params, finish="length"))) == "a."


def test_the_end_token_flushes_what_is_held_and_a_stop_string_before_it_wins() -> None:
    params = TextParams(stop=("STOP",), eos_token_ids=(EOS,))
    assert joined(run(Detokenizer(BYTES), outputs([[83, 84], [EOS]], params, finish="stop"))) == "ST"
    deltas = run(Detokenizer(BYTES), outputs([list(b"aSTOP"), [EOS]], params, finish="stop"))
    assert [(d.text, d.stop_reason, d.num_tokens) for d in deltas] == [("a", "STOP", 5)]


def test_special_tokens_in_the_middle_are_removed_or_shown() -> None:
    for skip, text in ((True, "ab"), (False, "a<|bos|>b")):
        deltas = run(Detokenizer(BYTES), outputs([[97], [256], [98]], TextParams(skip_special_tokens=skip)))
        assert joined(deltas) == text


# -- life of the state


def test_a37_a_late_output_is_dropped_and_cannot_bring_its_request_back() -> None:
    detokenizer = Detokenizer(BYTES)
    made = outputs([[97], [98], [99]], TextParams(stop=("b",)))
    assert len(run(detokenizer, made)) == 2
    assert (len(detokenizer), detokenizer.num_late) == (0, 1)
    assert detokenizer.handle(TokenOutput("unknown", 0, 0, 0, (97,))) is None
    assert detokenizer.handle(TokenOutput("r", 0, 0, 3, (), "length")) is None
    assert (len(detokenizer), detokenizer.num_late) == (0, 3)


def test_choices_of_a_request_have_separate_text_and_are_dropped_one_by_one_or_together() -> None:
    detokenizer = Detokenizer(BYTES)
    for choice in range(4):
        detokenizer.handle(outputs([[0xC3]], finish=None, choice=choice)[0])
    assert len(detokenizer) == 4
    detokenizer.drop("r", 1)
    detokenizer.drop("r", 1)
    detokenizer.drop("other", None)
    assert len(detokenizer) == 3
    assert detokenizer.handle(TokenOutput("r", 0, 1, 1, (0xA9,))) is None
    result = detokenizer.handle(TokenOutput("r", 0, 2, 1, (0xA9,)))
    assert result is not None and result[1].text == "é"
    detokenizer.drop("r", None)
    assert len(detokenizer) == 0


def test_a_failure_as_the_very_first_output_reaches_the_ingress_and_leaves_nothing() -> None:
    detokenizer = Detokenizer(BYTES)
    failure = Failure("context_length_exceeded", "too long", 400)
    result = detokenizer.handle(TokenOutput("r", 0, 0, 0, (), "error", None, failure, opening()))
    assert result is not None
    assert result[1] == TextDelta("r", 0, 0, 0, (), "", 0, "error", None, failure, "scheduler", 7, 3, 0)
    assert len(detokenizer) == 0


def test_missing_or_repeated_ids_are_refused_and_the_choice_can_be_failed() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.handle(outputs([[97, 0xC3]], finish=None)[0])
    bad = TokenOutput("r", 0, 0, 5, (98,))
    with pytest.raises(ValueError, match="expected token 2 of the choice, got token 5"):
        detokenizer.handle(bad)
    failure = Failure("internal_error", "lost tokens")
    result = detokenizer.fail(bad, failure)
    # first_index 1: the ingress has the id of "a", not that of the incomplete character.
    assert result == ("ingress", TextDelta("r", 0, 0, 1, (), "", 2, "error", None, failure))
    assert len(detokenizer) == 0
    assert detokenizer.fail(bad, failure) is None


def test_a_newer_attempt_replaces_an_older_one_and_never_the_reverse() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.handle(outputs([[97]], finish=None, attempt=0)[0])
    detokenizer.handle(outputs([[98]], finish=None, attempt=1)[0])
    assert len(detokenizer) == 1
    assert detokenizer.handle(TokenOutput("r", 0, 0, 1, (99,))) is None
    assert detokenizer.handle(outputs([[99]], finish=None, attempt=0)[0]) is None
    result = detokenizer.handle(TokenOutput("r", 1, 0, 1, (100,)))
    assert result is not None and result[1].text == "d"


def test_silent_choices_are_forgotten_after_two_rounds() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.handle(outputs([[97]], finish=None, rid="silent")[0])
    detokenizer.handle(outputs([[97]], finish=None, rid="alive")[0])
    assert detokenizer.drop_idle() == 0
    detokenizer.handle(TokenOutput("alive", 0, 0, 1, (97,)))
    assert detokenizer.drop_idle() == 1
    assert detokenizer.handle(TokenOutput("alive", 0, 0, 2, (97,))) is not None
    assert len(detokenizer) == 1


def test_a_stop_list_is_compiled_once_for_all_choices_and_64_lists_are_kept() -> None:
    detokenizer = Detokenizer(BYTES)
    for index in range(200):
        params = TextParams(stop=(f"stop {index}",))
        for choice in range(3):
            run(detokenizer, outputs([[97]], params, rid=f"r{index}", choice=choice))
    assert len(detokenizer) == 0
    info = detokenizer._compile.cache_info()
    assert (info.misses, info.currsize) == (200, 64)


# -- resuming on another replica


def resumed(
    tokenizer: Tokenizer, ids: Sequence[int], params: TextParams, died_after: int
) -> tuple[str, tuple[int, ...], TextDelta]:
    """Deliver ids until the scheduler dies, resume with what was delivered, as an ingress does. Text, ids and last delta."""
    first = run(Detokenizer(tokenizer), outputs([[i] for i in ids[:died_after]], params, finish=None))
    delivered, text = joined_ids(first), joined(first)
    if first[-1].finish is not None:
        return text, delivered, first[-1]
    rest = [[i] for i in ids[len(delivered) :]] or [[]]
    second = run(Detokenizer(tokenizer), outputs(rest, params, generated=delivered, attempt=1))
    for delta in second:
        text += delta.text[max(0, len(text) - delta.text_offset) :]
    assert second[0].first_index == len(delivered)
    return text, delivered + joined_ids(second), second[-1]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(ALPHABET, min_size=2, max_size=8),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 3),
    data=st.data(),
)
def test_a_resumed_stream_equals_an_undisturbed_one(
    pieces: list[str], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    params = TextParams(stop=tuple(stops), min_tokens=min_tokens)
    tokenizer, ids = pieces_tokenizer(pieces)
    died_after = data.draw(st.integers(1, len(ids)))
    text, all_ids, last = resumed(tokenizer, ids, params, died_after)
    expected = oracle(pieces, params)
    assert (text, all_ids) == (expected.text, tuple(ids[: expected.num_ids]))
    assert (last.stop_reason, last.num_tokens) == (expected.stop, expected.num_tokens)


@pytest.mark.parametrize("died_after", range(1, 9))
def test_a_resumed_stream_completes_the_character_that_was_held(died_after: int) -> None:
    ids = [*"é👩x".encode(), 97]
    text, all_ids, last = resumed(BYTES, ids, TextParams(), died_after)
    assert (text, all_ids, last.num_tokens) == ("é👩xa", tuple(ids), len(ids))


def test_text_sent_beyond_the_released_ids_is_marked_for_the_ingress() -> None:
    params = TextParams(stop=("aab",))
    first = run(Detokenizer(BYTES), outputs([[97], [97], [97]], params, finish=None))
    assert (joined(first), joined_ids(first)) == ("a", (97,))
    # The id alone releases nothing ("a" may begin the stop string), yet its text is at the client already.
    second = run(Detokenizer(BYTES), outputs([[97], [97], [99]], params, generated=[97], attempt=1, finish=None))
    assert (joined(second), second[0].text_offset) == ("aaac", 0)
