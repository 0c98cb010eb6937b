"""modicum: grow a small language model from a folder of text into a chat model, and prove every hop on the way.

The command line is a thin layer over what stands here. Names are loaded when they are asked for, so that
`import modicum` costs milliseconds and `modicum --help` does not wait for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Decoder": "modicum.model",
    "Generator": "modicum.generate",
    "KVCache": "modicum.model",
    "ModelConfig": "modicum.model",
    "Recipe": "modicum.recipe",
    "SamplingParams": "modicum.generate",
    "Tokenizer": "modicum.tokenizer",
    "UserError": "modicum.store",
    "load": "modicum.checkpoint",
    "load_recipe": "modicum.recipe",
    "plan": "modicum.road.plan",
    "run": "modicum.road.stages",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'modicum' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return getattr(home, "load_checkpoint" if name == "load" else name)
