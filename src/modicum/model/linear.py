"""nn.Linear and nn.Embedding without PyTorch's own initialisation, and the check of ids against it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from modicum.store import UserError


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left to init_weights or to the checkpoint, which would only overwrite it."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Left to init_weights or to the checkpoint, which would only overwrite it."""

    def project(self, x: Tensor) -> Tensor:
        """Logits (..., V) of (..., hidden), where head and embedding are tied."""
        return linear(x, self.weight)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises UserError when an id is negative or beyond the vocabulary. Waits for the device that holds them."""
    if ids.numel() == 0 or ids.is_meta:
        return
    low, high = (int(edge) for edge in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside this model's vocabulary of {vocab_size}; "
            "the text was encoded with another tokenizer than the model's"
        )
