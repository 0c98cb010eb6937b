"""Write a checkpoint: everything flushed before it has a name, and `last` moved only to what is whole."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from modicum.checkpoint.rounded import rounded_config, rounded_tensors
from modicum.model import ModelConfig
from modicum.model.packing import RoundedMatrix
from modicum.store import UserError, atomic_directory, verify_manifest, write_json, write_manifest
from modicum.store.atomic import fsync_path, replace_directory
from modicum.store.manifest import MANIFEST
from modicum.tokenizer import Tokenizer

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "training/optimizer.safetensors", "training/state.json"
TRAINED = "training/trained.json"  # in place of the two where a checkpoint was made of one that was trained here


@dataclass(frozen=True)
class TrainingState:
    """What training needs to go on: tensors by name (optimizer moments, random states), and plain JSON data."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def step_folder(root: Path, step: int) -> Path:
    """root/step-00001000: names sort as the steps do."""
    return root / f"step-{step:08d}"


def save_checkpoint(
    root: Path,
    step: int,
    *,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    chat: bool,
    training: TrainingState | None,
    stop_ids: Sequence[int] | None = None,
    trained: bool = False,
) -> Path:
    """Write root/step-<step> and move `root/last` to it. Returns the folder.

    weights: the decoder's state dict, as it is to be stored (float32 masters while training). chat: whether an answer
    ends with the end of a turn, not only with the end of the text; stop_ids: what ends one instead, for a model that
    came with ids of its own. trained: whether it was trained here, for one without `training`. A kill or a full disk
    at any moment leaves the former checkpoints as they were.
    """
    final = step_folder(root, step)
    with atomic_directory(final) as folder:
        write_model(folder, config=config, weights=weights, tokenizer=tokenizer, chat=chat, stop_ids=stop_ids)
        if training is not None:
            (folder / "training").mkdir()
            _save_tensors(folder / OPTIMIZER, training.tensors)
            write_json(folder / STATE, training.state)
        elif trained:
            mark_trained(folder)
        write_manifest(folder)
    point(root / "last", final)
    return final


def mark_trained(folder: Path) -> None:
    """Say in a checkpoint that no training goes on from that its model was trained here all the same."""
    (folder / TRAINED).parent.mkdir(exist_ok=True)
    write_json(folder / TRAINED, {"version": 1})


def write_model(
    folder: Path,
    *,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    chat: bool,
    stop_ids: Sequence[int] | None = None,
    rounded: Mapping[str, RoundedMatrix] | None = None,
) -> None:
    """The files that make `folder` a Hugging Face model: config, generation_config, weights, tokenizer.

    rounded: matrices by the name of their module, which are not in `weights`.
    """
    if config.rotary_layout != "half":
        raise ValueError("files hold the half-split rotary layout: permute the weights before they are written")
    if any(name.startswith("_orig_mod.") for name in weights):
        raise ValueError("these are the names of a compiled module; give the state dict of the module it wraps")
    ours = [tokenizer.end_of_turn_id, tokenizer.eot_id] if chat else [tokenizer.eot_id]
    stops = list(dict.fromkeys(ours if stop_ids is None else stop_ids))  # one id may be both ends
    tokens: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stops if chat or len(stops) > 1 else stops[0],
        "pad_token_id": tokenizer.pad_id,
    }
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
    written = config.to_hf(**tokens, dtype=dtypes.pop() if len(dtypes) == 1 else "float32")
    if rounded:
        full = [name.removesuffix(".weight") for name, weight in weights.items() if weight.dim() == 2]
        bits = {name: matrix.bits for name, matrix in rounded.items()}
        written["quantization_config"] = rounded_config(bits, full, tied=config.tie_word_embeddings)
        weights = {**weights, **rounded_tensors(rounded, tied=config.tie_word_embeddings)}
    write_json(folder / "config.json", written)
    write_json(folder / "generation_config.json", {**tokens, "eos_token_id": stops})
    _save_tensors(folder / WEIGHTS, weights)
    tokenizer.save(folder)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to its neighbour `target`, in one step.

    A folder in its place, which a copy that follows links makes of one, is replaced where the step folder that it is a
    copy of stands beside it, whole. Raises UserError where none does.
    """
    copied = link.is_dir() and not link.is_symlink()
    if copied and not _stands_beside(link):
        raise UserError(
            f"{link}: a folder in the place of a link, and no step-… folder beside it holds the same; give it the name "
            "of its step, such as step-00001000, or move it away"
        )
    temporary = link.with_name(f".tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    if copied:
        replace_directory(temporary, link)
    else:
        os.replace(temporary, link)
        fsync_path(link.parent)


def _stands_beside(copy: Path) -> bool:
    """Whether a step folder beside this one has the same files, none of them damaged."""
    if not (copy / MANIFEST).is_file():
        return False
    same = (copy / MANIFEST).read_bytes()
    for manifest in copy.parent.glob(f"step-*/{MANIFEST}"):
        if manifest.read_bytes() == same:
            try:
                verify_manifest(manifest.parent)
            except UserError:
                continue
            return True
    return False


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors refuses tensors that share memory; a tied head is left out by the decoder's own state dict
    whole = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors.items()}
    try:
        save_file({name: whole[name] for name in sorted(whole)}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the Rust side wraps what the operating system said
        raise UserError(f"{path.parent}: the weights could not be written ({error}); make room on the disk") from None
