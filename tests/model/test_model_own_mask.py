import numpy as np
import pytest
import torch

from modicum.model import ModelConfig
from modicum.model.attention import Attention
from modicum.model.init import init_weights
from modicum.model.mask import Visibility, split_mask
from modicum.model.plan import make_plan
from modicum.model.rotary import RotaryEmbedding

CONFIG = ModelConfig(
    vocab_size=8,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=8,
)
LOWEST = torch.finfo(torch.float32).min
WAYS = pytest.mark.parametrize("way", ["sdpa", "weights"])


def attention(dtype: torch.dtype = torch.float32) -> Attention:
    part = Attention(CONFIG, 0)
    init_weights(part, std=0.4, layers=1, generator=torch.Generator().manual_seed(0))
    return part.to(dtype)


def attended(part: Attention, x: torch.Tensor, mask: torch.Tensor, way: str) -> torch.Tensor:
    batch, length = x.shape[:2]
    own, added = split_mask(mask, batch=batch, heads=4, length=length, past=0)
    visibility = Visibility(0, length, own=own, added=added)
    positions = torch.arange(length)[None]
    plan = make_plan(RotaryEmbedding(CONFIG), x, visibility, positions=positions, implementation=way)
    return part(x, plan)[0]


def inputs(length: int = 7, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(1))


def by_definition(part: Attention, x: torch.Tensor, mask: np.ndarray) -> np.ndarray:
    """float64, one query at a time; mask (B, 4, T, T) is added to the scores, -inf hides."""
    weights = {name: value.detach().double().numpy() for name, value in part.named_parameters()}
    x = x.double().numpy()
    batch, length = x.shape[:2]
    spin = np.exp(1j * np.arange(length)[:, None] * 10_000.0 ** (-2 * np.arange(2) / 4))
    out = np.zeros((batch, length, 16))
    for row in range(batch):
        q, k, v = (x[row] @ weights[f"{name}_proj.weight"].T for name in "qkv")
        for head in range(4):
            mine, theirs = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
            turned = [(part[:, :2] + 1j * part[:, 2:]) * spin for part in (q[:, mine], k[:, theirs])]
            scores = (turned[0] @ turned[1].conj().T).real / 2 + mask[row, head]
            for t in range(length):
                seen = np.flatnonzero(np.isfinite(scores[t, : t + 1]))
                if len(seen):
                    shares = np.exp(scores[t, seen] - scores[t, seen].max())
                    out[row, t, mine] = shares / shares.sum() @ v[seen, theirs]
    return out @ weights["o_proj.weight"].T


def agrees(part: Attention, x: torch.Tensor, mask: torch.Tensor, way: str) -> None:
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    added = added.masked_fill(added < -30_000, -torch.inf).expand(2, 4, 7, 7)
    ours = attended(part, x, mask, way).detach().double().numpy()
    assert abs(ours - by_definition(part, x, added.double().numpy())).max() < 1e-5


@WAYS
@pytest.mark.parametrize("shape", [(2, 4, 7, 7), (2, 1, 1, 7), (1, 4, 7, 1), (7, 7), (1, 1, 1, 1), (7,)])
def test_a_bool_mask_of_any_shape_composes_with_causality(way, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    agrees(attention(), inputs(), mask, way)


@WAYS
@pytest.mark.parametrize("shape", [(2, 4, 7, 7), (2, 1, 1, 7), (4, 1, 7), (7, 7)])
def test_soft_values_are_added_to_the_scores(way, shape):
    mask = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    agrees(attention(), inputs(), mask, way)


@WAYS
@pytest.mark.parametrize("lowest", [-torch.inf, LOWEST, 0.6 * LOWEST, -1e9, torch.finfo(torch.float16).min])
def test_the_lowest_numbers_hide_also_where_a_whole_row_has_no_other(way, lowest):
    hidden = torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(4)) > 0.6
    hidden[:, 1, 2:5] = True
    soft = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
    agrees(attention(), inputs(), soft.masked_fill(hidden, lowest), way)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lowest", [None, -torch.inf, -1e9])
