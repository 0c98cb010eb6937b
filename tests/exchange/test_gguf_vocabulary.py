import io
import json
from dataclasses import replace
from unicodedata import is_normalized, ucd_3_2_0

import gguf_models
import pytest
import tokenizers
from gguf import GGUFReader
from sentencepiece import SentencePieceTrainer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from modicum.exchange import export_gguf, gguf_pieces, import_checkpoint
from modicum.exchange.gguf_pieces import pieces_definition
from modicum.exchange.gguf_runtime import ask
from modicum.exchange.gguf_vocabulary import vocabulary_metadata
from modicum.exchange.strings import agreed_strings
from modicum.store import UserError
from modicum.tokenizer import PRETOKENIZER_PATTERN, Tokenizer, load_tokenizer, sentencepiece_tokenizer

TEXTS = ["It's 2024, and (the) model's 100% sure: don't wait. In 1999 he'd said 1,234,567 words\n\n  there"] * 40


def _split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS = {
    "qwen2": (_split(PRETOKENIZER_PATTERN), False),
    "llama-bpe": (_split(LLAMA3), True),
    "gpt-2": (GPT2, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), False),
}


@pytest.fixture
def foreign_tokenizer(tmp_path):
    """A function that trains a tokenizer elsewhere: 384 ids, `<|end|>` ends a text."""

    def foreign_tokenizer(cut, *, whole=False, normalizer=None, around=None):
        backend = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
        backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
        if normalizer:
            backend.normalizer = normalizer
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=384, initial_alphabet=alphabet, special_tokens=["<|end|>"])
        backend.train_from_iterator(TEXTS, trainer)
        if around:
            backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<|end|>", 0)])
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        return load_tokenizer(folder, missing="keep")

    return foreign_tokenizer


@pytest.mark.usefixtures("brief_gate")
@pytest.mark.parametrize("name", CUTS)
def test_a_known_way_of_cutting_goes_out_by_its_name_with_equal_ids(name, foreign_tokenizer, tmp_path):
    cut, whole = CUTS[name]
    folder = gguf_models.save(foreign_tokenizer(cut, whole=whole), tmp_path, chat=False)
    report = export_gguf(folder, out=tmp_path / "out")
    assert report.proof.strings == 200
    import_checkpoint(tmp_path / "out" / "model-f32.gguf", dialect="gguf", out=tmp_path / "ours")
    first, second = (json.loads((place / "tokenizer.json").read_text()) for place in (folder, tmp_path / "ours"))
    assert first["model"] == second["model"]
    assert vocabulary_metadata(load_tokenizer(tmp_path / "ours", missing="keep"), 384)["tokenizer.ggml.pre"] == name


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_ten_thousand_texts_have_equal_ids(name, foreign_tokenizer, tmp_path):
    cut, whole = CUTS[name]
    folder = gguf_models.save(foreign_tokenizer(cut, whole=whole), tmp_path, chat=False)
    proof = export_gguf(folder, out=tmp_path / "out").proof
    assert (proof.strings, proof.unicode) == (10_000, "3.2.0")
    assert proof.judged.quality.positions == 3200


@pytest.mark.usefixtures("brief_gate")
@pytest.mark.parametrize(("around", "first", "last"), [("<|end|> $A", [0], []), ("<|end|> $A <|end|>", [0], [0])])
def test_what_stands_around_a_text_stands_there_too(around, first, last, foreign_tokenizer, tmp_path):
    tokenizer = foreign_tokenizer(GPT2, around=around)
    export_gguf(gguf_models.save(tokenizer, tmp_path, chat=False), out=tmp_path / "out")
    file = tmp_path / "out" / "model-f32.gguf"
    assert ask(file, texts=["model"]).ids == [[*first, *tokenizer.encode("model"), *last]]
    import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")
    roles = load_tokenizer(tmp_path / "ours", missing="keep").roles
    assert (roles.opens, roles.closes) == ("<|end|>", "<|end|>" if last else None)


def test_what_llama_cpp_cannot_put_around_a_text_is_refused(foreign_tokenizer):
    tokenizer = foreign_tokenizer(GPT2)
    tokenizer.roles = replace(tokenizer.roles, bos="a", opens="<|end|>")
    with pytest.raises(UserError, match=r"puts <\|end\|> around a text; llama\.cpp can put bos a and"):
        vocabulary_metadata(tokenizer, 384)


