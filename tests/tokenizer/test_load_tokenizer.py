"""Tokenizers made elsewhere: taken with the ids they have, extended, or refused in one clear line."""

import json
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from modicum.store import UserError
from modicum.tokenizer import load_tokenizer

NEEDED = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def gpt2_like(texts, special=("<|endoftext|>",), size=400):
    """Byte-level BPE as GPT-2 has it: its own pattern, added tokens behind the vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    backend.add_special_tokens(list(special))
    return backend


def sentencepiece_like(texts):
    """BPE over characters with byte fallback, spaces written as U+2581, as Llama 2 has it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, limit_alphabet=60)
    backend.train_from_iterator([text[:2000].replace(" ", "▁") for text in texts[:50]], trainer)
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def write(backend, folder):
    path = folder / "tokenizer.json"
    path.write_text(backend.to_str() if isinstance(backend, tokenizers.Tokenizer) else json.dumps(backend), "utf-8")
    return path


def test_a_tokenizer_without_the_needed_tokens_is_refused_with_the_choice(texts, tmp_path):
    path = write(gpt2_like(texts), tmp_path)
    with pytest.raises(UserError) as refusal:
        load_tokenizer(path)
    message = str(refusal.value)
    assert str(path) in message
    assert "lacks <|pad|>, <|im_start|>, <|im_end|>, <tool_call>" in message
    assert "<|endoftext|>" not in message
    assert "tokenizer.missing_special_tokens: extend" in message
    assert "up to 448 tokens" in message


def test_a_tokenizer_is_extended_behind_its_last_id_and_keeps_the_ids_it_has(texts, tmp_path):
    backend = gpt2_like(texts)
    tokenizer = load_tokenizer(write(backend, tmp_path), missing="extend")
    assert tokenizer.vocab_size == 448
    assert tokenizer.eot_id == backend.token_to_id("<|endoftext|>") == 400
    assert (tokenizer.pad_id, tokenizer.encode_with_control("<|im_start|>")[0], tokenizer.end_of_turn_id) == (
        401,
        402,
        403,
    )
    assert [tokenizer.decode([i]) for i in range(404, 410)] == [*TOOLS, "<|reserved_0|>", "<|reserved_1|>"]
    assert tokenizer.special_ids == set(range(400, 448))
    for text in texts[:20]:
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.render([{"role": "user", "content": "a"}]).ids[0] == 402


def test_an_extended_tokenizer_is_whole_and_transformers_reads_it(texts, tmp_path):
    extended = load_tokenizer(write(gpt2_like(texts), tmp_path), missing="extend")
    extended.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").hash == extended.hash
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert len(peer) == extended.vocab_size
    assert peer(texts[0])["input_ids"] == extended.encode(texts[0])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert peer.apply_chat_template(messages)["input_ids"] == extended.render(messages).ids


def test_a_size_that_is_no_multiple_of_64_is_refused_or_filled(texts, tmp_path):
    path = write(gpt2_like(texts, [*NEEDED, *TOOLS]), tmp_path)
    with pytest.raises(UserError, match="has 408 tokens, not a multiple of 64 without gaps"):
        load_tokenizer(path)
    assert load_tokenizer(path, missing="extend").vocab_size == 448


def test_gaps_between_ids_are_filled(tokenizer, folder, tmp_path):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for entry in definition["added_tokens"][10:14]:
        del definition["model"]["vocab"][entry["content"]]
    del definition["added_tokens"][10:14]
    path = write(definition, tmp_path)
    with pytest.raises(UserError, match="has 1020 tokens, not a multiple of 64 without gaps"):
        load_tokenizer(path)
    filled = load_tokenizer(path, missing="extend")
    assert filled.vocab_size == 1024
    assert filled.encode("some text") == tokenizer.encode("some text")
    assert all(filled.id_bytes(i) for i in range(1024))


def test_a_needed_token_that_stands_in_the_vocabulary_unflagged_keeps_its_id(folder, tmp_path):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    definition["added_tokens"] = [e for e in definition["added_tokens"] if e["content"] != "<|im_end|>"]
    extended = load_tokenizer(write(definition, tmp_path), missing="extend")
    assert extended.end_of_turn_id == 3
    assert 3 not in extended.encode("<|im_end|>")


