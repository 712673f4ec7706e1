"""`Tokenizer`: text to ids and back, on the `tokenizers` library.

Owns what a model folder says about its tokenizer: tokenizer.json, and the special tokens that the configuration files name. Knows
nothing of chats. The one idea: tokenizer.json is the whole truth about encoding, so a request's ids never depend on transformers.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from overlap_serve.config import FAKE_BOS_ID, FAKE_EOS_ID, FAKE_VOCAB_SIZE
from overlap_serve.errors import ModelLoadError
from overlap_serve.text.decoding import (
    REPLACEMENT,
    ByteDecoder,
    ByteScheme,
    Decoder,
    WindowDecoder,
    byte_characters,
    byte_scheme,
)

log = logging.getLogger(__name__)

FAKE_BOS = "<|bos|>"
FAKE_EOS = "<|eos|>"


class Tokenizer:
    """Immutable and thread-safe after construction.

    special_tokens: names of the configuration (`bos_token`, `eos_token`, `pad_token`, ...) to token strings, as chat templates see
    them. special_ids: ids whose text `skip_special_tokens` removes.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], more_special: Sequence[str] = ()) -> None:
        self._backend = backend
        # Some tokenizer.json files carry the settings of a training run; a prompt is never cut or padded by them.
        backend.no_truncation()
        backend.no_padding()
        self._mark_special([*special_tokens.values(), *more_special])
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.eos_token_id = None if self.eos_token is None else self.token_id(self.eos_token)
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._length = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._scheme: ByteScheme | None = None
        if backend.decoder is not None:
            self._scheme = byte_scheme(backend.decoder.__getstate__())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face style folder. Raises ModelLoadError naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{path} is missing; the model folder needs a tokenizer.json (the `tokenizers` format)"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path} is not a valid tokenizer: {error}") from None
        config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        named = {name: text for name, value in config.items() if (text := _named_token(name, value)) is not None}
        more = config.get("additional_special_tokens")
        texts = [_token_text(value) for value in more] if isinstance(more, list) else []
        return cls(backend, named, [text for text in texts if text is not None])

    @classmethod
    def bytes(cls) -> Tokenizer:
        """The tokenizer of `engine: fake`: id i is byte i, then bos and eos. Encoding with special tokens puts bos in front."""
        backend = Backend(models.BPE(vocab=byte_characters(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([FAKE_BOS, FAKE_EOS])
        backend.post_processor = processors.TemplateProcessing(
            single=f"{FAKE_BOS} $A", special_tokens=[(FAKE_BOS, FAKE_BOS_ID)]
        )
        tokenizer = cls(backend, {"bos_token": FAKE_BOS, "eos_token": FAKE_EOS})
        assert tokenizer.token_id(FAKE_BOS) == FAKE_BOS_ID and tokenizer.token_id(FAKE_EOS) == FAKE_EOS_ID
        assert len(tokenizer) == FAKE_VOCAB_SIZE
        return tokenizer

    def __len__(self) -> int:
        """One more than the greatest known id; the model's output may have more rows (padding)."""
        return self._length

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Special tokens written in the text are recognised either way; add_special_tokens adds what
        tokenizer.json puts around a text (usually bos)."""
        # encode() holds the GIL for the whole text (seconds for a megabyte, pains A31), the batch call does not.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of all ids at once; what the incremental decoders must add up to.

        It is the decode of `tokenizers`, with one exception: where a run of byte-fallback tokens is not valid UTF-8, `tokenizers`
        gives U+FFFD for every byte of the run, also for its complete characters. That cannot be streamed (a later byte would
        take back text already sent), so complete characters are kept here, as SentencePiece does. No clean-up of spaces.
        """
        # decode() holds the GIL for all ids, the batch call does not (as with encode).
        texts: list[str] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        text = texts[0]
        if self._scheme is None or self._scheme.errors == "replace" or REPLACEMENT not in text:
            return text
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, *, skip_special_tokens: bool) -> Decoder:
        """A new incremental decoder, at the start of a text."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if self._scheme is not None:
            return ByteDecoder(self._scheme, self.token_bytes, skip)
        return WindowDecoder(self._decode_window, skip)

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token string."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> builtins.bytes:
        """True bytes of one token, also when they are part of a character. b"" for an id that the tokenizer does not know."""
        if self._scheme is None:
            return self._decode_window([token_id]).encode()
        token: str | None = self._backend.id_to_token(token_id)
        return b"" if token is None else self._scheme.token_bytes(token)

    def _decode_window(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def _mark_special(self, texts: list[str]) -> None:
        """Tokens that the configuration calls special are special, if tokenizer.json knows them (as transformers does)."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        for text in dict.fromkeys(texts):
            if text in known:
                continue
            if self.token_id(text) is None:
                log.warning("special token %r is not in tokenizer.json; ignored", text)
            else:
                self._backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def read_json(path: Path) -> dict[str, object]:
    """A JSON object, {} if there is no such file. Raises ModelLoadError naming the file."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}") from None


def _named_token(name: str, value: object) -> str | None:
    return _token_text(value) if name.endswith("_token") else None


def _token_text(value: object) -> str | None:
    """A token in a configuration file: its string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