def test_a_way_of_cutting_that_has_no_name_is_refused(foreign_tokenizer, tmp_path):
    folder = gguf_models.save(foreign_tokenizer(_split(r"\p{L}+|\P{L}+")), tmp_path, chat=False)
    with pytest.raises(UserError, match=r"has no name for here \(pre-tokenizer Split \+ ByteLevel\); those .* qwen2"):
        export_gguf(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_normalizer_that_llama_cpp_lacks_is_refused(foreign_tokenizer):
    tokenizer = foreign_tokenizer(CUTS["qwen2"][0], normalizer=normalizers.NFKC())
    with pytest.raises(UserError, match=r"its tokenizer's normalizer \(NFKC\) has no counterpart"):
        vocabulary_metadata(tokenizer, 384)


@pytest.mark.usefixtures("brief_gate")
def test_composing_is_left_to_whoever_writes_the_text(foreign_tokenizer, tmp_path):
    folder = gguf_models.save(foreign_tokenizer(CUTS["qwen2"][0], normalizer=normalizers.NFC()), tmp_path, chat=False)
    report = export_gguf(folder, out=tmp_path / "out")
    assert report.proof.strings == 200
    assert report.notes[0].startswith("llama.cpp does not compose accents")


@pytest.fixture
def pieces(tmp_path):
    """A function that trains a SentencePiece tokenizer that leaves texts as they are but for what is given."""

    def pieces(**given):
        model = io.BytesIO()
        settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **given}
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
            pad_id=0, unk_id=1, bos_id=2, eos_id=3, minloglevel=2, hard_vocab_limit=False, **settings,
        )  # fmt: skip
        (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
        return sentencepiece_tokenizer(tmp_path / "tokenizer.model")

    return pieces


@pytest.mark.usefixtures("brief_gate")
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_goes_out_with_scores_and_comes_back(prefix, pieces, tmp_path):
    tokenizer = pieces(add_dummy_prefix=prefix)
    folder = gguf_models.save(tokenizer, tmp_path, chat=False)
    export_gguf(folder, out=tmp_path / "out")
    file = tmp_path / "out" / "model-f32.gguf"
    assert ask(file, texts=["  a model"]).ids == [[2, *tokenizer.encode("  a model")]]  # <s> begins its texts
    import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")
    found = load_tokenizer(tmp_path / "ours", missing="keep")
    assert found.definition["model"]["merges"] == tokenizer.definition["model"]["merges"]
    assert found.roles == tokenizer.roles
    texts = agreed_strings(tokenizer, 500)
    assert found.encode_batch(texts) == tokenizer.encode_batch(texts)
    export_gguf(tmp_path / "ours", out=tmp_path / "again")
    assert (tmp_path / "again" / "model-f32.gguf").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, r"changes texts before it cuts them \(NFC, Precompiled, Replace\)"),
        ({"remove_extra_whitespaces": True}, r"changes texts before it cuts them \(Replace\)"),
        ({"user_defined_symbols": ["model"]}, "keeps words whole"),
    ],
)
def test_a_sentencepiece_model_that_does_more_is_refused(given, word, pieces):
    with pytest.raises(UserError, match=word):
        vocabulary_metadata(pieces(**given), 384)


def test_the_texts_are_many_always_the_same_and_of_assigned_characters(tokenizer):
    texts = agreed_strings(tokenizer, 10_000)
    assert len(texts) == 10_000
    assert texts == agreed_strings(tokenizer, 10_000)
    assert len(set(texts)) > 9_000
    drawn = texts[1000::4] + texts[1001::4]
    kinds = {ucd_3_2_0.category(character)[0] for text in drawn for character in text}
    assert kinds >= set("LMNPSZC")
    assert any("<|im_end|>" in text for text in texts)


def test_texts_are_composed_where_the_tokenizer_does_it_and_the_runtime_does_not(foreign_tokenizer):
    composing = foreign_tokenizer(CUTS["qwen2"][0], normalizer=normalizers.NFC())
    assert all(is_normalized("NFC", text) for text in agreed_strings(composing, 2000, composed=True))
    assert not all(is_normalized("NFC", text) for text in agreed_strings(composing, 2000))


@pytest.mark.parametrize(
    ("tokens", "scores", "word"),
    [
        (["a", "b"], [0.0], "x: 2 tokens with 1 scores"),
        (["a", "b" * 600], [0.0, 0.0], "x: a piece has 600 characters"),
    ],
)
def test_pieces_that_cannot_be_are_refused(tokens, scores, word):
    vocab = {token: number for number, token in enumerate(tokens)}
    with pytest.raises(UserError, match=word):
        pieces_definition(vocab, [True] * len(tokens), scores, True, "x")


def test_pieces_that_make_each_other_in_endless_ways_are_refused(monkeypatch):
    monkeypatch.setattr(gguf_pieces, "_MOST_MERGES", 9)
    vocab = {"a" * length: length - 1 for length in range(1, 6)}  # 0 + 1 + 2 + 3 + 4 ways
    with pytest.raises(UserError, match="x: its pieces are made of each other in more than 9 ways"):
        pieces_definition(vocab, [True] * 5, [0.0] * 5, True, "x")


@pytest.mark.usefixtures("brief_gate")
def test_control_tokens_that_answers_may_say_come_back_as_such(tokenizer, tmp_path):
    entry = tokenizer.definition["added_tokens"][10]
    added = [{**one, "special": one != entry} for one in tokenizer.definition["added_tokens"]]
    thinking = Tokenizer({**tokenizer.definition, "added_tokens": added}, tokenizer.chat_template, tokenizer.roles)
    assert thinking.spoken_ids == tokenizer.spoken_ids | {entry["id"]}
    report = export_gguf(gguf_models.save(thinking, tmp_path), out=tmp_path / "out")
    assert report.notes[0].endswith(f"which the checkpoint shows: {entry['content']}")
    file = tmp_path / "out" / "model-f32.gguf"
    assert GGUFReader(file).fields["tokenizer.ggml.token_type"].contents()[entry["id"]] == 3  # control
    import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")
    found = load_tokenizer(tmp_path / "ours", missing="keep")
    assert (found.spoken_ids, found.special_ids) == (thinking.spoken_ids, thinking.special_ids)
    assert found.definition == thinking.definition
