"""Bodies of answers that are not streamed, and the parts of them that streams share (http-api sections 3, 8 and 9).

Plain dicts, ready for a JSON encoder; no I/O. Ids, fingerprint and time are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlap_serve.sampling import FinishReason

OWNER = "overlap_serve"

# Cause of an abort -> what the client reads as `stop_reason`.
_ABORTS = {"client": "client_abort", "api": "client_abort", "deadline": "deadline", "shutdown": "shutdown"}
NO_STRINGS: Mapping[int, str] = {}


@dataclass(frozen=True)
class AnswerHead:
    """What every chunk of an answer repeats. id: `chatcmpl-` or `cmpl-` and 32 hex digits. created: Unix time in whole seconds.

    model: as the client named it. system_fingerprint: `fp_` and 12 hex digits of weights and version.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, object]:
        """The start of a body; kind: its `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True)
class ChoiceResult:
    """One ended choice. stop_reason: as in `TextDelta` (stop token id, stop string, or cause of the abort).

    token_ids: generated, up to the cut. logprobs, prompt_logprobs: ready for JSON (`openai.logprobs`), None when not asked for.
    """

    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: Sequence[int]
    logprobs: Mapping[str, object] | None = None
    prompt_logprobs: Sequence[object] | None = None


@dataclass(frozen=True)
class Usage:
    """prompt_tokens counts the prompt once whatever n is; completion_tokens sums over the choices, to their cuts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def usage_body(usage: Usage) -> dict[str, object]:
    """Every number is an int, and cached_tokens never exceeds prompt_tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": max(0, min(usage.cached_tokens, usage.prompt_tokens))},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def client_stop_reason(
    finish: FinishReason, stop_reason: str | int | None, stop_strings: Mapping[int, str]
) -> str | int | None:
    """The engine's reason as the API names it: null for an end token, the string, the id, or why it was aborted.

    stop_strings: ids that stop only because the client gave their text as a stop string (`stop_token_strings`).
    """
    if finish == "abort":
        return _ABORTS.get(str(stop_reason), stop_reason)
    if finish == "stop" and isinstance(stop_reason, int):
        return stop_strings.get(stop_reason, stop_reason)
    return stop_reason if finish == "stop" else None


def chat_completion(
    head: AnswerHead,
    choices: Sequence[ChoiceResult],
    usage: Usage,
    *,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    stop_strings: Mapping[int, str] = NO_STRINGS,
) -> dict[str, object]:
    """Answer of POST /v1/chat/completions. prompt_token_ids: of its one prompt, given exactly with `return_token_ids`."""
    body = head.fields("chat.completion")
    with_ids = prompt_token_ids is not None
    if prompt_token_ids is not None:
        body["prompt_token_ids"] = list(prompt_token_ids[0])
    ordered = _in_order(choices)
    if ordered[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = ordered[0].prompt_logprobs
    body["choices"] = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            **_ending(choice, with_ids, stop_strings),
        }
        for choice in ordered
    ]
    body["usage"] = usage_body(usage)
    return body


def text_completion(
    head: AnswerHead,
    choices: Sequence[ChoiceResult],
    usage: Usage,
    *,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    stop_strings: Mapping[int, str] = NO_STRINGS,
) -> dict[str, object]:
    """Answer of POST /v1/completions.

    prompt_token_ids: of each prompt, given exactly with `return_token_ids`. A request may have many prompts, so here (as in
    vLLM) they are in the choices.
    """
    body = head.fields("text_completion")
    entries = []
    for choice in _in_order(choices):
        entry: dict[str, object] = {"index": choice.index, "text": choice.text}
        entry.update(_ending(choice, prompt_token_ids is not None, stop_strings))
        if prompt_token_ids is not None:
            entry["prompt_token_ids"] = list(prompt_token_ids[choice.index * len(prompt_token_ids) // len(choices)])
        if choice.prompt_logprobs is not None:
            entry["prompt_logprobs"] = choice.prompt_logprobs
        entries.append(entry)
    body["choices"] = entries
    body["usage"] = usage_body(usage)
    return body


def model_card(*, id: str, created: int, root: str, max_model_len: int, parent: str | None = None) -> dict[str, object]:
    """One model. created: when it was loaded, the same in every answer. root: where it came from. parent: of an adapter."""
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def model_list(cards: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Answer of GET /v1/models."""
    return {"object": "list", "data": [dict(card) for card in cards]}


def _ending(choice: ChoiceResult, with_ids: bool, stop_strings: Mapping[int, str]) -> dict[str, object]:
    assert choice.finish_reason != "error", "an error has a body of its own"
    ending: dict[str, object] = {
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": client_stop_reason(choice.finish_reason, choice.stop_reason, stop_strings),
    }
    if with_ids:
        ending["token_ids"] = list(choice.token_ids)
    return ending


def _in_order(choices: Sequence[ChoiceResult]) -> list[ChoiceResult]:
    ordered = sorted(choices, key=lambda choice: choice.index)
    assert [choice.index for choice in ordered] == list(range(len(ordered))), "a choice is missing or doubled"
    return ordered
