"""Faults that conversions have, planted one by one: each is refused with its name, and nothing is written."""

import json
from dataclasses import replace

import gguf_models
import numpy as np
import onnx
import pytest

from modicum.exchange import Limits, export_onnx, onnx_exporting, onnx_gate, onnx_graph, onnx_readback, onnx_writing
from modicum.exchange.layouts import relaid
from modicum.store import UserError
from modicum.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("brief_gate")
WIDE = Limits(10, 10, 0)


@pytest.fixture
def refused(tokenizer, tmp_path):
    """A function that exports a checkpoint and returns the refusal; keyword arguments go into its config."""

    def refused(*, quant="fp32", limits=None, **changes):
        folder = gguf_models.save(tokenizer, tmp_path, **changes)
        with pytest.raises(UserError) as told:
            export_onnx(folder, quant=quant, out=tmp_path / "out", limits=limits)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".tmp-*"))
        assert "out/onnx/model" in str(told.value)
        return str(told.value)

    return refused


@pytest.fixture
def graph_with(monkeypatch):
    """A function that plants a fault in the finished graph."""

    def graph_with(change):
        make = onnx_writing.decoder_graph

        def changed(*given):
            model = make(*given)
            change(model.graph)
            return model

        monkeypatch.setattr(onnx_writing, "decoder_graph", changed)

    return graph_with


@pytest.fixture
def weights_with(monkeypatch):
    """A function that changes what is written; `everywhere` also what the file is held against."""

    def weights_with(change, everywhere=False):
        for place in (onnx_writing, *([onnx_readback] if everywhere else [])):
            make = place.onnx_tensors
            changed = lambda weights, quant, make=make: make(change(weights), quant)  # noqa: E731
            monkeypatch.setattr(place, "onnx_tensors", changed)

    return weights_with


def _constant(graph, numbers, name):
    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(numbers), f"constant.{name}"))
    return f"constant.{name}"


def test_a_causal_mask_that_was_dropped_in_prefill(refused, graph_with):
    def seeing_all(graph):
        compare = next(node for node in graph.node if node.op_type == "LessOrEqual")
        compare.op_type = "GreaterOrEqual"
        compare.input[1] = _constant(graph, np.zeros((1, 1), np.int64), "first")

    graph_with(seeing_all)
    told = refused()
    assert "a prompt of 40 tokens alone: logits differ by" in told
    assert "as if the causal mask were missing: another last token changes the logits before it by" in told


