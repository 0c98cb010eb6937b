"""A GGUF file as bytes on the disk: metadata, then tensors, by the gguf package's writer."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modicum.exchange.gguf_metadata import architecture_of, model_metadata
from modicum.exchange.gguf_vocabulary import Value, vocabulary_metadata
from modicum.exchange.gguf_weights import FILE_TYPES, TYPES, FileTensor, Quant, gguf_library
from modicum.model import ModelConfig
from modicum.store import written_by_numpy
from modicum.tokenizer import Tokenizer


def file_metadata(config: ModelConfig, tokenizer: Tokenizer, quant: Quant) -> dict[str, Value]:
    """Every key of the file but the architecture's, which the writer puts first. UserError for what has no word."""
    return {
        **model_metadata(config),
        "general.file_type": FILE_TYPES[quant],
        "general.quantization_version": 2,
        **vocabulary_metadata(tokenizer, config.vocab_size),
    }


def write_gguf(
    path: Path, config: ModelConfig, metadata: Mapping[str, Value], tensors: Iterable[FileTensor]
) -> list[FileTensor]:
    """Write the file. Returns the tensors that did not take the type that was asked for.

    Raises UserError where they do not fit on the disk.
    """
    library = gguf_library()
    writer = library.GGUFWriter(None, architecture_of(config))
    for key, value in metadata.items():
        _add(writer, key, value)
    others = []
    for tensor in tensors:
        kind = library.GGMLQuantizationType(TYPES[tensor.kind][0])
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind)
        others += [tensor] if tensor.fallback else []
    with written_by_numpy(path):
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return others


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
