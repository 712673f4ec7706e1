"""Facts of a small model and short ways to parse, for the tests of this folder."""

from __future__ import annotations

import pytest

from overlap_serve.config import GenerationDefaults, ServeConfig, parse_config
from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.protocol import ChatRequest, CompletionRequest, RequestFacts, parse_chat, parse_completion

VOCAB = 1000  # rows of the output head
TOKENS = 900  # ids of the tokenizer; 900..999 are padding
MAX_LEN = 4096
FACTS = RequestFacts(
    model_name="m",
    vocab_size=VOCAB,
    num_token_ids=TOKENS,
    max_model_len=MAX_LEN,
    eos_token_ids=(2, 7),
    generation=GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1),
    special_token_ids={"<|im_end|>": 7, "<|sep|>": 8},
)
USER = {"role": "user", "content": "hi"}


def config(**fields: object) -> ServeConfig:
    return parse_config(fields)


def chat(settings: ServeConfig | None = None, /, **fields: object) -> ChatRequest:
    return parse_chat({"messages": [USER], **fields}, settings or config(), FACTS)


def completion(settings: ServeConfig | None = None, /, **fields: object) -> CompletionRequest:
    return parse_completion({"prompt": "hi", **fields}, settings or config(), FACTS)


def refused_chat(settings: ServeConfig | None = None, /, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(settings, **fields)
    return caught.value


def refused_completion(settings: ServeConfig | None = None, /, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        completion(settings, **fields)
    return caught.value
