"""Scores do not depend on what shares a batch, and cost no more memory than stated."""

import pytest
import torch

from modicum.evaluate import scoring
from modicum.evaluate.scoring import Scored, token_logprobs
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError


@pytest.fixture
def sequences(tokenizer):
    random = torch.Generator().manual_seed(0)
    lengths = [2, 3, 65, 30, 31, 7, 64, 2, 12, 50]
    rows = [torch.randint(0, tokenizer.vocab_size, (n,), generator=random).tolist() for n in lengths]
    return [Scored(ids, 1 + i % (len(ids) - 1)) for i, ids in enumerate(rows)]


def test_scores_are_those_of_the_float64_reference(model, reference, sequences):
    found = token_logprobs(model, sequences, batch_tokens=200)
    for sequence, scores in zip(sequences, found, strict=True):
        assert scores.tolist() == pytest.approx(reference(sequence.ids)[sequence.start - 1 :], abs=1e-4)
        assert scores.dtype == torch.float64


def test_batches_of_any_size_score_alike(model, sequences):
    alone = [token_logprobs(model, [sequence])[0] for sequence in sequences]
    for batch_tokens in (1, 100, 10_000):
        together = token_logprobs(model, sequences, batch_tokens=batch_tokens)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_a_batch_holds_no_more_tokens_than_asked_and_the_head_no_more_rows(model, sequences, monkeypatch):
    inputs, rows = [], []
    hidden, head = model.hidden, model.head
    monkeypatch.setattr(scoring, "_HEAD_ROWS", 16)
    monkeypatch.setattr(model, "hidden", lambda ids: inputs.append(ids.shape) or hidden(ids))
    monkeypatch.setattr(model, "head", lambda x: rows.append(len(x)) or head(x))
    token_logprobs(model, sequences, batch_tokens=130)
    assert max(batch * length for batch, length in inputs) <= 130
    assert sum(batch for batch, _ in inputs) == len(sequences)
    assert max(rows) <= 16
    assert sum(rows) == sum(len(s.ids) - s.start for s in sequences)


def test_bfloat16_autocast_scores_close_to_float32(model, sequences):
    exact, rough = (token_logprobs(model, sequences, bfloat16=flag) for flag in (False, True))
    apart = torch.cat(exact) - torch.cat(rough)
    assert 0 < apart.abs().mean() < 0.1


def test_a_training_model_is_scored_without_dropout_and_trains_on(model, sequences):
    config = ModelConfig(**{**vars(model.config), "attention_dropout": 0.5})
    dropping = Decoder(config)
    dropping.load_state_dict(model.state_dict())
    dropping.train()
    for a, b in zip(token_logprobs(dropping, sequences), token_logprobs(model, sequences), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert dropping.training


def test_nothing_to_score_is_a_mistake():
    for start in (0, 2, 3):
        with pytest.raises(ValueError, match="cannot score"):
            Scored([1, 2], start)


def test_probabilities_that_are_not_finite_are_one_clear_error(model, sequences):
    broken = Decoder(model.config)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.inf
    with pytest.raises(UserError, match="not finite"):
        token_logprobs(broken, sequences)
