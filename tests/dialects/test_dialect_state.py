"""State dicts in each dialect's own names: in and out bit for bit, or refused with every name."""

import pytest
import torch
from dialect_models import DIALECTS, block, lively, some_ids, whole

from modicum.dialects import core, cyberslm
from modicum.model.attention import Attention
from modicum.model.mlp import FeedForward
from modicum.store import UserError

NAMES = {
    "cyberslm": (
        "embedding.weight",
        "attn_norm attn.q_proj attn.k_proj attn.v_proj attn.o_proj ffn_norm ffn.gate_proj ffn.val_proj ffn.out_proj",
        "final_norm.weight",
    ),
    "slm": (
        "embed_tokens.weight",
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj",
        "norm.weight",
    ),
    "core": (
        "embedding.weight",
        "attn_norm attn.q_proj attn.k_proj attn.v_proj attn.out_proj ffn_norm mlp.gate_proj mlp.up_proj mlp.down_proj",
        "norm.weight",
    ),
}
both = pytest.mark.parametrize("dialect", DIALECTS)


@both
@pytest.mark.parametrize("bias", [False, True])
def test_the_names_are_the_dialects_own(dialect, bias):
    first, parts, last = NAMES[dialect]
    wanted = {first, last, *(["lm_head.weight"] if dialect == "core" else [])}
    for layer in range(2):
        wanted |= {f"layers.{layer}.{part}.weight" for part in parts.split()}
        if bias:
            wanted |= {f"layers.{layer}.{part}.bias" for part in parts.split() if "norm" not in part}
    assert set(whole(dialect, bias=bias).state_dict()) == wanted


@both
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_in_and_comes_out_bit_for_bit(dialect, assign):
    for made in (whole, block):
        state = lively(made(dialect, bias=True), 5).state_dict()
        foreign = {name: weight.clone() for name, weight in state.items()}
        other = lively(made(dialect, bias=True), 6)
        other.load_state_dict(foreign, assign=assign)
        back = other.state_dict()
        assert list(back) == list(state)
        assert all(torch.equal(back[name].view(torch.int32), foreign[name].view(torch.int32)) for name in foreign)


@both
@pytest.mark.parametrize("made", [whole, block])
def test_missing_added_and_wrong_shaped_weights_are_refused_together_and_nothing_is_loaded(dialect, made):
    model = lively(made(dialect))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = [name for name in before if "_proj" in name]
    state = {name: weight + 1 for name, weight in before.items() if name not in names[:2]}
    state |= {names[2]: torch.zeros(3, 3), "attn.qkv.weight": torch.zeros(1), "model.layers.0.mlp.x": torch.zeros(1)}
    with pytest.raises(UserError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    lines = [f"{name}: missing" for name in names[:2]]
    lines += ["attn.qkv.weight: not part of this model", "model.layers.0.mlp.x: not part of this model"]
    for line in [*lines, f"{names[2]}: has shape [3, 3], expected {list(before[names[2]].shape)}"]:
        assert line in text
    assert len(text.splitlines()) == 6
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@both
@pytest.mark.parametrize("kind", [Attention, FeedForward])
def test_parts_of_a_block_alone_are_as_strict(dialect, kind):
    [part] = [part for part in lively(block(dialect)).children() if isinstance(part, kind)]
    state = {name: weight.clone() for name, weight in part.state_dict().items()}
    name = next(iter(state))
    with pytest.raises(
        UserError, match=rf"(?s)nothing was loaded:.*{name}: missing.*qkv.weight: not part of this model"
    ):
        part.load_state_dict({"qkv.weight": torch.zeros(1), **{n: w + 1 for n, w in state.items() if n != name}})
    assert all(torch.equal(weight, state[key]) for key, weight in part.state_dict().items())
    part.load_state_dict(state)


@both
def test_the_state_of_another_dialect_is_refused_with_all_names_of_both(dialect):
    model = whole(dialect)
    for other in set(DIALECTS) - {dialect}:
        state = whole(other).state_dict()
        with pytest.raises(UserError) as caught:
            model.load_state_dict(state)
        assert not [name for name in set(state) ^ set(model.state_dict()) if f"{name}: " not in str(caught.value)]


def test_a_tied_head_is_taken_where_it_is_the_embedding_and_refused_where_not():
    model = lively(whole("cyberslm"))
    state = dict(model.state_dict())
    assert "lm_head.weight" not in state
    model.load_state_dict({**state, "lm_head.weight": state["embedding.weight"].clone()})
    with pytest.raises(UserError, match=r"lm_head.weight: not part of this model, whose head is embedding.weight"):
        model.load_state_dict({**state, "lm_head.weight": state["embedding.weight"] + 1})


def test_an_untied_head_is_a_weight_of_its_own_and_a_tied_core_head_is_not():
    untied = cyberslm.CyberSLM(cyberslm.CyberSLMConfig(vocab_size=61, hidden_dim=8, num_heads=2, tie_weights=False))
    assert "lm_head.weight" in untied.state_dict()
    config = core.ModelConfig(n_embd=8, n_head=2, n_layer=1, vocab_size=61, tie_weights=True)
    tied = lively(core.LanguageModel(config))
    assert "lm_head.weight" not in tied.state_dict()
    hidden = torch.randn(1, 1, 8)
    torch.testing.assert_close(tied.head(hidden), hidden @ tied.embedding.weight.T)


@both
def test_without_strict_a_part_may_be_loaded(dialect):
    model = lively(whole(dialect))
    name = next(iter(model.state_dict()))
    result = model.load_state_dict({name: torch.zeros_like(model.state_dict()[name])}, strict=False)
    assert name not in result.missing_keys
    assert model.state_dict()[name].eq(0).all()


@both
def test_a_model_built_without_memory_takes_its_weights_as_they_are(dialect):
    source, ids = lively(whole(dialect)), some_ids(1, 7)
    with torch.device("meta"):
        model = whole(dialect)
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model.eval()(ids), source(ids))
