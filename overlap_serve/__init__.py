"""overlap_serve: an LLM inference server whose CPU scheduling hides behind accelerator compute.

This package is the engine; it knows neither Ray nor HTTP. `deployments/` puts it on Ray Serve.
Start reading at `docs/architecture.md`, then `overlap_serve/runtime/loop.py`.
"""

__version__ = "0.1.0"
