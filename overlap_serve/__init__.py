"""overlap_serve: an LLM inference server whose CPU scheduling hides behind accelerator compute.

This package is the engine; it knows neither Ray nor HTTP. `deployments/` puts it on Ray Serve. For use without a server:

    from overlap_serve import LLM, SamplingParams

Start reading at `docs/architecture.md`, then `overlap_serve/runtime/loop.py`.
"""

import importlib

__version__ = "0.1.0"

# Imported on first use: an `import overlap_serve` in every process must stay cheap. `__init__.pyi` tells type checkers.
_PUBLIC = {
    "LLM": "overlap_serve.llm",
    "SamplingParams": "overlap_serve.llm",
    "ServeConfig": "overlap_serve.config",
}


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        found: object = vars(importlib.import_module(_PUBLIC[name]))[name]
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
