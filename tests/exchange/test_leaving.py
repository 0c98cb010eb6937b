"""A base model that was trained here says elsewhere what it says here: its texts begin alike, and it does not chat."""

import gguf_models
import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer as PlainTokenizer
from transformers import AutoTokenizer

from modicum.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from modicum.exchange import export_gguf, export_hf, export_onnx
from modicum.exchange.leaving import leaving
from modicum.store import read_json
from modicum.tokenizer import Tokenizer, load_tokenizer
from modicum.tokenizer.roles import Roles

pytestmark = pytest.mark.usefixtures("brief_gate")
TEXT = "what it said there"


@pytest.fixture
def trained(tokenizer, tmp_path):
    """A function: a checkpoint with what training goes on from."""

    def trained(*, chat, spoken=tokenizer):
        untrained = load_checkpoint(gguf_models.save(tokenizer, tmp_path / "plain", chat=chat))
        return save_checkpoint(
            tmp_path / "trained",
            1,
            config=untrained.config,
            weights=untrained.weights,
            tokenizer=spoken,
            chat=chat,
            training=TrainingState({}, {}),
        )

    return trained


def test_in_transformers(trained, tokenizer, tmp_path):
    export_hf(trained(chat=False), out=tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT).input_ids == [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    assert theirs.chat_template is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'tokenizer("Once"' in card
    assert "A language model trained with modicum." in card


def test_in_llama_cpp(trained, tokenizer, tmp_path):
    export_gguf(trained(chat=False), out=tmp_path / "out")  # whose gate asks llama.cpp for ids with what stands around
    fields = GGUFReader(tmp_path / "out" / "model-f32.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.bos_token_id"].contents() == tokenizer.bos_id
    assert "tokenizer.chat_template" not in fields


def test_in_onnxruntime(trained, tokenizer, tmp_path):
    export_onnx(trained(chat=False), out=tmp_path / "out")
    found = PlainTokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(TEXT).ids
    assert found == [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    assert "chat_template" not in read_json(tmp_path / "out" / "tokenizer_config.json")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_chat_model_begins_as_its_template_does_and_nothing_else_is_put_there(trained, tokenizer, tmp_path):
    folder = trained(chat=True)
    checkpoint = load_checkpoint(folder)
    assert leaving(checkpoint) is checkpoint
    export_hf(folder, out=tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT).input_ids == tokenizer.encode(TEXT)
    assert theirs.chat_template == tokenizer.chat_template


def test_what_came_from_elsewhere_stays_as_it_came(tokenizer, tmp_path):
    checkpoint = load_checkpoint(gguf_models.save(tokenizer, tmp_path, chat=False))
    assert leaving(checkpoint) is checkpoint


def test_a_base_model_that_came_without_a_template_leaves_without_one(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer.with_template(None), tmp_path, chat=False)
    assert load_checkpoint(folder).tokenizer.chat_template, "ChatML, for a tuning to come"
    export_hf(folder, out=tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template is None
    assert theirs(TEXT).input_ids == tokenizer.encode(TEXT)


def test_a_chat_model_that_came_without_a_template_leaves_with_the_one_it_answers_in(tokenizer, tmp_path):
    checkpoint = load_checkpoint(gguf_models.save(tokenizer.with_template(None), tmp_path, chat=True))
    assert checkpoint.talks
    assert leaving(checkpoint) is checkpoint


def test_a_base_model_whose_texts_begin_with_a_token_of_their_own_keeps_it_and_no_template(trained, tokenizer):
    roles = Roles(eos="<|endoftext|>", pad="<|pad|>", bos="<|im_start|>", opens="<|im_start|>")
    spoken = Tokenizer(tokenizer.definition, tokenizer.chat_template, roles)
    found = leaving(load_checkpoint(trained(chat=False, spoken=spoken))).tokenizer
    assert (found.roles, found.chat_template) == (roles, None)


@pytest.mark.parametrize(
    "around",
    [{"opens": "<|im_start|>"}, {"opens": "<|endoftext|>"}, {"closes": "<|im_end|>"}, {"closes": "<|endoftext|>"}],
)
@pytest.mark.parametrize("bos", [None, "<|endoftext|>"])
def test_transformers_puts_around_a_text_what_the_tokenizer_did(around, bos, tokenizer, tmp_path):
    roles = Roles(eos="<|endoftext|>", pad="<|pad|>", bos=bos, **around)
    Tokenizer(tokenizer.definition, None, roles).save(tmp_path)
    vocab = tokenizer.definition["model"]["vocab"]
    before, after = ([vocab[token]] if token else [] for token in (roles.opens, roles.closes))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT).input_ids == [*before, *tokenizer.encode(TEXT), *after]


@pytest.mark.parametrize("chat", [True, False])
def test_a_template_that_ends_turns_as_texts_end_makes_no_chat_model_of_a_base_model(
    trained, tokenizer, tmp_path, chat
):
    tokenizer.save(tmp_path / "tokenizer")
    template = "{% for m in messages %}{{ m.role + ':\n' + m.content + '<|endoftext|>' }}{% endfor %}"
    own = load_tokenizer(tmp_path / "tokenizer", template=template)
    found = load_checkpoint(trained(chat=chat, spoken=own))
    assert found.stop_ids == [own.end_of_turn_id] == [own.eot_id]
    assert found.talks is chat
    assert (leaving(found).tokenizer.chat_template is None) is not chat
