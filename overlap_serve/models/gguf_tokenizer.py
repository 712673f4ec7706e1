"""tokenizer.json, tokenizer_config.json and chat template out of the metadata of a GGUF file.

Owns how llama.cpp's two kinds of vocabulary are written for the `tokenizers` library: `gpt2` (byte-level BPE with merges; how text
is cut before merging is named by `tokenizer.ggml.pre`) and `llama` (SentencePiece BPE, whose merges follow from the scores).
Imports neither transformers nor torch. Sources: llama.cpp, src/llama-vocab.cpp; the tokenizer.json files of the families.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.gguf_file import GGUFFile

KINDS = ("gpt2", "llama")

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


@dataclass(frozen=True)
class Cut:
    """How a byte-level vocabulary wants its text. split: a regular expression, None for GPT-2's own. nfc: Unicode is composed first.
    whole: a piece that is a token is taken as it is, without merging. add_bos: where the file does not say."""

    split: str | None = None
    digits_apart: bool = False
    nfc: bool = False
    whole: bool = False
    add_bos: bool = False


# By tokenizer.ggml.pre.
CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut(),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"), Cut(digits_apart=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Cut(_LLAMA3, whole=True, add_bos=True)),
    "qwen2": Cut(_QWEN2, nfc=True),
    "deepseek-r1-qwen": Cut(_QWEN2),
}


@dataclass(frozen=True)
class _Vocabulary:
    """tokens, types: by id, without the padding at the end. Ids are None where the file names none."""

    tokens: list[str]
    types: list[int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None

    @property
    def ids(self) -> dict[str, int]:
        """The first id of each text."""
        return {token: id_ for id_, token in reversed(list(enumerate(self.tokens)))}

    def named(self) -> dict[str, str]:
        """The special tokens as tokenizer_config.json names them."""
        ids = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unk, "pad_token": self.pad}
        return {name: self.tokens[id_] for name, id_ in ids.items() if id_ is not None}


def write_tokenizer(file: GGUFFile, out: Path, *, vocab_size: int, max_length: int) -> list[str]:
    """Write the files into the folder `out`; returns warnings. vocab_size: rows of the embedding.

    Raises ModelLoadError that names the file and what in it cannot be converted.
    """
    kind = file.need("tokenizer.ggml.model", str)
    if kind not in KINDS:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.model is {kind!r}, supported are {', '.join(KINDS)}")
    words = _read_vocabulary(file, vocab_size)
    warnings: list[str] = []
    if kind == "gpt2":
        pre = file.get("tokenizer.ggml.pre", str, "default")
        cut = CUTS.get(pre)
        if cut is None:
            cut = Cut()
            warnings.append(
                f"tokenizer.ggml.pre is {pre!r}, not known here: text is cut as for gpt-2, some may encode differently"
            )
        tokenizer, add_bos = _byte_level(file, words, cut), cut.add_bos
    else:
        tokenizer, add_bos = _sentencepiece(file, words), True
    _add_tokens(tokenizer, words)
    _surround(
        tokenizer,
        words,
        bos=words.bos if file.get("tokenizer.ggml.add_bos_token", bool, add_bos) else None,
        eos=words.eos if file.get("tokenizer.ggml.add_eos_token", bool, False) else None,
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_settings(words, out, max_length)
    template = file.get("tokenizer.chat_template", str, "")
    if template:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    return warnings


def _read_vocabulary(file: GGUFFile, vocab_size: int) -> _Vocabulary:
    tokens = file.need("tokenizer.ggml.tokens", list[str])
    types = file.get("tokenizer.ggml.token_type", list[int], [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; fetch the file again"
        )
    if len(tokens) > vocab_size:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, token_embd.weight only {vocab_size} rows; "
            "the file is not consistent, use another"
        )

    def id_of(name: str) -> int | None:
        id_ = file.get(f"tokenizer.ggml.{name}_token_id", int, None)
        if id_ is not None and not 0 <= id_ < len(tokens):
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.{name}_token_id is {id_}, there are {len(tokens)} tokens"
            )
        return id_

    bos, eos, unk, pad = id_of("bos"), id_of("eos"), id_of("unknown"), id_of("padding")
    last = max((id_ for id_ in (bos, eos, unk, pad) if id_ is not None), default=-1)
    # Rows that only round the size up have made-up names; no text has them and no sample may be one.
    while len(tokens) - 1 > last and types[len(tokens) - 1] == _UNUSED:
        tokens = tokens[:-1]
    return _Vocabulary(tokens, types[: len(tokens)], bos, eos, unk, pad)


def _byte_level(file: GGUFFile, words: _Vocabulary, cut: Cut) -> Tokenizer:
    ids = words.ids
    merges = []
    for entry in file.need("tokenizer.ggml.merges", list[str]):
        left, blank, right = entry.partition(" ")
        if not blank or left not in ids or right not in ids or left + right not in ids:
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.merges holds {entry!r}, which joins no tokens of this file"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cut.whole))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    first: Any = None
    if cut.split is not None:
        first = pre_tokenizers.Split(Regex(cut.split), behavior="isolated")
    elif cut.digits_apart:
        first = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.split is None)
    tokenizer.pre_tokenizer = byte_level if first is None else pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, words: _Vocabulary) -> Tokenizer:
    """As the tokenizer.json of Llama 2: a blank before every piece of text, also after a special token (llama.cpp does the same)."""
    scores = file.need("tokenizer.ggml.scores", list[float])
    if len(scores) < len(words.tokens):
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(words.tokens)} tokens; fetch the file again"
        )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = (
        words.unk if words.unk is not None else next((i for i, t in enumerate(words.types) if t == _UNKNOWN), None)
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=words.ids,
            merges=merges_of(words.tokens, words.types, scores),
            unk_token=None if unknown is None else words.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in words.types,
        )
    )
    blank = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), blank]) if prefix else blank
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_of(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint token has the best score; as merges: every way to make a token of two others,
    best score first. Of equal scores the smaller id, then the longer left part."""
    whole = (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)
    known = {token for token, type_ in zip(tokens, types, strict=True) if type_ not in whole}
    order = sorted((id_ for id_ in range(len(tokens)) if types[id_] not in whole), key=lambda id_: (-scores[id_], id_))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[id_] for id_ in order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _add_tokens(tokenizer: Tokenizer, words: _Vocabulary) -> None:
    """Tokens that are found whole in any text: control tokens and those with a role (special), and the user's (not special)."""
    roles = set(words.named().values())
    if words.unk is not None and words.types[words.unk] not in (_UNKNOWN, _CONTROL):
        roles.discard(words.tokens[words.unk])
    special = [
        t for t, type_ in zip(words.tokens, words.types, strict=True) if type_ in (_UNKNOWN, _CONTROL) or t in roles
    ]
    plain = [t for t, type_ in zip(words.tokens, words.types, strict=True) if type_ == _USER_DEFINED and t not in roles]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _surround(tokenizer: Tokenizer, words: _Vocabulary, *, bos: int | None, eos: int | None) -> None:
    """What `add_special_tokens` puts around a text."""

    def around(name: str) -> list[str]:
        before = [] if bos is None else [f"{words.tokens[bos]}:{int(name == 'B')}"]
        after = [] if eos is None else [f"{words.tokens[eos]}:{int(name == 'B')}"]
        return [*before, f"${name}:{int(name == 'B')}", *after]

    ids: Iterable[int] = {id_ for id_ in (bos, eos) if id_ is not None}
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around("A"),
            pair=[*around("A"), *around("B")],
            special_tokens=[(words.tokens[id_], id_) for id_ in ids],
        )


def _write_settings(words: _Vocabulary, out: Path, max_length: int) -> None:
    settings = {
        "backend": "tokenizers",
        **words.named(),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that old and new versions of transformers know
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
