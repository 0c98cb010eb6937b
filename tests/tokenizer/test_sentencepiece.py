"""SentencePiece models: the ids that the sentencepiece library and transformers give, or one clear refusal."""

import json
import sys
import unicodedata
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as protocol
from transformers import AutoTokenizer

from modicum.store import UserError
from modicum.tokenizer import load_tokenizer, pieces, sentencepiece_tokenizer
from modicum.tokenizer.sentencepiece_model import ADVERSARIAL
from sentencepiece_models import train

KINDS = {
    "identity": {},
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "nfkc with its spaces": {"normalization_rule_name": "nfkc"},
    "no dummy prefix": {"add_dummy_prefix": False},
    "spaces removed": {"remove_extra_whitespaces": True},
    "digits and words kept whole": {"split_digits": True, "user_defined_symbols": ["\n", "foobar", "foo", "12 34"]},
}
CHARACTERS = st.characters(exclude_categories=["Cs"])
PARTS = [
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
    "<",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "▁",
    "é",
    "e\u0301",
    "\u0301",
    "the ",
    "ing",
]
PARTS += [
    "\u200b",
    "\u200d",
    "\0",
    "foobar",
    "foo",
    "12 34",
    "\U0001f469\u200d\U0001f680",
    "\U0001f3fd",
    "\uff9e",
    "\u0e33",
    "①",
    "한",
    "\u1112\u1161",
    "ﬁ",
]
texts_of = st.lists(st.text(CHARACTERS, max_size=6) | st.sampled_from(PARTS), max_size=8).map("".join)


@pytest.fixture(scope="module")
def models(texts):
    return {kind: train(texts, **options) for kind, options in KINDS.items()}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, models, tmp_path_factory):
    """(kind, our tokenizer, theirs)"""
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(models[request.param])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=models[request.param])
    return request.param, sentencepiece_tokenizer(path), theirs


def told_apart(kind, text):
    """Whether the map to NFKC leaves marks in an order that is not Unicode's: several on one letter."""
    if "nfkc" not in kind:
        return False
    marks = [unicodedata.category(c)[0] == "M" for c in unicodedata.normalize("NFKD", text)]
    return any(a and b for a, b in pairwise(marks))


@given(text=texts_of)
@settings(max_examples=150, deadline=None)
def test_ids_are_those_of_the_sentencepiece_library(pair, text):
    kind, tokenizer, theirs = pair
    if not told_apart(kind, text):
        assert tokenizer.encode(text) == theirs.encode(text)
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text))


def test_ids_of_adversarial_and_of_real_texts_are_those_of_the_sentencepiece_library(pair, texts):
    _, tokenizer, theirs = pair
    beside = ["foobar<0x41>", "<0x41>", "foo<0x00>foobar<0x41>12 34", "<0x41>foo"]
    for text in (*ADVERSARIAL, *texts[:40], "".join(texts[:5]), *beside):
        assert tokenizer.encode(text) == theirs.encode(text)


@given(text=texts_of)
@settings(max_examples=100, deadline=None)
def test_a_model_that_normalizes_nothing_gives_every_text_back(pair, text):
    kind, tokenizer, theirs = pair
    if kind in ("identity", "no dummy prefix", "digits and words kept whole"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode("a b")) == theirs.decode(theirs.encode("a b")) == "a b"


