"""Training in each dialect: users' own scripts, deep stacks, dropout."""

from itertools import pairwise

import pytest
import torch
from dialect_models import DIALECTS, Called, block, lively, some_hidden, some_ids, whole
from torch import nn
from torch.nn.functional import cross_entropy

# What a user of each system has: a model of their own around the blocks, written against that system alone.
SCRIPTS = {
    "cyberslm": """
from modicum.dialects.cyberslm import CyberSLMConfig, DecoderBlock, RMSNorm

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = CyberSLMConfig(vocab_size=32, hidden_dim=32, num_layers=2, num_heads=2, head_dim=16, ffn_hidden_dim=64)
        config.validate()
        self.embedding = nn.Embedding(32, 32)
        self.layers = nn.ModuleList([DecoderBlock(config, i, None) for i in range(config.num_layers)])
        self.final_norm = RMSNorm(32, config.norm_eps)
    def forward(self, ids, attention_mask=None):
        x = self.embedding(ids)
        for layer in self.layers:
            x, _, _ = layer(x, attention_mask=attention_mask)
        return self.final_norm(x) @ self.embedding.weight.T
""",
    "slm": """
from modicum.dialects.slm import DecoderBlock, RMSNorm, SLMConfig

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = SLMConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
        self.embed_tokens = nn.Embedding(32, 32)
        self.layers = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(32, 32, bias=False)
    def forward(self, ids):
        hidden_states = self.embed_tokens(ids)
        position_ids = torch.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape[0], -1)
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, position_ids)
        return self.lm_head(self.norm(hidden_states))
""",
    "core": """
from modicum.dialects.core import ModelConfig, RMSNorm, TransformerBlock

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = ModelConfig(n_embd=32, n_head=2, n_layer=2, vocab_size=32, block_size=64, dropout=0.0, bias=True,
                             rope_theta=10000.0, norm_eps=1e-5, ffn_dim_multiplier=None, multiple_of=16)
        self.wte = nn.Embedding(32, 32)
        self.blocks = nn.Sequential(*[TransformerBlock(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(32, 32)
    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.wte(ids))))
""",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_users_own_training_script_learns(dialect):
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn}
    exec(SCRIPTS[dialect], names)
    model = names["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # a token again after four others: learned by attention only
    parts = torch.randint(0, 32, (16, 5), generator=torch.Generator().manual_seed(0))
    ids, losses = parts.repeat(1, 4), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 3
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_whole_model_learns(dialect):
    torch.manual_seed(0)
    model, ids = whole(dialect), some_ids(4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(4.1, abs=0.2)  # ln 61
    assert all(later < earlier for earlier, later in pairwise(losses))


@pytest.mark.parametrize("layers", [12, 48])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_gradients_reach_the_first_layer_at_the_last_ones_magnitude(dialect, layers):
    torch.manual_seed(0)
    model, ids = whole(dialect, layers=layers), some_ids(2, 32)
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    first, last = (
        torch.cat([weight.grad.flatten() for weight in layer.parameters()]).norm()
        for layer in (model.layers[0], model.layers[-1])
    )
    assert 0.1 < float(first / last) < 10


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dropout_acts_in_training_only(dialect):
    plain, dropping = lively(block(dialect)), lively(block(dialect, dropout=0.5))
    x = some_hidden(2, 30)
    assert torch.equal(Called(dropping)(x), Called(plain)(x))
    dropping.train()
    torch.manual_seed(0)
    first = Called(dropping)(x)
    assert not torch.allclose(first, Called(dropping)(x))
    torch.manual_seed(0)
    assert torch.equal(first, Called(dropping)(x))


@pytest.mark.parametrize("dialect", ["cyberslm", "core"])
def test_dropout_falls_on_weights_and_on_both_outputs(dialect):
    """With all outputs dropped but one in a million, the stream stays what it was; half of the weights changes it."""
    x = some_hidden(1, 8)
    made = lively(block(dialect, dropout=0.999999)).train()
    torch.manual_seed(0)
    assert torch.equal(Called(made)(x), x)
    made.attn.residual_dropout = made.attn.dropout = 0.0
    made.eval()
    attended = Called(made)(x)
    made.train()
    assert not torch.equal(Called(made)(x), attended)  # the feed-forward's output is still dropped
    made.attn.dropout = 0.5
    made.ffn_norm.weight.data.zero_()
    assert not torch.equal(Called(made)(x), Called(made)(x))  # attention's weights


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_block_compiles_to_the_same_numbers(dialect):
    made, x = lively(block(dialect)), some_hidden(2, 9)
    compiled = torch.compile(Called(made), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), Called(made)(x))
