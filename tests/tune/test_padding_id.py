"""Padding is known by its place, never by its id: a tokenizer without a token to spare pads with the end of text."""

import numpy as np
import torch

from modicum.model import Decoder, ModelConfig
from modicum.train.loss import SupervisedLoss
from modicum.tune.examples import Examples
from modicum.tune.rows import packed_batch

EOT, OTHER = 3, 0


def test_padding_with_the_end_of_text_changes_no_target_no_loss_and_no_gradient():
    ids = np.array([2, 9, 10, EOT, 2, 11, EOT], np.uint32)
    supervised = np.array([0, 0, 1, 1, 0, 1, 1], bool)
    examples = Examples(ids, supervised, np.array([0, 4, 7]))
    config = ModelConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = Decoder(config)
    model.init_weights(0)
    loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    results = []
    for pad in (EOT, OTHER):
        batch = packed_batch(examples, [[0, 1]], sequence_length=12, pad_id=pad, pad_rows_to=2)
        assert batch.ids[batch.supervised].tolist().count(EOT) == 2, "the true ends are learned"
        assert batch.supervised_tokens == 4
        model.zero_grad()
        value = loss(batch)
        value.backward()
        results.append((value.detach(), [p.grad.clone() for p in model.parameters()]))
    (first, first_gradients), (second, second_gradients) = results
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(first_gradients, second_gradients, strict=True))