@pytest.mark.parametrize("unit", ["a", " ", " \n", "é", "word "])
def test_a_text_of_more_than_a_megabyte_survives(models, tmp_path, unit):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(models["identity"])
    text = unit * (1_300_000 // len(unit))
    tokenizer = sentencepiece_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_and_roles_have_the_ids_of_the_model(pair):
    _, tokenizer, theirs = pair
    assert tokenizer.vocab_size == theirs.get_piece_size() == 600
    assert (tokenizer.bos_id, tokenizer.eot_id, tokenizer.pad_id) == (2, 3, 0)
    assert tokenizer.end_of_turn_id == 3
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.id_bytes(theirs.piece_to_id("<0xE2>")) == b"\xe2"
    assert tokenizer.id_bytes(theirs.piece_to_id("▁the")) == b" the"


def test_transformers_reads_what_is_saved_with_the_same_ids_and_special_tokens(pair, tmp_path):
    kind, tokenizer, theirs = pair
    tokenizer.save(tmp_path)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    assert (peer.bos_token, peer.eos_token, peer.pad_token, peer.unk_token) == ("<s>", "</s>", "<pad>", "<unk>")
    for text in ADVERSARIAL:
        if "<s>" not in text:  # transformers takes the name of a control token for the token
            assert peer(text)["input_ids"] == [2, *tokenizer.encode(text)]
    if kind == "identity":
        assert peer.decode(theirs.encode(" two  spaces")) == " two  spaces"
    again = load_tokenizer(tmp_path, missing="keep")
    assert again.hash == tokenizer.hash
    assert again.encode(ADVERSARIAL[5]) == tokenizer.encode(ADVERSARIAL[5])
    assert again.chat_template is None


def test_a_text_is_the_same_in_pieces_beside_control_tokens(pair):
    kind, tokenizer, _ = pair
    ids = tokenizer.encode_with_control("<s>one two</s><s> three</s>")
    assert ids == [2, *tokenizer.encode("one two"), 3, 2, *tokenizer.encode(" three"), 3]
    if "nfkc" not in kind and kind != "spaces removed":
        assert tokenizer.decode(ids) == "<s>one two</s><s> three</s>"
        assert tokenizer.decode(ids, skip_special=True) == "one two three"


def test_a_word_kept_whole_is_text_unless_it_looks_like_a_marker(texts, tmp_path):
    path = tmp_path / "tokenizer.model"
    model = train(texts, user_defined_symbols=["<tool>", "Cloud"])
    path.write_bytes(model)
    tokenizer, theirs = (
        sentencepiece_tokenizer(path),
        sentencepiece.SentencePieceProcessor(model_proto=model),
    )
    marker, word = (theirs.piece_to_id(piece) for piece in ("<tool>", "Cloud"))
    assert marker in tokenizer.special_ids
    assert marker not in tokenizer.encode("a <tool> b")
    assert marker in tokenizer.encode_with_control("a<tool>b")
    assert tokenizer.encode("my Clouds") == theirs.encode("my Clouds")
    assert word in tokenizer.encode("my Clouds")


def test_a_model_without_a_start_or_padding_begins_with_the_end_and_pads_with_the_unknown(texts, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train(texts, bos_id=-1, pad_id=-1, unk_id=0, eos_id=1))
    tokenizer = sentencepiece_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eot_id, tokenizer.pad_id) == (1, 1, 0)
    tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a").input_ids == tokenizer.encode("a")


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_settings_beside_a_model_say_what_stands_around_a_text_as_they_do_for_transformers(
    start, end, models, tmp_path
):
    (tmp_path / "tokenizer.model").write_bytes(models["identity"])
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": start, "add_eos_token": end}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = sentencepiece_tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.bos_id == (2 if start else 3)
    tokenizer.save(tmp_path / "saved")
    peer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert peer("a").input_ids == AutoTokenizer.from_pretrained(tmp_path)("a").input_ids
    assert peer("a").input_ids == [*[2] * start, *tokenizer.encode("a"), *[3] * end]


@pytest.mark.parametrize(
    ("settings", "added", "told"),
    [
        ({"added_tokens_decoder": {"600": {"content": "<|im_start|>"}}}, {}, r"'<\|im_start\|>' \(id 600\)"),
        ({"added_tokens_decoder": {"600": "<|a|>", "601": "<|b|>"}}, {}, r"'<\|a\|>' \(id 600\), '<\|b\|>' \(id 601\)"),
        ({"added_tokens_decoder": {"1": {"content": "<s>"}}}, {}, r"'<s>' \(id 1\)"),
        ({}, {"<|im_end|>": 600}, r"'<\|im_end\|>' \(id 600\)"),
        ({}, {f"<{n}>": n for n in range(600, 605)}, r"'<602>' \(id 602\) and 2 more, which"),
        ({}, {"▁the": 0}, r"'▁the' \(id 0\)"),
        ({"eos_token": "<|im_end|>"}, {}, r"eos_token '<\|im_end\|>'"),
        ({"bos_token": {"content": "</s>"}}, {}, "bos_token '</s>'"),
    ],
)
def test_a_model_that_the_files_beside_it_make_another_of_is_refused(settings, added, told, models, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(models["identity"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match=rf"tokenizer\.model: the files beside it name .*{told}.*own tokenizer\.json"):
        sentencepiece_tokenizer(tmp_path / "tokenizer.model")


def test_a_word_of_text_that_is_named_an_added_token_is_refused(models, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(models["identity"])
    number = sentencepiece.SentencePieceProcessor(model_proto=models["identity"]).piece_to_id("▁the")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"▁the": number}))
    with pytest.raises(UserError, match=rf"'▁the' \(id {number}\), which it does not have so"):
        sentencepiece_tokenizer(tmp_path / "tokenizer.model")


