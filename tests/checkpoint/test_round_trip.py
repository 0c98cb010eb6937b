import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from modicum.checkpoint import load_checkpoint

SHAPES = [
    {},
    {"qk_norm": True},
    {"tie_word_embeddings": False},
    {"attention_bias": True, "mlp_bias": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


def ids(tokenizer, rows=2, length=24):
    return torch.randint(0, tokenizer.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transformers_loads_the_folder_as_it_lies_with_equal_logits(save, small, tokenizer, shape):
    model = small(**shape)
    folder = save(model=model)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = ids(tokenizer)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4


def test_transformers_reads_equal_token_ids(save, tokenizer):
    theirs = AutoTokenizer.from_pretrained(save())
    for text in ("A small model\tis saved.\r\n", "caf\u00e9 \u2603 123456", "  two  spaces "):
        assert theirs(text).input_ids == tokenizer.encode(text)
    assert len(theirs) == tokenizer.vocab_size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loaded_model_is_the_saved_one_bit_for_bit(save, small, tokenizer, shape):
    model = small(seed=3, **shape)
    loaded = load_checkpoint(save(model=model))
    assert loaded.config == model.config
    assert torch.equal(loaded.model()(ids(tokenizer)), model(ids(tokenizer)))
    assert loaded.weights.keys() == model.state_dict().keys()


def test_a_tied_head_is_stored_once(save, small):
    assert "lm_head.weight" not in load_checkpoint(save()).weights
    assert "lm_head.weight" in load_checkpoint(save(model=small(tie_word_embeddings=False), step=11)).weights


def test_the_training_state_comes_back_unchanged(save):
    training = load_checkpoint(save(step=7)).training
    assert torch.equal(training.tensors["moment"], torch.full((3,), 7.0))
    assert training.state == {"step": 7}


def test_two_models_of_one_checkpoint_share_nothing(save):
    loaded = load_checkpoint(save())
    first, second = loaded.model(), loaded.model()
    with torch.no_grad():
        first.model.norm.weight.fill_(5)
    assert second.model.norm.weight.max() == 1
    assert loaded.model().model.norm.weight.max() == 1


@pytest.mark.parametrize("chat", [False, True])
def test_a_base_model_ends_at_the_end_of_text_and_a_chat_model_also_at_the_end_of_a_turn(save, tokenizer, chat):
    folder = save(chat=chat)
    wanted = [tokenizer.end_of_turn_id, tokenizer.eot_id] if chat else [tokenizer.eot_id]
    assert load_checkpoint(folder).stop_ids == wanted
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == wanted
    assert tokenizer.pad_id not in wanted


def test_the_chat_template_travels_with_the_weights(save, tokenizer):
    assert load_checkpoint(save()).tokenizer.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_can_be_asked_for_in_another_dtype(save, tokenizer, dtype):
    model = load_checkpoint(save()).model(dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert model(ids(tokenizer)).isfinite().all()


def test_the_manifest_names_every_file(save):
    folder = save()
    named = json.loads((folder / "manifest.json").read_text())["files"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert named.keys() == files - {"manifest.json"}
    assert {"model.safetensors", "training/optimizer.safetensors", "training/state.json"} <= named.keys()


def test_no_file_of_a_checkpoint_is_a_pickle_or_an_archive(save):
    for path in save().rglob("*"):
        if path.is_file():
            assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK"), path


def test_the_names_of_a_compiled_module_are_refused(save, small):
    model = small()
    weights = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    model.state_dict = lambda: weights
    with pytest.raises(ValueError, match="compiled"):
        save(model=model)


def test_the_same_state_gives_the_same_bytes(save, tmp_path):
    first, second = save(root=tmp_path / "a"), save(root=tmp_path / "b")
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