def test_what_would_change_a_texts_ids_from_outside_is_left_out(texts, tmp_path):
    """A post-processor's BOS would stand twice once the template writes one; truncation would cut texts unseen."""
    backend = gpt2_like(texts, [*NEEDED, *TOOLS])
    plain = backend.encode(texts[0]).ids
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 400)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=10_000)
    definition = json.loads(backend.to_str())
    definition["model"]["dropout"] = 0.5
    assert len(plain) > 5
    template = "{{ '<|endoftext|>' }}{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}"
    tokenizer = load_tokenizer(write(definition, tmp_path), missing="extend", template=template)
    assert tokenizer.encode(texts[0]) == plain
    assert tokenizer.render([{"role": "user", "content": "a"}]).ids.count(tokenizer.eot_id) == 1
    tokenizer.save(tmp_path / "saved")
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert peer(texts[0])["input_ids"] == plain
    assert peer.apply_chat_template([{"role": "user", "content": "a"}])["input_ids"].count(tokenizer.eot_id) == 1


def test_added_words_and_spaces_are_text_and_added_markers_are_not(texts, tmp_path):
    backend = gpt2_like(texts, [*NEEDED, *TOOLS])
    backend.add_tokens(
        [AddedToken("    ", normalized=False), AddedToken("zyzzyva", normalized=False), "<think>", "[INST]"]
    )
    tokenizer = load_tokenizer(write(backend, tmp_path), missing="extend")
    text = "def f():\n    zyzzyva\n        x"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert backend.token_to_id("zyzzyva") in tokenizer.encode(text)
    for marker in ("<think>", "[INST]"):
        assert backend.token_to_id(marker) in tokenizer.special_ids
        assert backend.token_to_id(marker) not in tokenizer.encode(f"a {marker} b")
        assert tokenizer.decode(tokenizer.encode(f"a {marker} b")) == f"a {marker} b"


def test_control_tokens_that_swallow_the_space_beside_them_do_so_in_the_renderer_too(texts, tmp_path):
    entries = [AddedToken(token, special=True, normalized=False, rstrip=True) for token in NEEDED]
    backend = gpt2_like(texts, [*entries, *TOOLS])
    tokenizer = load_tokenizer(write(backend, tmp_path), missing="extend")
    rendered = tokenizer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert rendered.ids == backend.encode(rendered.text).ids


def test_a_sentencepiece_like_tokenizer_says_every_text_by_bytes(texts, tmp_path):
    backend = sentencepiece_like(texts)
    tokenizer = load_tokenizer(write(backend, tmp_path), missing="extend")
    for text in ("hello there", "é → 🙂", "a  b"):
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert b"".join(map(tokenizer.id_bytes, tokenizer.encode(text))) == f" {text}".encode()
    assert not tokenizer.special_ids.intersection(tokenizer.encode("</s> <|im_end|>"))


def broken(change):
    def changed(definition):
        change(definition)
        return definition

    return changed


