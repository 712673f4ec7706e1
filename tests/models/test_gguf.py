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
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families import Llama3Rope, read_config, read_facts
from overlap_serve.models.gguf import convert, main
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import make_checkpoint
from tests.models.test_decoder import expected, run

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "he", "ll", "hell", "hello"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(key: str) -> str:
    stem, kind = key.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    interleaved: np.ndarray = halves.swapaxes(1, 2).reshape(weights.shape)
    return interleaved


def write_gguf(
    file: Path,
    tensors: dict[str, torch.Tensor],
    *,
    kinds: dict[str, gguf_file.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    skip: str = "",
    pre: str = "smollm",
    theta: float = 500.0,
    rope: tuple[str, float] | None = None,
    experts: int = 0,
) -> None:
    """A file like llama.cpp's converter makes from these checkpoint tensors. kinds: checkpoint name -> type, else float32."""
    writer = gguf_file.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    if skip != "embedding_length":
        writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    if rope is not None:
        writer.add_rope_scaling_type(gguf_file.RopeScalingType(rope[0]))
        writer.add_rope_scaling_factor(rope[1])
    if experts:
        writer.add_expert_count(experts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, tensor in tensors.items():
        values = tensor.numpy()
        if "q_proj" in key or "k_proj" in key:
            values = permute(values, 4 if "q_proj" in key else 2)
        kind = (kinds or {}).get(key, gguf_file.GGMLQuantizationType.F32)
        writer.add_tensor(gguf_name(key), gguf_file.quantize(values, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Case:
    """A checkpoint of transformers, the GGUF file to be made of it, and the folder to be made of that."""

    def __init__(self, folder: Path) -> None:
        self.original, self.out, self.file = folder / "original", folder / "out", folder / "tiny.gguf"
        self.out.mkdir()

    def prepare(self, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, torch.Tensor]:
        sizes = {"vocab_size": len(TOKENS), "intermediate_size": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        self.reference = make_checkpoint(self.original, **{**sizes, **rope, **(changes or {})})
        self.tensors = load_file(self.original / "model.safetensors")
        write_gguf(self.file, self.tensors, **options)
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
        "model.layers.0.self_attn.q_proj.weight": gguf_file.GGMLQuantizationType.BF16,
        "model.layers.0.self_attn.k_proj.weight": gguf_file.GGMLQuantizationType.F16,
        "model.layers.1.self_attn.k_proj.weight": gguf_file.GGMLQuantizationType.Q8_0,
        "model.layers.1.mlp.up_proj.weight": gguf_file.GGMLQuantizationType.Q4_1,
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
    case.prepare(pre="some-new-one")
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
    case.prepare(theta=5e5, extra={"rope_freqs.weight": llama3_divisors(5e5, 32.0, 8192)})
    config = read_config(case.out)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(32.0, 1.0, 4.0, 8192))


def test_divisors_of_another_scaling_are_refused(case: Case) -> None:
    fails(case, "rope_freqs.weight", theta=5e5, extra={"rope_freqs.weight": llama3_divisors(5e5, 32.0, 4096 * 3)})


def test_linear_rope_is_read_and_others_are_refused(case: Case) -> None:
    case.prepare(rope=("linear", 4.0))
    assert json.loads((case.out / "config.json").read_text())["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 500.0,
        "factor": 4.0,
    }
    fails(case, "yarn", rope=("yarn", 4.0))


def test_what_cannot_be_converted_is_named(case: Case) -> None:
    fails(case, "general.architecture", "gpt2", "llama", architecture="gpt2")
    fails(case, "expert_count", experts=8)
    fails(case, "llama.embedding_length", skip="embedding_length")
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
