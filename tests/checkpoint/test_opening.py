"""What stands before a text to be continued: what the tokenizer puts there, or what the model learned to find there."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from modicum.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.roles import OWN_ROLES, Roles

TEXT = "A small model"
INSTRUCT = Roles(eos="<|im_end|>", pad="<|endoftext|>")  # as Qwen2.5's
BASE = Roles(eos="<|endoftext|>", pad="<|endoftext|>")


@pytest.fixture
def loaded(tokenizer, small, tmp_path):
    """A function: a checkpoint whose tokenizer has these roles, with or without what training goes on from."""

    def loaded(roles, *, chat, trained, state=True):
        model = small()
        folder = save_checkpoint(
            tmp_path,
            1,
            config=model.config,
            weights=model.state_dict(),
            tokenizer=Tokenizer(tokenizer.definition, tokenizer.chat_template, roles),
            chat=chat,
            training=TrainingState({}, {}) if trained and state else None,
            trained=trained,
        )
        return load_checkpoint(folder)

    return loaded


@pytest.mark.parametrize("roles", [INSTRUCT, BASE, replace(INSTRUCT, opens="<|im_start|>")], ids=str)
@pytest.mark.parametrize("chat", [True, False])
def test_a_model_from_elsewhere_is_asked_as_transformers_asks_it(loaded, roles, chat):
    checkpoint = loaded(roles, chat=chat, trained=False)
    theirs = AutoTokenizer.from_pretrained(checkpoint.path)(TEXT).input_ids
    assert [*checkpoint.opening, *checkpoint.tokenizer.encode(TEXT)] == theirs


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_where_the_tokenizer_was_trained_here_the_end_of_a_text_opens_the_next(loaded, tokenizer, chat, trained):
    assert loaded(OWN_ROLES, chat=chat, trained=trained).opening == [tokenizer.eot_id]


def test_a_base_model_that_was_trained_on_here_learned_to_find_it_and_a_chat_model_did_not(loaded, tokenizer):
    assert loaded(BASE, chat=False, trained=True).opening == [tokenizer.eot_id]
    assert loaded(INSTRUCT, chat=True, trained=True).opening == []
    handed_on = loaded(BASE, chat=False, trained=True, state=False)
    assert (handed_on.opening, handed_on.training) == ([tokenizer.eot_id], None)