FAULTS = {
    "no object": (lambda d: [d], "not a tokenizer.json: it has no model"),
    "no model": (broken(lambda d: d.pop("model")), "not a tokenizer.json: it has no model"),
    "another model": (broken(lambda d: d["model"].update(type="Unigram")), "its model is 'Unigram'; only BPE"),
    "no merges": (broken(lambda d: d["model"].pop("merges")), "only BPE tokenizers"),
    "merges no list": (broken(lambda d: d["model"].update(merges={})), "model.merges: expected a list"),
    "vocab no object": (broken(lambda d: d["model"].update(vocab=[])), "model.vocab: expected an object"),
    "id no number": (broken(lambda d: d["model"]["vocab"].update(zz="1")), "model.vocab: expected an object"),
    "id true": (broken(lambda d: d["model"]["vocab"].update(zz=True)), "model.vocab: expected an object"),
    "added no list": (broken(lambda d: d.update(added_tokens={})), "added_tokens: expected a list"),
    "added without id": (broken(lambda d: d["added_tokens"][0].pop("id")), "added_tokens: expected a list"),
    "added empty": (broken(lambda d: d["added_tokens"][0].update(content="")), "added_tokens: expected a list"),
    "flag no boolean": (broken(lambda d: d["added_tokens"][0].update(lstrip=3)), "added_tokens: expected a list"),
    "decoder no object": (broken(lambda d: d.update(decoder=[])), "expected objects"),
    "two ids": (broken(lambda d: d["added_tokens"][0].update(id=77)), "has another id in model.vocab"),
    "one id twice": (broken(lambda d: d["model"]["vocab"].update(zz=5)), "two tokens have the same id"),
    "a token twice": (broken(lambda d: d["added_tokens"].append(d["added_tokens"][0])), "one token stands twice"),
    "negative id": (broken(lambda d: d["model"]["vocab"].update(zz=-1)), "from -1 to 1023"),
    "absurd id": (broken(lambda d: d["model"]["vocab"].update(zz=2**40)), "ids must lie close together"),
    "a byte missing": (broken(lambda d: d["model"]["vocab"].pop("!")), "no token for byte 0x21"),
    "no byte fallback": (broken(lambda d: d.update(decoder=None)), "no token for byte 0x00"),
    "words with a suffix": (broken(lambda d: d["model"].update(end_of_word_suffix="</w>")), "prefix or suffix"),
    "a merge that makes a control token": (
        broken(lambda d: d["model"]["merges"].append(["<|im_end", "|>"])),
        "a merge makes or uses a control token",
    ),
    "a merge without its parts": (broken(lambda d: d["model"]["merges"].append(["qqq", "zzz"])), "cannot be used"),
    "a merge of three": (broken(lambda d: d["model"]["merges"].append(["a", "b", "c"])), "cannot be used"),
    "a merge of numbers": (broken(lambda d: d["model"]["merges"].append([1, 2])), "cannot be used"),
    "a broken pattern": (
        broken(lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="((((")),
        "cannot be used",
    ),
    "an unknown part": (broken(lambda d: d.update(normalizer={"type": "Nonsense"})), "cannot be used"),
    "a surrogate": (broken(lambda d: d["model"]["vocab"].update({"\ud800": 1024})), r"lone surrogate \(U\+D800\)"),
    "a number that is none": (broken(lambda d: d.update(normalizer={"type": "NFC", "x": float("nan")})), "plain JSON"),
    "the start of a text is special": (
        broken(
            lambda d: d.update(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
                        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                    ],
                }
            )
        ),
        "encoded in another way than text alone",
    ),
    "a control token that matches whole words": (
        broken(lambda d: d["added_tokens"][3].update(single_word=True)),
        "text beside <|im_end|> is encoded in another way",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_definition_is_one_clear_error_with_its_file(folder, tmp_path, fault):
    change, expected = FAULTS[fault]
    path = write(change(json.loads((folder / "tokenizer.json").read_text("utf-8"))), tmp_path)
    with pytest.raises(UserError, match=expected) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value).strip()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"[" * 200_000, "nested too deeply|not valid JSON"),
        (b'{"a": ' * 200_000, "nested too deeply|not valid JSON"),
        (b"1" * 10_000, "not valid JSON"),
        (b"null", "not a tokenizer.json"),
        (b"\x80\x04\x95.", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_json_is_one_clear_error(tmp_path, content, expected):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        load_tokenizer(path)


def test_a_missing_file_a_folder_without_one_and_an_absurd_size_are_clear_errors(tmp_path):
    with pytest.raises(UserError, match=r"no such file; expected a tokenizer\.json or a folder that holds one"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(UserError, match="larger than 256 MiB"):
        load_tokenizer(tmp_path)


def test_a_pattern_that_explodes_is_one_clear_error(folder, tmp_path):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"
    tokenizer = load_tokenizer(write(definition, tmp_path))
    with pytest.raises(UserError, match=r"the tokenizer's pattern fails on this text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


PATHS = st.lists(st.integers(0, 2**16), min_size=1, max_size=6)
JUNK = st.sampled_from(
    [None, True, -1, 0, 3, 2**70, 1.5, "", "x", "<|im_end|>", "Ġ", [], {}, [["a", "b"]], {"type": "BPE"}]
)


@given(path=PATHS, junk=JUNK)
@settings(max_examples=100, deadline=None)
def test_a_definition_with_anything_anywhere_loads_or_is_one_clear_error(folder, path, junk):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    place = definition
    for step in path[:-1]:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = place[keys[step % len(keys)]] if keys else None
        if not isinstance(inner, dict | list) or not inner:
            break
        place = inner
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    place[keys[path[-1] % len(keys)]] = junk
    path = write(definition, folder.parent)
    try:
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("a <|im_end|> é")
    except UserError as error:
        assert re.match(f"{path}: |the tokenizer's pattern fails", str(error))  # noqa: PT017 (both ends are right)
    else:
        assert not tokenizer.special_ids.intersection(ids)
