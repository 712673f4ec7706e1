"""Small tokenizers of every decoder family, built in code, and helpers that run the detokenizer over ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from overlap_serve.messages import StreamOpen, TextDelta, TokenOutput, pack_ids
from overlap_serve.sampling import FinishReason, TextParams
from overlap_serve.text.detokenizer import Detokenizer
from overlap_serve.text.tokenizer import Tokenizer

CORPUS = [
    "the capital of France is Paris",
    "hello there, héllo wörld",
    "def f(x):\n    return x",
    "你好 世界 你好",
] * 20
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Backend:
    """GPT-2 style BPE with merges that cross character boundaries of the corpus' CJK text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "<|im_end|>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback(*, strip: bool = True) -> Backend:
    """Llama style: spaces as ▁, unknown characters as <0xXX> tokens. strip: the text begins with a space that is removed."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if strip else "never")
    latin = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=200))
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS, *BYTES, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(SPECIALS)
    return backend


def word_piece() -> Backend:
    """BERT style: ## continues a word, and " ." is cleaned up."""
    words = ["[UNK]", "[CLS]", "the", "capital", "of", "fr", "##ance", "is", "par", "##is", ".", ",", "##s"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return backend


def metaspace() -> Backend:
    """T5 style: the decoder itself drops the first ▁."""
    words = ["<unk>", "▁the", "▁capital", "s", "▁", "▁of", "▁Paris", ".", "▁▁x"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return backend


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, {})


def saved(backend: Backend, folder: Path, config: Mapping[str, object] | None = None) -> Path:
    """A model folder."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config or {})))
    return folder


def pieces_tokenizer(pieces: Sequence[str]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer in which every piece is one token, and the ids of the pieces."""
    backend = Backend(models.BPE(vocab={}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(dict.fromkeys(pieces)))
    tokenizer = wrapped(backend)
    ids = [tokenizer.token_id(piece) for piece in pieces]
    assert None not in ids
    return tokenizer, [token_id for token_id in ids if token_id is not None]


def opening(
    text: TextParams | None = None, context: Sequence[int] = (), generated: Sequence[int] = (), ingress: str = "ingress"
) -> StreamOpen:
    return StreamOpen(
        ingress=ingress,
        scheduler="scheduler",
        text=text or TextParams(),
        context=pack_ids(list(context)),
        generated=pack_ids(list(generated)),
        prompt_tokens=7,
        cached_tokens=3,
    )


def outputs(
    groups: Sequence[Sequence[int]],
    text: TextParams | None = None,
    *,
    context: Sequence[int] = (),
    generated: Sequence[int] = (),
    finish: FinishReason | None = "length",
    stop_reason: int | str | None = None,
    rid: str = "r",
    attempt: int = 0,
    choice: int = 0,
) -> list[TokenOutput]:
    """One output per group of ids; the first opens the choice, the last ends it."""
    made: list[TokenOutput] = []
    index = len(generated)
    for position, group in enumerate(groups):
        last = position == len(groups) - 1
        made.append(
            TokenOutput(
                rid=rid,
                attempt=attempt,
                choice=choice,
                first_index=index,
                token_ids=tuple(group),
                finish=finish if last else None,
                stop_reason=stop_reason if last else None,
                open=opening(text, context, generated) if position == 0 else None,
            )
        )
        index += len(group)
    return made


def run(detokenizer: Detokenizer, made: Sequence[TokenOutput]) -> list[TextDelta]:
    """All deltas; outputs after the end are late, as with a scheduler that has not heard of the stop yet."""
    results = [detokenizer.handle(output) for output in made]
    return [result[1] for result in results if result is not None]


def joined(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def joined_ids(deltas: Sequence[TextDelta]) -> tuple[int, ...]:
    """Ids of all deltas, after a check that first_index leaves no gap."""
    ids: list[int] = []
    for delta in deltas:
        assert delta.first_index == deltas[0].first_index + len(ids)
        ids.extend(delta.token_ids)
    return tuple(ids)


def random_groups(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Cut ids at these positions."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    return [list(ids[low:high]) for low, high in itertools.pairwise(bounds)]
