"""`overlap-serve config check`: every mistake at once; else every value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_serve.cli import main
from overlap_serve.cli.check import problems_of
from overlap_serve.config import HostFacts, ServeConfig, decided, fake_facts, resolve

ROOT = Path(__file__).parent.parent.parent


def check(tmp_path: Path, text: str, *arguments: str) -> int:
    (tmp_path / "c.yaml").write_text(text)
    return main(["config", "check", *arguments, str(tmp_path / "c.yaml")])


def rows(out: str) -> dict[str, tuple[str, str]]:
    """Field -> (value, why)."""
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("  ") and "base_ms" not in line]
    return {name: (value, why) for name, value, why in lines}


def test_the_repositorys_own_file_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(ROOT / "serve_config.yaml")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{ROOT / 'serve_config.yaml'}: application overlap\n")
    shown = rows(out)
    assert set(shown) | {"fake"} == set(ServeConfig.model_fields)
    assert shown["drain_timeout"] == ("60.0", "given")
    assert shown["page_size"] == ("16", "default")
    assert shown["max_model_len"] == ("later", "default: the model's own; not read (--fetch)")


def test_every_auto_has_a_value_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "engine: fake\nfake: {max_model_len: 64}\nattention_backend: auto") == 0
    shown = rows(capsys.readouterr().out)
    assert shown["device"] == ("cpu", "default: the fake engine needs no device")
    assert shown["attention_backend"][1].startswith("auto: ")
    assert shown["max_model_len"][0] == "64"
    assert shown["kv_cache_tokens"] == ("256", "default: room for 4 requests of max_model_len")


@pytest.mark.parametrize(
    "host", [HostFacts(num_cpus=1, bf16=False, cuda=False), HostFacts(num_cpus=8, bf16=True, cuda=True)]
)
def test_a_new_auto_needs_a_reason(host: HostFacts) -> None:
    config = ServeConfig()
    reasons = decided(config, host, resolve(config, fake_facts(config.fake), host, ""))
    autos = {name for name, field in ServeConfig.model_fields.items() if field.default == "auto"}
    assert autos <= set(reasons)
    assert all(value not in ("auto", None) and reason for value, reason in reasons.values())
    assert decided(
        config.model_copy(update={"device": "cpu"}), host, resolve(config, fake_facts(config.fake), host, "")
    ).keys() == (reasons.keys() - {"device"})


def test_every_mistake_is_named_each_on_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        pagesize: 16
        zzz: 1
        overlap_depth: 7
        fake: {base_mss: 1}
        max_step_tokens: 8
        max_running_requests: 8
        load_format: dummy
    """
    assert check(tmp_path, text) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert all(line.startswith(f"{tmp_path / 'c.yaml'}: ") for line in lines)
    for words in (
        "pagesize: unknown field; did you mean page_size?",
        "zzz: unknown field; known are admin_api_keys, admin_api_keys_file, api_keys",
        "overlap_depth: Input should be 0 or 1 (given: 7)",
        "fake.base_mss: unknown field; did you mean base_ms?",
        "max_step_tokens is 8, max_running_requests 8",
        "load_format: dummy needs",
    ):
        assert words in shown.err
    assert len(lines) == 6 - 1  # the contradictions share a line


def test_contradictions_are_found_beside_wrong_fields() -> None:
    assert problems_of({}) == []
    assert len(problems_of({"nope": 1, "max_step_tokens": 1})) == 2


def test_what_this_machine_and_model_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "engine: fake\nfake: {max_model_len: 64}\ndevice: cuda\nmax_model_len: 100\nkv_cache_tokens: 16"
    assert check(tmp_path, text) == 2
    shown = capsys.readouterr().err
    for words in (
        "device is cuda, but",
        "max_model_len is 100, the model's positions end at 64",
        "kv_cache_tokens is 16",
    ):
        assert words in shown


def test_a_model_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "vocab_size": 99,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert check(tmp_path, f"model: {tmp_path / 'm'}\ndevice: cpu\nmax_model_len: 129") == 2
    assert "max_model_len is 129, the model's positions end at 128" in capsys.readouterr().err
    assert check(tmp_path, f"model: {tmp_path / 'm'}\ndevice: cpu", "--fetch") == 0
    assert rows(capsys.readouterr().out)["max_model_len"] == ("128", "default: what the model's config.json says")


def test_fields_without_effect_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "engine: fake\nprotect_metrics: true\nkv_cache_tokens: 64\nkv_memory_fraction: 0.5\ndtype: float32\ndefault_max_tokens: 9000"
    assert check(tmp_path, text) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == [
        "kv_memory_fraction",
        "protect_metrics",
        "dtype",
        "default_max_tokens",
    ]


def test_keys_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "engine: fake\napi_keys: [sk-secret, sk-other]") == 0
    assert "sk-" not in (out := capsys.readouterr().out)
    assert "(2 keys)" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "c.yaml: "),
        ("- a", "holds no fields"),
        ("page_size: 8\npage_size: 16", "line 2: page_size is written twice"),
        ("applications: []", "no application with import_path deployments.app:build"),
        ("applications: [{import_path: 'deployments.app:build', args: 3}]", "`args` must hold fields"),
    ],
)
def test_files_that_hold_no_configuration(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, text) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err


def test_one_of_two_applications_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
applications:
- {name: other, import_path: "x:y", args: {nope: 1}}
- {name: a, import_path: "deployments.app:build", args: {engine: fake}}
- {name: b, import_path: "deployments.app:build", args: {engine: fake, nope: 1}}
"""
    assert check(tmp_path, text) == 2
    shown = capsys.readouterr()
    assert "application a" in shown.out
    assert "application b: nope: unknown field" in shown.err and "other" not in shown.err
