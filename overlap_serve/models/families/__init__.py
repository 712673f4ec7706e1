"""What a model folder says of its model: configuration, facts for the front, and where each checkpoint tensor belongs.

Imports no torch, because the ingress reads facts here. A family is a reader of its config.json and a table of weight rules; the
decoder is the same for all. Families differ in data, not in code.

`config` what a decoder is | `rope` rotary settings of a config.json | `readers` config.json of each family | `tables` weight
rules of each family | `facts` end tokens, limits and sampling defaults | `files` JSON with errors that name file and key
"""

from overlap_serve.models.families.config import (
    DynamicRope,
    Experts,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
)
from overlap_serve.models.families.facts import read_facts
from overlap_serve.models.families.readers import READERS, read_config
from overlap_serve.models.families.tables import FUSED, WEIGHTS, Ignore, Part, Rule, Shard, Table

__all__ = [
    "FUSED",
    "READERS",
    "WEIGHTS",
    "DynamicRope",
    "Experts",
    "Ignore",
    "LinearRope",
    "Llama3Rope",
    "LongRope",
    "ModelConfig",
    "Part",
    "RopeScaling",
    "Rule",
    "Shard",
    "Table",
    "YarnRope",
    "read_config",
    "read_facts",
]
