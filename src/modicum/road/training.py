"""The training stages: a recipe's values handed to the one loop, for pretraining and for fine-tuning."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

from modicum.checkpoint import load_checkpoint, newest, save_checkpoint, step_folder
from modicum.checkpoint.save import STATE
from modicum.corpus import Contamination
from modicum.data import Batch, Loader, Rows, Shards, WindowRows, eval_windows, open_shards
from modicum.model import Decoder, ModelConfig
from modicum.recipe import SftSettings, TrainSettings, identity
from modicum.road.context import Road
from modicum.road.prepare import HELDOUT, TRAIN, corpus_weights, open_tokenizer, shards_folder, texts_to_avoid
from modicum.road.start import model_identity, starting_checkpoint
from modicum.store import UserError, hash_file, hash_json, write_json
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.load import template_in
from modicum.train import Intervals, OptimizerSettings, Schedule, Wishes, train
from modicum.tune import ConversationRows, ConversationSplit, Count, load_conversations, packed_batches

_EPOCHS_THAT_PAY = 4.0
_MORE_OFTEN = 1.25  # times what was asked for: conversations that are seen so much more often are told of


def pretrain_inputs(road: Road) -> dict[str, str]:
    shards = {split: hash_file(shards_folder(road, split) / "manifest.json") for split in (TRAIN, HELDOUT)}
    return {
        "shards": hash_json(shards),
        "model": hash_json(model_identity(road.recipe)),
        "pretrain": hash_json(identity(road.recipe.pretrain)),
        "sources": hash_json(_mixture(road)),
        "steps": str(road.recipe.pretrain.steps),
        "seed": str(road.seed("pretrain")),
    }


def pretrain(road: Road) -> None:
    """Train the base model to the recipe's number of updates, from the newest checkpoint on."""
    settings, tokenizer = road.recipe.pretrain, open_tokenizer(road)
    untouched = step_folder(road.run.checkpoints("pretrain"), 0)
    if not settings.steps:
        road.ranks.by_first(lambda: _take_over(road, tokenizer))
        return
    if untouched.exists() and road.ranks.is_first:
        # the run had no updates and is now to have some; nothing was learnt that could be lost
        shutil.rmtree(untouched)
    shards = open_shards(shards_folder(road, TRAIN), tokenizer_hash=tokenizer.hash)
    heldout = open_shards(shards_folder(road, HELDOUT), tokenizer_hash=tokenizer.hash)
    weights, max_epochs = corpus_weights(road, shards.sources)
    for name, most in max_epochs.items():
        if most > _EPOCHS_THAT_PAY:
            road.listener.say(
                f"warning: source {name}: max_epochs is {most:g}; above {_EPOCHS_THAT_PAY:g} passes a repeated text "
                "teaches little more (Muennighoff et al. 2023)"
            )
    rows = WindowRows(
        shards,
        sequence_length=settings.sequence_length,
        seed=road.seed("pretrain"),
        weights=weights,
        max_epochs=max_epochs,
        separate_documents=settings.separate_documents,
    )
    train(
        initial_model(road, tokenizer.vocab_size),
        _loader(road, rows, settings),
        chat=False,
        tokenizer=tokenizer,
        identity={
            "model": model_identity(road.recipe),
            "pretrain": identity(settings),
            "sources": _mixture(road),
            "shards": shards.fingerprint,
            "tokenizer": tokenizer.hash,
            "seed": road.recipe.seed,
        },
        heldout=(lambda: _heldout_windows(road, heldout, settings)) if heldout.sources else None,
        **_common(road, "pretrain", settings, settings.steps),
    )


