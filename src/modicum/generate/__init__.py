"""Text from a model: many requests at once over one key-value cache, sampling, streaming, stop strings, and chat.

Serving over HTTP and what a command prints are left to the rooms above.
"""

from modicum.generate.answer import Chunk, Completion
from modicum.generate.chat import ChatSession
from modicum.generate.choice import TokenMask
from modicum.generate.engine import Engine, EngineNumbers
from modicum.generate.generator import Generator, evaluation_mode
from modicum.generate.params import SamplingParams
from modicum.generate.passes import ModelFault
from modicum.generate.sampler import probabilities
from modicum.generate.ticket import QueueFull, Ticket

__all__ = [
    "ChatSession",
    "Chunk",
    "Completion",
    "Engine",
    "EngineNumbers",
    "Generator",
    "ModelFault",
    "QueueFull",
    "SamplingParams",
    "Ticket",
    "TokenMask",
    "evaluation_mode",
    "probabilities",
]
