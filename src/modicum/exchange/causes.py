"""What is wrong with a converted model, guessed from what it says: known faults of conversions, tried one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from modicum.checkpoint import Checkpoint
from modicum.exchange.layouts import relaid
from modicum.exchange.parity import Ids, Speaker, Truth, decoder_speaker
from modicum.model import KVCache, ModelConfig


def likely_cause(
    truth: Truth, said: Sequence[np.ndarray], weights: dict[str, Tensor], config: ModelConfig
) -> str | None:
    """What would make our decoder say of the truth's prompts what a runtime said; None where nothing known does."""
    longest = int(np.argmax([len(prompt) if len(prompt) <= 64 else 0 for prompt in truth.prompts]))
    prompt, found = truth.prompts[longest], said[longest]
    off = float(np.abs(found - truth.logits[longest]).max())
    for cause, speak in _suspects(weights, config):
        if float(np.abs(np.asarray(speak(prompt)) - found).max()) < 0.1 * off:
            return cause
    return None


def place_cause(
    prompt: Ids, alone: np.ndarray, found: np.ndarray, cuts: Sequence[int], checkpoint: Checkpoint
) -> str | None:
    """Of a prompt that was given in pieces, by how much the places of those behind a cache were off, if that is it.

    alone and found: the runtime's logits (T, V) of it whole and in pieces.
    """
    model, off = checkpoint.model(), float(np.abs(found - alone).max())
    for moved in (1, -1):
        said, cache = [], KVCache(checkpoint.config, 1, len(prompt))
        for start, end in pairwise((0, *cuts, len(prompt))):
            places = torch.arange(start, end)[None] + (moved if start else 0)
            with torch.no_grad():
                ids = torch.from_numpy(prompt[None, start:end])
                said.append(model(ids, positions=places, cache=cache)[0].numpy())
        if float(np.abs(np.concatenate(said) - found).max()) < 0.1 * off:
            return f"the positions behind a cache were off by one ({moved:+d})"
    return None


def _suspects(weights: dict[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Speaker]]:
    if not config.qk_norm:
        other = replace(config, rotary_layout="interleaved")
        yield "the rows of queries and keys were not put into the interleaved layout", decoder_speaker(weights, other)
    moved = relaid(weights, head_dim=config.head_dim, source="half", target="interleaved")
    yield "the rows of queries and keys were in the interleaved layout", decoder_speaker(moved, config)
    if config.rope_scaling is not None:
        yield "the rotary scaling were missing", decoder_speaker(weights, replace(config, rope_scaling=None))
    if not config.tie_word_embeddings:
        tied = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
        yield "the head were the embedding", decoder_speaker(tied, replace(config, tie_word_embeddings=True))
    for a, b in combinations(range(min(config.num_hidden_layers, 12)), 2):
        names = {f"model.layers.{a}.": f"model.layers.{b}.", f"model.layers.{b}.": f"model.layers.{a}."}
        swapped = dict(weights)
        for start, other_start in names.items():
            for name in (name for name in weights if name.startswith(start)):
                swapped[other_start + name.removeprefix(start)] = weights[name]
        yield f"layers {a} and {b} had changed places", decoder_speaker(swapped, config)
