"""modicum chat and modicum generate --chat: what a model is asked, and what is said of one that cannot answer."""

import json

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.cli import chat, generate
from modicum.cli.app import app
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import Tokenizer, train_tokenizer
from modicum.tokenizer.roles import Roles

assert chat  # registers the verb
assert generate


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A chat model and a base model, with the same random weights."""
    tokenizer = train_tokenizer(["What is a port?"] * 9, vocab_size=320, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=128, **sizes))
    model.init_weights(0)
    return {
        chat: save_checkpoint(
            tmp_path_factory.mktemp("checkpoints"),
            1,
            config=model.config,
            weights=model.state_dict(),
            tokenizer=tokenizer,
            chat=chat,
            training=None,
        )
        for chat in (True, False)
    }


@pytest.fixture
def asked(monkeypatch):
    """What each conversation that was rendered ended with."""
    found, render = [], Tokenizer.render

    def noting(self, messages, **how):
        if how.get("add_generation_prompt"):
            found.append(messages[-1]["content"])
        return render(self, messages, **how)

    monkeypatch.setattr(Tokenizer, "render", noting)
    return found


def answer(*words, typed):
    ended = CliRunner().invoke(app, [*map(str, words), "--max-new-tokens", "2"], input=typed)
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.mark.parametrize("verb", [["generate"], ["generate", "--chat"], ["chat"]])
def test_what_is_piped_in_and_is_no_text_is_told_in_a_line(verb, checkpoints):
    ended = CliRunner().invoke(app, [verb[0], str(checkpoints[True]), *verb[1:]], input=b"What is \xff?\n")
    assert ended.exit_code == 2, ended.output
    assert "standard input: not UTF-8 text (byte 8)" in ended.output


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_piped_question_is_asked_without_the_end_of_its_line(end, checkpoints, asked):
    answer("generate", checkpoints[True], "--chat", typed=f"What is a port?{end}")
    answer("chat", checkpoints[True], typed=f" What is a port?{end}")
    assert asked == ["What is a port?", " What is a port?"]


def test_lines_piped_to_a_chat_are_questions_one_by_one_and_blank_ones_are_none(checkpoints, asked):
    answer("chat", checkpoints[True], typed="one?\n\n \ntwo?\n/quit\nthree?\n")
    assert asked == ["one?", "two?"]


def test_a_text_is_continued_as_transformers_would_read_it(checkpoints, tmp_path):
    """Nothing stands before it that the tokenizer of a model from elsewhere does not put there."""
    own = load_checkpoint(checkpoints[True])
    spoken = Tokenizer(own.tokenizer.definition, own.tokenizer.chat_template, Roles(eos="<|im_end|>", pad="<|pad|>"))
    how = {"config": own.config, "weights": own.weights, "tokenizer": spoken, "chat": True, "training": None}
    folder = save_checkpoint(tmp_path, 1, **how)
    told = json.loads(answer("generate", folder, "--json", typed="What is a port?").stdout)
    assert told["prompt_tokens"] == len(AutoTokenizer.from_pretrained(folder)("What is a port?").input_ids)


@pytest.mark.parametrize("words", [["chat"], ["generate", "--chat"], ["generate"]], ids=" ".join)
@pytest.mark.parametrize("chat", [True, False])
def test_a_base_model_that_is_to_talk_is_said_to_be_none(words, chat, checkpoints):
    lines = answer(words[0], checkpoints[chat], *words[1:], typed="What is a port?\n").stderr.splitlines()
    told = [line for line in lines if line.startswith(f"{checkpoints[chat]}: never learned to end a turn")]
    assert len(told) == (not chat and words != ["generate"])
