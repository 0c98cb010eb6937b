"""A GGUF file behind the same API: llama.cpp's passes, and everything else as with the checkpoint it was made of."""

import concurrent.futures
import json
import random
import re
import time
from dataclasses import replace

import httpx2
import jsonschema
import openai
import pytest
import torch
from processes import free_port, start_process, wait_until_ready
from talking import WAYS, ask

from modicum.exchange.gguf_runtime import ask as ask_runtime
from modicum.exchange.gguf_weights import file_tensors
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.generate import Engine, Generator, SamplingParams
from modicum.generate.passes import make_passes
from modicum.model import Decoder, ModelConfig
from modicum.serve import Limits, Served, ServerSettings, model_name, serve
from modicum.serve.gguf import read_source
from modicum.serve.llama import LlamaModel
from modicum.store import UserError

QUESTIONS = ["What is a port?", "Name one.", "What is a port? And what is none?", "é 日本 🙂\n\ttab", "x" * 150]
GREEDY = {"temperature": 0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asked(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def write(generator, path, quant):
    config = generator.model.config
    metadata = file_metadata(config, generator.tokenizer, quant)
    write_gguf(path, config, metadata, file_tensors(generator.model.state_dict(), config, quant))
    return path


@pytest.fixture(scope="module")
def file(generator, tmp_path_factory):
    return write(generator, tmp_path_factory.mktemp("gguf") / "model-f32.gguf", "f32")


@pytest.fixture(scope="module")
def source(file):
    return read_source(file)


def served(source, slots=4, max_queue=16):
    generator = Generator(LlamaModel(source), source.tokenizer, stop_ids=source.stop_ids)
    engine = Engine(generator, slots=slots, max_queue=max_queue, prefill_chunk=32)
    return Served("nano", generator, engine, Limits(seconds=60, retry_seconds=3))


@pytest.fixture(scope="module")
def gguf(source, start):
    with start(load=lambda: served(source)) as server:
        yield server


def test_the_file_says_what_the_checkpoint_does(source, generator):
    assert source.tokenizer.definition["model"]["vocab"] == generator.tokenizer.definition["model"]["vocab"]
    assert source.tokenizer.chat_template == generator.tokenizer.chat_template
    assert set(source.stop_ids) == generator.stop_ids
    assert source.sizes.vocab_size == generator.model.config.vocab_size
    assert source.sizes.max_position_embeddings == generator.context
    config = generator.model.config
    assert source.cache_numbers == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_the_checkpoint(gguf, server, way):
    for question in QUESTIONS:
        found, wanted = (ask(one.address, way, asked(question, **GREEDY)) for one in (gguf, server))
        assert found.texts == wanted.texts
        assert found.finish_reasons == wanted.finish_reasons
        assert found.finishes == {0: 1}
        assert found.usage.prompt_tokens == wanted.usage.prompt_tokens
        assert found.usage.completion_tokens == wanted.usage.completion_tokens


def test_sampled_answers_with_their_probabilities_are_those_of_the_checkpoint(gguf, server):
    fields = {"seed": 3, "n": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}
    found, wanted = (ask(one.address, "sync", asked(QUESTIONS[0], **fields)) for one in (gguf, server))
    assert found.texts == wanted.texts
    assert len(set(found.texts.values())) == 3
    for index, tokens in wanted.tokens.items():
        ours = [token.logprob for token in found.tokens[index]]
        assert ours == pytest.approx([token.logprob for token in tokens], abs=1e-3)


def test_a_stop_string_ends_an_answer(gguf, server):
    whole = ask(server.address, "sync", asked(QUESTIONS[0], seed=5, max_tokens=60)).texts[0]
    stop = whole[9:14]
    found = ask(gguf.address, "sync stream", asked(QUESTIONS[0], seed=5, max_tokens=60, stop=stop))
    assert (found.texts[0], found.finish_reasons[0]) == (whole[: whole.index(stop)], "stop")


def test_who_shares_the_batch_changes_no_greedy_answer(gguf, server):
    """More requests than slots, many of them beginning alike: slots are taken over, copied and cut."""
    dice = random.Random(0)
    begins = ["Ports are doors of a machine, and ", "A key opens what "]
    texts = [dice.choice(begins) + "".join(dice.choices("abc ", k=dice.randint(0, 40))) for _ in range(16)]
    wanted = [ask(server.address, "sync", asked(text, **GREEDY)).texts for text in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: ask(gguf.address, "sync", asked(text, **GREEDY)).texts, texts))
    assert found == wanted
    assert gguf.engine.numbers().prefix_hits > 0


def test_a_second_turn_is_read_from_the_first_ones_slot(gguf):
    first = ask(gguf.address, "sync", asked("One?", **GREEDY))
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": first.texts[0].strip()}]
    again = ask(gguf.address, "sync", {"messages": [*turns, {"role": "user", "content": "Two?"}], **GREEDY})
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_answers_are_held_to_schemas_expressions_and_tools(gguf):
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    expression = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "CVE-20[12][0-9]-[0-9]{4,7}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    for seed in range(4):
        found = ask(gguf.address, "sync", asked("go", response_format=wanted, seed=seed, max_tokens=300))
        assert found.finish_reasons == {0: "stop"}
        jsonschema.validate(json.loads(found.texts[0]), SCHEMA)
        found = ask(gguf.address, "sync", asked("go", extra_body={"response_format": expression}, seed=seed))
        assert re.fullmatch("CVE-20[12][0-9]-[0-9]{4,7}", found.texts[0])
        found = ask(gguf.address, "sync stream", asked("go", tools=[tool], tool_choice="required", seed=seed))
        for call in found.calls[0]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


def test_who_goes_away_frees_a_slot_and_a_full_house_says_when_to_return(source, start, generator):
    endless = asked("hi", model="nano", max_tokens=900, logit_bias={str(i): -100 for i in generator.stop_ids})
    with start(load=lambda: served(source, slots=1, max_queue=1)) as server, server.client() as client:
        stream = client.chat.completions.create(**endless | {"stream": True})
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert server.engine.numbers().active == 1
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.chat.completions.create, **endless | {"max_tokens": 3})
            while server.engine.numbers().queued < 1:
                time.sleep(0.01)
            with pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(**endless)
            assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "3")
            stream.close()
            assert waiting.result(20).usage.completion_tokens == 3
        server.wait_until_idle()
        with server.http() as http:
            assert http.get("/health").json() == {"status": "ok"}
            assert "modicum_engine_cancelled_total 1\n" in http.get("/metrics").text


