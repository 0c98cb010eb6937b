"""What a run begins with: the checkpoint that its recipe names, or fresh weights of the shape that it describes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.model import ModelConfig
from modicum.recipe import Recipe, identity
from modicum.store import UserError, hash_file


def check_start(recipe: Recipe) -> None:
    """Read the starting checkpoint's files, once, before anything is done with it.

    Raises UserError for a folder that is no checkpoint, files that are not as they were written, sequences that are
    longer than the model's positions, and conversations without a chat template to write them with.
    """
    path = recipe.model.checkpoint
    if path is None:
        return
    try:
        start = load_checkpoint(path)
    except UserError as error:
        raise UserError(f"model.checkpoint: {error}") from None
    config = start.config
    faults = [
        f"{stage}.sequence_length: {settings.sequence_length} tokens are longer than the checkpoint's "
        f"max_position_embeddings {config.max_position_embeddings}"
        for stage, settings in (("pretrain", recipe.pretrain), ("sft", recipe.sft))
        if settings is not None and settings.sequence_length > config.max_position_embeddings
    ]
    if recipe.sft is not None and recipe.chat.template is None and start.tokenizer.chat_template is None:
        faults.append("chat.template: missing, and the checkpoint has no chat template to write conversations with")
    if faults:
        raise UserError("\n".join(faults))


def check_ranks(recipe: Recipe, world_size: int) -> None:
    """Raise UserError for a batch that the ranks cannot share evenly, before anything else is done."""
    faults = [
        f"{stage}.batch_size: {settings.batch_size} sequences cannot be shared evenly by {world_size} ranks; "
        "make it a multiple of them"
        for stage, settings in (("pretrain", recipe.pretrain), ("sft", recipe.sft))
        if settings is not None and settings.batch_size % world_size
    ]
    if faults:
        raise UserError("\n".join(faults))


def starting_checkpoint(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to begin with, with the recipe's dropout where it sets one; None where there is none."""
    path = recipe.model.checkpoint
    if path is None:
        return None
    start = load_checkpoint(path, verify=False)
    if "attention_dropout" not in recipe.model.model_fields_set:
        return start
    return replace(start, config=replace(start.config, attention_dropout=recipe.model.attention_dropout))


def start_hash(path: Path) -> str:
    """What tells one checkpoint from another: its manifest holds the hash of every file."""
    return hash_file(path / "manifest.json")


def model_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The run's model, for a tokenizer of `vocab_size` ids."""
    start = starting_checkpoint(recipe)
    return ModelConfig.from_settings(recipe.model, vocab_size) if start is None else start.config


def model_identity(recipe: Recipe) -> dict[str, Any]:
    """What may not change about the model while a run goes on, as plain data."""
    if recipe.model.checkpoint is None:
        return identity(recipe.model)
    dropout = {name: recipe.model.attention_dropout for name in {"attention_dropout"} & recipe.model.model_fields_set}
    return {"checkpoint": start_hash(recipe.model.checkpoint), **dropout}