def test_files_that_name_a_models_own_tokens_change_nothing(models, tmp_path):
    path, kind = tmp_path / "tokenizer.model", "digits and words kept whole"
    path.write_bytes(models[kind])
    alone = sentencepiece_tokenizer(path)
    word = sentencepiece.SentencePieceProcessor(model_proto=models[kind]).piece_to_id("foobar")
    decoder = {"0": {"content": "<pad>"}, "2": {"content": "<s>", "special": True}, str(word): {"content": "foobar"}}
    settings = {"added_tokens_decoder": decoder, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"</s>": 3}))
    assert sentencepiece_tokenizer(path).hash == alone.hash


FAULTS = {
    "unigram": (lambda m: setattr(m.trainer_spec, "model_type", 1), "a unigram model; only BPE models"),
    "no bytes": (lambda m: setattr(m.trainer_spec, "byte_fallback", False), "without byte fallback"),
    "a byte lost": (lambda m: setattr(m.pieces[30], "piece", "zzz"), "not one token for each byte"),
    "a byte that is text": (lambda m: setattr(m.pieces[30], "type", 1), "not one token for each byte"),
    "no end": (lambda m: setattr(m.trainer_spec, "eos_id", -1), r"no token that ends a text \(eos_id -1\)"),
    "an end that is text": (lambda m: setattr(m.trainer_spec, "eos_id", 500), "no token that ends a text"),
    "two unknowns": (lambda m: setattr(m.pieces[0], "type", 2), "it has 2 unknown tokens"),
    "switched off": (lambda m: setattr(m.pieces[400], "type", 5), "switched off"),
    "suffixes": (lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True), "in another way than as U"),
    "plain spaces": (lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False), "in another way than as U"),
    "denormalizer": (lambda m: setattr(m.denormalizer_spec, "precompiled_charsmap", b"x"), "when it decodes"),
    "no number": (lambda m: setattr(m.pieces[400], "score", float("nan")), "not a finite number"),
    "twice": (lambda m: setattr(m.pieces[400], "piece", "▁the"), "stands twice"),
    "without end": (lambda m: setattr(m.pieces[400], "piece", "a" * 400_000), "a piece has 400,000 characters"),
    "empty": (lambda m: setattr(m.pieces[400], "piece", ""), "is empty"),
    "no pieces": (lambda m: m.ClearField("pieces"), "it has no pieces"),
    "a map cut off": (
        lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"\0\4\0\0" + b"\xff" * 1000),
        "character map is damaged",
    ),
    "a map that leads astray": (
        lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"\0\4\0\0" + b"\xff\xff\xff\x7f" * 256 + b"a\0"),
        "character map is damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_said_is_refused_with_the_reason(models, tmp_path, fault):
    change, expected = FAULTS[fault]
    model = protocol.ModelProto.FromString(models["identity"])
    change(model)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=expected) as refusal:
        sentencepiece_tokenizer(path)
    assert str(path) in str(refusal.value)


def test_a_model_whose_pieces_would_be_joined_in_another_order_is_refused_with_the_text(models, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(models["identity"])
    merges = pieces._merges
    monkeypatch.setattr(pieces, "_merges", lambda proto: merges(proto)[::-1])
    with pytest.raises(UserError, match=r"the text '.*' would get other ids than SentencePiece gives it"):
        sentencepiece_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"\0", b"{}", b"\x80\x04\x95.", b"\x0a\xff\xff\xff\xff\x0f", b"x" * 1000])
def test_a_file_that_is_no_model_is_one_clear_error(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.model: not a SentencePiece model"):
        sentencepiece_tokenizer(path)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "tokenizer.model"
    path.write_bytes(models["identity"])
    return path


@given(place=st.integers(0, 5000), length=st.integers(1, 300), junk=st.binary(max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_damaged_model_loads_with_equal_ids_or_is_one_clear_error(whole, place, length, junk):
    path, model = whole.with_name("damaged.model"), whole.read_bytes()
    place %= len(model)
    path.write_bytes(model[:place] + junk + model[place + length :])
    try:
        tokenizer = sentencepiece_tokenizer(path)
    except UserError:
        return
    theirs = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    assert tokenizer.encode("the 12 é") == theirs.encode("the 12 é")


def test_a_missing_file_and_a_missing_library_are_clear_errors(models, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        sentencepiece_tokenizer(tmp_path / "none.model")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(models["identity"])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'modicum\[sentencepiece\]'"):
        sentencepiece_tokenizer(path)
