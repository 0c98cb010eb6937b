"""Logits against NumPy float64, written from each system's own names, layout and definitions."""

import numpy as np
import pytest
import torch
from dialect_models import DIALECTS, lively, some_ids, whole

NAMES = {
    # embedding, first norm, attention, its output, second norm, feed-forward: gate, up, down, last norm
    "cyberslm": "embedding attn_norm attn o_proj ffn_norm ffn gate_proj val_proj out_proj final_norm",
    "slm": "embed_tokens input_layernorm self_attn o_proj "
    "post_attention_layernorm mlp gate_proj up_proj down_proj norm",
    "core": "embedding attn_norm attn out_proj ffn_norm mlp gate_proj up_proj down_proj norm",
}
HEADS = {"cyberslm": (3, 3), "slm": (6, 2), "core": (3, 3)}
EPS = {"cyberslm": 1e-6, "slm": 1e-6, "core": 1e-5}


def reference(dialect, state, ids, positions=None, seen=None):
    """Logits of ids (B, T); positions (B, T); seen (B, T, T) beside causality."""
    weights = {name: value.double().numpy() for name, value in state.items()}
    table, norm1, attention, out, norm2, mlp, gate, up, down, last = NAMES[dialect].split()
    heads, groups = HEADS[dialect]
    batch, length = ids.shape
    positions = np.tile(np.arange(length), (batch, 1)) if positions is None else np.asarray(positions)
    seen = np.ones((batch, length, length), dtype=bool) if seen is None else np.asarray(seen)
    rows = []
    for row in range(batch):

        def linear(name, x):
            return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

        def norm(name, x):
            return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS[dialect]) * weights[f"{name}.weight"]

        x = weights[f"{table}.weight"][ids[row].numpy()]
        for layer in range(2):
            here = f"layers.{layer}"
            h = norm(f"{here}.{norm1}", x)
            q, k, v = (linear(f"{here}.{attention}.{name}_proj", h) for name in "qkv")
            width = q.shape[1] // heads
            mixed = np.zeros_like(q)
            for head in range(heads):
                group = head * groups // heads
                queries = turned(q[:, head * width : (head + 1) * width], positions[row], dialect)
                keys = turned(k[:, group * width : (group + 1) * width], positions[row], dialect)
                for t in range(length):
                    sees = np.flatnonzero(seen[row, t, : t + 1])
                    if len(sees):
                        shares = np.exp(keys[sees] @ queries[t] / np.sqrt(width))
                        values = v[sees, group * width : (group + 1) * width]
                        mixed[t, head * width : (head + 1) * width] = shares / shares.sum() @ values
            x = x + linear(f"{here}.{attention}.{out}", mixed)
            h = norm(f"{here}.{norm2}", x)
            gated = linear(f"{here}.{mlp}.{gate}", h)
            x = x + linear(f"{here}.{mlp}.{down}", gated / (1 + np.exp(-gated)) * linear(f"{here}.{mlp}.{up}", h))
        head = "lm_head.weight" if dialect == "core" else f"{table}.weight"
        rows.append(norm(last, x) @ weights[head].T)
    return np.stack(rows)


def turned(x, positions, dialect):
    """Rotary: pairs (2i, 2i + 1), and in slm (i, i + width/2), each turned by position / 10000^(2i/width)."""
    width = x.shape[1]
    out = np.empty_like(x)
    for i in range(width // 2):
        a, b = (i, i + width // 2) if dialect == "slm" else (2 * i, 2 * i + 1)
        angle = positions * 10_000.0 ** (-2 * i / width)
        out[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        out[:, b] = x[:, a] * np.sin(angle) + x[:, b] * np.cos(angle)
    return out


def agree(ours, theirs, kept=None):
    kept = np.ones(theirs.shape[:2], dtype=bool) if kept is None else np.asarray(kept)
    assert abs(ours.detach().double().numpy() - theirs)[kept].max() < 1e-4
    assert abs(theirs).max() > 1  # so that 1e-4 means something


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_agree_with_float64(dialect, bias):
    model, ids = lively(whole(dialect, bias=bias)), some_ids(2, 40)
    agree(model(ids), reference(dialect, model.state_dict(), ids))


def test_cyberslm_with_key_padding_agrees_with_float64_whatever_is_padded():
    model, ids = lively(whole("cyberslm")), some_ids(3, 20)
    keep = torch.rand(3, 20, generator=torch.Generator().manual_seed(4)) > 0.3
    keep[0, :6] = False
    theirs = reference("cyberslm", model.state_dict(), ids, seen=keep[:, None].expand(3, 20, 20))
    agree(model(ids, keep.long()), theirs)


def test_slm_with_any_positions_and_masks_agrees_with_float64():
    model, ids = lively(whole("slm", bias=True)), some_ids(2, 20)
    positions = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(5))
    seen = torch.rand(2, 20, 20, generator=torch.Generator().manual_seed(6)) > 0.3
    theirs = reference("slm", model.state_dict(), ids, positions, seen)
    agree(model(ids, positions, seen[:, None]), theirs)
    added = torch.zeros(2, 1, 20, 20).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    agree(model(ids, positions, added), theirs)
