"""How fresh weights are drawn, in the decoder and in the blocks of every dialect."""

import torch
from torch import Tensor, nn

# what writes into the residual stream, in every dialect's names
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@torch.no_grad()
def init_weights(module: nn.Module, *, std: float, layers: int, generator: torch.Generator | None = None) -> None:
    """N(0, std); what writes into the residual stream is scaled by 1/sqrt(2 * layers) (GPT-2); gains 1, biases 0.

    The same generator gives the same weights on every machine; None draws from PyTorch's own. Weights on the meta
    device stay as they are.
    """
    residual = std / (2 * layers) ** 0.5
    for name, weight in module.named_parameters():
        if not weight.is_meta:
            _fill(name, weight, residual if name.endswith(_OUTPUTS) else std, generator)


def _fill(name: str, weight: Tensor, deviation: float, generator: torch.Generator | None) -> None:
    if weight.dim() == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
