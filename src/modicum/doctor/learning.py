"""Does the loss mean what it should, and does training lower it: two probes through the trainer's own loss.

The label shift is looked at from outside: what a model has learnt by heart must come out of its logits one place early.
"""

from math import log

import torch

from modicum.data import Batch
from modicum.doctor.finding import Finding, judged
from modicum.model import Decoder, ModelConfig
from modicum.train.loss import SupervisedLoss

# Targets that are not shifted take off 1.3 or more, because a tied embedding recognises its own token.
UNTRAINED_TOLERANCE = 0.5
STEPS, START_SHARE, BY_HEART = 150, 0.1, 0.9

NANO = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=192,
    max_position_embeddings=256,
)


def untrained_loss(config: ModelConfig, device: torch.device) -> Finding:
    """A model that knows nothing is as unsure as a fair die with a face for each token: ln(vocabulary) nats, and half
    the variance of its logits (the mean of exp of a normal number), which are `hidden_size` products of a normed state
    with weights that spread by `initializer_range`."""
    torch.manual_seed(0)
    loss = SupervisedLoss(Decoder(config).to(device), device=device, dtype=torch.float32, compiled=False)
    batch = random_batch(config, rows=4, length=min(64, config.max_position_embeddings))
    with torch.no_grad():
        found = float(loss(batch)) / batch.supervised_tokens
    variance = config.hidden_size * config.initializer_range**2
    expected = log(config.vocab_size) + variance / 2
    detail = (
        f"{found:.3f} nats a token; ln({config.vocab_size}) and half the variance of fresh logits are {expected:.3f}"
    )
    return judged("untrained loss", abs(found - expected) < UNTRAINED_TOLERANCE, detail)


def overfit(device: torch.device) -> Finding:
    """A tiny model learns one random batch by heart, and then says each next token, not this one or the one after."""
    name = "overfit one batch"
    model = Decoder(NANO).to(device)
    loss = SupervisedLoss(model, device=device, dtype=torch.float32, compiled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    batch = random_batch(NANO, rows=4, length=32)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(batch) / batch.supervised_tokens
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
        if losses[-1] < START_SHARE * losses[0]:
            break
    else:
        return judged(name, False, f"loss went from {losses[0]:.2f} only to {losses[-1]:.2f} in {STEPS} updates")
    model.eval()
    with torch.no_grad():
        said = model(batch.ids[:, :-1].to(device)).argmax(-1).cpu()
    right = float((said == batch.ids[:, 1:]).float().mean())
    detail = f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} updates; {right:.0%} of next tokens by heart"
    return judged(name, right >= BY_HEART, detail)


def random_batch(config: ModelConfig, *, rows: int, length: int) -> Batch:
    """Random ids, one document a row, every target supervised."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    positions = torch.arange(length).expand(rows, length).contiguous()
    supervised = torch.ones(rows, length + 1, dtype=torch.bool)
    supervised[:, 0] = False
    return Batch(ids, positions, torch.zeros(rows, length, dtype=torch.int32), supervised)
