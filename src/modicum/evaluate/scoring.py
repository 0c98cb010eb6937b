"""Log-probabilities of given tokens: the one forward pass that every figure here is made from.

Sequences of like length share a batch and are padded on the right, where causality hides the padding from all that
counts. Only the positions asked for go through the head, in slices: memory does not grow with length times vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.generate import evaluation_mode
from modicum.model import Decoder
from modicum.store import UserError

# Rows of logits held at once: 1,024 x 16,384 x 4 bytes is 64 MB.
_HEAD_ROWS = 1024


@dataclass(frozen=True)
class Scored:
    """Token ids, of which those from `start` to the end are to be scored: at least one of them, and not the first."""

    ids: list[int]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.ids):
            raise ValueError(f"cannot score from {self.start} on in {len(self.ids)} ids")


@torch.inference_mode()
def token_logprobs(
    model: Decoder, sequences: Sequence[Scored], *, batch_tokens: int = 8192, bfloat16: bool = False
) -> list[Tensor]:
    """For each sequence the log-probability (nats, float64, CPU) of ids[start], ids[start+1], ..., given all before.

    batch_tokens bounds rows times length of one batch. bfloat16 runs the blocks under autocast; head and softmax are
    in fp32 where the weights are. Raises UserError when the model's logits are not finite.
    """
    device = model.device
    result: list[Tensor] = [torch.empty(0)] * len(sequences)
    autocast = torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()
    with evaluation_mode(model):
        for batch in _batches(sequences, batch_tokens):
            group = [sequences[i] for i in batch]
            length = max(len(s.ids) for s in group) - 1
            ids_BT = torch.tensor([s.ids[:-1] + [0] * (length + 1 - len(s.ids)) for s in group], device=device)
            with autocast:
                hidden_BTD = model.hidden(ids_BT)
            rows = torch.cat([hidden_BTD[i, s.start - 1 : len(s.ids) - 1] for i, s in enumerate(group)])
            targets = torch.tensor([i for s in group for i in s.ids[s.start :]], device=device)
            scores = torch.cat([_pick(model, *part) for part in _slices(rows, targets)])
            if not scores.isfinite().all():
                raise UserError("the model gives probabilities that are not finite; try float32, or another checkpoint")
            sizes = [len(s.ids) - s.start for s in group]
            for i, part in zip(batch, torch.split(scores, sizes), strict=True):
                result[i] = part
    return result


def _pick(model: Decoder, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = model.head(hidden_ND.to(model.model.norm.weight.dtype)).float()
    return logits_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0].cpu().double()


def _slices(rows: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(rows, _HEAD_ROWS), torch.split(targets, _HEAD_ROWS), strict=True))


def _batches(sequences: Sequence[Scored], batch_tokens: int) -> list[list[int]]:
    """Places of sequences that go together, longest first, so that what does not fit into memory shows at once."""
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids)):
        if not room:
            batches.append([])
            room = max(1, batch_tokens // len(sequences[i].ids))
        batches[-1].append(i)
        room -= 1
    return batches
