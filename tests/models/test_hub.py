"""Models of the Hugging Face hub, from a stand-in server on 127.0.0.1: what is fetched, and what the user is told when it is not."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from overlap_serve.errors import ModelLoadError
from overlap_serve.models import hub as hub_module
from overlap_serve.models.source import resolve_model
from tests.models.hub_server import HubServer, Repository, hub_server

CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NOISE = {
    "README.md": b"read me",
    "pytorch_model.bin": b"x" * 100,
    "consolidated.safetensors": b"x" * 100,
    "original/params.json": b"{}",
    "original/model.safetensors": b"x" * 100,
    "onnx/model.onnx": b"x" * 100,
}
TINY = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"weights" * 100, **NOISE}
SHARDED = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    **{name: name.encode() * 50 for name in SHARDS},
    "model.safetensors": b"an older copy",
    **NOISE,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The server, as the endpoint of this process. No token, and no retries that wait."""
    with hub_server() as server:
        point_to(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server
        huggingface_hub.close_session()


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def fails(cache: Path, *words: str, model: str = "org/tiny", **options: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(model, cache_dir=cache, **options)
    for word in (model, *words):
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message


# -- what is fetched


def test_only_what_is_needed_is_downloaded(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)
    folder = resolve_model("org/tiny", cache_dir=cache)
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    assert sorted(hub.bodies()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert folder.is_relative_to(cache / "hub")


def test_of_a_sharded_model_the_files_of_the_index_are_downloaded(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folder = resolve_model("org/tiny", cache_dir=cache)
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}


def test_who_needs_no_weights_gets_none(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)
    folder = resolve_model("org/tiny", cache_dir=cache, weights=False)
    assert names(folder) == {"config.json", "tokenizer.json"}
    assert resolve_model("org/tiny", cache_dir=cache) == folder
    assert (folder / "model.safetensors").exists()


def test_a_second_start_downloads_nothing(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folder = resolve_model("org/tiny", cache_dir=cache)
    hub.requests.clear()
    assert resolve_model("org/tiny", cache_dir=cache) == folder
    assert hub.bodies() == []


def test_a_revision_is_fetched_from_that_revision(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY, revisions=("main", "v2"), commit="b" * 40)
    folder = resolve_model("org/tiny", revision="v2", cache_dir=cache)
    assert folder.name == "b" * 40
    assert any(request.path == "/api/models/org/tiny/revision/v2" for request in hub.requests)


def test_a_branch_that_moves_during_the_download_gives_one_commit(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.repositories["org/tiny"] = Repository(TINY)
    fetch_weights = hub_module.Hub._fetch_weights

    def move_then_fetch(self: hub_module.Hub, model: str, folder: Path) -> None:
        repository.commit, old = "c" * 40, repository.commit
        repository.revisions = ("main", old)
        fetch_weights(self, model, folder)

    monkeypatch.setattr(hub_module.Hub, "_fetch_weights", move_then_fetch)
    folder = resolve_model("org/tiny", cache_dir=cache)
    assert folder.name == "a" * 40
    assert (folder / "model.safetensors").exists()


def test_the_token_is_sent_and_opens_gated_models(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repositories["org/tiny"] = Repository(TINY, gated=True, private=True, token="hf_secret")
    assert (resolve_model("org/tiny", cache_dir=cache) / "model.safetensors").exists()
    assert {request.token for request in hub.requests} == {"hf_secret"}


def test_a_broken_connection_is_resumed_where_it_broke(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.repositories["org/tiny"] = Repository(TINY)
    hub.break_at["model.safetensors"] = 123
    folder = resolve_model("org/tiny", cache_dir=cache)
    assert (folder / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    assert [request.range for request in hub.requests if request.range] == ["bytes=100-"]


def test_bars_are_shown_only_when_asked(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # bars although this is no terminal
    hub.repositories["org/tiny"] = Repository(TINY)
    resolve_model("org/tiny", cache_dir=cache)
    assert capsys.readouterr() == ("", "")
    resolve_model("org/tiny", cache_dir=cache / "other", progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "downloading org/tiny: 1 files, 0 MB" in shown.err
    assert "Fetching" in shown.err


# -- what the user is told


def test_an_unknown_model_names_the_endpoint_and_the_token(hub: HubServer, cache: Path) -> None:
    fails(cache, "no such model", hub.url, "no token is set", "HF_TOKEN", model="org/nothing")


def test_a_private_model_with_the_wrong_token(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    hub.repositories["org/tiny"] = Repository(TINY, private=True, token="hf_secret")
    fails(cache, "the token that is set has no access", "HF_TOKEN")


@pytest.mark.parametrize(("token", "said"), [(None, "no token is set"), ("hf_other", "has no access")])
def test_a_gated_model_says_where_to_ask_for_access(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, said: str
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.repositories["org/tiny"] = Repository(TINY, gated=True, token="hf_secret")
    fails(cache, "is gated", said, f"accept its conditions at {hub.url}/org/tiny", "HF_TOKEN")


def test_no_message_shows_the_token(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    for repository in (Repository(TINY, gated=True), Repository(TINY, status=401), Repository(TINY, status=500)):
        hub.repositories["org/tiny"] = repository
        with pytest.raises(ModelLoadError) as caught:
            resolve_model("org/tiny", cache_dir=cache)
        assert "very_secret" not in caught.value.message


def test_an_unknown_revision_names_the_field(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)
    fails(cache, "has no revision 'v9'", "`revision`", revision="v9")


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_hub_that_refuses(hub: HubServer, cache: Path, status: int) -> None:
    hub.repositories["org/tiny"] = Repository(TINY, status=status)
    fails(cache, str(status), hub.url)


def test_no_network_names_the_endpoint_and_the_cache(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        point_to(monkeypatch, url)
        fails(cache, "cannot be reached", url, str(cache), "set `model` to a folder")


def test_without_network_what_is_cached_is_used(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folder = resolve_model("org/tiny", cache_dir=cache)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_to(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert resolve_model("org/tiny", cache_dir=cache) == folder


def test_offline_mode_asks_nobody(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folder = resolve_model("org/tiny", cache_dir=cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    hub.requests.clear()
    assert resolve_model("org/tiny", cache_dir=cache) == folder
    fails(cache, "HF_HUB_OFFLINE", "models prepare --model org/other", model="org/other")
    assert hub.requests == []


def test_offline_with_a_part_of_the_weights_is_an_error(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folder = resolve_model("org/tiny", cache_dir=cache)
    (folder / SHARDS[1]).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    fails(cache, "HF_HUB_OFFLINE", "does not hold all of it")


@pytest.mark.parametrize("model", ["a/b/c", "org/na me", "org/..", "pypi-like==1.0"])
def test_what_is_no_id_is_said_to_be_none(hub: HubServer, cache: Path, model: str) -> None:
    fails(cache, "neither a folder here nor a Hugging Face id", model=model)


def test_a_repository_without_config(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository({"model.gguf": b"GGUF"})
    fails(cache, "no config.json", "GGUF")


def test_a_repository_without_safetensors(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository({"config.json": CONFIG, "pytorch_model.bin": b"x"})
    fails(cache, "model.safetensors", "only safetensors")
    assert hub.bodies() == ["config.json"]


def test_a_shard_that_the_repository_lacks(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository({name: data for name, data in SHARDED.items() if name != SHARDS[1]})
    fails(cache, "model.safetensors.index.json", SHARDS[1])


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "x.py"])
def test_an_index_that_leads_elsewhere_is_refused(hub: HubServer, cache: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.repositories["org/tiny"] = Repository({"config.json": CONFIG, "model.safetensors.index.json": index, name: b""})
    with pytest.raises(ModelLoadError, match=r"index\.json: names .*no safetensors file"):
        resolve_model("org/tiny", cache_dir=cache)


def test_a_damaged_index_is_refused(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository({"config.json": CONFIG, "model.safetensors.index.json": b"<html>"})
    with pytest.raises(ModelLoadError, match=r"index\.json: JSON is malformed"):
        resolve_model("org/tiny", cache_dir=cache)


def test_too_little_room_is_found_before_the_download(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 300}))
    fails(cache, "are to be downloaded", "HF_HOME")
    assert "model.safetensors" not in hub.bodies()


def test_a_disk_that_fills_up_meanwhile(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    fails(cache, "No space left on device", str(cache), "HF_HOME")
    monkeypatch.undo()


def test_a_cache_without_write_access_names_the_folder(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY)
    cache.write_text("a file where the folder should be")
    fails(cache, str(cache), "HF_HOME")


# -- processes


def run_prepare(url: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overlap_serve.cli", "models", "prepare", "--model", "org/tiny"]
    return subprocess.Popen(
        [*command, "--cache-dir", str(cache)],
        env={**os.environ, "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_line_follows_endpoint_token_and_offline_mode(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(TINY, private=True, token="hf_secret")
    out, err = run_prepare(hub.url, cache, HF_TOKEN="hf_secret").communicate(timeout=120)
    folder = Path(out.strip())
    assert (folder / "model.safetensors").read_bytes() == TINY["model.safetensors"], err
    process = run_prepare(hub.url, cache / "other", HF_HUB_OFFLINE="1")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("overlap-serve: org/tiny: HF_HUB_OFFLINE is set")
    assert err.count("\n") == 1


def test_a_download_that_is_killed_leaves_nothing_that_is_used(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    hub.stall_at[SHARDS[1]] = 20
    process = run_prepare(hub.url, cache)
    try:
        assert hub.stalled.wait(60)
    finally:
        process.kill()
        process.communicate(timeout=60)
    hub.stall_at.clear()
    hub.go_on.set()
    folder = resolve_model("org/tiny", cache_dir=cache)
    assert {name: (folder / name).read_bytes() for name in SHARDS} == {name: SHARDED[name] for name in SHARDS}


def test_two_at_once_get_the_same_complete_folder(hub: HubServer, cache: Path) -> None:
    hub.repositories["org/tiny"] = Repository(SHARDED)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(resolve_model("org/tiny", cache_dir=cache))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert all((folders[0] / name).read_bytes() == SHARDED[name] for name in SHARDS)
