"""GGUF file to Hugging Face folder, on a tiny file written here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf as gguf_file
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families import Llama3Rope, read_config, read_facts
from overlap_serve.models.gguf import FAMILIES, convert, main
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import (
    NORMAL,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    UNUSED,
    byte_level_vocabulary,
    random_tensors,
    sentencepiece_vocabulary,
    write_gguf,
)
from tests.models.test_decoder import expected, run


class Case:
    """A checkpoint of transformers, the GGUF file to be made of it, and the folder to be made of that."""

    def __init__(self, folder: Path) -> None:
        self.original, self.out, self.file = folder / "original", folder / "out", folder / "tiny.gguf"
        self.out.mkdir()

    def prepare(
        self, changes: dict[str, Any] | None = None, checkpoint: str = "LlamaForCausalLM", **options: Any
    ) -> dict[str, torch.Tensor]:
        sizes = {"vocab_size": len(TOKENS), "intermediate_size": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        self.reference = make_checkpoint(self.original, checkpoint, **{**sizes, **rope, **(changes or {})})
        self.tensors = load_file(self.original / "model.safetensors")
        write_gguf(self.file, {key: tensor.numpy() for key, tensor in self.tensors.items()}, **options)
        self.warnings = convert(self.file, self.out)
        prepared: dict[str, torch.Tensor] = load_file(self.out / "model.safetensors")
        return prepared


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def fails(case: Case, *words: str, **options: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        case.prepare(**options)
    for word in (str(case.file), *words):
        assert word in caught.value.message


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
def test_float32_tensors_come_back_bit_for_bit(case: Case, changes: dict[str, Any]) -> None:
    prepared = case.prepare(changes)
    assert prepared.keys() == case.tensors.keys()
    for key, tensor in case.tensors.items():
        assert torch.equal(prepared[key], tensor), key


def test_the_prepared_folder_gives_the_logits_of_the_original(case: Case) -> None:
    case.prepare()
    decoder = build_decoder(case.out, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP())
    tokens_T = torch.arange(40)
    torch.testing.assert_close(run(decoder, tokens_T, [40]), expected(case.reference, tokens_T), rtol=1e-5, atol=1e-5)


def test_floats_keep_their_type_and_quantized_tensors_become_float32(case: Case) -> None:
    kinds = {
        "model.layers.0.self_attn.q_proj.weight": Kind.BF16,
        "model.layers.0.self_attn.k_proj.weight": Kind.F16,
        "model.layers.1.self_attn.k_proj.weight": Kind.Q8_0,
        "model.layers.1.mlp.up_proj.weight": Kind.Q4_1,
    }
    prepared = case.prepare(kinds=kinds)
    assert [str(prepared[key].dtype) for key in kinds] == [
        "torch.bfloat16",
        "torch.float16",
        "torch.float32",
        "torch.float32",
    ]
    for key, kind in kinds.items():
        raw = gguf_file.quantize(case.tensors[key].numpy(), kind)
        wanted = torch.from_numpy(gguf_file.dequantize(raw, kind))  # rows are quantized one by one: permuting commutes
        assert torch.equal(prepared[key].float(), wanted), key


def test_config_and_facts(case: Case) -> None:
    case.prepare()
    config = read_config(case.out)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 8)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (len(TOKENS), 32, 64)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 500.0, 64)
    assert config.tie_word_embeddings
    assert read_facts(case.out).eos_token_ids == (2, 0)  # end of sequence, and end of turn


def test_an_output_tensor_means_untied_embeddings(case: Case) -> None:
    case.prepare({"tie_word_embeddings": False})
    assert not read_config(case.out).tie_word_embeddings


def test_special_tokens_are_single_and_template_is_written(case: Case) -> None:
    case.prepare()
    tokenizer = Tokenizer.from_file(str(case.out / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello<|im_end|>").ids == [1, TOKENS.index("hello"), 2]
    assert (case.out / "chat_template.jinja").read_text() == TEMPLATE
    settings = json.loads((case.out / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["model_max_length"]) == (SPECIAL[1], SPECIAL[2], 64)
    assert case.warnings == []


def test_digits_stand_apart_as_smollm_was_trained(case: Case) -> None:
    case.prepare()
    tokenizer = Tokenizer.from_file(str(case.out / "tokenizer.json"))
    assert tokenizer.encode("x  42").tokens == ["x", "ĠĠ", "4", "2"]  # transformers' loader gives Ġ Ġ 4 2


def test_an_unknown_way_of_cutting_text_is_a_warning(case: Case) -> None:
    case.prepare(vocabulary={"pre": "some-new-one"})
    assert len(case.warnings) == 1
    assert "some-new-one" in case.warnings[0]


def llama3_divisors(theta: float, factor: float, context: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py writes rope_freqs.weight."""
    divisors = []
    for frequency in 1.0 / (theta ** (np.arange(0, 8, 2) / 8)):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / 4.0:
            divisors.append(1.0)
        elif wavelength > context / 1.0:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / 3.0
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(divisors)) == 3  # all three branches
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_is_recovered_from_its_divisors(case: Case) -> None:
    case.prepare(values={"rope.freq_base": 5e5}, extra={"rope_freqs.weight": llama3_divisors(5e5, 32.0, 8192)})
    config = read_config(case.out)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(32.0, 1.0, 4.0, 8192))


