import math
from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from modicum.model import Decoder, KVCache, ModelConfig
from modicum.recipe import ModelSettings
from modicum.store import UserError


def test_the_loss_of_an_untrained_model_is_the_log_of_its_vocabulary():
    settings = ModelSettings(preset="nano")
    model = Decoder(ModelConfig.from_settings(settings, settings.vocab_size))
    ids = torch.randint(0, 1024, (4, 129), generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(1024), abs=0.1)


def test_residual_projections_start_smaller_by_the_depth():
    config = ModelConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=512,
        mlp_bias=True,
    )
    for name, weight in Decoder(config).named_parameters():
        if weight.dim() == 1:
            assert weight.eq(0.0 if name.endswith("bias") else 1.0).all(), name
        else:
            expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.03), name


def test_the_same_seed_gives_the_same_weights(tiny):
    one, two = Decoder(tiny()), Decoder(tiny())
    state = torch.get_rng_state()
    two.init_weights(5)
    assert not torch.equal(one.model.layers[0].mlp.up_proj.weight, two.model.layers[0].mlp.up_proj.weight)
    one.init_weights(torch.Generator().manual_seed(5))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers were used


def test_gradients_reach_the_first_of_48_layers(tiny, some_ids):
    model, ids = Decoder(tiny(num_hidden_layers=48)), some_ids(2, 32)
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    norms = [
        torch.cat([weight.grad.flatten() for weight in layer.parameters()]).norm()
        for layer in (model.model.layers[0], model.model.layers[-1])
    ]
    assert 0.01 < float(norms[0] / norms[1]) < 100


def test_bf16_stays_close_to_fp32(tiny, lively, some_ids):
    model, ids = lively(tiny(qk_norm=True)), some_ids(2, 100)
    with torch.no_grad():
        exact = model(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = model(ids).float()
        low = model.bfloat16()(ids).float()
    for rounded in (cast, low):
        assert (rounded - exact).abs().mean() < 0.03 * exact.abs().mean() + 0.01
        assert (rounded.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_fp16_forward_and_backward_stay_finite(tiny, some_ids):
    model = Decoder(tiny()).half()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(15000)  # residual stream near 300, whose squares overflow
    hidden = model.hidden(some_ids(1, 20))
    hidden.float().square().mean().backward()
    assert torch.isfinite(hidden).all()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


def test_packed_documents_equal_the_same_documents_apart(tiny, lively, some_ids):
    lengths = (7, 150, 1, 42)
    ids = some_ids(1, sum(lengths))
    numbers = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(lengths))[None]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    model = lively(tiny(qk_norm=True))
    with torch.no_grad():
        apart = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
        for impl in ("sdpa", "blocks"):
            model.attention_impl, model.attention_block = impl, 32
            for positions in (places, None):
                packed = model(ids, documents=numbers, positions=positions)
                torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)


def test_padding_never_changes_the_kept_rows(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 30)
    documents = torch.zeros(2, 30, dtype=torch.int32)
    documents[:, 22:] = -1
    other = ids.clone()
    other[:, 22:] = 3
    with torch.no_grad():
        assert torch.equal(model(ids, documents=documents)[:, :22], model(other, documents=documents)[:, :22])
        torch.testing.assert_close(model(ids, documents=documents)[:, :22], model(ids[:, :22]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["sdpa", "blocks"])
def test_no_token_sees_a_later_one(tiny, lively, some_ids, impl):
    model, ids = lively(tiny()), some_ids(1, 50)
    model.attention_impl, model.attention_block = impl, 16
    table = model.embed(ids).detach().requires_grad_()
    for at in (0, 15, 16, 49):
        (grad,) = torch.autograd.grad(model.hidden_from_embeddings(table)[0, at].sum(), table)
        assert grad[0, at + 1 :].eq(0).all()
        assert grad[0, : at + 1].ne(0).any(-1).all()


def test_blocks_train_as_the_kernel_does(tiny, lively, some_ids):
    model, ids = lively(tiny()).train(), some_ids(2, 200)
    outcomes = []
    for impl in ("blocks", "sdpa"):
        model.attention_impl = impl
        model.zero_grad()
        model(ids).square().mean().backward()
        outcomes.append([weight.grad.clone() for weight in model.parameters()])
    for blocks, sdpa in zip(*outcomes, strict=True):
        torch.testing.assert_close(blocks, sdpa, rtol=1e-3, atol=1e-5)


def test_blocks_are_picked_where_they_pay(tiny):
    def picked(model: Decoder, tokens: int, cache: KVCache | None = None) -> str:
        return model._implementation(torch.zeros(1, tokens, 1), cache, False)

    model = Decoder(tiny())
    assert picked(model, 200) == "sdpa"
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert picked(model, 200) == "blocks"
    assert picked(model, 128) == "sdpa"
    assert picked(model, 200, KVCache(model.config, 1, 200)) == "sdpa"
    with torch.no_grad():
        assert picked(model, 200) == "sdpa"
    model.attention_impl = "sdpa"
    assert picked(model, 200) == "sdpa"
    dropping = Decoder(tiny(attention_dropout=0.1)).train()
    dropping.attention_impl = "blocks"
    assert picked(dropping, 200) == "sdpa"


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"attention_dropout": 0.3}], ids=str
)
def test_checkpointed_activations_change_no_gradient(tiny, lively, some_ids, changes):
    model, ids = lively(tiny(**changes)).train(), some_ids(2, 140)
    grads = []
    for what in ("none", "selective", "full"):
        model.activation_checkpointing = what
        model.zero_grad()
        torch.manual_seed(0)
        model(ids).square().mean().backward()
        grads.append([weight.grad.clone() for weight in model.parameters()])
    for checkpointed in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], checkpointed, strict=True))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again_is_what_was_asked_for(tiny, lively, some_ids):
    model, ids = lively(tiny(num_hidden_layers=4)), some_ids(2, 20)
    products, norms = {}, {}
    for what in ("none", "selective", "full"):
        model.activation_checkpointing = what
        loss = model(ids).square().mean()
        with Counting() as counting:
            loss.backward()
        products[what] = counting.calls[torch.ops.aten.mm.default]
        norms[what] = counting.calls[torch.ops.aten.rsqrt.default]
    assert norms == {"none": 0, "selective": 8, "full": 8}
    # nothing behind the last product of a layer is needed again, so that one is not computed
    assert products == {"none": 4 * 14 + 2, "selective": 4 * 14 + 2, "full": 4 * (14 + 6) + 2}


