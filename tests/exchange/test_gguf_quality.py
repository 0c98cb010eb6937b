import gguf_models
import numpy as np
import pytest
import torch

from modicum.checkpoint import load_checkpoint
from modicum.exchange import LIMITS, Limits
from modicum.exchange.gguf_quality import own_texts, quality


def test_the_measures_are_those_of_torch():
    draw = np.random.default_rng(0)
    full = [draw.normal(size=(length, 50)).astype(np.float32) * 3 for length in (4, 1, 9)]
    found = [logits + draw.normal(size=logits.shape).astype(np.float32) for logits in full]
    measured = quality(full, found)
    truth, other = (torch.from_numpy(np.concatenate(part)).double().log_softmax(-1) for part in (full, found))
    divergence = torch.nn.functional.kl_div(other, truth, log_target=True, reduction="none").sum(-1)
    assert measured.positions == 14
    assert measured.mean_kl == pytest.approx(float(divergence.mean()), rel=1e-9)
    assert measured.tail_kl == pytest.approx(float(divergence.quantile(0.99)), rel=1e-9)
    assert measured.agreement == pytest.approx(float((truth.argmax(-1) == other.argmax(-1)).double().mean()))
    best = truth.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.01
    assert measured.clear == int(clear.sum())
    assert measured.clear_differing == int((clear & (truth.argmax(-1) != other.argmax(-1))).sum())


def test_a_distribution_does_not_depart_from_itself_whatever_is_added_to_it():
    logits = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    measured = quality([logits], [logits + 7])
    assert measured.mean_kl == pytest.approx(0, abs=1e-12)
    assert measured.agreement == 1


@pytest.mark.parametrize(
    ("limits", "word"),
    [(Limits(1e-3, 9, 0), "mean KL"), (Limits(9, 1e-3, 0), "99th percentile"), (Limits(9, 9, 0.999), "top-1")],
)
def test_each_limit_refuses_by_its_name(limits, word):
    draw = np.random.default_rng(2)
    full = draw.normal(size=(200, 30)).astype(np.float32)
    faults = quality([full], [full + draw.normal(size=full.shape).astype(np.float32) / 5]).faults(limits)
    assert len(faults) == 1
    assert word in faults[0]
    assert quality([full], [full]).faults(limits) == []


def test_limits_grow_with_what_is_thrown_away():
    kinds = ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0"]
    assert [*LIMITS] == kinds
    assert [LIMITS[kind].mean_kl for kind in kinds] == sorted(LIMITS[kind].mean_kl for kind in kinds)
    assert (LIMITS["q8_0"].mean_kl, LIMITS["q8_0"].agreement) == (0.002, 0.985)


def test_the_models_own_texts_are_always_the_same_and_begin_as_documents_do(tokenizer, tmp_path):
    checkpoint = load_checkpoint(gguf_models.save(tokenizer, tmp_path))
    texts = own_texts(checkpoint)
    assert [len(text) for text in texts] == [40] * 50
    assert {int(text[0]) for text in texts} == {tokenizer.bos_id}
    assert all(np.array_equal(a, b) for a, b in zip(texts, own_texts(checkpoint), strict=True))
    assert len({tuple(text) for text in texts}) > 40
