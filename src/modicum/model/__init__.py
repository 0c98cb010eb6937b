"""The decoder: RMSNorm, rotary embedding, attention, SwiGLU, key-value cache. Pure torch, no files, no network.

Expressible as a stock Llama or Qwen3 by construction; `reference` is the one allowed second implementation.
"""

from modicum.model.block import ActivationCheckpointing, DecoderBlock
from modicum.model.cache import KVCache
from modicum.model.config import ModelConfig
from modicum.model.decoder import Decoder
from modicum.model.norm import RMSNorm
from modicum.model.parameters import Parameters, parameters_by_part, training_flops_per_token

__all__ = [
    "ActivationCheckpointing",
    "Decoder",
    "DecoderBlock",
    "KVCache",
    "ModelConfig",
    "Parameters",
    "RMSNorm",
    "parameters_by_part",
    "training_flops_per_token",
]
