"""Read a checkpoint: every fault of its files is one clear error that names them."""

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modicum.checkpoint.opening import opening_of
from modicum.checkpoint.rounded import bits_of, read_matrix, stored_shapes
from modicum.checkpoint.save import OPTIMIZER, STATE, TRAINED, WEIGHTS, TrainingState
from modicum.model import Decoder, ModelConfig
from modicum.model.packing import RoundedMatrix
from modicum.model.quantized import install
from modicum.store import UserError, read_json, verify_manifest
from modicum.store.manifest import MANIFEST
from modicum.tokenizer import Tokenizer, load_tokenizer

_ANOTHER = "take another checkpoint, or copy this one again"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose files have been checked. Weights and training state are read when asked for.

    chat: whether its config lists its ends, one of a turn among them, as it does for a chat model. rounded: bits of
    each matrix that is stored in 8 or 4, by the name of its module; none at full precision.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    stop_ids: list[int]
    chat: bool
    rounded: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The update it was written after; 0 where the folder is not named after one."""
        name = self.path.resolve().name
        return int(name.removeprefix("step-")) if name.startswith("step-") and name[5:].isdecimal() else 0

    @property
    def talks(self) -> bool:
        """Whether it answers in its tokenizer's chat template: it stops where that ends a turn. Where a text ends in
        the same way, `chat` tells it from a base model."""
        tokenizer, turn = self.tokenizer, self.tokenizer.end_of_turn_id
        return tokenizer.chat_template is not None and turn in self.stop_ids and (turn != tokenizer.eot_id or self.chat)

    @property
    def was_trained(self) -> bool:
        """Whether it was written in training, or made of one that was: its folder tells."""
        return (self.path / STATE).exists() or (self.path / TRAINED).exists()

    @property
    def opening(self) -> list[int]:
        """What stands before a text that it is to go on from, none or one: see opening_of. A chat model of a tokenizer
        from elsewhere met in training here what its template writes, and nothing before it."""
        return opening_of(self.tokenizer, learnt=self.was_trained and not self.talks)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Names to tensors, as they lie on disk."""
        return _read_tensors(self.path / WEIGHTS)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Hugging Face's names to weights. Raises UserError where they are rounded, which nothing can be made of."""
        if self.rounded:
            raise UserError(
                f"{self.path}: its weights are rounded to {' and '.join(map(str, sorted(set(self.rounded.values()))))} "
                "bits, to be asked only; to train, export or convert, take the checkpoint that it was made from"
            )
        return self.tensors

    @cached_property
    def training(self) -> TrainingState | None:
        """What training goes on from, or None where the checkpoint has no such part."""
        if not (self.path / STATE).exists():
            return None
        return TrainingState(_read_tensors(self.path / OPTIMIZER), _read_json(self.path / STATE))

    def model(
        self, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", widened: bool = False
    ) -> Decoder:
        """The decoder with these weights, ready to be asked (in evaluation mode). Each call makes a new one.

        Rounded ones stay so, in modules of their own, and nothing of such a model takes a gradient. Those round what
        they multiply too; widened: with full matrices of the same numbers instead, whose products are exact.
        """
        with torch.device("meta"):
            model = Decoder(self.config)
        shapes = _shapes(self.config)
        stored = dict(self.tensors)
        for name, bits in self.rounded.items():
            matrix = read_matrix(self.tensors, name, bits, shapes[f"{name}.weight"][1])
            if widened:
                stored[f"{name}.weight"] = matrix.wide()
                continue
            moved = RoundedMatrix(matrix.values.to(device), matrix.scale.to(device), bits)
            install(model, name, moved, dtype=dtype)
        kept = model.state_dict().keys()
        weights = {name: stored[name].to(device=device, dtype=dtype, copy=True) for name in kept}
        model.load_state_dict(weights, assign=True)
        return model.requires_grad_(not self.rounded).eval()