def test_a_row_that_sees_nothing_is_zero_and_never_nan_forward_or_backward(way, dtype, lowest):
    seen = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    seen[1, :, 3] = False
    mask = seen if lowest is None else torch.zeros(seen.shape).masked_fill(~seen, lowest)
    part, x = attention(dtype), inputs().to(dtype).requires_grad_()
    out = attended(part, x, mask, way)
    assert out[1, 3].eq(0).all()
    out.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in (x, *part.parameters()))
    assert out.dtype == dtype


@WAYS
def test_a_whole_row_of_a_low_number_is_hidden_under_autocast_too(way):
    mask = torch.zeros(2, 1, 7, 7)
    mask[1, :, 3] = -1e9  # -inf once it is float16
    with torch.autocast("cpu", dtype=torch.float16):
        out = attended(attention(), inputs(), mask, way)
    assert torch.isfinite(out).all()


@WAYS
def test_a_learned_bias_gets_its_gradient(way):
    part, x = attention(torch.float64), inputs(4, 1).double()
    bias = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()
    attended(part, x, bias, way).square().sum().backward()
    step = 1e-4
    for at in ((0, 1, 2, 1), (0, 3, 3, 0)):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                moved = bias.clone()
                moved[at] += sign * step
                losses.append(attended(part, x, moved, way).square().sum())
        assert float(bias.grad[at]) == pytest.approx(float(losses[0] - losses[1]) / (2 * step), rel=1e-4)
    assert bias.grad[0, 0, 0, 3] == 0  # a later key


def test_what_does_not_broadcast_is_refused_with_the_shape_that_would():
    sizes = {"batch": 3, "heads": 4, "length": 7, "past": 2}
    with pytest.raises(ValueError, match=r"does not broadcast to .* \(3, 4, 7, 9\); .*mask\[:, None, None, :\]"):
        split_mask(torch.ones(3, 9, dtype=torch.bool), **sizes)
    with pytest.raises(ValueError, match="does not broadcast"):
        split_mask(torch.zeros(1, 3, 4, 7, 9), **sizes)
    with pytest.raises(ValueError, match=r"torch.int64; mask.bool\(\) if 1 keeps"):
        split_mask(torch.ones(3, 1, 1, 9, dtype=torch.long), **sizes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.0, torch.nan, -torch.inf, 0.0], "holds NaN or \\+inf; -inf hides"),
        ([0.0, torch.inf, 0.0, 0.0], "holds NaN or \\+inf; -inf hides"),
        ([1.0, 1.0, 0.0, 0.0], r"only 0 and 1, but floats are added to the scores; mask.bool\(\) if 1 keeps"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_that_cannot_be_meant_as_something_to_add_are_refused(values, words, dtype):
    sizes = {"batch": 1, "heads": 4, "length": 4, "past": 0}
    with pytest.raises(ValueError, match=words):
        split_mask(torch.tensor(values, dtype=dtype), **sizes)


def test_floats_of_zero_alone_or_of_more_than_zero_and_one_are_added():
    sizes = {"batch": 1, "heads": 4, "length": 4, "past": 0}
    for values in ([0.0] * 4, [1.0] * 4, [0.0, 1.0, 0.5, 0.0], [0.0, 1.0, -torch.inf, 0.0]):
        own, added = split_mask(torch.tensor(values), **sizes)
        assert own.flatten()[:4].tolist() == [value > -torch.inf for value in values]
        assert added.flatten()[:4].tolist() == [max(value, 0.0) for value in values]
    split_mask(torch.zeros(2, 1, 0, 0), batch=2, heads=4, length=0, past=0)  # nothing to look at


def test_a_mask_of_ones_changes_nothing_against_no_mask():
    part, x = attention(), inputs()
    plan = make_plan(RotaryEmbedding(CONFIG), x, Visibility(0, 7))
    whole = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(attended(part, x, whole, "sdpa"), part(x, plan)[0], rtol=0, atol=1e-6)
