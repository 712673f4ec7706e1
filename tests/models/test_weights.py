"""Checkpoint to parameters: complete, exact, by table, and with errors that name file and key."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import READERS, WEIGHTS, Ignore, Rule, Shard, Table, read_config
from overlap_serve.models.layers import RMSNorm
from overlap_serve.models.tp import TP, NoTP
from overlap_serve.models.weights import Ignored, build_decoder, dummy_weights, expand, load_weights
from tests.models.checkpoints import edit_json, edit_tensors, make_checkpoint

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FakeTP:
    """A rank without a group: loading makes no collective call."""

    rank: int
    size: int

    def all_reduce(self, t: Tensor) -> Tensor:
        raise AssertionError("loading must not communicate")

    all_gather = all_reduce
    broadcast = all_reduce

    def minimum(self, value: int) -> int:
        raise AssertionError("loading must not communicate")


def new_decoder(folder: Path, tp: TP | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(read_config(folder), tp or NoTP(), dtype=dtype, device=CPU)


def load(folder: Path, tp: TP | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_decoder(folder, load_format="auto", dtype=dtype, device=CPU, tp=tp or NoTP())


def shard_files(folder: Path, num_files: int = 3) -> dict[str, str]:
    """Split model.safetensors over several files with an index; returns key -> file."""
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    where = {key: names[i % num_files] for i, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key, file in where.items() if file == name}, folder / name)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 12},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "mistral": {"architecture": "MistralForCausalLM"},
    "gemma2": {"architecture": "Gemma2ForCausalLM"},
    "gemma3": {"architecture": "Gemma3ForCausalLM"},
    "gemma3_multimodal": {"architecture": "Gemma3ForConditionalGeneration"},
    "gemma3_multimodal_in_memory": {
        "architecture": "Gemma3ForConditionalGeneration",
        "save_original_format": False,
    },
    "phi3": {"architecture": "Phi3ForCausalLM"},
    "olmo2": {"architecture": "Olmo2ForCausalLM"},
    "mixtral": {"architecture": "MixtralForCausalLM"},
    "mixtral_stacked": {"architecture": "MixtralForCausalLM", "save_original_format": False},
    "qwen3_moe": {"architecture": "Qwen3MoeForCausalLM", "mlp_only_layers": [1]},
    "qwen3_moe_stacked": {"architecture": "Qwen3MoeForCausalLM", "save_original_format": False},
}
every_model = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)


def rule_name(key: str) -> str:
    return re.sub(r"experts\.\d+", "experts.{expert}", re.sub(r"layers\.\d+", "layers.{layer}", key))


def table_of(decoder: Decoder, keys: set[str]) -> Table:
    """The form of this checkpoint, found without the loader."""
    tables = WEIGHTS[decoder.config.architecture]
    return max(tables, key=lambda table: len(keys & set(expand(decoder, NoTP(), table))))


@every_model
def test_the_table_fills_every_place_of_every_parameter_exactly_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, **changes)
    decoder = new_decoder(tmp_path)
    for table in WEIGHTS[decoder.config.architecture]:
        with torch.inference_mode():
            for parameter in decoder.parameters():
                parameter.zero_()
            for target in expand(decoder, NoTP(), table).values():
                for piece in target.pieces:
                    piece.destination.add_(1.0)
        for name, parameter in decoder.named_parameters():
            assert (parameter == 1.0).all(), name


@every_model
def test_every_checkpoint_key_is_used_or_ignored_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, **changes)
    keys = set(load_file(tmp_path / "model.safetensors"))
    decoder = new_decoder(tmp_path)
    table = table_of(decoder, keys)
    expected = set(expand(decoder, NoTP(), table))
    ignored = Ignored(table, decoder.config)
    assert expected <= keys
    assert {key for key in keys if key not in ignored and key not in expected} == set()
    assert {key.split(".")[-2] for key in expected if key in ignored} <= {"lm_head"}
    others = keys - expected
    assert all("vision_tower" in key or "multi_modal_projector" in key for key in others)
    assert bool(others) == (decoder.config.architecture == "Gemma3ForConditionalGeneration")


def test_tables_name_each_checkpoint_tensor_once() -> None:
    for architecture, tables in WEIGHTS.items():
        for table in tables:
            for kind in (Rule, Ignore):
                names = [entry.checkpoint_name for entry in table if isinstance(entry, kind)]
                assert len(names) == len(set(names)), architecture


def test_every_family_has_a_reader_and_a_table() -> None:
    assert list(READERS) == sorted(READERS)
    assert list(WEIGHTS) == list(READERS)


@pytest.mark.parametrize("size", [2, 4])
@every_model
def test_shards_of_all_ranks_make_the_whole(tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, **changes, num_attention_heads=8, num_key_value_heads=4)
    tensors = load_file(tmp_path / "model.safetensors")
    decoder = new_decoder(tmp_path)
    table = table_of(decoder, set(tensors))
    shards = {rule.checkpoint_name: rule.shard for rule in table if isinstance(rule, Rule)}
    wholes = {key: torch.full_like(tensors[key], float("nan")) for key in expand(decoder, NoTP(), table)}
    for rank in range(size):
        tp = FakeTP(rank, size)
        for key, target in expand(load(tmp_path, tp), tp, table).items():
            for piece in target.pieces:
                place = wholes[key].narrow(target.dim, piece.take.start, piece.take.length)
                if shards[rule_name(key)] is Shard.REPLICATED:
                    assert rank == 0 or torch.equal(place, piece.destination), key
                else:
                    assert place.isnan().all(), f"{key} is on several ranks"
                place.copy_(piece.destination)
    for key, whole in wholes.items():
        assert torch.equal(whole, tensors[key]), key


def test_experts_of_either_form_load_the_same(tmp_path: Path) -> None:
    for architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        apart, stacked = tmp_path / f"{architecture}_apart", tmp_path / f"{architecture}_stacked"
        make_checkpoint(apart, architecture)
        make_checkpoint(stacked, architecture, save_original_format=False)
        assert set(load_file(apart / "model.safetensors")) != set(load_file(stacked / "model.safetensors"))
        for rank in range(2):
            wanted = load(apart, FakeTP(rank, 2)).state_dict()
            for name, value in load(stacked, FakeTP(rank, 2)).state_dict().items():
                assert torch.equal(value, wanted[name]), name


def test_a_lost_expert_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "MixtralForCausalLM")
    edit_tensors(tmp_path, {"model.layers.1.block_sparse_moe.experts.3.w2.weight": None})
    fails(tmp_path, "model.layers.1.block_sparse_moe.experts.3.w2.weight")


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    edit_tensors(tmp_path, {"model.layers.1.mlp.experts.6.up_proj.weight": torch.zeros(24, 32)})
    fails(tmp_path, "model.layers.1.mlp.experts.6.up_proj.weight", "config.json")


def test_a_wrong_shape_of_a_fused_or_stacked_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "phi", "Phi3ForCausalLM")
    edit_tensors(tmp_path / "phi", {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(32, 32)})
    fails(tmp_path / "phi", "model.layers.0.self_attn.qkv_proj.weight", "(32, 32)", "(64, 32)")
    make_checkpoint(tmp_path / "moe", "MixtralForCausalLM", save_original_format=False)
    edit_tensors(tmp_path / "moe", {"model.layers.2.mlp.experts.down_proj": torch.zeros(4, 32, 48)})
    fails(tmp_path / "moe", "model.layers.2.mlp.experts.down_proj", "(4, 32, 48)", "(5, 32, 48)")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_of_a_family_with_two_forms_is_named(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path, "MixtralForCausalLM")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(tmp_path, str(file))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_dummy_norms_multiply_by_one(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture)
    decoder = build_decoder(tmp_path, load_format="dummy", dtype=torch.float32, device=CPU, tp=NoTP())
    norms = [module for module in decoder.modules() if isinstance(module, RMSNorm)]
    assert len(norms) >= 7
    for norm in norms:
        torch.testing.assert_close(
            norm(torch.ones(2, len(norm.weight))), torch.ones(2, len(norm.weight)), rtol=0, atol=1e-4
        )


def test_ranks_beyond_the_kv_heads_hold_copies(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_key_value_heads=2)
    k_proj = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    for rank in range(4):
        tp = FakeTP(rank, 4)
        decoder = load(tmp_path, tp)
        assert decoder.num_kv_heads == 1
        target = expand(decoder, tp, WEIGHTS["LlamaForCausalLM"][0])["model.layers.1.self_attn.k_proj.weight"]
        assert torch.equal(target.pieces[0].destination, k_proj.chunk(2)[rank // 2])


def test_vocabulary_rows_that_no_rank_fills_are_zero(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)  # 101 rows: 26 on each of 4 ranks, 23 on the last
    decoder = load(tmp_path, FakeTP(3, 4))
    assert decoder.embed.weight.shape == (26, 32)
    assert torch.equal(decoder.embed.weight[23:], torch.zeros(3, 32))


@pytest.mark.parametrize(("change", "what"), [({}, "4 attention heads"), ({"num_attention_heads": 6}, "2 kv heads")])
def test_a_group_that_does_not_divide_the_heads_is_refused(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    make_checkpoint(tmp_path, **change, hidden_size=48, num_key_value_heads=2)
    with pytest.raises(ModelLoadError, match=f"{what} cannot be .* 3 ranks.*tensor_parallel_size"):
        load(tmp_path, FakeTP(0, 3))


def test_sharded_checkpoints_load_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    whole = load(tmp_path).state_dict()
    assert len(set(shard_files(tmp_path).values())) == 3
    for name, value in load(tmp_path).state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_values_are_cast_to_the_asked_type(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    decoder = load(tmp_path, dtype=torch.bfloat16)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(decoder.embed.weight, embed.to(torch.bfloat16))
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}


def test_a_tied_checkpoint_may_carry_a_copy_of_the_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, {"lm_head.weight": torch.zeros(101, 32)})
    decoder = load(tmp_path)
    assert decoder.logits(torch.ones(1, 32)).abs().max() > 0


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_tensors(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load(tmp_path)


def fails(folder: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_tensors(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    fails(tmp_path, str(tmp_path), "model.layers.1.mlp.up_proj.weight")


def test_many_missing_keys_are_summed_up(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", {"num_hidden_layers": 5})
    fails(tmp_path, "model.layers.3.input_layernorm.weight", "and 13 more")


def test_a_foreign_key_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_tensors(tmp_path, {"model.layers.1.self_attn.q_norm.weight": torch.ones(8)})
    fails(tmp_path, "model.safetensors", "model.layers.1.self_attn.q_norm.weight", "config.json")


def test_a_bias_that_the_config_does_not_announce_is_foreign(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, attention_bias=True)
    edit_json(tmp_path / "config.json", {"attention_bias": False})
    fails(tmp_path, "model.layers.0.self_attn.q_proj.bias")


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_tensors(tmp_path, {"model.layers.2.self_attn.k_proj.weight": torch.zeros(8, 32)})
    fails(tmp_path, "model.safetensors", "model.layers.2.self_attn.k_proj.weight", "(8, 32)", "(16, 32)")


def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_tensors(tmp_path, {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    fails(tmp_path, "model.norm.weight", "I8", "BF16")


def test_a_key_in_two_files_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    where = shard_files(tmp_path, 2)
    first, second = sorted(set(where.values()))
    edit_tensors(tmp_path, {"model.norm.weight": torch.ones(32)}, first)
    edit_tensors(tmp_path, {"model.norm.weight": torch.ones(32)}, second)
    fails(tmp_path, "model.norm.weight", first, second)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(tmp_path, str(file))


def test_a_file_of_another_kind_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    fails(tmp_path, str(tmp_path / "model.safetensors"))


def test_no_safetensors_at_all_says_what_is_looked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    fails(tmp_path, str(tmp_path), "model.safetensors", "model.safetensors.index.json")


def test_an_index_that_names_an_absent_file_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = sorted(shard_files(tmp_path).values())[0]
    (tmp_path / name).unlink()
    fails(tmp_path, "model.safetensors.index.json", name)


def test_a_damaged_index_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    shard_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    fails(tmp_path, "model.safetensors.index.json", "weight_map")


def test_dummy_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # nothing but config.json is needed

    def dummy(seed: int) -> dict[str, Tensor]:
        decoder = build_decoder(tmp_path, load_format="dummy", dtype=torch.float32, device=CPU, tp=NoTP(), seed=seed)
        return dict(decoder.named_parameters())

    first, again, other = dummy(3), dummy(3), dummy(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.mlp.w_down.weight"], first["layers.1.mlp.w_down.weight"])
    assert torch.equal(first["layers.0.mlp_norm.weight"], torch.ones(32))
    assert 0.01 < first["embed.weight"].std() < 0.03


def test_dummy_weights_leave_the_global_random_state_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    before = torch.random.get_rng_state()
    dummy_weights(new_decoder(tmp_path), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_progress_is_shown_on_stderr_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path)
    capsys.readouterr()
    load_weights(new_decoder(tmp_path), tmp_path, NoTP())
    assert capsys.readouterr().err == ""
    load_weights(new_decoder(tmp_path), tmp_path, NoTP(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading weights" in shown.err
