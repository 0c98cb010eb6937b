"""From a dialect's live model to a checkpoint: what users train with `modicum.dialects` is what the import reads."""

from dataclasses import asdict

import pytest
import torch

from modicum.checkpoint import load_checkpoint
from modicum.dialects import core, cyberslm, slm
from modicum.exchange import export_checkpoint, import_checkpoint
from modicum.exchange.names import foreign_names, weight_shapes

VOCAB = 384
MODELS = {
    "cyberslm": (
        cyberslm.CyberSLM,
        cyberslm.CyberSLMConfig(VOCAB, 64, 48, num_layers=2, num_heads=4, head_dim=12, ffn_hidden_dim=64),
    ),
    "slm": (slm.SLM, slm.SLMConfig(VOCAB, 48, 64, 2, 4, num_key_value_heads=2, max_position_embeddings=64)),
    "core": (
        core.LanguageModel,
        core.ModelConfig(n_embd=48, n_head=4, n_layer=2, vocab_size=VOCAB, block_size=64, bias=True),
    ),
}
SETTINGS = {"cyberslm": cyberslm.model_config, "slm": slm.model_config, "core": core.model_config}
DIALECTS = pytest.mark.parametrize("dialect", MODELS)


def model_of(dialect):
    torch.manual_seed(0)
    make, config = MODELS[dialect]
    model = make(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)  # so that every weight shows in the logits
    return model, config


@DIALECTS
def test_the_table_of_names_is_what_the_live_model_calls_its_weights(dialect):
    model, config = model_of(dialect)
    settings = SETTINGS[dialect](config)
    shapes, state = weight_shapes(settings), model.state_dict()
    assert {theirs: shapes[ours] for theirs, ours in foreign_names(dialect, settings).items()} == {
        name: tuple(weight.shape) for name, weight in state.items()
    }


@DIALECTS
def test_an_imported_model_says_what_the_dialects_model_said(dialect, tokenizer, sentencepiece_model, tmp_path):
    model, config = model_of(dialect)
    torch.save({"model_state": model.state_dict(), "config": asdict(config)}, tmp_path / "model.pt")
    if dialect == "cyberslm":
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    else:
        tokenizer.save(tmp_path)
    import_checkpoint(tmp_path / "model.pt", dialect=dialect, out=tmp_path / "out")
    ids = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = model(ids), load_checkpoint(tmp_path / "out").model()(ids)
    assert wanted.abs().max() > 1
    assert (wanted - found).abs().max() < 1e-4


def test_a_cyberslm_model_comes_back_from_export_and_loads_into_its_class(sentencepiece_model, tmp_path):
    model, config = model_of("cyberslm")
    torch.save({"model_state": model.state_dict(), "config": asdict(config)}, tmp_path / "model.pt")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    import_checkpoint(tmp_path / "model.pt", dialect="cyberslm", out=tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", to="cyberslm", out=tmp_path / "back")
    read = torch.load(tmp_path / "back" / "model.pt", weights_only=True)
    again = cyberslm.CyberSLM(cyberslm.config_from_dict(read["config"]))
    again.load_state_dict(read["model_state"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