def _take_over(road: Road, tokenizer: Tokenizer) -> None:
    """Without an update the base model is the starting checkpoint: weights and chat template as they lie on disk."""
    start, root = starting_checkpoint(road.recipe), road.run.checkpoints("pretrain")
    if start is None:
        raise UserError("pretrain.steps: 0 goes with model.checkpoint alone")
    found = newest(root)
    if found not in (None, step_folder(root, 0)):
        raise UserError(f"{found}: updates were made, and the run is now to have none; give it another name")
    save_checkpoint(
        root,
        0,
        config=start.config,
        weights=start.weights,
        tokenizer=tokenizer.with_template(template_in(start.path)),
        chat=start.talks,
        training=None,
        stop_ids=start.stop_ids,
        trained=start.was_trained,
    )
    road.listener.say(f"pretrain: no updates, the base model is {start.path}")


def sft_inputs(road: Road) -> dict[str, str]:
    settings = _sft_settings(road)
    inputs = {
        "base": hash_file(_base(road) / "manifest.json"),
        "template": hash_json(open_tokenizer(road).chat_template),
        "sft": hash_json(identity(settings)),
        "epochs": str(settings.epochs),
        "seed": str(road.seed("sft")),
    }
    if avoided := texts_to_avoid(road):
        inputs["evaluate.items"] = hash_json([road.recipe.corpus.decontaminate_words, avoided])
    return inputs | {f"sft.data.{number}": road.fingerprints.of(path) for number, path in enumerate(settings.data)}


def sft(road: Road) -> None:
    """Tune the base model on conversations for the recipe's number of epochs."""
    # the run's tokenizer is the base model's, but for a chat template that came after pretraining
    settings, base, tokenizer = _sft_settings(road), load_checkpoint(_base(road)), open_tokenizer(road)
    if "strftime_now" in (tokenizer.chat_template or ""):
        tokenizer = tokenizer.at(road.ranks.by_first(lambda: _moment_of_sft(road)))
    split = conversations(road, tokenizer)
    report = split.report
    road.listener.say(
        f"conversations: {report.read:,} read, {report.train:,} to train on, {report.heldout:,} held out; left out: "
        f"{_told(report.duplicates)} repeated, {_told(report.contaminated)} with a question of evaluate.items, "
        f"{_told(report.too_long)} too long; {_told(report.shortened)} shortened"
    )
    rows = ConversationRows(
        split.train,
        sequence_length=settings.sequence_length,
        seed=road.seed("sft"),
        pad_id=tokenizer.pad_id,
        separate_documents=settings.separate_documents,
    )
    wanted = rows.rows_for(settings.epochs)
    steps = ceil(wanted / settings.batch_size)
    if steps * settings.batch_size > _MORE_OFTEN * wanted:
        seen = steps * settings.batch_size / rows.rows_per_epoch
        road.listener.say(
            f"warning: the conversations fill {rows.rows_per_epoch:,} rows, and sft.batch_size is "
            f"{settings.batch_size}, so each is seen {seen:.1f} times, not {settings.epochs:g} (sft.epochs); lower "
            "sft.batch_size"
        )
    train(
        base.model().train(),
        _loader(road, rows, settings),
        chat=True,
        tokenizer=tokenizer,
        identity={
            "sft": identity(settings),
            "base": hash_file(_base(road) / "manifest.json"),
            "data": split.train.hash,
            "tokenizer": tokenizer.hash,
            "template": hash_json(tokenizer.chat_template),
            "seed": road.recipe.seed,
        },
        heldout=lambda: packed_batches(
            split.heldout_examples,
            settings.sequence_length,
            settings.evaluate_tokens,
            batch_size=_rows_at_once(road, settings),
            pad_id=tokenizer.pad_id,
            separate_documents=settings.separate_documents,
        ),
        **_common(road, "sft", settings, steps),
    )
    if road.ranks.is_first:
        write_json(road.folder("sft") / "conversations.json", asdict(report))


def _moment_of_sft(road: Road) -> float:
    """When tuning began, in seconds since the epoch: a template that tells the date writes that one until it ends, or
    the examples of tomorrow were others."""
    path, now = road.folder("sft") / "began.json", time.time()
    if path.exists():
        return float(json.loads(path.read_text("utf-8"))["seconds_since_epoch"])
    if newest(road.run.checkpoints("sft")) is None:  # else a version began it that kept no such file
        write_json(path, {"seconds_since_epoch": now})
    return now


