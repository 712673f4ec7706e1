"""The form of a result: raw repeats of both sides of every ratio, and the figures that are computed from them.

{"name", "command", "machine", "versions", "commit", "date", "runs": [...], "figures": {key: number}}
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("torch", "ray", "numpy", "pyzmq", "msgspec")


def machine() -> str:
    model = "unknown CPU"
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}{gpus()}"


def gpus() -> str:
    """Of this machine, by name; "" without any."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return "".join(f", {names.count(name)} {name}" for name in dict.fromkeys(names))


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER.parent)
    return done.stdout.strip() or "unknown"


def write(name: str, command: str, runs: Sequence[Mapping[str, object]], figures: Mapping[str, float]) -> Path:
    """Save a result; figures are rounded to 4 significant digits."""
    FOLDER.mkdir(exist_ok=True)
    result = {
        "name": name,
        "command": command,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "runs": list(runs),
        "figures": {key: float(f"{value:.4g}") for key, value in figures.items()},
    }
    file = FOLDER / f"{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file
