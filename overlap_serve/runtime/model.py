"""What a process needs of the model named in a `ServeConfig`: folder, facts, text side, engine spec. `engine: fake` needs no files.

Every process asks for itself, on its own node; the first one there downloads and prepares, the others find the folder. Torch-free.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_serve.config import EngineSpec, HostFacts, ModelFacts, ServeConfig, fake_facts, resolve
from overlap_serve.models.families import read_facts
from overlap_serve.models.source import resolve_model
from overlap_serve.text.template import TextModel, fake_text, load_text

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def model_folder(config: ServeConfig, progress: bool = False, weights: bool = True) -> Path:
    """Folder with config.json, tokenizer.json and weights; downloads and prepares what is missing. weights False: of a hub model
    the small files only, as for load_format dummy. Raises ModelLoadError."""
    wanted = weights and config.load_format != "dummy"
    return resolve_model(config.model, revision=config.revision, progress=progress, weights=wanted)


def model_facts(config: ServeConfig) -> ModelFacts:
    return fake_facts(config.fake) if config.engine == "fake" else read_facts(model_folder(config, weights=False))


def text_model(config: ServeConfig) -> TextModel:
    """Tokenizer and chat template."""
    if config.engine == "fake":
        return fake_text()
    return load_text(
        model_folder(config, weights=False), None if config.chat_template is None else Path(config.chat_template)
    )


def engine_spec(config: ServeConfig, host: HostFacts) -> EngineSpec:
    """The engine of one rank on this host. Raises ConfigError, ModelLoadError."""
    path = "" if config.engine == "fake" else str(model_folder(config))
    return resolve(config, model_facts(config), host, path)


def on_this_node(config: ServeConfig, spec: EngineSpec) -> EngineSpec:
    """The spec with a model folder that exists here: a rank may live on another node than the process that made the spec."""
    if config.engine == "fake" or Path(spec.model_path).is_dir():
        return spec
    return msgspec.structs.replace(spec, model_path=str(model_folder(config)))


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without, bf16 is slower than fp32. False where Linux does not say."""
    if not CPUINFO.is_file():
        return False
    with CPUINFO.open() as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return not BF16_FLAGS.isdisjoint(flags.split())
