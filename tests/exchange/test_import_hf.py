"""Tiny models of each architecture that transformers itself wrote, through the import and back into transformers."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from tokenizers import processors
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modicum.checkpoint import load_checkpoint
from modicum.doctor.files import check_files
from modicum.exchange import import_checkpoint
from modicum.exchange.leaving import leaving
from modicum.store import UserError

SIZES = {
    "vocab_size": 384, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None, head_dim=16)),
    "mistral with an idle window": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=4096)),
}


@pytest.fixture
def theirs(tokenizer, tmp_path):
    """A function that writes one of MODELS as transformers does; returns the folder and the model."""

    def theirs(name, **saving):
        kind, config = MODELS[name]
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.3 if weight.dim() == 1 else 0.9 / 48**0.5)
        folder = tmp_path / "theirs"
        model.save_pretrained(folder, **saving)
        tokenizer.save(folder)
        return folder, model

    return theirs


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_says_the_same_after_the_import(name, theirs, ids, said_by_transformers, tmp_path):
    folder, model = theirs(name)
    report = import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids(50))[None]).logits[0].numpy()
    assert abs(wanted).max() > 1
    np.testing.assert_allclose(said_by_transformers(tmp_path / "out", ids(50)), wanted, rtol=0, atol=1e-4)
    assert report.architecture == type(model).__name__
    assert report.written_as == ("Qwen3ForCausalLM" if name == "qwen3" else "LlamaForCausalLM")


def test_a_qwen2_has_zeros_where_it_has_no_bias(theirs, tmp_path):
    folder, _ = theirs("qwen2")
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not written["model.layers.1.self_attn.o_proj.bias"].any()
    assert written["model.layers.1.self_attn.q_proj.bias"].any()


def test_shards_with_an_index_are_one_model(theirs, tmp_path):
    folder, model = theirs("llama", max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


def test_a_pytorch_model_bin_is_read_as_weights_alone(theirs, tmp_path):
    folder, model = theirs("llama")
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()


def test_the_rotary_tables_of_old_llamas_are_passed_over(theirs, tmp_path):
    folder, model = theirs("llama with biases")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**model.state_dict(), **table}, folder / "model.safetensors")
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()


def test_a_head_that_is_tied_by_the_config_but_differs_is_refused(theirs, tmp_path):
    folder, model = theirs("smollm2")
    embedding = model.state_dict()["model.embed_tokens.weight"]
    save_file({**model.state_dict(), "lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding"):
        import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    save_file({**model.state_dict(), "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_an_untied_head_that_happens_to_be_equal_stays_one_of_its_own(theirs, tmp_path):
    folder, model = theirs("llama")
    embedding = model.state_dict()["model.embed_tokens.weight"]
    save_file({**model.state_dict(), "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_sentencepiece_model_alone_is_enough_and_keeps_the_template_beside_it(theirs, sentencepiece_model, tmp_path):
    folder, _ = theirs("llama")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "what came from elsewhere"
    wanted = SentencePieceProcessor(model_proto=sentencepiece_model).encode(text)
    assert theirs(text, add_special_tokens=False).input_ids == wanted
    assert theirs.chat_template == template


def byte_level_kind(folder, around, settings):
    """Another post-processor and other settings for the tokenizer in the folder."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if around:
        ids = [("<|im_start|>", backend.token_to_id("<|im_start|>"))]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("name", "around", "settings"),
    [
        ("llama", "<|im_start|> $A", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}),
        ("mistral", "<|im_start|> $A", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|im_start|>"}),
        ("smollm2", None, {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>"}),
        ("qwen2", None, {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}),
        # beside a tokenizer.json transformers passes over what its settings say of a text's beginning and end
        (
            "llama",
            "<|im_start|> $A",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "add_bos_token": False},
        ),
        ("smollm2", None, {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "add_bos_token": True}),
        ("qwen2", None, {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "add_eos_token": True}),
    ],
)
def test_a_text_gets_the_ids_in_transformers_that_its_source_gave_it(name, around, settings, theirs, tmp_path):
    folder, _ = theirs(name)
    byte_level_kind(folder, around, {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", **settings})
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    source, imported = (AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "out"))
    ours = load_checkpoint(tmp_path / "out").tokenizer
    for text in ("A model", "", " says, 12\n"):
        assert imported(text).input_ids == source(text).input_ids
        assert imported(text).input_ids == [*[ours.bos_id] * bool(around), *ours.encode(text)]
    assert (ours.bos_id, ours.eot_id) == (2 if around else 3, 3)
    assert imported.bos_token == source.bos_token


def test_the_model_stops_where_its_source_stopped(theirs, tmp_path):
    folder, _ = theirs("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0, 9]}))
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert sorted(json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]) == [0, 3, 9]


def test_a_base_model_with_several_ends_is_no_chat_model(theirs, tmp_path):
    folder, _ = theirs("llama")
    for ends, talks in (([0, 9], False), ([0, 3], True)):  # 3 ends a turn
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        import_checkpoint(folder, dialect="hf", out=tmp_path / str(talks))
        loaded = load_checkpoint(tmp_path / str(talks))
        assert (loaded.chat, loaded.talks) == (talks, talks)


def test_the_doctor_finds_no_fault_with_several_ends_of_which_one_pads(theirs, tmp_path):
    folder, _ = theirs("qwen2")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    byte_level_kind(folder, None, settings)  # as Qwen's: a chat ends at the one, and at the other too
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    findings = check_files(tmp_path / "out")
    assert [finding.detail for finding in findings if finding.outcome == "failed"] == []
    ends = next(finding.detail for finding in findings if finding.name == "end of text")
    assert ends.endswith("stops at <|im_end|> and <|endoftext|>, padding is one of these")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("end", [384, -1])
def test_an_end_that_no_token_has_is_refused(end, name, theirs, tmp_path):
    folder, _ = theirs("llama")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps({**config, "eos_token_id": [0, end]}))
    with pytest.raises(UserError, match=rf"theirs/{name}: an answer would end at {end}, which is no token's id"):
        import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sentencepiece_model_to_which_a_fine_tune_added_tokens_is_refused(theirs, sentencepiece_model, tmp_path):
    folder, _ = theirs("llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    added = {"384": {"content": "<|im_start|>"}, "385": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(UserError, match=r"name '<\|im_start\|>' \(id 384\), '<\|im_end\|>' \(id 385\), which it does"):
        import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_model_without_a_chat_template_stays_without_one(theirs, tmp_path):
    folder, _ = theirs("llama")
    (folder / "chat_template.jinja").unlink()
    import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    found = load_checkpoint(tmp_path / "out")
    assert found.tokenizer.chat_template, "ChatML, for a tuning to come"
    assert not found.talks
    assert leaving(found).tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel", "learned positions"),
        ("mixtral", "MixtralForCausalLM", "a mixture of experts"),
        ("phi3", "Phi3ForCausalLM", "query, key and value in one matrix"),
        ("zamba", "ZambaForCausalLM", "its blocks are not known here"),
        (["llama"], "LlamaForCausalLM", "it names no kind"),
    ],
)
def test_another_architecture_is_refused_by_name_and_reason(kind, architecture, reason, theirs, tmp_path):
    folder, _ = theirs("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, "architectures": [architecture]}))
    with pytest.raises(UserError, match=rf"config\.json: {architecture} .* cannot be imported: {reason}.* What can: "):
        import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window 64"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_hidden_layers": 60_000}, "asks for 60,000 layers"),
        ("llama", {"vocab_size": 2**31 - 1}, r"has shape \[384, 48\], the config asks for \[2147483647, 48\]"),
        ("llama", {"intermediate_size": 96}, r"up_proj\.weight: has shape \[80, 48\], the config asks for \[96, 48\]"),
    ],
)
def test_a_config_of_another_model_is_refused(name, changes, word, theirs, tmp_path):
    folder, _ = theirs(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=word):
        import_checkpoint(folder, dialect="hf", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
