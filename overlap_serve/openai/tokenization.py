"""Requests of /tokenize and /detokenize (http-api section 11), and their answers. Knows no tokenizer.

The one idea: what is tokenized is checked by the classes of the generate routes, so the ids are those that a generation would use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from overlap_serve.config import ServeConfig
from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.conversation import Message
from overlap_serve.openai.fields import MAX_PROMPTS, RequestFacts, ServedRequest, checked_token_ids, context_of
from overlap_serve.openai.ignored import unknown_fields, unknown_message_fields
from overlap_serve.openai.problems import fault, json_type, wrong_type
from overlap_serve.openai.protocol import ChatRequest, parse_as

# Of a chat body, what decides about its prompt. The rest may come along, is ignored and reported.
_CHAT_FIELDS = frozenset(
    {
        "model",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "tool_choice",
        "documents",
        "reasoning_effort",
        "enable_thinking",
        "chat_template",
        "chat_template_kwargs",
        "return_token_strs",
    }
)


def _texts(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("a string or an array of strings", value)
    if len(value) > MAX_PROMPTS:
        raise fault("array_above_max_length", f"has {len(value)} texts, allowed are at most {MAX_PROMPTS}")
    for position, text in enumerate(value):
        if not isinstance(text, str):
            raise fault("invalid_type", f"must hold strings, item {position} is {json_type(text)}")
    return tuple(value)


def _ids(value: object, info: ValidationInfo) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise wrong_type("an array of token ids", value)
    limit = context_of(info).facts.id_limit
    if not {list}.issuperset(map(type, value)) or not value:
        return checked_token_ids(value, limit)
    if len(value) > MAX_PROMPTS:
        raise fault("array_above_max_length", f"has {len(value)} arrays, allowed are at most {MAX_PROMPTS}")
    return tuple(checked_token_ids(ids, limit, f" of array {position}") for position, ids in enumerate(value))


_STRINGS = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS}
_INTEGERS = {"type": "array", "items": {"type": "integer", "minimum": 0}}

Texts = Annotated[
    str | tuple[str, ...], PlainValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})
]
Ids = Annotated[
    tuple[int, ...] | tuple[tuple[int, ...], ...],
    PlainValidator(_ids),
    WithJsonSchema({"anyOf": [_INTEGERS, {"type": "array", "items": _INTEGERS, "maxItems": MAX_PROMPTS}]}),
]


class TokenizeText(ServedRequest):
    """Body of POST /tokenize with a text, or several."""

    prompt: Texts
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    @property
    def many(self) -> bool:
        """The answer has a list for each text."""
        return not isinstance(self.prompt, str)


class TokenizeChat(ChatRequest):
    """Body of POST /tokenize with messages."""

    return_token_strs: bool = False


class DetokenizeRequest(ServedRequest):
    """Body of POST /detokenize."""

    tokens: Ids
    skip_special_tokens: bool = False

    @property
    def sequences(self) -> Sequence[tuple[int, ...]]:
        if self.many:
            return self.tokens  # type: ignore[return-value]  # `many` has just looked
        return (self.tokens,)  # type: ignore[return-value]

    @property
    def many(self) -> bool:
        """The answer has a text for each of several arrays."""
        return bool(self.tokens) and isinstance(self.tokens[0], tuple)


def parse_tokenize(body: dict[str, object], config: ServeConfig, facts: RequestFacts) -> TokenizeText | TokenizeChat:
    """Raises InvalidRequest or NotFound with code and param of http-api section 13."""
    with_prompt, with_messages = (body.get(name) is not None for name in ("prompt", "messages"))
    if with_prompt and with_messages:
        raise InvalidRequest("send either prompt or messages, not both", param="messages")
    if not with_prompt and not with_messages:
        raise InvalidRequest("prompt is required, or messages", code="missing_required_parameter", param="prompt")
    if with_prompt:
        return parse_as(TokenizeText, body, config, facts, unknown_fields(body, TokenizeText.model_fields))
    unknown = unknown_fields(body, _CHAT_FIELDS)
    unknown_in_messages = unknown_message_fields(body.get("messages"), Message.model_fields)
    chat = {name: value for name, value in body.items() if name in _CHAT_FIELDS}
    return parse_as(TokenizeChat, chat, config, facts, unknown, unknown_in_messages)


def parse_detokenize(body: dict[str, object], config: ServeConfig, facts: RequestFacts) -> DetokenizeRequest:
    """Raises InvalidRequest or NotFound with code and param of http-api section 13."""
    return parse_as(DetokenizeRequest, body, config, facts, unknown_fields(body, DetokenizeRequest.model_fields))


def tokenize_body(
    ids: Sequence[Sequence[int]], strings: Sequence[Sequence[str]] | None, *, many: bool, max_model_len: int
) -> dict[str, object]:
    """Answer of POST /tokenize; for one text or chat plain lists, for many a list of each (SGLang)."""
    counts = [len(tokens) for tokens in ids]
    return {
        "count": counts if many else counts[0],
        "max_model_len": max_model_len,
        "tokens": ids if many else ids[0],
        "token_strs": strings if many or strings is None else strings[0],
    }


def detokenize_body(texts: Sequence[str], *, many: bool) -> dict[str, object]:
    """Answer of POST /detokenize under both names: vLLM's clients read `prompt`, SGLang's `text`."""
    text: object = list(texts) if many else texts[0]
    return {"prompt": text, "text": text}
