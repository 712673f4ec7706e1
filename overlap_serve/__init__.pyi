from overlap_serve.config import ServeConfig as ServeConfig
from overlap_serve.llm import LLM as LLM
from overlap_serve.llm import SamplingParams as SamplingParams

__version__: str
