"""Facts that configuration and ingress need: limits, end tokens of all files, sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from overlap_serve.config import GenerationDefaults, ModelFacts
from overlap_serve.models.families.files import decode_optional
from overlap_serve.models.families.readers import read_config, token_ids

log = logging.getLogger(__name__)


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TokenizerConfigFile(msgspec.Struct):
    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`, with every end token that any of its files names.

    Raises ModelLoadError that names file and key. generation_config.json and the tokenizer files are optional.
    """
    config = read_config(folder)
    generation = decode_optional(folder / "generation_config.json", _GenerationFile)
    eos = (*token_ids(generation.eos_token_id), *config.eos_token_ids, *_tokenizer_eos(folder))
    return ModelFacts(
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        kv_elements_per_token=config.kv_elements_per_token,
        num_kv_heads=config.num_kv_heads,
        splits=config.splits(),
        eos_token_ids=tuple(_known(dict.fromkeys(eos), config.vocab_size, folder)),
        generation=_generation_defaults(generation),
    )


def _generation_defaults(given: _GenerationFile) -> GenerationDefaults:
    """What the file sets; null and absent mean our own default. top_k below 1 is off."""
    values = {
        name: value
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        if (value := msgspec.structs.asdict(given)[name]) is not None
    }
    return GenerationDefaults(top_k=max(given.top_k or 0, 0), **values)


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """Id of the tokenizer's own end token, if its files name one."""
    settings = decode_optional(folder / "tokenizer_config.json", _TokenizerConfigFile)
    if settings.eos_token is None:
        return ()
    text = settings.eos_token if isinstance(settings.eos_token, str) else settings.eos_token.content
    for id_, token in settings.added_tokens_decoder.items():
        if token.content == text:
            return (id_,)
    added = decode_optional(folder / "tokenizer.json", _TokenizerFile).added_tokens
    return tuple(token.id for token in added if token.content == text)


def _known(ids: Iterable[int], vocab_size: int, folder: Path) -> list[int]:
    """Ids that the output head can produce; others could only index out of range."""
    known = []
    for id_ in ids:
        if 0 <= id_ < vocab_size:
            known.append(id_)
        else:
            log.warning("%s: end token id %d is outside the vocabulary of %d, it is left out", folder, id_, vocab_size)
    return known
