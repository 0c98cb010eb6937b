"""The language model: embedding, blocks, last norm, head.

Parameter names are Hugging Face's. `hidden` and `head` are apart so that a loss need not hold the logits of a whole
batch; `embed` and `hidden_from_embeddings` are apart because the compiled backward pass of an embedding adds
atomically, in another order each run: whoever compiles for training compiles the second, or its layers, alone.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from modicum.model.block import ActivationCheckpointing, DecoderBlock
from modicum.model.cache import KVCache
from modicum.model.config import ModelConfig
from modicum.model.init import init_weights
from modicum.model.linear import Embedding, Linear, check_ids
from modicum.model.mask import Visibility
from modicum.model.norm import RMSNorm
from modicum.model.plan import Implementation, make_plan
from modicum.model.rotary import RotaryEmbedding
from modicum.store import UserError


class DecoderBody(nn.Module):
    """What Hugging Face calls `model`: everything but the head. Holds the parts; Decoder walks through them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)


class Decoder(nn.Module):
    """A decoder with freshly initialised weights.

    attention_impl: "sdpa", "blocks" (of attention_block queries), or "auto", which takes blocks where they were
    measured to be faster: on a CPU, with gradients, without a cache, for more tokens than one block, in compiled code.
    (Uncompiled they take the same time and more memory.) With an attention_block of 0, "auto" is "sdpa".
    activation_checkpointing: what each block keeps for the backward pass (DecoderBlock says it).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.attention_impl: Literal["auto", "sdpa", "blocks"] = "auto"
        self.attention_block = 128
        self.init_weights(0)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        first = self.model.layers[0]
        assert isinstance(first, DecoderBlock)
        return first.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, what: ActivationCheckpointing) -> None:
        kinds = get_args(ActivationCheckpointing)
        if what not in kinds:
            raise ValueError(f"activation_checkpointing: {what} is none of {', '.join(kinds)}")
        for block in self.model.layers:
            assert isinstance(block, DecoderBlock)
            block.activation_checkpointing = what

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so where ids must be."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states, and of a cache's keys and values; rounded weights have others of their own."""
        return self.model.norm.weight.dtype

    def init_weights(self, seed: int | torch.Generator) -> None:
        """Draw all weights anew (see model/init.py). The same seed gives the same weights on every machine."""
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        init_weights(self, std=self.config.initializer_range, layers=self.config.num_hidden_layers, generator=generator)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Logits (B, T, V) of ids (B, T) int64; with return_attention also each layer's weights (B, H, T, S), a tuple.

        positions: (B, T) int64; by default a token's place among those of its document that are no padding.
        documents: (B, T) int32 numbers; a token sees only its own document's, and -1 is padding.
        attention_mask: (B, T), or (B, past+T) with a cache; true where a token is real, false where it is padding.
        cache: holds what came before, and takes these tokens in.
        Raises UserError for an id outside the vocabulary, a sequence longer than max_position_embeddings, a full cache.
        """
        hidden, weights = self._hidden(
            self.embed(ids_BT), positions, documents, attention_mask, cache, return_attention
        )
        return (self.head(hidden), weights) if return_attention else self.head(hidden)

    def hidden(
        self,
        ids_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the head reads: (B, T, hidden) after the last norm. Arguments as for `forward`."""
        return self._hidden(self.embed(ids_BT), positions, documents, attention_mask, cache, False)[0]

    def hidden_from_embeddings(
        self,
        x_BTD: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """`hidden` from what `embed` returned."""
        return self._hidden(x_BTD, positions, documents, attention_mask, cache, False)[0]

    def embed(self, ids_BT: Tensor) -> Tensor:
        """(B, T, hidden) of ids (B, T). Outside of compiled code an id beyond the vocabulary raises UserError."""
        if not torch.compiler.is_compiling():
            self.check_ids(ids_BT)
        out: Tensor = self.model.embed_tokens(ids_BT)
        return out

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (..., V) of (..., hidden)."""
        logits: Tensor = (
            self.model.embed_tokens.project(hidden_BTD) if self.lm_head is None else self.lm_head(hidden_BTD)
        )
        return logits

    def check_ids(self, ids: Tensor) -> None:
        """Raises UserError when an id is negative or beyond the vocabulary. Waits for the device that holds them."""
        check_ids(ids, self.config.vocab_size)

    def _hidden(
        self,
        x_BTD: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        attention_mask: Tensor | None,
        cache: KVCache | None,
        return_attention: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        visibility = self._visibility(x_BTD, documents, attention_mask, cache)
        plan = make_plan(
            self.model.rotary,
            x_BTD,
            visibility,
            positions=positions,
            cache=cache,
            implementation=self._implementation(x_BTD, cache, return_attention),
            block=self.attention_block,
        )
        weights = []
        for block in self.model.layers:
            x_BTD, layer_weights = block(x_BTD, plan)
            if layer_weights is not None:
                weights.append(layer_weights)
        if cache is not None:
            cache.length += x_BTD.shape[1]
        return self.model.norm(x_BTD), tuple(weights)

    def _visibility(
        self, x_BTD: Tensor, documents: Tensor | None, attention_mask: Tensor | None, cache: KVCache | None
    ) -> Visibility:
        batch, length = x_BTD.shape[:2]
        past = 0 if cache is None else cache.length
        if past + length > self.config.max_position_embeddings:
            raise UserError(
                f"a sequence of {past + length} tokens is longer than the model's "
                f"{self.config.max_position_embeddings} positions (max_position_embeddings)"
            )
        keep = None if attention_mask is None else attention_mask.bool()
        if keep is not None and keep.shape not in ((batch, length), (batch, past + length)):
            raise ValueError(f"attention_mask {tuple(keep.shape)} fits neither {length} nor {past + length} tokens")
        if documents is not None and documents.shape != (batch, length):
            raise ValueError(f"documents {tuple(documents.shape)} does not fit an input of {(batch, length)}")
        if cache is None:
            return Visibility(past, length, keep, documents, documents)
        cache.check_room(batch, length)
        return cache.visibility(length, keep, documents)

    def _implementation(self, x_BTD: Tensor, cache: KVCache | None, return_attention: bool) -> Implementation:
        if return_attention:
            return "weights"
        if self.training and self.config.attention_dropout:
            return "sdpa"
        if self.attention_impl != "auto":
            return self.attention_impl
        trains_on_cpu = torch.is_grad_enabled() and x_BTD.device.type == "cpu" and cache is None
        compiled = torch.compiler.is_compiling() or self.model.layers[0]._compiled_call_impl is not None
        blocks = 0 < self.attention_block < x_BTD.shape[1]
        return "blocks" if trains_on_cpu and compiled and blocks else "sdpa"

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's. A tied model takes a state with `lm_head.weight` too, where it equals the embedding."""
        head, table = state_dict.get("lm_head.weight"), state_dict.get("model.embed_tokens.weight")
        if self.lm_head is None and head is not None:
            if table is None or not torch.equal(head, table):
                raise UserError(
                    "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true: "
                    "the config does not belong to these weights"
                )
            state_dict = {name: value for name, value in state_dict.items() if name != "lm_head.weight"}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)
