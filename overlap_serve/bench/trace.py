"""One load on one engine at depth 0 and then at depth 1, recorded (`Timeline` says what of it)."""

from __future__ import annotations

import msgspec

from overlap_serve.bench.drive import Driver, Load
from overlap_serve.bench.loop import WaitingEngine
from overlap_serve.bench.timeline import Timeline
from overlap_serve.config import EngineSpec
from overlap_serve.engine.base import Engine
from overlap_serve.errors import ConfigError
from overlap_serve.runtime.worker import build_engine

DEPTHS = (0, 1)
WARM_STEPS = 8


def record(spec: EngineSpec, load: Load, *, host_s: float = 0.0) -> list[Timeline]:
    """host_s: busy Python on top of the loop's own in every step. With `engine: fake` the device waits for fake_base_s a step and does
    nothing else. Raises ConfigError if the engine has no room for the load, and what `build_engine` raises."""
    if load.rows > spec.max_running or load.rows > spec.max_step_tokens:
        fitting = min(spec.max_running, spec.max_step_tokens)
        raise ConfigError(f"{load.rows} rows do not run side by side here; use at most {fitting}")
    if load.longest > spec.max_model_len:
        raise ConfigError(f"requests of {load.longest} tokens are longer than max_model_len, {spec.max_model_len}")
    if spec.tp_size > 1:
        raise ConfigError(f"tensor_parallel_size is {spec.tp_size}, this engine runs in one process; set it to 1")
    engine, num_pages = _engine(msgspec.structs.replace(spec, depth=max(DEPTHS), max_waiting=load.rows))
    with Driver(msgspec.structs.replace(spec, max_waiting=load.rows), engine, num_pages, host_s=host_s) as driver:
        driver.run(_warm(load), max(DEPTHS))
        return [Timeline.of(driver.run(load, depth), load.rows) for depth in DEPTHS]


def _warm(load: Load) -> Load:
    return Load(load.rows, load.prompt_len, WARM_STEPS, load.spread)


def _engine(spec: EngineSpec) -> tuple[Engine, int]:
    if spec.engine == "fake":
        return WaitingEngine(spec, spec.fake_base_s), spec.num_pages
    engine, num_pages, _ = build_engine(spec)
    return engine, num_pages
