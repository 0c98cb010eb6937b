"""Rounded weights on disk, in the public compressed-tensors layout: transformers with that package loads it as it lies.

8 bits ("int-quantized"): NAME.weight int8 (outputs, inputs) and NAME.weight_scale (outputs, 1). 4 bits
("pack-quantized"): NAME.weight_packed int32 (outputs, inputs/8), the first number in the lowest bits, each plus eight,
NAME.weight_scale float16 (outputs, inputs/32), NAME.weight_shape. config.json names the matrices of each kind. A tied
head has no weight of its own, but its scale once more: transformers widens both of them, each by its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.model.packing import BLOCK, RoundedMatrix
from modicum.store import UserError

HEAD, TABLE = "lm_head", "model.embed_tokens"
_FORMATS = {8: "int-quantized", 4: "pack-quantized"}
_ANOTHER = "only files of `modicum quantize` are read; take the checkpoint at full precision"


def rounded_config(bits: Mapping[str, int], full: list[str], *, tied: bool) -> dict[str, Any]:
    """config.json's quantization_config. bits: of each rounded matrix by name; full: those that are not."""
    groups = {}
    for width, name in ((8, "eight_bits"), (4, "four_bits")):
        targets = [matrix for matrix, its in bits.items() if its == width]
        if tied and TABLE in targets:
            targets.append(HEAD)
        if targets:
            groups[name] = _group(targets, width)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*full, HEAD] if tied and TABLE in full else full,
        "kv_cache_scheme": None,
    }


def rounded_tensors(matrices: Mapping[str, RoundedMatrix], *, tied: bool) -> dict[str, Tensor]:
    """What the file holds of these matrices, by the names above."""
    stored = {}
    for name, matrix in matrices.items():
        if matrix.bits == 8:
            stored[f"{name}.weight"] = matrix.values
        else:
            stored[f"{name}.weight_packed"] = _pack(matrix.values)
            stored[f"{name}.weight_shape"] = torch.tensor(matrix.values.shape)
        stored[f"{name}.weight_scale"] = matrix.scale if matrix.bits == 8 else matrix.scale.half()
    if tied and TABLE in matrices:
        stored[f"{HEAD}.weight_scale"] = matrices[TABLE].scale.clone()
    return stored


def bits_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bits of each rounded matrix by name, from a config.json; none where it has no quantization_config.

    shapes: of the decoder's own tensors by name. Raises UserError for what `rounded_config` does not write.
    """
    given = config.get("quantization_config")
    if given is None:
        return {}
    groups = given.get("config_groups") if isinstance(given, dict) else None
    if not isinstance(groups, dict) or given.get("quant_method") != "compressed-tensors":
        raise UserError(f"quantization_config: expected the compressed-tensors layout; {_ANOTHER}")
    found: dict[str, int] = {}
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, dict) else None
        width = {"eight_bits": 8, "four_bits": 4}.get(name)
        if width is None or not isinstance(targets, list) or group != _group(targets, width):
            raise UserError(f"quantization_config.config_groups.{name}: not as it is written here; {_ANOTHER}")
        found |= {str(target): width for target in targets}
    if f"{HEAD}.weight" not in shapes:
        found.pop(HEAD, None)
    if found.get(TABLE) == 4:
        raise UserError(f"quantization_config: {TABLE} of 4 bits; {_ANOTHER}")
    strangers = [name for name in found if len(shapes.get(f"{name}.weight", ())) != 2]
    if strangers:
        raise UserError(f"quantization_config: {', '.join(strangers)}: no matrix of this model; {_ANOTHER}")
    return found


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], bits: Mapping[str, int], *, tied: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the file must have: those of the decoder's, the rounded ones as they are stored."""
    stored = dict(shapes)
    for name, width in bits.items():
        outputs, inputs = shapes[f"{name}.weight"]
        groups = 1 if width == 8 else -(-inputs // BLOCK)
        stored[f"{name}.weight_scale"] = (outputs, groups)
        if width == 4:
            del stored[f"{name}.weight"]
            stored[f"{name}.weight_packed"] = (outputs, -(-inputs // 8))
            stored[f"{name}.weight_shape"] = (2,)
    if tied and TABLE in bits:
        stored[f"{HEAD}.weight_scale"] = (shapes[f"{TABLE}.weight"][0], 1)
    return stored


def read_matrix(tensors: Mapping[str, Tensor], name: str, bits: int, inputs: int) -> RoundedMatrix:
    """One matrix from a file's tensors. Raises UserError where its numbers are of another type."""
    numbers = tensors[f"{name}.weight" if bits == 8 else f"{name}.weight_packed"]
    wanted = torch.int8 if bits == 8 else torch.int32
    if numbers.dtype != wanted:
        raise UserError(f"{name}: holds {numbers.dtype}, config.json says {wanted}; take another checkpoint")
    values = numbers if bits == 8 else _unpack(numbers, inputs)
    return RoundedMatrix(values, tensors[f"{name}.weight_scale"].float(), bits)


def _group(targets: list[Any], bits: int) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if bits == 8 else "group",
        "group_size": None if bits == 8 else BLOCK,
        "dynamic": False,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": _FORMATS[bits],
    }


def _pack(values_OI: Tensor) -> Tensor:
    outputs, inputs = values_OI.shape
    filled = torch.full((outputs, -(-inputs // 8) * 8), 8, dtype=torch.int64)
    filled[:, :inputs] = values_OI.long() + 8
    words = (filled.view(outputs, -1, 8) << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack(words: Tensor, inputs: int) -> Tensor:
    halves = (words[..., None] >> (4 * torch.arange(8, dtype=torch.int32))) & 15
    return (halves.flatten(1)[:, :inputs] - 8).to(torch.int8)
