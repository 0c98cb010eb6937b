"""The loss: cross-entropy summed over the supervised tokens. The one place where labels are shifted.

The sum is divided by nothing here; whoever accumulates batches divides once, by the targets of all of them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from modicum.data import Batch
from modicum.model import Decoder
from modicum.train.ranks import ALONE, Ranks

# Logits held at once, 64 MiB in fp32. Measured on two cores (Zen 4, bf16, 8 x 512 tokens, vocabulary 32,000), tokens/s:
# 2^22 1,850; 2^24 2,783; 2^26 2,780; all at once 2,484. With a vocabulary of 4,096 they are within 3 % of each other.
_LOGITS_AT_ONCE = 2**24
_MIN_ROWS = 64

Chunk = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class SupervisedLoss(nn.Module):
    """Calls a decoder on batches and sums the loss of their supervised targets.

    dtype: what matrix products run in (autocast); weights, sums and the softmax stay fp32. compiled: one layer, which
    serves for all, and one chunk of the head go through torch.compile, until `close`. That is as fast as the decoder in
    one piece and made in a third of the time (docs/training-notes.md). The embedding stays eager: its compiled backward
    adds with atomics, in another order each time. A module, so that PyTorch's parallel engines can take it as a whole.
    """

    def __init__(self, model: Decoder, *, device: torch.device, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.dtype = dtype
        self._chunk: Chunk = chunk_gradients
        if compiled:
            self._chunk = torch.compile(chunk_gradients, dynamic=False)
            for layer in model.model.layers:
                layer.compile(dynamic=False)

    def close(self) -> None:
        """Leave the decoder's layers as they were, not compiled."""
        for layer in self.model.model.layers:
            layer._compiled_call_impl = None

    def forward(self, batch: Batch) -> Tensor:
        """The summed loss, an fp32 scalar with a gradient. batch: on the CPU.

        Raises UserError for an id beyond the vocabulary.
        """
        self.model.check_ids(batch.ids)
        targets_BT, supervised_BT = batch.ids[:, 1:], batch.supervised[:, 1:]
        rows = supervised_BT.flatten().nonzero()[:, 0]
        targets = targets_BT.flatten()[rows].to(self.device, non_blocking=True)
        moved = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            embedded = self.model.model.embed_tokens(moved.ids[:, :-1])
            hidden_BTD = self.model.hidden_from_embeddings(
                embedded, positions=moved.positions, documents=moved.documents
            )
        head = self.model.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return linear_cross_entropy(
            hidden_BTD.flatten(0, 1).to(self.dtype),
            head.weight,
            targets,
            rows.to(self.device, non_blocking=True),
            chunk=self._chunk,
        )

    @torch.no_grad()
    def mean(self, batches: Iterable[Batch], ranks: Ranks = ALONE) -> tuple[float, int]:
        """(loss a target, targets) over held-out batches, in evaluation mode; (nan, 0) where nothing is supervised.

        The batches, the same ones on all ranks, are shared out among them; the mean is over all.
        Not compiled: a second program for a forward pass alone takes longer to make than it saves in a short run.
        """
        total, targets = 0.0, 0
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                for batch, counts in ranks.shares(batches):
                    loss = float(self(batch))
                    if counts:
                        total, targets = total + loss, targets + batch.supervised_tokens
        finally:
            self.model.train(was_training)
        total, everywhere = ranks.sum(total, targets)
        return (total / everywhere if everywhere else float("nan")), int(everywhere)


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets: Tensor, rows: Tensor, *, chunk: Chunk | None = None
) -> Tensor:
    """Sum of -log softmax(hidden[rows] weightᵀ)[targets], an fp32 scalar, without the logits of all rows at once.

    rows: int64 places in hidden, each at most once; targets: as many ids. Products run in hidden's dtype, the softmax
    in fp32. Both gradients are made in the forward pass, chunk by chunk, while its logits are there (Hsu et al. 2024,
    Liger Kernel), so no product is done twice. The gradient of `weight` comes in its own dtype.
    """
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    return apply(hidden_ND, weight_VD, targets, rows, chunk or chunk_gradients)


def chunk_gradients(
    hidden_CD: Tensor, weight_VD: Tensor, targets: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(summed loss, its gradient at hidden, its gradient at weight) of C rows; counts: 0 for those to ignore."""
    logits = (hidden_CD @ weight_VD.T).float()
    log_sum = logits.logsumexp(-1)
    loss = ((log_sum - logits.gather(1, targets[:, None])[:, 0]) * counts).sum()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    slope = (((logits - log_sum[:, None]).exp() - hit.float()) * counts[:, None]).to(hidden_CD.dtype)
    return loss, slope @ weight_VD, slope.T @ hidden_CD


def chunk_rows(vocab_size: int, rows: int) -> int:
    """How many rows one chunk takes: as many as the bound on logits allows, and no more than there are."""
    return max(1, min(rows, max(_MIN_ROWS, _LOGITS_AT_ONCE // vocab_size // _MIN_ROWS * _MIN_ROWS)))


def _split(tensor: Tensor, size: int) -> list[Tensor]:
    return [tensor[start : start + size] for start in range(0, tensor.shape[0], size)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets: Tensor, rows: Tensor, chunk: Chunk) -> Tensor:
        every_row = rows.shape[0] == hidden_ND.shape[0]
        chosen = hidden_ND if every_row else hidden_ND[rows]
        weight = weight_VD.to(hidden_ND.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        size = chunk_rows(weight_VD.shape[0], hidden_ND.shape[0])
        pieces = zip(_split(chosen, size), _split(targets, size), strict=True)
        if not any(ctx.needs_input_grad[:2]):
            for hidden, wanted in pieces:
                loss += cross_entropy((hidden @ weight.T).float(), wanted, reduction="sum")
            return loss
        d_chosen, d_weight = [], torch.zeros_like(weight_VD)
        for hidden, wanted in pieces:
            # the last chunk is filled up, so that a compiled one is made for a single shape
            missing = size - hidden.shape[0]
            counts = torch.ones(size, device=hidden.device)
            counts[hidden.shape[0] :] = 0
            part, slope_hidden, slope_weight = chunk(
                pad(hidden, (0, 0, 0, missing)) if missing else hidden,
                weight,
                pad(wanted, (0, missing)) if missing else wanted,
                counts,
            )
            loss += part
            d_chosen.append(slope_hidden[: hidden.shape[0]])
            d_weight += slope_weight
        slopes = torch.cat(d_chosen) if d_chosen else chosen
        ctx.save_for_backward(
            slopes if every_row else torch.zeros_like(hidden_ND).index_copy_(0, rows, slopes), d_weight
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradients[0], d_weight * gradients[0], None, None, None