def test_what_is_refused_is_refused_alike(gguf, server):
    for change in ({"temperature": -1}, {"guided_regex": "a"}, {"response_format": {"type": "poem"}}, {"model": "x"}):
        errors = []
        for one in (gguf, server):
            with one.http() as http:
                response = http.post("/v1/chat/completions", json=asked("hi", model="nano") | change)
                errors.append((response.status_code, response.json()))
        assert errors[0] == errors[1]
        assert errors[0][0] in (400, 404)
    with gguf.client() as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="nano", **asked("a " * 3000))
    assert error.value.code == "context_length_exceeded"


def test_passes_are_those_of_the_decoder_whatever_the_slots_held(source, generator):
    """Random reads, steps, takeovers and copies, side by side; the logits agree as float32 does."""
    sizes = {"slots": 3, "capacity": 40, "longest": 16}
    ours = make_passes(generator.model, compiled=False, **sizes)
    theirs = make_passes(LlamaModel(source), compiled=False, **sizes)
    dice, held = random.Random(4), [0, 0, 0]
    theirs.warm()
    with torch.inference_mode():
        for _ in range(120):
            slot, act = dice.randrange(3), dice.random()
            start = dice.randint(0, held[slot])
            if act < 0.4 and start < 30:
                ids = [dice.randrange(512) for _ in range(dice.randint(1, 10))]
                last = dice.random() < 0.8
                both = [passes.read(ids, slot, start, last=last) for passes in (ours, theirs)]
                held[slot] = start + len(ids)
            elif act < 0.8 and max(held) < 39:
                rows = dice.sample(range(3), dice.randint(1, 3))
                ids, places = [dice.randrange(512) for _ in rows], [dice.randint(0, held[row]) for row in rows]
                both = [passes.step(ids, rows, places) for passes in (ours, theirs)]
                for row, place in zip(rows, places, strict=True):
                    held[row] = place + 1
            else:
                target = dice.choice([other for other in range(3) if other != slot])
                for passes in (ours, theirs):
                    passes.copy(slot, target, start)
                held[target] = start
                continue
            if both[0] is not None:
                torch.testing.assert_close(both[1], both[0], atol=1e-3, rtol=0)
            else:
                assert both[1] is None


@pytest.mark.parametrize("length", [3, 40, 300, 500])
def test_what_is_not_finite_leaves_with_the_request_that_made_it(tokenizer, tmp_path, length):
    """One damaged row of the embedding: it fails whoever says that token, and nobody after them."""
    model = Decoder(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=600,
            tie_word_embeddings=False,
        )
    ).eval()
    model.init_weights(1)
    with torch.no_grad():
        model.model.embed_tokens.weight[[0, 77]] = torch.nan
    path = write(Generator(model, tokenizer, stop_ids=[]), tmp_path / "damaged-f32.gguf", "f32")
    damaged = read_source(path)
    engine = Engine(
        Generator(LlamaModel(damaged), damaged.tokenizer, stop_ids=[]), slots=1, context=520, prefill_chunk=32
    )
    engine.start()

    def answer(prompt):
        ticket = engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=12))
        return [number for chunk in ticket for number in chunk.ids]

    wanted = answer([30, 31, 32])
    assert len(wanted) == 12
    for _ in range(2):
        with pytest.raises(UserError, match="not finite"):
            answer([31, 77, *[40] * (length - 2)])
        assert answer([30, 31, 32]) == wanted
    engine.close()


