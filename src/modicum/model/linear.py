"""nn.Linear and nn.Embedding without PyTorch's own initialisation, which Decoder.init_weights would only overwrite."""

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left to Decoder.init_weights, or to the checkpoint."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Left to Decoder.init_weights, or to the checkpoint."""
