"""Keys and values of the tokens already seen, in memory reserved at the start."""

import torch
from torch import Tensor

from modicum.model.config import ModelConfig
from modicum.model.mask import Visibility
from modicum.store import UserError


def check_rows(index: Tensor) -> None:
    """ValueError for what is no list of row numbers: a bool or uint8 tensor would be taken for a mask of the rows."""
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        raise ValueError(f"expected row numbers, (rows,) int32 or int64, not {tuple(index.shape)} {index.dtype}")


class KVCache:
    """Room for `capacity` tokens of `batch` rows in every layer.

    One forward pass of the decoder appends its tokens to all layers and then moves `length` on. Padding and document
    numbers of the cached tokens are kept beside them, so that a later pass need not repeat them. It never grows and
    never overwrites: a pass that does not fit raises UserError and leaves the cache as it was.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.keep = torch.ones(batch, capacity, dtype=torch.bool, device=device)
        self.documents = torch.zeros(batch, capacity, dtype=torch.int32, device=device)
        self.batch = batch
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget every token; the memory stays."""
        self.length = 0
        self.has_padding = False
        self.has_documents = False

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} tokens of {self.length}")
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was; `index` (batch,) int32 or int64. Rows may repeat, as in beam search."""
        check_rows(index)
        if index.shape != (self.batch,):
            raise ValueError(f"expected {self.batch} row numbers, not a tensor of shape {tuple(index.shape)}")
        for layer in (*self.keys, *self.values):
            layer[:, :, : self.length] = layer[index, :, : self.length]
        for note in (self.keep, self.documents):
            note[:, : self.length] = note[index, : self.length]

    def check_room(self, batch: int, tokens: int) -> None:
        """Raises UserError when `tokens` more do not fit, ValueError when the rows are not the cache's."""
        if batch != self.batch:
            raise ValueError(f"the cache has {self.batch} rows, the input {batch}")
        if self.length + tokens > self.capacity:
            raise UserError(
                f"the key-value cache is full: it has room for {self.capacity} tokens, and {self.length} + {tokens} "
                "are asked for; shorten the prompt, ask for fewer new tokens, or reserve more"
            )

    def visibility(self, tokens: int, keep: Tensor | None, documents: Tensor | None) -> Visibility:
        """What `tokens` new tokens may see. Notes their documents and `keep` (B, tokens or length + tokens) bool.

        Once a pass had documents, every later one must name its own: ValueError otherwise.
        """
        end = self.length + tokens
        if self.has_documents and documents is None and self.length:
            raise ValueError("the cached tokens have document numbers: give the new ones theirs")
        new = slice(self.length, end)
        self.has_padding = (self.has_padding and self.length > 0) or keep is not None
        self.has_documents = documents is not None or (self.has_documents and self.length > 0)
        self.keep[:, new] = True if keep is None else keep[:, -tokens:]
        if keep is not None and keep.shape[1] == end:
            self.keep[:, :end] = keep
        self.documents[:, new] = 0 if documents is None else documents
        return Visibility(
            self.length,
            tokens,
            self.keep[:, :end] if self.has_padding else None,
            documents if self.has_documents else None,
            self.documents[:, :end] if self.has_documents else None,
        )

    def append(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values of one layer after the cached ones; returns all of them as views."""
        end = self.length + k_BHTK.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k_BHTK
        values[:, :, self.length : end] = v_BHTK
        return keys[:, :, :end], values[:, :, :end]