def test_a_word_that_is_none_for_activation_checkpointing_is_refused(tiny):
    with pytest.raises(ValueError, match="activation_checkpointing: True is none of none, selective, full"):
        Decoder(tiny()).activation_checkpointing = True


def test_attention_weights_come_on_request_and_explain_the_output(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 20)
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, :4] = False
    with torch.no_grad():
        logits, weights = model(ids, attention_mask=keep, return_attention=True)
        torch.testing.assert_close(logits, model(ids, attention_mask=keep), rtol=0, atol=1e-5)
    assert [layer.shape for layer in weights] == [(2, 6, 20, 20)] * 2
    for layer in weights:
        sums = layer.sum(-1)
        torch.testing.assert_close(sums[0], torch.ones(6, 20))
        torch.testing.assert_close(sums[1], keep[1].float().expand(6, 20))
        assert layer.triu(1).eq(0).all()


def test_dropout_acts_in_training_only(tiny, lively, some_ids):
    plain, ids = lively(tiny()), some_ids(2, 140)
    dropping = lively(tiny(attention_dropout=0.5))
    assert torch.equal(dropping(ids), plain(ids))
    dropping.train()
    torch.manual_seed(0)
    first = dropping(ids)
    assert not torch.allclose(first, dropping(ids))
    torch.manual_seed(0)
    assert torch.equal(first, dropping(ids))


def test_the_head_of_the_hidden_state_is_the_forward_pass(tiny, lively, some_ids):
    for tied in (True, False):
        model, ids = lively(tiny(tie_word_embeddings=tied)), some_ids(1, 9)
        assert torch.equal(model.head(model.hidden(ids)), model(ids))
        assert torch.equal(model.head(model.hidden_from_embeddings(model.embed(ids))), model(ids))


@pytest.mark.parametrize("bad", [96, -1, 10**9])
def test_an_id_outside_the_vocabulary_is_named(tiny, bad):
    with pytest.raises(UserError, match=f"token id {bad} is outside this model's vocabulary of 96"):
        Decoder(tiny())(torch.tensor([[1, bad, 2]]))


def test_a_sequence_beyond_the_positions_is_named(tiny):
    with pytest.raises(UserError, match="sequence of 513 tokens is longer than the model's 512 positions"):
        Decoder(tiny())(torch.zeros(1, 513, dtype=torch.int64))


def test_a_model_built_on_the_meta_device_and_filled_is_the_model(tiny, lively, some_ids):
    full, ids = lively(tiny(qk_norm=True)), some_ids(1, 9)
    with torch.device("meta"):
        model = Decoder(full.config).eval()
    model.load_state_dict(full.state_dict(), assign=True)
    assert torch.equal(model(ids), full(ids))
    assert all(weight.requires_grad for weight in model.parameters())


def test_masks_of_the_wrong_shape_are_refused(tiny, some_ids):
    model, ids = Decoder(tiny()), some_ids(2, 5)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="documents"):
        model(ids, documents=torch.zeros(1, 5, dtype=torch.int32))
