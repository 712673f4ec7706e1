"""Logprobs travel with the ids of their text: released with it, cut with it, each exactly once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from overlap_serve.messages import TextDelta, TokenOutput
from overlap_serve.sampling import TextParams, TokenLogprob
from overlap_serve.text.detokenizer import Detokenizer
from overlap_serve.text.tokenizer import Tokenizer
from tests.text.built import joined, joined_ids, outputs, pieces_tokenizer, random_groups, run
from tests.text.test_detokenizer import VECTORS, every_cut, oracle

BYTES = Tokenizer.bytes()
EOS = 257
PROMPT = (TokenLogprob(1, None), TokenLogprob(2, -0.5, ((3, -0.25),)))


def entry(index: int, token_id: int) -> TokenLogprob:
    """Of the index-th generated token."""
    return TokenLogprob(token_id, -1.0 - index, ((token_id, -1.0 - index),))


def asked(made: Sequence[TokenOutput], prompt_logprobs: tuple[TokenLogprob, ...] | None = None) -> list[TokenOutput]:
    """The outputs with an entry for each id."""
    filled = [
        msgspec.structs.replace(out, logprobs=tuple(entry(out.first_index + i, t) for i, t in enumerate(out.token_ids)))
        for out in made
    ]
    filled[0] = msgspec.structs.replace(filled[0], prompt_logprobs=prompt_logprobs)
    return filled


def check(deltas: Sequence[TextDelta]) -> None:
    """Each delta has the entries of its own ids."""
    for delta in deltas:
        assert delta.logprobs == tuple(entry(delta.first_index + i, t) for i, t in enumerate(delta.token_ids))


@pytest.mark.parametrize(("stops", "pieces", "text", "stop"), VECTORS)
@pytest.mark.parametrize("include", [False, True])
def test_entries_are_kept_only_for_tokens_whose_text_starts_before_the_cut(
    stops: tuple[str, ...], pieces: list[str], text: str, stop: str | None, include: bool
) -> None:
    params = TextParams(stop=stops, include_stop_str_in_output=include)
    for cut in every_cut("".join(pieces)):
        tokenizer, ids = pieces_tokenizer(cut)
        for grouped in ([[i] for i in ids], [ids]):
            deltas = run(Detokenizer(tokenizer), asked(outputs(grouped, params)))
            check(deltas)
            kept = [item for delta in deltas for item in delta.logprobs]
            assert kept == [entry(i, t) for i, t in enumerate(ids)][: oracle(cut, params).num_ids]


def test_entries_follow_their_ids_through_random_texts_and_groups() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.choice([97, 98, 0xC3, 0xA4, 256, 0xF0]) for _ in range(rng.randint(1, 20))]
        grouped = random_groups(ids, [rng.randrange(1, 20) for _ in range(rng.randint(0, 10))])
        params = TextParams(stop=("ab", "ba"), min_tokens=rng.randint(0, 3))
        deltas = run(Detokenizer(BYTES), asked(outputs(grouped, params)))
        check(deltas)
        plain = run(Detokenizer(BYTES), outputs(grouped, params))
        assert joined_ids(deltas) == joined_ids(plain) and joined(deltas) == joined(plain)
        assert not any(delta.logprobs for delta in plain)


@pytest.mark.parametrize("include", [True, False])
def test_the_end_token_keeps_its_entry_though_its_text_is_cut(include: bool) -> None:
    params = TextParams(stop=("xyz",), include_stop_str_in_output=include, eos_token_ids=(EOS,))
    deltas = run(Detokenizer(BYTES), asked(outputs([[97], list(b"xy"), [EOS]], params, finish="stop")))
    check(deltas)
    assert joined_ids(deltas) == (97, *b"xy", EOS)


def test_prompt_logprobs_come_with_the_first_delta_and_only_there() -> None:
    for first in ([65], list(b"S")):  # text at once, and text that is held back: the first output makes a delta anyway
        made = asked(outputs([first, list(b"TX"), list(b"end")], TextParams(stop=("STOP",))), PROMPT)
        deltas = run(Detokenizer(BYTES), made)
        assert [delta.prompt_logprobs for delta in deltas] == [PROMPT, *[None] * (len(deltas) - 1)]
        check(deltas)


def test_a_terminal_first_output_brings_the_prompt_logprobs_along() -> None:
    [delta] = run(Detokenizer(BYTES), asked(outputs([[65]]), PROMPT))
    assert (delta.finish, delta.prompt_logprobs, delta.logprobs) == ("length", PROMPT, (entry(0, 65),))


def test_a_resumed_choice_has_entries_of_new_tokens_only() -> None:
    made = asked(outputs([list(b"cd"), list(b"e")], generated=list(b"ab")))
    deltas = run(Detokenizer(BYTES), made)
    check(deltas)
    assert [item for delta in deltas for item in delta.logprobs] == [entry(2 + i, t) for i, t in enumerate(b"cde")]


def test_entries_that_do_not_match_their_ids_are_refused() -> None:
    [good] = asked(outputs([[65, 66]]))
    with pytest.raises(ValueError, match="2 tokens came with 1 logprobs"):
        Detokenizer(BYTES).handle(msgspec.structs.replace(good, logprobs=good.logprobs[:1]))