def test_divisors_of_another_scaling_are_refused(case: Case) -> None:
    fails(
        case,
        "rope_freqs.weight",
        values={"rope.freq_base": 5e5},
        extra={"rope_freqs.weight": llama3_divisors(5e5, 32.0, 4096 * 3)},
    )


def test_linear_rope_is_read_and_others_are_refused(case: Case) -> None:
    case.prepare(values={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert json.loads((case.out / "config.json").read_text())["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 500.0,
        "factor": 4.0,
    }
    fails(case, "longrope", values={"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0})


def test_what_cannot_be_converted_is_named(case: Case) -> None:
    fails(case, "general.architecture", "gpt2", "llama, qwen2, qwen3", architecture="gpt2")
    fails(case, "llama.embedding_length", values={"embedding_length": None})
    fails(case, "blk.0.attn_q_norm.weight", extra={"blk.0.attn_q_norm.weight": np.ones(8, dtype=np.float32)})


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000])
def test_a_truncated_file_is_an_error_that_names_it(case: Case, keep: int) -> None:
    case.prepare()
    case.file.write_bytes(case.file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: damaged"):
        convert(case.file, case.out)


def test_a_full_disk_is_found_before_writing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelLoadError, match="MB are needed"):
        case.prepare()
    assert not (case.out / "model.safetensors").exists()


def test_the_process_prints_one_line_and_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.gguf"), str(tmp_path)]) == 2
    assert capsys.readouterr().out.count("\n") == 1


# -- families


FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12}),
}


def test_every_family_is_tried() -> None:
    assert FAMILY_CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_every_family_gives_the_tensors_and_logits_of_the_original(case: Case, family: str, tied: bool) -> None:
    checkpoint, changes = FAMILY_CASES[family]
    values = {"attention.key_length": changes["head_dim"]} if "head_dim" in changes else {}
    prepared = case.prepare({**changes, "tie_word_embeddings": tied}, checkpoint, architecture=family, values=values)
    assert prepared.keys() == case.tensors.keys()
    for key, tensor in case.tensors.items():
        assert torch.equal(prepared[key], tensor), key
    decoder = build_decoder(case.out, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP())
    tokens_T = torch.arange(40)
    torch.testing.assert_close(run(decoder, tokens_T, [40]), expected(case.reference, tokens_T), rtol=1e-5, atol=1e-5)


def test_yarn_is_read(case: Case) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 24.0}
    case.prepare(
        checkpoint="Qwen2ForCausalLM",
        architecture="qwen2",
        values={f"rope.scaling.{key}": value for key, value in scaling.items()},
    )
    assert json.loads((case.out / "config.json").read_text())["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 24.0,
    }


