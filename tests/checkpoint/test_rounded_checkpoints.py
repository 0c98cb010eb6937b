"""Checkpoints of rounded weights: what is written is read back, here and in transformers, or refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from modicum.checkpoint import load_checkpoint
from modicum.checkpoint.rounded import _pack, _unpack
from modicum.checkpoint.save import write_model
from modicum.model import native
from modicum.model.quantized import install, matrix_names
from modicum.quantize.rounding import round_matrix
from modicum.store import UserError, write_manifest

KINDS = {"int8": lambda _: 8, "int4": lambda _: 4, "mixed": lambda name: 8 if "down" in name else 4}


@pytest.fixture
def round_and_save(small, tokenizer, tmp_path):
    """A function that rounds a tiny decoder and saves it; `full` matrices are left alone."""

    def save(kind, full=(), **shape):
        model = small(**{"hidden_size": 64, **shape}).requires_grad_(False)
        matrices = {}
        for name in matrix_names(model):
            bits = 8 if name in ("model.embed_tokens", "lm_head") else KINDS[kind](name)
            if name not in full:
                matrices[name] = round_matrix(model.get_submodule(name).weight, bits)
        weights = {n: w for n, w in model.state_dict().items() if n.removesuffix(".weight") not in matrices}
        folder = tmp_path / kind
        folder.mkdir()
        write_model(folder, config=model.config, weights=weights, tokenizer=tokenizer, chat=False, rounded=matrices)
        write_manifest(folder)
        wide = small(**{"hidden_size": 64, **shape}).requires_grad_(False)
        for name, matrix in matrices.items():
            wide.get_submodule(name).weight.copy_(matrix.wide())
            install(model, name, matrix)
        return folder, model, wide

    return save


SHAPES = [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_folder_with_the_answers_of_the_rounded_weights(round_and_save, tokenizer, kind, shape):
    folder, _, wide = round_and_save(kind, full=("model.layers.1.self_attn.k_proj",), **shape)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, tokenizer.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(ids).logits - wide(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_is_the_rounded_one_bit_for_bit(round_and_save, tokenizer, kind, shape):
    folder, model, wide = round_and_save(kind, **shape)
    loaded = load_checkpoint(folder)
    ids = torch.randint(0, tokenizer.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    found = loaded.model()(ids)
    assert torch.equal(found, model(ids))
    # activations are rounded to 8 bits too, where the kernel is
    assert (found - wide(ids)).abs().max() < (0.05 if native.kernel_fault() is None else 1e-4) * wide(ids).abs().max()
    assert not any(p.requires_grad for p in loaded.model().parameters())


def test_widened_it_has_full_matrices_of_the_same_numbers(round_and_save, tokenizer):
    folder, _, wide = round_and_save("mixed")
    ids = torch.randint(0, tokenizer.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_checkpoint(folder).model(widened=True)(ids), wide(ids))


def test_it_cannot_be_trained_on_or_exported(round_and_save):
    folder, _, _ = round_and_save("mixed")
    loaded = load_checkpoint(folder)
    with pytest.raises(UserError, match="rounded to 4 and 8 bits"):
        _ = loaded.weights
    assert loaded.training is None


def test_bfloat16_is_the_dtype_of_what_is_not_rounded(round_and_save):
    folder, _, _ = round_and_save("int8")
    model = load_checkpoint(folder).model(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16


def test_numbers_of_four_bits_stand_as_the_public_layout_has_them():
    # compressed-tensors: eight numbers in an int32, the first in its lowest bits, each plus eight
    values = torch.tensor([[-8, -7, 0, 1, 7, 2, 3, -1, 5]], dtype=torch.int8)
    words = _pack(values)
    assert words.dtype == torch.int32
    wanted = [sum((v + 8) << (4 * i) for i, v in enumerate(part)) for part in ([-8, -7, 0, 1, 7, 2, 3, -1], [5])]
    found = [word & 0xFFFFFFFF for word in words[0].tolist()]
    assert found[0] == wanted[0]
    assert found[1] & 15 == wanted[1]
    assert torch.equal(_unpack(words, 9), values)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q: q.update(quant_method="gptq"), "compressed-tensors"),
        (lambda q: q.update(config_groups=[]), "compressed-tensors"),
        (lambda q: q["config_groups"]["four_bits"]["weights"].update(group_size=64), "four_bits"),
        (lambda q: q["config_groups"].update(two_bits={}), "two_bits"),
        (lambda q: q["config_groups"]["four_bits"]["targets"].append("model.norm"), "model.norm"),
        (lambda q: q["config_groups"]["four_bits"]["targets"].append("model.embed_tokens"), "4 bits"),
        (lambda q: q["config_groups"]["four_bits"]["targets"].pop(), "missing"),
        (lambda q: q["config_groups"]["four_bits"].update(targets=7), "four_bits"),
    ],
)
def test_a_layout_that_is_not_ours_is_refused_by_name(round_and_save, change, named):
    folder, _, _ = round_and_save("mixed")
    edit(folder, change)
    with pytest.raises(UserError, match=named):
        load_checkpoint(folder, verify=False).model()


def test_one_changed_bit_of_a_scale_is_seen(round_and_save):
    folder, _, _ = round_and_save("int8")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(folder)
