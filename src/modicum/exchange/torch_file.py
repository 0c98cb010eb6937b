"""A torch file from anywhere: what it says is checked before it is read, and nothing in it is executed.

torch.load's weights-only unpickler does the reading. Before it, the file must be the plain zip archive that torch.save
writes, and its pickle may name nothing but tensors and plain containers: that leaves the rest of what torch allows, and
what a program around us may have allowed, out of reach.
"""

import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickletools import genops
from typing import Any

import torch

from modicum.store import UserError

_LARGEST_PICKLE = 1 << 24  # a tensor takes about 200 bytes of it
_STORAGES = ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool", "Untyped")
_HARMLESS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch Size",
    "torch device",
    *(f"torch {name}Storage" for name in _STORAGES),
    *(f"torch.storage {name}Storage" for name in _STORAGES),
    *(f"torch {name}" for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")),
}


def read_torch_file(path: Path, *, only_shapes: bool) -> Any:
    """What a torch file holds. Raises UserError for one that is not as torch.save writes it, or that names code.

    only_shapes: no tensor's bytes are read; their shapes may then be anything that the file claims. Otherwise tensors
    lie in the file, mapped into memory, and a claim that it does not hold is refused.
    """
    _check_globals(path, _pickle_of(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, to whoever wrote the file
            if only_shapes:
                return torch.load(path, weights_only=True, map_location="meta")
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        # the unpickler lets through whatever a malformed file makes Python raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read as weights alone ({reason}); save it again with torch.save") from None


def _pickle_of(path: Path) -> bytes:
    """The archive's pickle, once the archive is known to be one that torch.save writes: plain, whole, not packed."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(path, members, size)
            (pickle,) = (member for member in members if member.filename.lower().endswith("data.pkl"))
            return archive.read(pickle)
    except (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(
            f"{path}: not a whole file of torch.save's ({error}); copy it again. One that a PyTorch before 1.6 wrote "
            "must be loaded and saved again with a newer one"
        ) from None


def _check_members(path: Path, members: list[zipfile.ZipInfo], size: int) -> None:
    names = [member.filename.lower() for member in members]  # torch's own reader does not mind the case
    if len(set(names)) != len(names) or sum(name.endswith("data.pkl") for name in names) != 1:
        raise UserError(f"{path}: not a file of torch.save's: it must hold one data.pkl, and no name twice")
    if any(name.endswith("constants.pkl") for name in names):
        raise UserError(f"{path}: a TorchScript program, not weights; save the model's state_dict() instead")
    packed = [member.filename for member in members if member.compress_type or member.file_size != member.compress_size]
    if packed:
        raise UserError(
            f"{path}: {packed[0]} is compressed, which torch.save never does: unpacked it claims "
            f"{next(m.file_size for m in members if m.filename == packed[0]):,} bytes; save it again with torch.save"
        )
    if sum(member.file_size for member in members) > size or min(member.header_offset for member in members) != 0:
        raise UserError(f"{path}: its parts claim more bytes than the file has, or do not begin where it does")
    if any(member.file_size > _LARGEST_PICKLE for member in members if member.filename.lower().endswith(".pkl")):
        raise UserError(f"{path}: its data.pkl is larger than {_LARGEST_PICKLE >> 20} MiB; no model's is")


def _check_globals(path: Path, pickle: bytes) -> None:
    """Raise UserError unless everything that the pickle names is on our list. Parses; runs nothing."""
    named: dict[str, None] = {}
    try:
        for opcode, argument, _ in genops(pickle):
            if opcode.name == "GLOBAL":
                named[str(argument)] = None
            elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):  # torch.save writes none of these
                named[f"what its {opcode.name} names"] = None
    except Exception as error:  # genops raises what a broken argument makes it raise
        raise UserError(f"{path}: its data.pkl is broken ({error}); copy the file again") from None
    foreign = [".".join(name.split(" ", 1)) if name.count(" ") == 1 else name for name in named.keys() - _HARMLESS]
    if foreign:
        raise UserError(
            f"{path}: would call {', '.join(sorted(foreign))}; nothing was executed. Only tensors, numbers, texts, "
            "lists and mappings are read: save the state_dict and the config as plain ones"
        )


def is_mapping_of_tensors(value: Any) -> bool:
    """Whether every value is a tensor and every key a text."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def write_torch_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data and tensors as torch.save does, to be read back as weights alone. OSError names the file."""
    try:
        with path.open("wb") as file:  # torch's own writer hides what the operating system said
            torch.save(dict(content), file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
