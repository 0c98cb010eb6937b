"""The names, signatures and sizes that scripts of the three systems rely on."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from dialect_models import DIALECTS, VOCAB, block, config, some_ids, whole

from modicum import dialects
from modicum.dialects import core, cyberslm, slm
from modicum.model import Decoder
from modicum.store import UserError

MODULES = {"cyberslm": cyberslm, "slm": slm, "core": core}


def arguments(function) -> dict:
    """Positional arguments and their defaults; keyword-only ones are additions that no script of theirs uses."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}


NONE = inspect.Parameter.empty


def test_cyberslm_has_its_exact_number_of_parameters():
    model = cyberslm.CyberSLM(cyberslm.CyberSLMConfig())
    assert sum(weight.numel() for weight in model.parameters()) == 33_531_264


def test_cyberslm_calls_are_those_of_its_scripts():
    assert arguments(cyberslm.DecoderBlock) == {"config": NONE, "layer_idx": 0, "rope": None}
    assert arguments(cyberslm.DecoderBlock.forward) == {
        "x": NONE,
        "attention_mask": None,
        "return_attn_weights": False,
        "kv_cache": None,
        "use_cache": False,
    }
    made = block("cyberslm")
    assert [name for name, _ in made.named_children()] == ["attn_norm", "attn", "ffn_norm", "ffn"]
    assert isinstance(made.attn, cyberslm.MultiHeadSelfAttention)
    assert isinstance(made.ffn, cyberslm.SwiGLUFeedForward)
    assert "layer_idx=1" in repr(made)
    x, weights, present = made(torch.randn(2, 5, 24), use_cache=True)
    assert (x.shape, weights) == ((2, 5, 24), None)
    assert [part.shape for part in present] == [(2, 3, 5, 8)] * 2
    assert made(torch.randn(2, 5, 24))[2] is None


def test_slm_calls_are_those_of_its_scripts():
    assert arguments(slm.DecoderBlock) == {"config": NONE, "layer_idx": NONE, "rope": None}
    assert arguments(slm.DecoderBlock.forward) == {
        "hidden_states": NONE,
        "position_ids": NONE,
        "attention_mask": None,
        "kv_cache": None,
        "use_cache": False,
    }
    made = block("slm")
    names = ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"]
    assert [name for name, _ in made.named_children()] == names
    assert isinstance(made.self_attn, slm.MultiHeadAttention)
    assert isinstance(made.mlp, slm.FeedForward)
    assert "layer_idx=1" in repr(made)
    x, cache = made(torch.randn(2, 5, 24), torch.arange(5)[None], use_cache=True)
    assert (x.shape, cache.length) == ((2, 5, 24), 5)
    assert made(torch.randn(2, 5, 24), torch.arange(5)[None])[1] is None


def test_core_calls_are_those_of_its_scripts():
    assert list(arguments(core.TransformerBlock))[:1] == ["config"]
    assert arguments(core.TransformerBlock.forward) == {"x": NONE, "cache": None}
    assert arguments(core.RMSNorm) == {"dim": NONE, "eps": 1e-5}
    assert arguments(core.RotaryEmbedding) == {"head_dim": NONE, "theta": 10_000.0}
    assert arguments(core.RotaryEmbedding.get_cos_sin) == {
        "seq_len": NONE,
        "device": None,
        "dtype": torch.float32,
    }
    assert core.RMSNorm(24).eps == core.ModelConfig().norm_eps
    assert all(part.dtype == torch.float32 for part in core.RotaryEmbedding(8).get_cos_sin(5))
    assert isinstance(inspect.getattr_static(core.RotaryEmbedding, "apply_rope"), staticmethod)
    made = block("core")
    assert [name for name, _ in made.named_children()] == ["attn_norm", "ffn_norm", "attn", "mlp"]
    assert isinstance(made.attn, core.CausalSelfAttention)
    assert isinstance(made.mlp, core.SwiGLUMLP)
    assert made(torch.randn(2, 5, 24)).shape == (2, 5, 24)
    assert made.attn(torch.randn(2, 5, 24)).shape == (2, 5, 24)


