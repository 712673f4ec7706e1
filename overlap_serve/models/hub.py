"""A model of the Hugging Face hub, through `huggingface_hub` and its cache.

Owns which files of a repository are needed, and what to tell the user when the hub does not give them. Cache folder, token, offline
mode and endpoint are huggingface_hub's own business (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT). The one idea: the small files
come first, because they say which weights there are; nothing else of a repository is fetched.
"""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import constants, get_token, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

from overlap_serve.errors import ModelLoadError

SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Quiet(hub_tqdm):
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]


class Hub:
    """cache_dir: None for huggingface_hub's own. progress: bars on stderr, where it is a terminal."""

    def __init__(self, cache_dir: Path | None, progress: bool) -> None:
        self._cache_dir = cache_dir or Path(constants.HF_HUB_CACHE)
        self._progress = progress

    def download(self, model: str, revision: str | None, *, weights: bool) -> Path:
        """Folder of the snapshot with all that is needed. Blocks. weights False: configuration and tokenizer only.

        Raises ModelLoadError that says what to do.
        """
        folder = self._fetch(model, revision, SMALL_FILES)
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"{model}: the repository has no config.json, so it is no model in the Hugging Face layout; for one that holds a "
                "GGUF file, download the file and set `model` to its path"
            )
        if weights:
            self._fetch_weights(model, folder)
        return folder

    def _fetch_weights(self, model: str, folder: Path) -> None:
        names = weight_files(folder)
        absent = [name for name in names if not (folder / name).exists()]
        if not absent:
            return
        # The commit, not the revision: a branch may have moved since the small files came.
        self._check_room(model, folder.name, absent)
        self._fetch(model, folder.name, absent)
        absent = [name for name in absent if not (folder / name).exists()]
        if absent == [SINGLE]:
            raise ModelLoadError(
                f"{model}: has neither {SINGLE} nor {INDEX}; only safetensors checkpoints can be loaded, choose another revision or "
                "convert it (https://huggingface.co/spaces/safetensors/convert)"
            )
        if absent:
            raise ModelLoadError(
                f"{folder / INDEX}: names {absent[0]}, which the repository {model} lacks; tell its owner"
            )

    def _check_room(self, model: str, commit: str, names: list[str]) -> None:
        """Before the download, not after hours of it."""
        try:
            files = self._snapshot(model, commit, names, dry_run=True)
        except DryRunError:  # offline; the download says it better
            return
        except Exception as error:
            raise self._explained(model, commit, error) from error
        needed = sum(file.file_size or 0 for file in files if file.will_download)
        free = shutil.disk_usage(self._cache_dir).free
        if needed > free:
            raise ModelLoadError(
                f"{model}: {needed / 1e6:.0f} MB are to be downloaded, {free / 1e6:.0f} MB are free in {self._cache_dir}; make room, "
                "or set HF_HOME to a folder on another disk"
            )
        if self._progress and needed:
            print(f"downloading {model}: {len(names)} files, {needed / 1e6:.0f} MB", file=sys.stderr, flush=True)

    def _fetch(self, model: str, revision: str | None, names: list[str]) -> Path:
        try:
            return Path(self._snapshot(model, revision, names, dry_run=False))
        except Exception as error:
            # Not a list of classes: its HTTP library differs between versions (httpx, httpx2), and hf_xet raises RuntimeError.
            raise self._explained(model, revision, error) from error

    def _snapshot(self, model: str, revision: str | None, names: list[str], *, dry_run: bool) -> Any:
        return snapshot_download(
            model,
            revision=revision,
            cache_dir=self._cache_dir,
            allow_patterns=names,
            dry_run=dry_run,
            tqdm_class=None if self._progress and not dry_run else _Quiet,
        )

    def _explained(self, model: str, revision: str | None, error: Exception) -> ModelLoadError:
        """One line: what happened, and what to do."""
        endpoint = constants.ENDPOINT
        token = "the token that is set has no access" if get_token() else "no token is set"
        login = "set HF_TOKEN or run `hf auth login`"
        if isinstance(error, HFValidationError):
            return ModelLoadError(
                f"{model}: neither a folder here nor a Hugging Face id, which is written NAMESPACE/NAME; see `model`"
            )
        if isinstance(error, GatedRepoError):
            return ModelLoadError(
                f"{model}: is gated, and {token}; accept its conditions at {endpoint}/{model}, then {login}"
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelLoadError(
                f"{model}: no folder here, and no such model at {endpoint}, or a private one ({token}); check `model`, or {login}"
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelLoadError(f"{model}: has no revision {revision!r} at {endpoint}; check `revision`")
        if isinstance(error, LocalEntryNotFoundError):
            return ModelLoadError(self._unreachable(model, error))
        if isinstance(error, HfHubHTTPError):
            return ModelLoadError(_refused(model, error))
        # The second: of huggingface_hub's own check, which has no errno.
        if isinstance(error, OSError) and (error.errno in _NO_ROOM or "free disk space" in str(error)):
            return ModelLoadError(
                f"{model}: No space left on device in {self._cache_dir}; make room, or set HF_HOME to a folder on another disk"
            )
        if isinstance(error, OSError) and error.filename is not None:
            return ModelLoadError(
                f"{model}: {error.filename}: {error.strerror or error}; give write access, or set HF_HOME to another folder"
            )
        return ModelLoadError(
            f"{model}: the download from {endpoint} broke off ({_first_line(error)}); start again, what is complete is kept"
        )

    def _unreachable(self, model: str, error: Exception) -> str:
        """The hub was not asked or did not answer, and the cache does not have (all of) the model."""
        where = f"and {self._cache_dir} does not hold all of it"
        if constants.HF_HUB_OFFLINE:
            return (
                f"{model}: HF_HUB_OFFLINE is set, {where}; run `overlap-serve models prepare --model {model}` once with network, "
                "or set `model` to a folder"
            )
        reason = _first_line(error.__cause__ or error)
        return (
            f"{model}: no folder here, {constants.ENDPOINT} cannot be reached ({reason}), {where}; check the name, the network, the "
            "proxy and HF_ENDPOINT, or set `model` to a folder"
        )


def _refused(model: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    advice = {
        401: "the token is not valid, set another HF_TOKEN or run `hf auth login`",
        403: "the token may not read this, give it read access or set another HF_TOKEN",
        429: "too many requests, wait or set HF_TOKEN",
    }.get(status, "try again later, or set `model` to a folder")
    return f"{model}: {constants.ENDPOINT} answers with status {status} ({error.server_message or _first_line(error)}); {advice}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- what a snapshot says of itself


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files. Raises ModelLoadError for an index that cannot be read or leads out of the folder."""
    index = folder / INDEX
    if not index.exists():
        return [SINGLE]
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{index}: {error}") from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: names {name!r}, which is no safetensors file of this folder")
    return names
