"""How many tokens a request may generate, and how much of its prompt is kept (http-api section 2.3). Pure arithmetic.

P prompt tokens, M context length of the model, C tokens the KV cache holds. What can never run is refused here, before
anything is queued.
"""

from __future__ import annotations

from overlap_serve.errors import ContextLengthExceeded, InvalidRequest


def token_budget(
    prompt_tokens: int,
    limit: int | None,
    *,
    max_model_len: int,
    capacity_tokens: int,
    default_max_tokens: int | None,
    clamp: bool,
    param: str,
) -> int:
    """Effective max_tokens, >= 1: prompt plus result fit both the model and the KV cache.

    limit: what the request asks, None for no limit. clamp: cut a limit that does not fit the model instead of refusing it.
    param: `messages` or `prompt`, for the envelope.
    Raises InvalidRequest `empty_prompt`, ContextLengthExceeded.
    """
    if prompt_tokens == 0:
        raise InvalidRequest(f"{param} has no tokens; send some text", code="empty_prompt", param=param)
    context = f"This model's maximum context length is {max_model_len} tokens"
    if prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"{context}. Your {param} has {prompt_tokens} tokens, which leaves no room for an answer; shorten it to at most "
            f"{max_model_len - 1} tokens",
            param=param,
        )
    if prompt_tokens + 1 > capacity_tokens:
        raise ContextLengthExceeded(
            f"{context}, and the KV cache of this server holds {capacity_tokens}. Your {param} has {prompt_tokens} tokens; "
            f"shorten it to at most {max(0, capacity_tokens - 1)} tokens",
            param=param,
        )
    room = min(max_model_len, capacity_tokens) - prompt_tokens
    if limit is None:
        return room if default_max_tokens is None else min(room, default_max_tokens)
    if prompt_tokens + limit > max_model_len and not clamp:
        raise ContextLengthExceeded(
            f"{context}. You asked for {prompt_tokens + limit} tokens: {prompt_tokens} in the {param} and {limit} to "
            f"generate; shorten the {param} or ask for at most {max_model_len - prompt_tokens} tokens",
            param=param,
        )
    return min(limit, room)


def kept_prompt_tokens(truncate: int, limit: int | None, *, max_model_len: int, capacity_tokens: int) -> int:
    """How many tokens of a prompt's right end `truncate_prompt_tokens` keeps, >= 1.

    truncate: -1 keeps as many as leave room for `limit` tokens (one, without a limit), else the number itself.
    """
    if truncate != -1:
        return truncate
    room_for_answer = 1 if limit is None else limit
    return max(1, min(max_model_len, capacity_tokens) - room_for_answer)
