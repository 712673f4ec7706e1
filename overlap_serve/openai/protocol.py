"""Requests of the OpenAI API as data: a JSON body in, a checked request out (http-api sections 1, 2, 8 and 15).

The module that the rest of the server imports for requests; the fields that both routes share are in `generation`. Knows no
HTTP, no tokenizer and no template. The one idea: everything that can be refused without tokenizing is refused by `parse_chat` and
`parse_completion`; what they return can only fail on lengths (`token_budget`, `sampling`) and in the template.

A check sees the fields declared above its own, so their order matters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from overlap_serve.config import ServeConfig
from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.body import parse_json
from overlap_serve.openai.budget import kept_prompt_tokens, token_budget
from overlap_serve.openai.conversation import Message, Messages
from overlap_serve.openai.fields import (
    Context,
    LimitOrZero,
    Modalities,
    Prompts,
    Rejected,
    RequestFacts,
    ServedRequest,
    TopCount,
    context_of,
    only,
)
from overlap_serve.openai.generation import GenerationRequest, StreamOptions, is_request_id
from overlap_serve.openai.ignored import (
    ignored_label,
    inert_fields,
    reported,
    unknown_fields,
    unknown_message_fields,
)
from overlap_serve.openai.problems import Problem, fault, problems_of, refusal, unknown_parameter

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "RequestFacts",
    "StreamOptions",
    "ignored_label",
    "is_request_id",
    "kept_prompt_tokens",
    "parse_chat",
    "parse_completion",
    "parse_json",
    "parse_timeout_ms",
    "refuse_embeddings",
    "token_budget",
]

COMPLETION_MAX_TOKENS = 16
USE_TOOLS = "use tools"
USE_CHAT = "use /v1/chat/completions"

_FIXED_VARIABLES = ("messages", "tools", "add_generation_prompt")


def parse_timeout_ms(text: str, config: ServeConfig) -> float:
    """Seconds, from the header `x-request-timeout-ms`. Raises InvalidRequest."""
    try:
        timeout_s = float(text) / 1e3
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s <= config.max_timeout:
        raise InvalidRequest(
            f"x-request-timeout-ms must be a number above 0 and at most {config.max_timeout * 1e3:g}",
            param="x-request-timeout-ms",
        )
    return timeout_s


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    documents: list[object] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    logprobs: bool = False
    top_logprobs: TopCount | None = None

    # Features that this version lacks: only values that ask for nothing pass.
    tools: Annotated[list[object], only([])] = Field(default_factory=list)
    tool_choice: Annotated[object, only("none")] = "none"
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: Annotated[bool, only(True)] = True
    # Never supported.
    functions: Annotated[object, only(instead=USE_TOOLS)] = None
    function_call: Annotated[object, only(instead=USE_TOOLS)] = None
    modalities: Modalities = Field(default_factory=list)
    audio: Rejected = None
    web_search_options: Rejected = None

    @field_validator("continue_final_message")
    @classmethod
    def _has_final_message(cls, value: bool, info: ValidationInfo) -> bool:
        messages = info.data.get("messages")
        if not value or messages is None:
            return value
        if info.data.get("add_generation_prompt") is True:
            raise fault("invalid_value", "cannot be combined with add_generation_prompt: true; leave that out")
        last: Message = messages[-1]
        if last.role != "assistant" or last.tool_calls or last.content is None:
            raise fault("invalid_value", "needs an assistant message with text at the end")
        return value

    @field_validator("chat_template")
    @classmethod
    def _trusted(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not context_of(info).config.trust_request_chat_template:
            raise fault(
                "unsupported_parameter", "is not allowed on this server (its setting `trust_request_chat_template`)"
            )
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _keeps_fixed_variables(cls, value: dict[str, object]) -> dict[str, object]:
        for name in _FIXED_VARIABLES:
            if name in value:
                raise fault("invalid_value", f"cannot override {name}; use the field of that name")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("logprobs") is False:
            raise fault("invalid_value", "is only allowed with logprobs: true")
        return value

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def generation_prompt(self) -> bool:
        """Whether the template opens an assistant turn at the end."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    def template_messages(self, *, keep_parts: bool = False, developer_role: bool = False) -> list[dict[str, object]]:
        """The conversation as a Hugging Face chat template reads it.

        keep_parts: content is always a list of text parts, for templates that iterate over it; else one string.
        developer_role: the template knows the role; else it is rendered as system.
        """
        return [m.for_template(keep_parts=keep_parts, developer_role=developer_role) for m in self.messages]

    def template_kwargs(self) -> dict[str, object]:
        """Further variables of the template. What the client writes into chat_template_kwargs wins."""
        variables: dict[str, object] = {}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables | self.chat_template_kwargs


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    max_completion_tokens: LimitOrZero | None = None
    max_tokens: LimitOrZero | None = None
    prompt: Prompts
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: TopCount | None = None

    # Features that this version lacks: only values that ask for nothing pass.
    suffix: Annotated[str, only("")] = ""
    prompt_embeds: Rejected = None
    json_schema: Rejected = None
    messages: Annotated[object, only(instead=USE_CHAT)] = None
    tools: Annotated[object, only([], instead=USE_CHAT)] = None
    tool_choice: Annotated[object, only("none", instead=USE_CHAT)] = None
    reasoning_effort: Annotated[object, only(instead=USE_CHAT)] = None
    separate_reasoning: Annotated[object, only(instead=USE_CHAT)] = None
    include_reasoning: Annotated[object, only(instead=USE_CHAT)] = None
    enable_thinking: Annotated[object, only(instead=USE_CHAT)] = None

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _zero_only_with_echo(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not context_of(info).echo:
            raise fault(
                "integer_below_min_value",
                "is 0, must be at least 1 unless echo is true",
            )
        return value

    @classmethod
    def limit_of(cls, fields: Mapping[str, object]) -> int | None:
        """As for chat, but 16 by default."""
        limit = super().limit_of(fields)
        return COMPLETION_MAX_TOKENS if limit is None else limit

    @property
    def scoring(self) -> bool:
        """Only the prompt is wanted back (`echo` with a limit of 0): one token is generated all the same, and hidden."""
        return super().token_limit == 0

    @property
    def token_limit(self) -> int | None:
        return 1 if self.scoring else super().token_limit

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One text or one tuple of token ids for each prompt; choice j of prompt i has the index i * n + j."""
        return self.prompt


def parse_chat(body: dict[str, object], config: ServeConfig, facts: RequestFacts) -> ChatRequest:
    """Raises InvalidRequest or NotFound with code and param of http-api section 13."""
    unknown = unknown_fields(body, ChatRequest.model_fields)
    unknown_in_messages = unknown_message_fields(body.get("messages"), Message.model_fields)
    return parse_as(ChatRequest, body, config, facts, unknown, unknown_in_messages, "omit it for no limit")


def parse_completion(body: dict[str, object], config: ServeConfig, facts: RequestFacts) -> CompletionRequest:
    """Raises InvalidRequest or NotFound with code and param of http-api section 13."""
    unknown = unknown_fields(body, CompletionRequest.model_fields)
    return parse_as(CompletionRequest, body, config, facts, unknown, limit_hint=f"omit it for {COMPLETION_MAX_TOKENS}")


def refuse_embeddings(body: dict[str, object], config: ServeConfig, facts: RequestFacts) -> NoReturn:
    """The answer of POST /v1/embeddings where the model generates. Raises InvalidRequest, or NotFound for another model."""
    parse_as(ServedRequest, {"model": body.get("model")}, config, facts, [])
    raise InvalidRequest(
        f"{facts.model_name!r} generates text and makes no embeddings; send this to a server with an embedding model",
        code="unsupported_operation",
        param="model",
    )


R = TypeVar("R", bound=ServedRequest)


def parse_as(
    model: type[R],
    body: dict[str, object],
    config: ServeConfig,
    facts: RequestFacts,
    unknown: Collection[str],
    unknown_deep: Collection[str] = (),
    limit_hint: str = "",
) -> R:
    """A checked request of this kind. unknown, unknown_deep: names without a meaning; strict configurations refuse the first."""
    names = reported([*inert_fields(body), *unknown, *unknown_deep])
    context = Context(config, facts, names, echo=body.get("echo") is True)
    problems: list[Problem] = []
    if config.strict_fields:
        problems += [_unknown(path) for path in unknown]
    try:
        request = model.model_validate(body, context=context)
    except ValidationError as error:
        problems += problems_of(error, {"max_tokens": limit_hint, "max_completion_tokens": limit_hint})
    if problems:
        raise refusal(problems, body) from None
    return request


def _unknown(path: str) -> Problem:
    field = "stream_options" if path.startswith("stream_options.") else path
    return unknown_parameter(path, field)