@pytest.mark.parametrize("moved", [1, -1])
def test_positions_that_are_off_by_one_behind_a_cache(moved, refused, graph_with):
    def shifted(graph):
        node = next(node for node in graph.node if "position_ids" in node.input)
        step = [
            onnx.helper.make_node("Shape", ["past_key_values.0.key"], ["held"], start=2, end=3),
            onnx.helper.make_node("Min", ["held", _constant(graph, [1], "one")], ["any"]),
            onnx.helper.make_node("Mul", ["any", _constant(graph, [moved], "moved")], ["step"]),
            onnx.helper.make_node("Add", ["position_ids", "step"], ["places"]),
        ]
        node.input[list(node.input).index("position_ids")] = "places"
        nodes = [*step, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    graph_with(shifted)
    told = refused()
    assert "tokens with a cache: logits differ by" in told
    assert "tokens alone" not in told
    assert f"as if the positions behind a cache were off by one ({moved:+d})" in told


def test_a_cache_that_forgets_what_it_holds(refused, graph_with):
    def zeroed(graph):
        node = next(node for node in graph.node if "past_key_values.1.value" in node.input)
        zero = onnx.helper.make_node("Mul", [node.input[0], _constant(graph, np.float32(0), "zero")], ["none"])
        node.input[0] = "none"
        nodes = [zero, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    graph_with(zeroed)
    assert "as if the cache held other keys or values than were put in" in refused()


def test_padding_that_is_seen(refused, graph_with):
    def blind(graph):
        node = next(node for node in graph.node if node.op_type == "And")
        node.op_type = "Or"
        node.input[1] = _constant(graph, np.array(False), "no")  # without the mask, and still causal

    graph_with(blind)
    told = refused()
    assert "in a batch padded on the left: logits differ by" in told
    assert "it is as if padding were seen" in told


def test_a_head_that_was_untied_silently(refused, graph_with):
    def untied(graph):
        table = next(one for one in graph.initializer if one.name == "model.embed_tokens.weight")
        copy = onnx.TensorProto()
        copy.CopyFrom(table)
        copy.name = "lm_head.weight"
        graph.initializer.append(copy)
        node = next(node for node in graph.node if node.op_type == "Gemm")
        node.input[1] = "lm_head.weight"

    graph_with(untied)
    assert "lm_head.weight: left over (the head is tied: it is the embedding)" in refused()


def test_a_head_that_is_the_embedding_where_it_is_not_tied(refused, graph_with):
    def tied(graph):
        next(node for node in graph.node if node.op_type == "Gemm").input[1] = "model.embed_tokens.weight"

    graph_with(tied)
    assert "it is as if the head were the embedding" in refused(tie_word_embeddings=False)


def _swapped(weights):
    def other(name):
        return name.replace("layers.0.", "x.").replace("layers.1.", "layers.0.").replace("x.", "layers.1.")

    return {other(name): weight for name, weight in weights.items()}


def _interleaved(weights):
    return relaid(weights, head_dim=16, source="half", target="interleaved")


def _short(weights):
    name = "model.embed_tokens.weight"
    return {**weights, name: weights[name][:-1]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_swapped, "model.layers.0.mlp.up_proj.weight: holds the numbers of model.layers.1.mlp.up_proj.weight"),
        (_interleaved, "model.layers.1.self_attn.q_proj.weight: its rows are in the interleaved rotary layout"),
        (_short, "model.embed_tokens.weight: is float32 [383, 64], should be float32 [384, 64]"),
    ],
    ids=["layers", "rotary", "vocabulary"],
)
def test_weights_that_are_not_the_checkpoints(change, told, refused, weights_with):
    weights_with(change)
    assert told in refused()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_swapped, "it is as if layers 0 and 1 had changed places"),
        (_interleaved, "it is as if the rows of queries and keys were in the interleaved layout"),
        (_short, "model.embed_tokens.weight: has rows for 383 tokens, the checkpoint's vocabulary has 384"),
    ],
    ids=["layers", "rotary", "vocabulary"],
)
def test_weights_that_are_not_the_checkpoints_for_writer_and_gate_alike(change, told, refused, weights_with):
    weights_with(change, everywhere=True)
    assert told in refused()


