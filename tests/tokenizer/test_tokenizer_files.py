"""What is saved is what transformers reads, and what is loaded is what was saved."""

import hashlib
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modicum.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer

CHARACTERS = st.characters(exclude_categories=["Cs"])
CONFIGS = {
    "alone": None,
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


@pytest.fixture(scope="module", params=CONFIGS)
def beside_a_model(request, tokenizer, tmp_path_factory):
    """transformers picks a tokenizer class by the model's config.json when one lies beside."""
    path = tmp_path_factory.mktemp(request.param)
    tokenizer.save(path)
    if CONFIGS[request.param]:
        (path / "config.json").write_text(json.dumps({**CONFIGS[request.param], "vocab_size": tokenizer.vocab_size}))
    return AutoTokenizer.from_pretrained(path)


def test_transformers_finds_the_same_size_and_special_ids(tokenizer, beside_a_model):
    assert len(beside_a_model) == tokenizer.vocab_size
    assert beside_a_model.pad_token_id == tokenizer.pad_id
    assert beside_a_model.eos_token_id == tokenizer.eot_id != tokenizer.pad_id
    assert beside_a_model.bos_token_id is None
    assert beside_a_model.convert_tokens_to_ids("<|im_end|>") == tokenizer.end_of_turn_id
    assert beside_a_model.padding_side == "left"


@given(
    text=st.text(CHARACTERS) | st.sampled_from([" lead", "don't  \r\n stop", "e\u0301\u00e9 1234 ...\n\n", "a . b , c"])
)
def test_transformers_gives_the_same_ids_and_the_same_text(tokenizer, beside_a_model, text):
    assume(not any(token in text for token in SPECIAL_TOKENS))  # transformers takes its name for the token
    ids = tokenizer.encode(text)
    assert beside_a_model(text)["input_ids"] == ids
    assert beside_a_model.decode(ids) == text


def test_transformers_finds_the_chat_template(tokenizer, beside_a_model):
    assert beside_a_model.chat_template == tokenizer.chat_template
    messages = [{"role": "user", "content": "Hi"}]
    rendered = beside_a_model.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_what_was_saved_loads_as_the_same_tokenizer(tokenizer, folder):
    for path in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(path).hash == tokenizer.hash


def test_what_transformers_saves_again_loads_as_the_same_tokenizer(tokenizer, peer, tmp_path):
    peer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.hash == tokenizer.hash
    assert again.chat_template == tokenizer.chat_template


def test_saving_twice_gives_the_same_bytes(tokenizer, folder, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "new" / "folder" / name).read_bytes() == (folder / name).read_bytes()


def test_the_hash_changes_with_a_merge_and_a_special_token_and_not_with_the_template(tokenizer, folder):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    hashes = {tokenizer.hash, Tokenizer(definition, "{{ messages }}").hash}
    assert len(hashes) == 1
    definition["model"]["merges"][-2:] = definition["model"]["merges"][:-3:-1]
    hashes.add(Tokenizer(definition, tokenizer.chat_template).hash)
    definition["added_tokens"][5]["special"] = False
    hashes.add(Tokenizer(definition, tokenizer.chat_template).hash)
    assert len(hashes) == 3


def test_the_hash_is_a_known_one_for_a_known_tokenizer(folder):
    """It ties shards and checkpoints to a tokenizer, so it must not move with a release of ours or of a library."""
    tokenizer = load_tokenizer(folder, template="{{ messages }}")
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    plain = json.dumps({"tokenizer": definition}, sort_keys=True, separators=(",", ":"))
    assert tokenizer.hash == hashlib.sha256(plain.encode("ascii")).hexdigest()


def test_a_template_is_kept_byte_for_byte(folder, tmp_path):
    source = "{{ messages }}\r\n  \u00e9\n\n"
    load_tokenizer(folder, template=source).save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == source


def test_the_template_of_an_older_program_is_found_in_its_settings(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for template in ("{{ 1 }}", [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ 1 }}"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert load_tokenizer(tmp_path).chat_template == "{{ 1 }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ 2 }}"
    assert load_tokenizer(tmp_path, template="{{ 3 }}").chat_template == "{{ 3 }}"


def test_without_a_template_there_is_chatml(tokenizer, folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template
