"""The model without a server: `LLM`. Same parsing, same loop, same text as over HTTP; no sockets, no Ray.

prompts, messages --arguments--> bodies --runtime.prepare--> requests --runtime.local--> results, in input order
"""

from overlap_serve.llm.arguments import SamplingParams
from overlap_serve.llm.offline import LLM
from overlap_serve.llm.results import Choice, Completion, Piece

__all__ = ["LLM", "Choice", "Completion", "Piece", "SamplingParams"]