@pytest.mark.parametrize("quant", ["q8_0", "q4_k"])
def test_rounded_weights_answer_too(tokenizer, start, tmp_path, quant):
    """Also of types that only llama.cpp reads."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}
    model = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=256, **sizes)).eval()
    model.init_weights(1)
    wide = Generator(model, tokenizer, stop_ids=[])
    source = read_source(write(wide, tmp_path / f"model-{quant}.gguf", quant))
    assert not source.float32
    with start(load=lambda: served(source)) as server:
        found = ask(server.address, "sync", asked("What is a port?", n=2, seed=1, max_tokens=20))
        assert found.finishes == {0: 1, 1: 1}


def test_the_verb_serves_a_file(file, tmp_path):
    port, named = free_port(), tmp_path / "model-f32"
    named.symlink_to(file)
    process = start_process(named, "--engine", "gguf", "--port", port, "--slots", 2, "--context", 300)
    address = f"http://127.0.0.1:{port}"
    with httpx2.Client(base_url=address) as http:
        wait_until_ready(http, process)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [(model.id, model.context) for model in client.models.list().data] == [("model-f32", 300)]
        with pytest.raises(openai.BadRequestError, match="this model's context of 300 tokens"):
            client.completions.create(model="model-f32", prompt=[30] * 300)
        assert client.completions.create(model="model-f32", prompt="a", max_tokens=3).usage.completion_tokens <= 3
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert f"model-f32 (llama.cpp runs it) at http://127.0.0.1:{port}/" in log


def test_the_engine_can_be_named_for_a_file_of_another_name(file, checkpoint, tmp_path, monkeypatch):
    class ReachedError(Exception):
        pass

    def stop(*_, **__):
        raise ReachedError

    monkeypatch.setattr("modicum.serve.server.create_app", stop)
    other = tmp_path / "weights.bin"
    other.write_bytes(file.read_bytes())
    for path, engine in ((file, None), (file, "gguf"), (other, "gguf"), (checkpoint, None), (checkpoint, "modicum")):
        with pytest.raises(ReachedError):
            serve(path, ServerSettings(engine=engine))
    for path, engine, word in (
        (file, "modicum", "--engine gguf"),
        (other, None, "--engine gguf"),
        (checkpoint, "gguf", ""),
    ):
        with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{word}"):
            serve(path, ServerSettings(engine=engine))


def test_a_file_is_called_as_it_is_named(file):
    assert model_name(file) == "model-f32"


def test_what_is_no_sound_file_is_the_users_to_mend(file, tmp_path):
    data = file.read_bytes()
    for name, content, word in (
        ("text.gguf", b"hello, world", "not a GGUF file"),
        ("header.gguf", data[:5000], "ends inside its header|room for"),
        ("weights.gguf", data[:-4000], "llama.cpp"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=word) as error:
            read_source(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path / name))
    with pytest.raises(UserError, match=r"none\.gguf: missing"):
        read_source(tmp_path / "none.gguf")


def test_without_llama_cpp_one_line_says_how_to_get_it(file, monkeypatch):
    monkeypatch.setattr("modicum.exchange.gguf_runtime.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'modicum\[gguf\]'") as error:
        read_source(file)
    assert "\n" not in str(error.value)


def test_a_file_without_an_end_of_answers_is_refused(file, monkeypatch):
    def endless(path, **asked):
        return replace(ask_runtime(path, **asked), ends=[])

    monkeypatch.setattr("modicum.serve.gguf.ask", endless)
    with pytest.raises(UserError, match="names no token that ends an answer"):
        read_source(file)


def test_a_file_whose_texts_have_other_ids_in_llama_cpp_is_refused(file, monkeypatch):
    monkeypatch.setattr("modicum.serve.gguf.spoken_ids", lambda _, texts: [[1]] * len(texts))
    with pytest.raises(UserError, match="gives other ids to"):
        read_source(file)


def test_a_file_whose_markers_llama_cpp_finds_in_any_text_is_served(generator, tmp_path):
    """As llama.cpp's converter writes Qwen's `<tool_call>`: a user-defined token, and no control token."""
    path, config, tokenizer = tmp_path / "qwen.gguf", generator.model.config, generator.tokenizer
    metadata = file_metadata(config, tokenizer, "f32")
    marker = metadata["tokenizer.ggml.tokens"].index("<tool_call>")
    assert metadata["tokenizer.ggml.token_type"][marker] == 3
    metadata["tokenizer.ggml.token_type"][marker] = 4
    write_gguf(path, config, metadata, file_tensors(generator.model.state_dict(), config, "f32"))
    (in_llama_cpp,) = ask_runtime(path, texts=["<tool_call>"]).ids
    found = read_source(path)
    assert marker in in_llama_cpp
    assert marker not in found.tokenizer.encode("<tool_call>")


def test_a_model_without_positions_to_go_back_to_is_refused(source, monkeypatch):
    monkeypatch.setattr(LlamaModel, "_is", lambda _, fact: fact in ("is_recurrent", "has_decoder"))
    with pytest.raises(UserError, match="recurrent"):
        LlamaModel(source)