def test_a_head_one_token_short_for_writer_and_gate_alike(refused, weights_with):
    weights_with(lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"][:-1]}, everywhere=True)
    told = refused(tie_word_embeddings=False)
    assert "lm_head.weight: has rows for 383 tokens, the checkpoint's vocabulary has 384" in told


def test_a_vocabulary_one_short_in_eight_bits_for_writer_and_gate_alike(refused, weights_with):
    weights_with(_short, everywhere=True)
    assert "model.embed_tokens.weight.rounded: has rows for 383 tokens" in refused(quant="int8", limits=WIDE)


def test_a_graph_that_gives_fewer_logits_than_there_are_tokens(refused, monkeypatch):
    ask = onnx_gate.ask_onnx

    def narrow(*given, **named):
        answer = ask(*given, **named)
        return replace(answer, logits=[logits[..., :-1] for logits in answer.logits])

    monkeypatch.setattr(onnx_gate, "ask_onnx", narrow)
    assert "it gives logits to 383 tokens, the vocabulary has 384" in refused()


def test_rotary_frequencies_that_were_not_scaled(refused, monkeypatch):
    plain = onnx_graph.rotary_frequencies
    monkeypatch.setattr(onnx_graph, "rotary_frequencies", lambda width, theta, _, most: plain(width, theta, None, most))
    assert "it is as if the rotary scaling were missing" in refused(rope_scaling={"rope_type": "linear", "factor": 2.0})


def test_one_bit_of_one_scale(refused, graph_with):
    def damaged(graph):
        one = next(one for one in graph.initializer if one.name == "model.layers.1.mlp.up_proj.weight.scales")
        numbers = bytearray(one.raw_data)
        numbers[4 * 17] ^= 1
        one.raw_data = bytes(numbers)

    graph_with(damaged)
    told = refused(quant="int8", limits=WIDE)
    assert told.endswith("up_proj.weight.scales: 1 of 192 scales differ, the first at [8, 1]")


def _edited(name, **values):
    """A change of a file beside the graph: what stands in its place at dotted keys; None takes a key away."""

    def change(folder):
        said = json.loads((folder / name).read_text())
        for key, value in values.items():
            *parents, last = key.split("__")
            place = said
            for parent in parents:
                place = place[parent]
            if value is None:
                del place[last]
            else:
                place[last] = value
        (folder / name).write_text(json.dumps(said))

    return change


def _two_begin(folder):
    token = "<|endoftext|>"
    begins = {"SpecialToken": {"id": token, "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [begins, begins, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
    }
    _edited("tokenizer.json", post_processor=around)(folder)


def _one_ends(folder):
    token = "<|endoftext|>"
    ends = {"SpecialToken": {"id": token, "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, ends],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
    }
    _edited("tokenizer.json", post_processor=around)(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_edited("generation_config.json", eos_token_id=[5]), "eos_token_id is [5], the checkpoint ends an answer at"),
        (_edited("genai_config.json", model__eos_token_id=[5]), "model.eos_token_id is [5], should be [3, 0]"),
        (_edited("genai_config.json", model__bos_token_id=7), "genai_config.json: model.bos_token_id is 7, should be"),
        (_edited("genai_config.json", model__context_length=10**6), "model.context_length is 1000000, should be 64"),
        (_edited("genai_config.json", model__decoder__head_size=None), "decoder.head_size is None, should be 16"),
        (_edited("genai_config.json", search__do_sample=True), "search.do_sample is True, should be False"),
        (_edited("tokenizer_config.json", chat_template=None), "tokenizer_config.json: chat_template is not the"),
        (_edited("tokenizer_config.json", chat_template="{{ messages }}"), "chat_template is not the checkpoint's"),
        (_edited("tokenizer_config.json", eos_token="a"), "its tokenizer cannot be read back"),
        (_edited("tokenizer_config.json", eos_token="<|im_end|>"), "tokens have other roles than in the checkpoint"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), "chat_template.jinja: is not"),
        (_two_begin, "tokenizer.json: its post_processor makes 3 tokens of a text of one"),
        (_one_ends, "tokens have other roles than in the checkpoint"),
    ],
)  # fmt: skip
def test_words_beside_the_graph_that_are_not_the_checkpoints(change, told, refused, monkeypatch):
    write = onnx_exporting.write_onnx

    def damaged(folder, *given, **named):
        write(folder, *given, **named)
        change(folder)

    monkeypatch.setattr(onnx_exporting, "write_onnx", damaged)
    found = refused()
    assert told in found
    assert ".tmp-" not in found


def test_another_pre_tokenizer(tmp_path, monkeypatch):
    write = onnx_exporting.write_onnx

    def damaged(folder, *given, **named):
        write(folder, *given, **named)
        said = json.loads((folder / "tokenizer.json").read_text())
        said["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
        (folder / "tokenizer.json").write_text(json.dumps(said))

    monkeypatch.setattr(onnx_exporting, "write_onnx", damaged)
    # joins a parenthesis with the word behind it, which GPT-2's pattern cuts apart
    joining = train_tokenizer(["a(open a(open"] * 40, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    with pytest.raises(UserError, match=r"model\.onnx: tokenizer\.json gives other ids to .* texts, so"):
        export_onnx(gguf_models.save(joining, tmp_path), out=tmp_path / "out")


def test_weights_that_lie_outside_the_folder(refused, monkeypatch):
    write = onnx_exporting.write_onnx

    def elsewhere(folder, *given, **_):
        write(folder, *given, data_bytes=0)
        file = folder / "onnx" / "model.onnx"
        model = onnx.load(file, load_external_data=False)
        for one in model.graph.initializer:
            for entry in one.external_data:
                if entry.key == "location":
                    entry.value = "../elsewhere"
        file.write_bytes(model.SerializeToString())

    monkeypatch.setattr(onnx_exporting, "write_onnx", elsewhere)
    assert "lies in '../elsewhere', not in model.onnx_data beside the graph" in refused()


def test_a_graph_that_onnxruntime_does_not_take(refused, graph_with):
    def broken(graph):
        next(node for node in graph.node if node.op_type == "Gemm").op_type = "Gamma"

    graph_with(broken)
    told = refused()
    assert "onnxruntime does not run it" in told
    assert "Gamma" in told