def test_one_value_for_all_layers_may_be_a_list(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", random_tensors(), values={"attention.head_count_kv": [2, 2, 2]})
    convert(tmp_path / "a.gguf", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 2


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "experts": ({"values": {"expert_count": 8}}, ("llama.expert_count is 8",)),
    "other_value_size": ({"values": {"attention.value_length": 4}}, ("llama.attention.value_length is 4",)),
    "partial_rotary": ({"values": {"rope.dimension_count": 4}}, ("llama.rope.dimension_count is 4",)),
    "embedding_model": ({"values": {"attention.causal": False}}, ("llama.attention.causal is False",)),
    "window": ({"values": {"attention.sliding_window": 32}}, ("llama.attention.sliding_window is 32",)),
    "heads_by_layer": ({"values": {"attention.head_count_kv": [2, 1, 2]}}, ("llama.attention.head_count_kv",)),
    "no_heads": ({"values": {"attention.head_count": 0}}, ("llama.attention.head_count is 0",)),
    "text_for_a_number": ({"values": {"block_count": "three"}}, ("llama.block_count", "int")),
    "one_of_several": ({"others": {"split.count": 3}}, ("split.count is 3", "llama-gguf-split --merge")),
    "fewer_layers": ({"values": {"block_count": 2}}, ("blk.2.attn_norm.weight", "no place")),
    "more_layers": ({"values": {"block_count": 4}}, ("blk.3.attn_norm.weight and 8 more is missing",)),
    "other_size": ({"values": {"feed_forward_length": 96}}, ("ffn_gate.weight has shape (64, 32)", "(96, 32)")),
    "other_heads": ({"values": {"attention.head_count_kv": 4}}, ("attn_k.weight has shape (16, 32)", "(32, 32)")),
    "integers": (
        {"raw": {"blk.0.ffn_up.weight": (np.zeros((64, 32), np.int8), Kind.I8)}},
        ("blk.0.ffn_up.weight has type I8",),
    ),
    "unknown_tokenizer": ({"vocabulary": {"model": "rwkv"}}, ("tokenizer.ggml.model is 'rwkv'", "gpt2, llama")),
    "no_tokens": ({"vocabulary": {"tokens": None}}, ("tokenizer.ggml.tokens is missing",)),
    "short_types": ({"vocabulary": {"token_type": [1, 1]}}, ("tokenizer.ggml.token_type has 2 entries",)),
    "foreign_id": ({"vocabulary": {"bos_token_id": 9999}}, ("tokenizer.ggml.bos_token_id is 9999",)),
    "foreign_merge": ({"vocabulary": {"merges": ["h e", "h zzz"]}}, ("tokenizer.ggml.merges holds 'h zzz'",)),
    "no_scores": ({"vocabulary": {"model": "llama"}}, ("tokenizer.ggml.scores is missing",)),
    "more_tokens_than_rows": ({"vocabulary": {"tokens": [*TOKENS, "x"], "token_type": None}}, ("token_embd.weight",)),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named_with_the_file(
    tmp_path: Path, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file, random_tensors(), **options)
    with pytest.raises(ModelLoadError) as caught:
        convert(file, tmp_path)
    for word in (str(file), *words):
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message
    assert not (tmp_path / "model.safetensors").exists()


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    """Each byte of header and metadata may be wrong: the file is converted, or the error is ours."""
    file, damaged = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(file, random_tensors(num_layers=1), values={"block_count": 1})
    whole = file.read_bytes()
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for place in random.integers(0, 1200, size=random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        damaged.write_bytes(data)
        try:
            convert(damaged, tmp_path)
        except ModelLoadError as error:
            assert str(damaged) in error.message
            refused += 1
    assert refused > 50


# -- tensor types


EXACT = {Kind.F32, Kind.F16, Kind.BF16}
DEQUANTIZED = [kind for kind in Kind if kind in gguf_file.quants._type_traits and kind not in EXACT]


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=[kind.name for kind in DEQUANTIZED])
def test_every_type_that_the_gguf_package_dequantizes_is_converted(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a few rows, which must not show. The bytes are random: only that they mean the same numbers counts."""
    monkeypatch.setattr("overlap_serve.models.gguf._BLOCK_BYTES", 3 * 4 * 256)
    rows, bytes_per_row = 256, gguf_file.quants.quant_shape_to_byte_shape((256, 256), kind)[1]
    data = np.random.default_rng(1).integers(0, 256, (rows, bytes_per_row), dtype=np.uint8)
    write_gguf(
        tmp_path / "a.gguf",
        random_tensors(hidden=256, inner=256, num_layers=1),
        raw={"blk.0.ffn_gate.weight": (data, kind), "blk.0.attn_q.weight": (data, kind)},
        values={"embedding_length": 256, "feed_forward_length": 256, "block_count": 1},
    )
    with np.errstate(all="ignore"):  # random scales overflow
        convert(tmp_path / "a.gguf", tmp_path)
        wanted = gguf_file.dequantize(data, kind)
    prepared = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0"
    assert prepared[f"{layer}.mlp.gate_proj.weight"].numpy().tobytes() == wanted.tobytes()
    pairs = wanted.reshape(4, 32, 2, 256)  # q is interleaved: even rows of a head are its first half
    halves = np.concatenate((pairs[:, :, 0], pairs[:, :, 1]), axis=1).reshape(256, 256)
    assert prepared[f"{layer}.self_attn.q_proj.weight"].numpy().tobytes() == halves.tobytes()


# -- tokenizers


def tokenizer_of(tmp_path: Path, **vocabulary: Any) -> Tokenizer:
    words = {**byte_level_vocabulary(), **vocabulary}
    write_gguf(tmp_path / "a.gguf", random_tensors(len(words["tokens"])), vocabulary=vocabulary)
    convert(tmp_path / "a.gguf", tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("gpt-2", "a 123", ["a", "Ġ123"]),
        ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
        ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("qwen2", "It'S\n\n x", ["It", "'S", "ĊĊ", "Ġx"]),
        ("deepseek-r1-qwen", "a 123", ["a", "Ġ", "1", "2", "3"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_trained(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_unicode_first(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, pre="qwen2").normalizer.normalize_str("e\u0301") == "\u00e9"


def test_llama3_takes_a_piece_that_is_a_token_whole_and_starts_with_bos(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "ello"]  # no merge makes it
    vocabulary = {"tokens": tokens, "token_type": None, "add_bos_token": None}
    assert tokenizer_of(tmp_path, pre="llama-bpe", **vocabulary).encode("ello").tokens == ["<|im_start|>", "ello"]
    assert "ello" not in tokenizer_of(tmp_path, pre="gpt-2", **vocabulary).encode("ello").tokens


def test_tokens_of_the_user_are_found_whole_and_are_not_special(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("hello<tool>").tokens == ["hello", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hello<tool>").ids) == "hello<tool>"


def test_rows_that_only_round_the_size_up_are_no_tokens(tmp_path: Path) -> None:
    types = [NORMAL] * len(TOKENS) + [UNUSED] * 3
    tokenizer = tokenizer_of(tmp_path, tokens=[*TOKENS, "[PAD1]", "[PAD2]", "[PAD3]"], token_type=types)
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert read_config(tmp_path).vocab_size == len(TOKENS) + 3


@pytest.mark.parametrize(
    ("settings", "ids"),
    [({}, []), ({"add_bos_token": True}, [1]), ({"add_bos_token": True, "add_eos_token": True}, [1, 2])],
)
def test_what_surrounds_a_text_follows_the_metadata(tmp_path: Path, settings: dict[str, bool], ids: list[int]) -> None:
    assert tokenizer_of(tmp_path, **settings).encode("").ids == ids


def test_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, **sentencepiece_vocabulary())
    encode = tokenizer.encode
    # el (-2) is joined before ll (-3), so no llo and no hello: the order of the scores is what counts.
    assert encode("hello", add_special_tokens=False).tokens == ["▁h", "el", "l", "o"]
    assert encode("hello").tokens[0] == "<s>"
    assert encode("hé", add_special_tokens=False).tokens == ["▁h", "<0xC3>", "<0xA9>"]
    assert encode("  h", add_special_tokens=False).tokens == ["▁▁", "▁h"]
    assert encode("h<tool>h", add_special_tokens=False).tokens == ["▁h", "<tool>", "▁h"]
    assert tokenizer.decode(encode("hello hé<tool>").ids) == "hello hé<tool>"


def test_sentencepiece_without_a_blank_in_front(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, **{**sentencepiece_vocabulary(), "add_space_prefix": False})
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["h", "e"]
    assert tokenizer.decode(tokenizer.encode(" he").ids) == " he"


def test_sentencepiece_vocabularies_encode_as_transformers_reads_them(tmp_path: Path) -> None:
    """transformers puts the blank only before the first piece, so the text has no special token inside."""
    ours = tokenizer_of(tmp_path, **sentencepiece_vocabulary())
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    for text in ("hello", "hello hello  he", "ohello lo", "größe ▁ he", "hell o\n"):
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
