"""Texts to be continued: what stands before them is what their model learned to find there, and nothing else."""

import pytest

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.generate import Generator
from modicum.serve import server
from modicum.serve.prompts import completion_prompts
from modicum.serve.requests import CompletionRequest
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.roles import OWN_ROLES, Roles


@pytest.mark.parametrize(("roles", "opens"), [(OWN_ROLES, True), (Roles(eos="<|im_end|>", pad="<|pad|>"), False)])
def test_a_text_of_a_request_begins_as_its_checkpoint_says(checkpoint, tmp_path, roles, opens):
    own = load_checkpoint(checkpoint)
    spoken = Tokenizer(own.tokenizer.definition, own.tokenizer.chat_template, roles)
    how = {"config": own.config, "weights": own.weights, "tokenizer": spoken, "chat": True, "training": None}
    model_of, tokenizer, stop_ids, opening, _ = server._own(save_checkpoint(tmp_path, 1, **how))
    generator = Generator(model_of(), tokenizer, stop_ids=stop_ids, opening=opening)
    (prompt,) = completion_prompts(generator, CompletionRequest(model="nano", prompt="A port is"))
    assert prompt.ids == [*[tokenizer.eot_id] * opens, *tokenizer.encode("A port is")]
