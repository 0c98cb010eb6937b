"""One optimizer update: gradients summed over the micro-batches of a window, divided once, clipped, applied."""

from dataclasses import dataclass
from math import isfinite

from torch import nn

from modicum.data import Batch, split
from modicum.store import UserError
from modicum.train.optimizer import Optimizer
from modicum.train.parallel import exchanging, whole
from modicum.train.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Update:
    """loss_sum: over the `targets` supervised tokens of the whole window. tokens: its inputs that are no padding.

    gradient_norm: before clipping. All of it is over all ranks.
    """

    loss_sum: float
    targets: int
    tokens: int
    gradient_norm: float

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.loss_sum / self.targets

    @property
    def finite(self) -> bool:
        return isfinite(self.loss_sum) and isfinite(self.gradient_norm)


def make_update(
    loss: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    *,
    micro_batch_size: int,
    rate: float,
    clip_norm: float,
    ranks: Ranks = ALONE,
) -> Update:
    """Learn from `batch`, at most micro_batch_size rows at a time; the result does not depend on how it is cut.

    loss: gives the summed loss of a batch, and is spread over the ranks where there are any; `batch` is then this
    rank's share of the window, of as many rows as any other's.

    Where the loss or the gradient is not finite the weights stay as they were, and the returned update says so. Raises
    UserError when nothing in the batch is supervised.
    """
    counted = ranks.sum(batch.supervised_tokens, int((batch.documents >= 0).sum()))
    targets, tokens = (int(count) for count in counted)
    if not targets:
        ranks.refuse(
            UserError("a whole batch has no supervised token, so there is nothing to learn from; look at the data")
        )
    losses = []
    micros = list(split(batch, micro_batch_size))
    for number, micro in enumerate(micros, 1):
        with exchanging(loss, last=number == len(micros)):
            value = loss(micro)
            # Divided by the window's targets, not by the micro-batch's: a mean of means would weigh short ones up. The
            # engines take the mean over ranks, where the sum is wanted.
            (value / (targets / ranks.world_size)).backward()
        losses.append(value.detach())
    norm = float(whole(nn.utils.clip_grad_norm_(optimizer.weights, clip_norm)))
    # read at the end: each look at a number waits for a GPU
    loss_sum = ranks.sum(sum(float(value) for value in losses))[0]
    update = Update(loss_sum, targets, tokens, norm)
    if update.finite:
        optimizer.set_rate(rate)
        optimizer.step()
    optimizer.zero_grad()
    return update
