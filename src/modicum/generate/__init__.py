"""Text from a model: batches with a key-value cache, sampling, streaming, stop strings, and chat with a memory.

Serving over HTTP and what a command prints are left to the rooms above.
"""

from modicum.generate.chat import ChatSession
from modicum.generate.engine import Chunk, Completion, Generator, evaluation_mode
from modicum.generate.params import SamplingParams
from modicum.generate.sampler import probabilities

__all__ = ["ChatSession", "Chunk", "Completion", "Generator", "SamplingParams", "evaluation_mode", "probabilities"]