def conversations(road: Road, tokenizer: Tokenizer) -> ConversationSplit:
    """The recipe's conversations, split into what is trained on and what is held out."""
    settings = _sft_settings(road)
    return load_conversations(
        settings.data,
        tokenizer,
        sequence_length=settings.sequence_length,
        heldout_fraction=settings.heldout_fraction,
        seed=road.seed("conversations"),
        avoid=Contamination.of(texts_to_avoid(road), road.recipe.corpus.decontaminate_words),
    )


def initial_model(road: Road, vocab_size: int) -> Decoder:
    """The model before any training: the starting checkpoint's, else the recipe's seed decides its weights."""
    start = starting_checkpoint(road.recipe)
    if start is not None:
        return start.model().train()
    model = Decoder(ModelConfig.from_settings(road.recipe.model, vocab_size))
    model.init_weights(road.seed("model"))
    return model


def device_used(road: Road, stage: str) -> str:
    """The device that a training stage's last checkpoint was made on; the other stages work on the CPU."""
    state = road.run.checkpoints(stage) / "last" / STATE
    return str(json.loads(state.read_text("utf-8"))["choices"]["device"]) if state.exists() else "cpu"


def _common(road: Road, stage: str, settings: TrainSettings, steps: int) -> dict[str, Any]:
    """The arguments of `train` that both stages take from their settings in the same way."""
    return {
        "out": road.folder(stage),
        "steps": steps,
        "seed": road.seed(stage),
        "micro_batch_size": settings.micro_batch_size,
        "schedule": Schedule(
            settings.schedule,
            settings.learning_rate,
            settings.final_learning_rate_fraction,
            settings.warmup_fraction,
            settings.decay_fraction,
        ),
        "optimizer": OptimizerSettings(
            settings.optimizer,
            settings.weight_decay,
            settings.betas,
            settings.epsilon,
            settings.momentum,
            settings.clip_norm,
            embedding_factor=settings.embedding_learning_rate_factor,
        ),
        "intervals": Intervals(
            log=settings.log_every_steps,
            evaluate=settings.evaluate_every_steps,
            checkpoint=settings.checkpoint_every_steps,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every_steps,
        ),
        "wishes": Wishes(
            device=settings.device,
            dtype=settings.dtype,
            compile=settings.compile,
            threads=settings.threads,
            activation_checkpointing=settings.activation_checkpointing,
            parallel=settings.parallel,
        ),
        "progress": road.listener.progress,
        "say": road.listener.say,
        "ranks": road.ranks,
    }


def _loader(road: Road, rows: Rows, settings: TrainSettings) -> Loader:
    return Loader(rows, batch_size=settings.batch_size, rank=road.ranks.rank, world_size=road.ranks.world_size)


def _rows_at_once(road: Road, settings: TrainSettings) -> int:
    """Rows of one forward pass of one rank."""
    share = settings.batch_size // road.ranks.world_size
    return min(settings.micro_batch_size or share, share)


def _heldout_windows(road: Road, shards: Shards, settings: TrainSettings) -> Iterator[Batch]:
    return eval_windows(
        shards,
        settings.sequence_length,
        settings.evaluate_tokens,
        batch_size=_rows_at_once(road, settings),
        separate_documents=settings.separate_documents,
    )


def _told(count: Count) -> str:
    return f"{count.conversations:,}" + (f" (the first: {count.first})" if count.first else "")


def _mixture(road: Road) -> dict[str, float]:
    return {source.name: source.weight for source in road.recipe.corpus.sources}


def _base(road: Road) -> Path:
    return road.run.checkpoints("pretrain") / "last"


def _sft_settings(road: Road) -> SftSettings:
    settings = road.recipe.sft
    if settings is None:
        raise UserError("sft: the recipe has no such part, so there is nothing to tune on")
    return settings
