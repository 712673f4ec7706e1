"""The `messages` of a chat request (http-api section 2.2): checked here, then handed to the chat template as plain dicts.

Owns which roles and content there are and what a template sees of them; knows no template and renders nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, ValidationInfo, WithJsonSchema

from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.body import parse_json
from overlap_serve.openai.fields import JsonObject, context_of
from overlap_serve.openai.problems import fault, shown, wrong_type

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # part type -> key of its text


class FunctionCall(JsonObject):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(JsonObject):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _content(value: object, info: ValidationInfo) -> str | tuple[str, ...] | None:
    """A string, or the texts of an array of parts. Only an assistant that calls tools or refuses may have none."""
    if value is None:
        given = info.data
        if "role" in given and not (given["role"] == "assistant" and (given.get("tool_calls") or given.get("refusal"))):
            raise fault("missing_required_parameter", "is required; only an assistant message with tool_calls has none")
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("a string or an array of parts", value)
    if not value:
        raise fault("empty_array", "is an empty array; send at least one part, or a string")
    return tuple(_part_text(part, f"[{position}]") for position, part in enumerate(value))


def _part_text(part: object, at: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type("an object", part, at)
    kind = part.get("type")
    if kind is None:
        raise fault("missing_required_parameter", "is required", f"{at}.type")
    if not isinstance(kind, str):
        raise wrong_type("a string", kind, f"{at}.type")
    if kind not in TEXT_PARTS:
        raise fault("unsupported_content_part", f"is of type {shown(kind)}, this model takes only text", at)
    key = TEXT_PARTS[kind]
    text = part.get(key)
    if text is None:
        raise fault("missing_required_parameter", "is required", f"{at}.{key}")
    if not isinstance(text, str):
        raise wrong_type("a string", text, f"{at}.{key}")
    return text


def _tool_call_id(value: object, info: ValidationInfo) -> str | None:
    if value is None:
        if info.data.get("role") == "tool":
            raise fault("missing_required_parameter", "is required in a tool message")
        return None
    if not isinstance(value, str):
        raise wrong_type("a string", value)
    return value


Content = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
ToolCallId = Annotated[str | None, PlainValidator(_tool_call_id), WithJsonSchema({"type": "string"})]


class Message(JsonObject):
    """One turn. content: text, or the texts of its parts; None for an assistant that only calls tools.

    The order of the fields matters: a check sees those above it.
    """

    role: Role
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field(default_factory=list)
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: ToolCallId = Field(default=None, validate_default=True)
    content: Content = Field(default=None, validate_default=True)

    def for_template(self, *, keep_parts: bool, developer_role: bool) -> dict[str, object]:
        """The dict that a Hugging Face chat template reads. Keys that the message lacks are absent, `tool_calls: []` too."""
        seen: dict[str, object] = {
            "role": _template_role(self.role, developer_role),
            "content": self._template_content(keep_parts),
        }
        if self.name is not None:
            seen["name"] = self.name
        if self.tool_calls:
            seen["tool_calls"] = [_template_call(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            seen["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            seen["reasoning_content"] = seen["reasoning"] = reasoning
        return seen

    def _template_content(self, keep_parts: bool) -> object:
        texts: Sequence[str]
        if isinstance(self.content, tuple):
            texts = self.content
        else:
            text = self.content if self.content is not None else self.refusal
            texts = [] if text is None else [text]
        # Templates print None as "None", so a message without text has an empty one.
        return [{"type": "text", "text": text} for text in texts] if keep_parts else "".join(texts)


def _template_role(role: Role, developer_role: bool) -> str:
    if role == "developer" and not developer_role:
        return "system"
    return "tool" if role == "function" else role


def _template_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": _mapping_or_text(call.function.arguments)}
    return {"id": call.id, "type": call.type, "function": function}


def _mapping_or_text(arguments: str) -> object:
    """Templates expect a mapping where the arguments are a JSON object; whatever is not stays the text it was."""
    try:
        return parse_json(arguments.encode("utf-8", "surrogatepass"))
    except InvalidRequest:
        return arguments


def _not_too_many(value: object, info: ValidationInfo) -> object:
    # Counted before any message is looked at: this is what bounds the work.
    if isinstance(value, list):
        limit = context_of(info).config.max_messages
        if not value:
            raise fault("empty_array", "is empty; send at least one message")
        if len(value) > limit:
            raise fault("array_above_max_length", f"has {len(value)} messages, allowed are at most {limit}")
    return value


# Fails fast: a body of millions of broken items must not become millions of error reports.
Messages = Annotated[list[Message], FailFast(), BeforeValidator(_not_too_many)]
