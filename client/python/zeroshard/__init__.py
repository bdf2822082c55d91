"""ZeroShard: large models trained with their states in a daemon.

import zeroshard
engine, optimizer, loader, scheduler = zeroshard.initialize(model=model, config="ds_config.json")
"""

from zeroshard import zero
from zeroshard.checkpoint import load_safetensors
from zeroshard.engine import Engine
from zeroshard.errors import ZeroShardError
from zeroshard.hooks import register_external_parameter, set_independent
from zeroshard.initialize import initialize

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "ZeroShardError",
    "initialize",
    "load_safetensors",
    "register_external_parameter",
    "set_independent",
    "zero",
]
