"""The folder of an ONNX model as transformers.js and onnxruntime-genai look for it: graph, configs, tokenizer."""

from pathlib import Path
from typing import Any

from modicum.checkpoint import Checkpoint
from modicum.exchange.onnx_graph import decoder_graph
from modicum.exchange.onnx_nodes import onnx_library
from modicum.exchange.onnx_weights import OnnxQuant, onnx_tensors
from modicum.store import read_json, write_json

DATA_BYTES = 1 << 30  # of weights in the graph's own file: what a browser still takes, and below protobuf's 2 GiB
_APART = 1024  # bytes of a tensor that lies beside the graph, where the large ones do
_SUFFIXES: dict[OnnxQuant, str] = {"fp32": "", "fp16": "_fp16", "int8": "_int8"}  # transformers.js' own


def model_file(quant: OnnxQuant) -> str:
    """The graph's place in the folder."""
    return f"onnx/model{_SUFFIXES[quant]}.onnx"


def write_onnx(folder: Path, checkpoint: Checkpoint, quant: OnnxQuant, *, data_bytes: int = DATA_BYTES) -> None:
    """Write onnx/model<quant>.onnx, config.json, generation_config.json, genai_config.json and the tokenizer's files.

    Weights of more than `data_bytes` lie beside the graph, in a file named as it with _data behind.
    """
    file = folder / model_file(quant)
    outside = write_graph(file, checkpoint, quant, data_bytes=data_bytes)
    config = read_json(checkpoint.path / "config.json")
    settings: dict[str, Any] = {"dtype": quant, "kv_cache_dtype": {"fp16": "float16"}}
    if outside:
        settings["use_external_data_format"] = {file.name: 1}
    write_json(folder / "config.json", {**config, "transformers.js_config": settings})
    write_json(folder / "generation_config.json", read_json(checkpoint.path / "generation_config.json"))
    write_json(folder / "genai_config.json", genai_config(checkpoint, quant))
    checkpoint.tokenizer.save(folder)
    if checkpoint.tokenizer.chat_template is not None:  # transformers.js looks for it here alone
        words = read_json(folder / "tokenizer_config.json")
        write_json(folder / "tokenizer_config.json", {**words, "chat_template": checkpoint.tokenizer.chat_template})


def write_graph(file: Path, checkpoint: Checkpoint, quant: OnnxQuant, *, data_bytes: int = DATA_BYTES) -> bool:
    """Write the graph alone. Returns whether its weights lie beside it."""
    library = onnx_library()
    model = decoder_graph(checkpoint.config, onnx_tensors(checkpoint.weights, quant), quant)
    sizes = [len(one.raw_data) for one in model.graph.initializer]
    outside = sum(sizes) > data_bytes
    if outside:  # marked here, for the library would look for the file in the folder that one stands in
        for one, size in zip(model.graph.initializer, sizes, strict=True):
            if size >= _APART:
                library.external_data_helper.set_external_data(one, f"{file.name}_data")
    file.parent.mkdir(parents=True, exist_ok=True)
    library.save_model(model, file)
    return outside


def genai_config(checkpoint: Checkpoint, quant: OnnxQuant) -> dict[str, Any]:
    """What onnxruntime-genai reads: sizes, names of inputs and outputs, tokens that begin and end, greedy search."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    pair = {"key": "past_key_values.%d.key", "value": "past_key_values.%d.value"}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": model_file(quant),
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            **{f"past_{part}_names": name for part, name in pair.items()},
        },
        "outputs": {
            "logits": "logits",
            **{f"present_{part}_names": name.replace("past_key_values", "present") for part, name in pair.items()},
        },
    }
    return {
        "model": {
            "type": "qwen3" if config.qk_norm else "llama",
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": checkpoint.stop_ids,
            "pad_token_id": tokenizer.pad_id,
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "decoder": decoder,
        },
        # the cache grows with each step: the graph puts new keys behind the old ones
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "max_length": config.max_position_embeddings,
            "past_present_share_buffer": False,
        },
    }
