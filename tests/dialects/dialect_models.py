"""Tiny models of every dialect whose every number matters, and one way to call them all."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modicum.dialects import core, cyberslm, slm

VOCAB = 61
DIALECTS = ["cyberslm", "slm", "core"]


def lively(module: nn.Module, seed: int = 1) -> nn.Module:
    """Biases, gains and weights all far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * 0.9 / weight.shape[1] ** 0.5)
    return module.eval()


def some_ids(batch: int, length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def some_hidden(batch: int, length: int, width: int = 24, seed: int = 3) -> torch.Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def config(dialect: str, *, layers: int = 2, hidden: int = 24, bias: bool = False, dropout: float = 0.0) -> Any:
    if dialect == "cyberslm":
        return cyberslm.CyberSLMConfig(
            vocab_size=VOCAB,
            max_seq_len=128,
            hidden_dim=hidden,
            num_layers=layers,
            num_heads=3,
            ffn_hidden_dim=40,
            bias=bias,
            dropout=dropout,
            attn_dropout=dropout,
        )
    if dialect == "slm":
        return slm.SLMConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=40,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attention_bias=bias,
            mlp_bias=bias,
            attention_dropout=dropout,
        )
    return core.ModelConfig(
        n_embd=hidden,
        n_head=3,
        n_layer=layers,
        vocab_size=VOCAB,
        block_size=128,
        bias=bias,
        dropout=dropout,
        multiple_of=8,
    )


def whole(dialect: str, **changes: Any) -> nn.Module:
    kinds = {"cyberslm": cyberslm.CyberSLM, "slm": slm.SLM, "core": core.LanguageModel}
    return kinds[dialect](config(dialect, **changes))


def block(dialect: str, **changes: Any) -> nn.Module:
    made = config(dialect, **changes)
    if dialect == "core":
        return core.TransformerBlock(made)
    return (cyberslm.DecoderBlock if dialect == "cyberslm" else slm.DecoderBlock)(made, 1)


@dataclass
class Called:
    """A block of any dialect as a function from hidden states to hidden states."""

    block: nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.block, slm.DecoderBlock):
            return self.block(x, torch.arange(x.shape[1])[None])[0]
        out = self.block(x)
        return out if isinstance(out, torch.Tensor) else out[0]
