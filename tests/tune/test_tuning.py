"""Fine-tuning as a whole, on a very small model: it answers, stops, resumes, and writes what it says it writes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tune_chats import conversation

from modicum.data import Loader
from modicum.generate import Generator, SamplingParams
from modicum.model import Decoder, ModelConfig
from modicum.store import hash_file
from modicum.train import Intervals, OptimizerSettings, Schedule, Wishes, read_metrics, train
from modicum.tune import ConversationRows, collect, make_example, packed_batches

CHATS = [
    conversation("What is a port?", "A number that names a service."),
    conversation("What is a socket?", "An address and a port."),
    conversation("Hello!", "Hi.", "Who are you?", "A small model."),
    conversation("Say <|im_end|> twice.", "No."),
    conversation("Why?", "Because.", system="Be brief."),
    conversation("Why?", "Because it was so from the beginning.", system="Explain."),
]


def fresh_model():
    model = Decoder(
        ModelConfig(
            vocab_size=1024,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            max_position_embeddings=128,
            rope_theta=10_000.0,
        )
    )
    model.init_weights(0)
    return model


def examples(tokenizer):
    return collect([make_example(chat, tokenizer) for chat in CHATS])


def loader(tokenizer):
    rows = ConversationRows(examples(tokenizer), sequence_length=64, seed=0, pad_id=tokenizer.pad_id)
    return Loader(rows, batch_size=3)


def tune(model, tokenizer, out, steps):
    return train(
        model,
        loader(tokenizer),
        out=out,
        tokenizer=tokenizer,
        chat=True,
        identity={"test": 1},
        steps=steps,
        seed=0,
        schedule=Schedule("cosine", peak=1e-2),
        optimizer=OptimizerSettings(weight_decay=0.0),
        micro_batch_size=2,
        heldout=lambda: packed_batches(examples(tokenizer), 64, pad_id=tokenizer.pad_id),
        intervals=Intervals(checkpoint=41, evaluate=41),
        wishes=Wishes(device="cpu", dtype="float32", compile="off", threads=1),
    )


@pytest.fixture(scope="module")
def tuned(tokenizer, tmp_path_factory):
    model, out = fresh_model(), tmp_path_factory.mktemp("tuned")
    return model, tune(model, tokenizer, out, 80)


def test_a_tuned_model_gives_each_prompt_its_own_answer_and_stops_by_itself(tuned, tokenizer):
    model, _ = tuned
    generator = Generator(model, tokenizer, stop_ids=[tokenizer.end_of_turn_id, tokenizer.eot_id])
    prompts = [tokenizer.render(chat.messages[:-1], add_generation_prompt=True).ids for chat in CHATS]
    answers = generator.generate(prompts, SamplingParams(max_new_tokens=32, temperature=0))
    assert [answer.text for answer in answers] == [chat.messages[-1]["content"] for chat in CHATS]
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_tuning_taken_up_in_the_midst_of_an_epoch_ends_with_the_same_weights(tuned, tokenizer, tmp_path):
    _, whole = tuned
    assert 41 * 3 % loader(tokenizer).rows.rows_per_epoch
    out = tmp_path / "again"
    shutil.copytree(whole.last.parent.parent, out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / "step-00000080")
    resumed = tune(fresh_model(), tokenizer, out, 80)
    assert (resumed.steps, resumed.tokens) == (80, whole.tokens)
    assert hash_file(resumed.last / "model.safetensors") == hash_file(whole.last / "model.safetensors")


def test_the_page_on_formats_names_every_file_and_field_that_tuning_writes(tuned):
    _, whole = tuned
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    named = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))
    records = read_metrics(whole.last.parent.parent / "metrics.jsonl")
    fields = {field for record in records for field in record} | {record["kind"] for record in records}
    state = set(json.loads((whole.last / "training" / "state.json").read_text("utf-8")))
    files = {path.relative_to(whole.last).as_posix() for path in whole.last.rglob("*") if path.is_file()}
    assert {"train", "heldout", "loss", "epochs"} <= fields
    assert fields | state | files <= named