def test_configs_have_the_fields_and_defaults_of_their_systems():
    made = cyberslm.CyberSLMConfig()
    assert dataclasses.asdict(made) == {
        "vocab_size": 32_000,
        "max_seq_len": 4096,
        "hidden_dim": 384,
        "num_layers": 12,
        "num_heads": 6,
        "head_dim": 64,
        "ffn_hidden_dim": 1024,
        "rope_base": 10_000,
        "norm_eps": 1e-6,
        "tie_weights": True,
        "bias": False,
        "dropout": 0,
        "attn_dropout": 0,
        "pad_token_id": None,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.hidden_dim = 1
    core_names = "n_embd n_head n_layer vocab_size block_size dropout bias rope_theta norm_eps"
    for name in (*core_names.split(), "ffn_dim_multiplier", "multiple_of"):
        assert hasattr(core.ModelConfig(), name)
    for name in ["hidden_size", "rms_norm_eps", "num_key_value_heads", "intermediate_size", "num_hidden_layers"]:
        assert hasattr(slm.SLMConfig(), name)
    assert slm.SLMConfig(num_attention_heads=8).num_key_value_heads == 8


def test_validate_names_every_violated_constraint_at_once():
    cyberslm.CyberSLMConfig().validate()
    wrong = cyberslm.CyberSLMConfig(
        vocab_size=0,
        num_layers=-1,
        head_dim=63,
        rope_base=-1.0,
        norm_eps=0,
        dropout=1.0,
        bias=None,
        eos_token_id=-1,
    )
    with pytest.raises(ValueError, match="not valid") as caught:
        wrong.validate()
    for name in ["vocab_size", "num_layers", "head_dim", "rope_base", "norm_eps", "dropout", "bias", "eos_token_id"]:
        assert f"  {name} must" in str(caught.value)
    with pytest.raises(ValueError, match=r"hidden_dim 384 is not num_heads 6 \* head_dim 32"):
        cyberslm.DecoderBlock(cyberslm.CyberSLMConfig(head_dim=32))


def test_core_refuses_sizes_that_do_not_divide_and_odd_heads():
    with pytest.raises(ValueError, match="n_embd 65 is not divisible by n_head 4"):
        core.CausalSelfAttention(core.ModelConfig(n_embd=65, n_head=4))
    with pytest.raises(ValueError, match="n_embd 64 is not divisible by n_head 0"):
        core.TransformerBlock(core.ModelConfig(n_embd=64, n_head=0))
    with pytest.raises(ValueError, match="head_dim must be even"):
        core.CausalSelfAttention(core.ModelConfig(n_embd=9, n_head=3))
    with pytest.raises(ValueError, match=r"head_dim must be even .* not 7"):
        core.RotaryEmbedding(7)


@pytest.mark.parametrize(
    ("width", "multiplier", "multiple", "expected"),
    # int(8 * 100 / 3) = 266; int(1.3 * 266) = 345; Llama 2 7B's is 11008
    [(100, None, 1, 266), (100, 1.3, 1, 345), (100, 1.3, 32, 352), (4096, None, 256, 11008), (100, None, 256, 512)],
)
def test_core_width_follows_its_rule(width, multiplier, multiple, expected):
    made = core.ModelConfig(n_embd=width, n_head=2, ffn_dim_multiplier=multiplier, multiple_of=multiple)
    with torch.device("meta"):
        assert core.SwiGLUMLP(made).gate_proj.out_features == expected


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_decoder_of_model_config_is_the_same_model(dialect):
    """Same count, and same logits once weights are handed over in order; only the names differ."""
    settings = MODULES[dialect].model_config(config(dialect, bias=True))
    assert settings.rotary_layout == ("half" if dialect == "slm" else "interleaved")
    model, decoder = whole(dialect, bias=True), Decoder(settings)
    parts = {"gate": 0, "up": 1, "val": 1, "down": 2}
    theirs = {key(name, parts): weight for name, weight in model.state_dict().items()}
    ours = {key(name, parts): name for name in decoder.state_dict()}
    assert theirs.keys() == ours.keys()
    decoder.load_state_dict({name: theirs[at] for at, name in ours.items()})
    ids = some_ids(2, 9)
    torch.testing.assert_close(model.eval()(ids), decoder(ids), rtol=0, atol=1e-6)


def key(name: str, parts: dict[str, int]) -> tuple:
    """What a weight is, whatever it is called."""
    kind = name.split(".")[-1]
    layer = next((int(part) for part in name.split(".") if part.isdigit()), -1)
    if "norm" in name:
        last = layer >= 0 and ("ffn" in name or "post" in name)
        return layer, "norm", last
    if layer < 0:
        return layer, "head" if "head" in name else "table", kind
    if "ffn" in name or "mlp" in name:
        part = name.split(".")[-2].removesuffix("_proj")
        return layer, "mlp", parts.get(part, 2), kind
    return layer, "attention", name.split(".")[-2][0], kind


@pytest.mark.parametrize("dialect", DIALECTS)
def test_configs_are_read_from_plain_values_and_refused_with_every_wrong_key(dialect):
    made = config(dialect)
    values = dataclasses.asdict(made)
    read = MODULES[dialect].config_from_dict
    assert read(values) == made
    first, second = [field.name for field in dataclasses.fields(made) if "vocab" in field.name or "eps" in field.name]
    rest = {name: value for name, value in values.items() if name not in (first, second)}
    with pytest.raises(UserError) as caught:
        read({**rest, "n_heads": 3, "hidden": 4})
    for line in (f"{first}: missing", f"{second}: missing", "n_heads: unknown", "hidden: unknown"):
        assert line in str(caught.value)
    heads = {"cyberslm": "num_heads", "slm": "num_attention_heads", "core": "n_head"}[dialect]
    with pytest.raises(UserError):
        read({**values, heads: 5})
    with pytest.raises(UserError):
        read({**values, heads: "six"})
    with pytest.raises(UserError, match=f"{heads}: missing"):
        read({name: value for name, value in values.items() if name != heads})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fresh_weights_are_small_normal_numbers_and_outputs_smaller_by_the_depth(dialect):
    torch.manual_seed(0)
    model = whole(dialect, hidden=240, layers=8, bias=True)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert weight.eq(0.0 if name.endswith("bias") else 1.0).all(), name
        else:
            small = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            assert float(weight.detach().std()) == pytest.approx(0.02 / 4 if small else 0.02, rel=0.05), name
    one, two = (block(dialect, hidden=240, layers=8) for _ in range(2))
    torch.manual_seed(0)
    three = block(dialect, hidden=240, layers=8)
    torch.manual_seed(0)
    four = block(dialect, hidden=240, layers=8)
    weights = [next(p for p in made.parameters() if p.dim() == 2) for made in (one, two, three, four)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert float(weights[0].detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ids_and_lengths_beyond_the_model_are_named(dialect):
    model = whole(dialect)
    with pytest.raises(UserError, match=f"token id {VOCAB} is outside this model's vocabulary of {VOCAB}"):
        model(torch.tensor([[1, VOCAB]]))
    with pytest.raises(UserError, match="a sequence of 129 tokens is longer than the model's 128 positions"):
        model(some_ids(1, 129))


@pytest.mark.parametrize("path", sorted(Path(dialects.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_no_dialect_computes_attention_norm_or_feed_forward_itself(path):
    text = path.read_text("utf-8")
    assert not [name for name in ("softmax", "scaled_dot", "rsqrt", ".mean(", " @ ", "functional as") if name in text]
    functions = set(re.findall(r"from torch.nn.functional import (.*)", text))
    assert functions <= {"dropout", "linear"}  # linear is the tied head's