def load_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path` (a folder, or a link to one).

    verify: compare every file with the manifest's SHA-256. Raises UserError, naming the file, for a folder that is no
    checkpoint (with the way in, for another program's), a file that is missing, cut off or altered, and tensors that
    are not those of the config.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; expected a folder such as runs/<name>/sft/checkpoints/last")
    if not (path / "config.json").exists():
        raise UserError(f"{path}: not a checkpoint, for it has no config.json; name a step-… folder or `last`")
    _refuse_links_out(path)
    if verify:
        if not (path / MANIFEST).exists():
            raise UserError(
                f"{path}: has no manifest.json, so it is another program's model, or an export; make a checkpoint of "
                f"it with `modicum import {path} --dialect hf --out DIR`"
            )
        verify_manifest(path)
    try:
        given = _read_json(path / "config.json")
        config = ModelConfig.from_hf({key: value for key, value in given.items() if key != "quantization_config"})
        shapes = _shapes(config)
        rounded = bits_of(given, shapes)
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from None
    tokenizer = load_tokenizer(path, missing="keep")
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path}: tokenizer.json has {tokenizer.vocab_size} ids and config.json a vocabulary of "
            f"{config.vocab_size}; they are not of one checkpoint: {_ANOTHER}"
        )
    _check_shapes(path / WEIGHTS, stored_shapes(shapes, rounded, tied=config.tie_word_embeddings))
    ends = given.get("eos_token_id")
    chat = isinstance(ends, list) and tokenizer.end_of_turn_id in ends
    return Checkpoint(path, config, tokenizer, _stop_ids(path, tokenizer), chat, rounded)


def newest(root: Path) -> Path | None:
    """The whole checkpoint of the highest step below `root`, or None. A damaged one is passed over with a warning."""
    folders = [path for path in root.glob("step-*") if path.is_dir() and path.name[5:].isdecimal()]
    for folder in sorted(folders, reverse=True):
        try:
            verify_manifest(folder)
        except UserError as error:
            warnings.warn(f"passed over a damaged checkpoint: {error}", stacklevel=2)
        else:
            return folder
    return None


def _refuse_links_out(path: Path) -> None:
    """A checkpoint from elsewhere must not make us read, or copy on, what lies outside of its folder."""
    inside = path.resolve()
    out = [file for file in path.rglob("*") if file.is_symlink() and not file.resolve().is_relative_to(inside)]
    if out:
        raise UserError("\n".join(f"{file}: a link out of the checkpoint; put the file itself there" for file in out))


def _stop_ids(path: Path, tokenizer: Tokenizer) -> list[int]:
    given = _read_json(path / "generation_config.json").get("eos_token_id")
    ids = [i for i in (given if isinstance(given, list) else [given]) if type(i) is int]
    if not ids or not all(0 <= i < tokenizer.vocab_size for i in ids):
        raise UserError(
            f"{path / 'generation_config.json'}: eos_token_id {given!r} is not in the vocabulary; {_ANOTHER}"
        )
    return ids


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in Decoder(config).state_dict().items()}


def _check_shapes(file: Path, wanted: dict[str, tuple[int, ...]]) -> None:
    """Compare names and shapes in the file's header with those wanted, before any tensor is read."""
    found = _read_shapes(file)
    faults = [f"{name}: missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name}: not part of this model" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name}: has shape {list(found[name])}, config.json asks for {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and found[name] != shape
    ]
    if faults:
        raise UserError("\n".join([*(f"{file}: {fault}" for fault in faults), _ANOTHER]))


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with _opened(file) as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _read_tensors(file: Path) -> dict[str, Tensor]:
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def _opened(file: Path) -> Any:
    """The file opened by safetensors, which checks the header's size, offsets and dtypes and executes nothing."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{file}: missing; {_ANOTHER}") from None
    except SafetensorError as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); {_ANOTHER}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except UserError as error:
        raise UserError(f"{error}; {_ANOTHER}") from None
