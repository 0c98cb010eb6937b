"""One optimizer update: gradients summed over the micro-batches of a window, divided once, clipped, applied."""

from dataclasses import dataclass
from math import isfinite

from torch import nn

from modicum.data import Batch, split
from modicum.store import UserError
from modicum.train.loss import SupervisedLoss
from modicum.train.optimizer import Optimizer


@dataclass(frozen=True)
class Update:
    """loss_sum: over the `targets` supervised tokens of the whole window. gradient_norm: before clipping."""

    loss_sum: float
    targets: int
    gradient_norm: float

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.loss_sum / self.targets

    @property
    def finite(self) -> bool:
        return isfinite(self.loss_sum) and isfinite(self.gradient_norm)


def make_update(
    loss: SupervisedLoss,
    optimizer: Optimizer,
    batch: Batch,
    *,
    micro_batch_size: int,
    rate: float,
    clip_norm: float,
) -> Update:
    """Learn from `batch`, at most micro_batch_size rows at a time; the result does not depend on how it is cut.

    Where the loss or the gradient is not finite the weights stay as they were, and the returned update says so. Raises
    UserError when nothing in the batch is supervised.
    """
    targets = batch.supervised_tokens
    if not targets:
        raise UserError("a whole batch has no supervised token, so there is nothing to learn from; look at the data")
    losses = []
    for micro in split(batch, micro_batch_size):
        value = loss(micro)
        # divided by the window's targets, not by the micro-batch's: a mean of means would weigh short ones up
        (value / targets).backward()  # type: ignore[no-untyped-call]
        losses.append(value.detach())
    norm = float(nn.utils.clip_grad_norm_(optimizer.weights, clip_norm))
    # read at the end: each look at a number waits for a GPU
    update = Update(sum(float(value) for value in losses), targets, norm)
    if update.finite:
        optimizer.set_rate(rate)
        optimizer.step()
    optimizer.zero_grad()
    return update
