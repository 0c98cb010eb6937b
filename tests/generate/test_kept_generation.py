"""Generation with a SentencePiece tokenizer: its spaces, its end of turn, and no token of ours that it has not."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from generate_models import build_model

from modicum.generate import ChatSession, Generator, SamplingParams
from modicum.tokenizer import CYBERSLM_TEMPLATE, load_tokenizer, sentencepiece_tokenizer
from sentencepiece_models import train

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)


def tokenizer_of(folder, **options):
    with gzip.open(INSTRUCT, "rt", encoding="utf-8") as file:
        texts = [m["content"] for _ in range(400) for m in json.loads(next(file))["messages"]]
    path = folder / "tokenizer.model"
    path.write_bytes(train(texts, **options))
    return sentencepiece_tokenizer(path, template=CYBERSLM_TEMPLATE)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("sp"))


@pytest.fixture(scope="module")
def says(kept):
    """A generator that says a chain of different tokens, each after the one before."""

    def build(chain, kept=kept):
        assert len(set(chain)) == len(chain)
        size = kept.vocab_size
        model = build_model(
            size,
            hidden_size=size,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=8,
            tie_word_embeddings=False,
            max_position_embeddings=128,
        )
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(size))
            model.lm_head.weight.zero_()
            for token, successor in pairwise(chain):
                model.lm_head.weight[successor, token] = 1.0
        return Generator(model, kept, stop_ids=[kept.eot_id])

    return build


def streamed(generator, prompt):
    return "".join(chunk.text for chunk in generator.stream(prompt, GREEDY))


def test_the_space_before_a_text_is_not_part_of_it(kept, says):
    text = kept.encode("the way")
    generator = says([kept.bos_id, *text, kept.eot_id])
    for prompt in ([], [kept.bos_id]):
        (answer,) = generator.generate([prompt], GREEDY)
        assert answer.text == streamed(generator, prompt) == "the way"
        assert answer.finish_reason == "stop"


def test_a_text_that_goes_on_keeps_the_space_between_its_words(kept, says):
    first, rest = kept.encode("the way")[0], kept.encode("the way")[1:]
    generator = says([kept.bos_id, first, *rest, kept.eot_id])
    (answer,) = generator.generate([[kept.bos_id, first]], GREEDY)
    assert answer.text == streamed(generator, [kept.bos_id, first]) == " way"


def test_an_answer_in_a_conversation_has_no_space_before_it_and_its_characters_are_whole(kept, says):
    line_break = kept.render([{"role": "user", "content": "a"}], add_generation_prompt=True).ids[-1]
    answer = kept.encode("x\n日 y")[2:]  # after a line break, as the header leaves it
    assert kept.id_bytes(line_break) == b"\n"
    session = ChatSession(says([line_break, *answer[1:], kept.eot_id]), GREEDY)
    assert session.ask("a") == kept.decode([line_break, *answer[1:]])[1:]
    assert session.messages[-1]["content"].startswith("日")


def test_an_answer_is_the_same_when_the_tokenizer_folds_the_line_break_before_it(says, tmp_path):
    folding = tokenizer_of(tmp_path, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    turn = [{"role": "user", "content": "a"}]
    prompt = folding.render(turn, add_generation_prompt=True).ids
    whole = folding.render([*turn, {"role": "assistant", "content": "the way"}]).ids
    answer = whole[len(prompt) : -1]
    assert folding.id_bytes(answer[0]).startswith(b" "), "the break became the space of the first word"
    session = ChatSession(says([prompt[-1], *answer, folding.eot_id], folding), GREEDY)
    assert session.ask("a") == "the way"


def test_padding_and_the_token_before_a_text_are_never_sampled(kept):
    model = build_model(kept.vocab_size, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[[0, 1, 2]] = 50.0
    generator = Generator(model, kept, stop_ids=[])
    ids = {i for answer in generator.generate([[30], [31]], SamplingParams(temperature=2.0)) for i in answer.ids}
    assert ids
    assert ids.isdisjoint({0, 1, 2})


def test_an_id_without_a_token_is_never_sampled(kept, tmp_path):
    kept.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    del content["model"]["vocab"]["e"]
    content["model"]["merges"] = []
    gap = kept.encode("xe")[-1]
    assert kept.id_bytes(gap) == b"e"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    holed = load_tokenizer(tmp_path, missing="keep")
    assert holed.id_bytes(gap) == b""
    model = build_model(holed.vocab_size, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[gap] = 50.0
    for answer in Generator(model, holed, stop_ids=[]).generate([[30], [31]], GREEDY):
        assert answer.ids
        assert gap not in answer.ids
