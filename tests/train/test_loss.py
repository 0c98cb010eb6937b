from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import random_batch, small_model

from modicum.data import Batch
from modicum.store import UserError
from modicum.train import loss as loss_module
from modicum.train.loss import SupervisedLoss, chunk_rows, linear_cross_entropy

CPU = torch.device("cpu")


def loss_of(model, dtype=torch.float32):
    return SupervisedLoss(model, device=CPU, dtype=dtype, compiled=False)


def plain_loss(model, batch):
    """The same sum from the definition: full logits, targets one place later, only where they are supervised."""
    logits = model(batch.ids[:, :-1], positions=batch.positions, documents=batch.documents)
    each = cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (each * batch.supervised[:, 1:].flatten()).sum()


def gradients(model):
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_is_as_unsure_as_a_die_with_a_face_for_each_token(tokenizer, tied):
    model = small_model(tokenizer, tie_word_embeddings=tied)
    batch = random_batch(tokenizer.vocab_size, 8, 64)
    assert float(loss_of(model)(batch).detach()) / batch.supervised_tokens == pytest.approx(
        log(tokenizer.vocab_size), abs=0.1
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("at_once", [1, 2**24])
def test_loss_and_gradients_are_those_of_full_logits_with_targets_one_place_later(
    tokenizer, tied, at_once, monkeypatch
):
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(loss_module, "_MIN_ROWS", 7)
    model = small_model(tokenizer, tie_word_embeddings=tied)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    batch = random_batch(tokenizer.vocab_size, 3, 20, supervised=mask)
    mine = loss_of(model)(batch)
    mine.backward()
    mine_gradients = gradients(model)
    theirs = plain_loss(model, batch)
    theirs.backward()
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    for name, gradient in gradients(model).items():
        assert torch.allclose(mine_gradients[name], gradient, atol=2e-5, rtol=1e-4), name


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(2, 30), st.integers(0, 40), st.integers(1, 50), st.randoms(use_true_random=False)
)
def test_chunks_of_any_size_give_one_loss_and_one_gradient(rows, vocab, kept, size, random):
    torch.manual_seed(random.randrange(1000))
    hidden = torch.randn(rows, 5, requires_grad=True)
    weight = torch.randn(vocab, 5, requires_grad=True)
    places = torch.tensor(sorted(random.sample(range(rows), min(kept, rows))), dtype=torch.int64)
    targets = torch.randint(vocab, places.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "chunk_rows", lambda *_: size)
        loss = linear_cross_entropy(hidden, weight, targets, places)
    expected = cross_entropy(hidden[places] @ weight.T, targets, reduction="sum")
    assert torch.allclose(loss, expected, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(3 * loss, [hidden, weight]),
        torch.autograd.grad(3 * expected, [hidden, weight]),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_a_row_that_is_not_supervised_gets_no_gradient():
    hidden = torch.randn(6, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(20, 8), torch.tensor([3, 4]), torch.tensor([1, 4]))
    loss.backward()
    assert hidden.grad.abs().sum(1).bool().tolist() == [False, True, False, False, True, False]


def test_the_logits_of_a_long_batch_are_never_held_at_once(monkeypatch):
    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.seen = max(self.seen, out.numel())
            return out

    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", 2**18)
    rows, vocab = 1024, 2048
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64), torch.arange(rows)).backward()
    assert 2**17 < largest.seen <= 2**18 < rows * vocab / 7


@given(st.integers(1, 300_000), st.integers(1, 100_000))
def test_a_chunk_has_rows_and_stays_within_its_bound(vocab, rows):
    size = chunk_rows(vocab, rows)
    assert 1 <= size <= rows
    assert size * vocab <= 2**24 or size <= 64


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_matrix_products_really_run_in_the_chosen_dtype_and_weights_stay_fp32(tokenizer, dtype, expected):
    model = small_model(tokenizer)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    loss = loss_of(model, dtype)(random_batch(tokenizer.vocab_size, 2, 16))
    loss.backward()
    assert len(seen) == 2 * 7
    assert set(seen.values()) == {expected}
    assert loss.dtype == torch.float32
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


def test_bf16_gives_nearly_the_loss_of_fp32(tokenizer):
    model, batch = small_model(tokenizer), random_batch(tokenizer.vocab_size, 4, 32)
    with torch.no_grad():
        assert float(loss_of(model, torch.bfloat16)(batch)) == pytest.approx(float(loss_of(model)(batch)), rel=2e-3)


def test_a_planted_copy_task_is_learnt(tokenizer):
    """Six random tokens, then the same six: whoever is one place off in the labels cannot say the second half."""
    half, vocab = 6, 12
    model = small_model(tokenizer, vocab_size=vocab, hidden_size=64, num_attention_heads=4, max_position_embeddings=32)
    loss = loss_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)

    def copies(rows):
        first = torch.randint(vocab, (rows, half), generator=generator)
        batch = random_batch(vocab, rows, 2 * half - 1)
        supervised = torch.zeros(rows, 2 * half, dtype=torch.bool)
        supervised[:, half:] = True
        return Batch(torch.cat([first, first], 1), batch.positions, batch.documents, supervised)

    for _ in range(300):
        batch = copies(32)
        value = loss(batch) / batch.supervised_tokens
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    test = copies(200)
    said = model(test.ids[:, :-1]).argmax(-1)[:, half - 1 :]
    assert (said == test.ids[:, half:]).float().mean() > 0.95


def test_an_id_beyond_the_vocabulary_is_one_clear_error(tokenizer):
    batch = random_batch(tokenizer.vocab_size + 100, 2, 64)
    with pytest.raises(UserError, match=rf"outside this model's vocabulary of {tokenizer.vocab_size}"):
        loss_of(small_model(tokenizer))(batch)


def test_the_held_out_loss_is_a_mean_over_targets_not_over_batches(tokenizer):
    model = small_model(tokenizer, attention_dropout=0.5).train()
    one = torch.zeros(2, 16, dtype=torch.bool)
    one[0, 3] = True
    batches = [
        random_batch(tokenizer.vocab_size, 2, 16, seed=1),
        random_batch(tokenizer.vocab_size, 2, 16, seed=2, supervised=one),
    ]
    loss, targets = loss_of(model).mean(batches)
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = sum(float(plain_loss(model, batch)) for batch in batches) / 33
    assert (loss, targets) == (pytest.approx(expected, rel=1e-5), 33)


def test_a_held_out_set_without_targets_has_no_loss(tokenizer):
    loss, targets = loss_of(small_model(tokenizer)).mean([])
    assert targets == 0
    assert loss != loss
