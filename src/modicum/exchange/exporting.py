"""A checkpoint leaves in a dialect's own names and layout, for tools that speak it; read back before it has a name."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.dialects import cyberslm
from modicum.exchange.foreign import read_foreign
from modicum.exchange.importing import SENTENCEPIECE, refuse_taken
from modicum.exchange.layouts import relaid
from modicum.exchange.names import foreign_names
from modicum.exchange.parity import Compared, decoder_speaker, prove, truth_of
from modicum.exchange.torch_file import write_torch_file
from modicum.model import ModelConfig
from modicum.store import UserError, atomic_directory, write_json
from modicum.store.atomic import write_bytes
from modicum.store.manifest import read_manifest

Target = Literal["cyberslm"]


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how closely the file, read back, says what the checkpoint says. notes: what it lacks."""

    out: Path
    to: str
    parameters: int
    tensors: int
    compared: tuple[Compared, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out)}


def export_checkpoint(
    checkpoint: Path, *, to: Target = "cyberslm", out: Path, progress: Callable[[str], None] = lambda _: None
) -> ExportReport:
    """Write a checkpoint as the folder `out` with model.pt, config.json and the tokenizer's files; among them the
    tokenizer.model that it was imported with, where the checkpoint has it still: training writes others without.

    model.pt: {"model_state", "config"}, readable as weights alone; a tied head is not repeated in it.
    Raises UserError, and writes nothing, when the dialect has no word for a part of the model, when the file read back
    is not the checkpoint, and when `out` is there already.
    """
    refuse_taken(out)
    progress(f"reading {checkpoint}")
    loaded = load_checkpoint(checkpoint)
    values = _cyberslm_config(loaded, checkpoint)
    config = loaded.config
    moved = relaid(loaded.weights, head_dim=config.head_dim, source="half", target="interleaved")
    state = {theirs: moved[ours].contiguous() for theirs, ours in foreign_names(to, config).items()}
    progress(f"writing {out}")
    with atomic_directory(out) as unfinished:
        write_torch_file(unfinished / "model.pt", {"model_state": state, "config": values})
        write_json(unfinished / "config.json", values)
        loaded.tokenizer.save(unfinished)
        kept = SENTENCEPIECE in read_manifest(checkpoint)  # so it was proven on import, and is as it was
        if kept:
            write_bytes(unfinished / SENTENCEPIECE, (checkpoint / SENTENCEPIECE).read_bytes())
        progress("reading it back and comparing its logits with the checkpoint's")
        compared = _read_back(unfinished, loaded, out)
    return ExportReport(out, to, config.parameter_count(), len(state), compared, tuple(_lacking(loaded, kept)))


def _lacking(checkpoint: Checkpoint, kept: bool) -> Iterator[str]:
    """What the dialect's files do not say. kept: whether the tokenizer.model came along."""
    if not kept:
        yield f"no {SENTENCEPIECE}: the checkpoint has none; its ids are those of tokenizer.json"
    more = sorted({*checkpoint.stop_ids} - {checkpoint.tokenizer.eot_id})
    if more:
        named = " and ".join(repr(checkpoint.tokenizer.decode([number])) for number in more)
        yield f"an answer ends at {named} here too; the config has one eos_token_id, so its reader must be told"


def _read_back(folder: Path, source: Checkpoint, out: Path) -> tuple[Compared, ...]:
    """What the written file says is the checkpoint's, bit for bit and in its logits, or it is refused."""
    found = read_foreign(folder, "cyberslm")
    again = relaid(found.weights, head_dim=found.config.head_dim, source="interleaved", target="half")
    differing = [name for name, weight in source.weights.items() if not torch.equal(again[name], weight)]
    if differing:
        raise UserError(f"{out}: read back, {', '.join(differing)} differ from the checkpoint's; was not written")
    truth = truth_of(found.weights, found.config)
    return prove(str(out), decoder_speaker(source.weights, source.config), truth)


def _cyberslm_config(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """The dialect's config of this model. Raises UserError naming all that it has no word for."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    faults = _inexpressible(config)
    if faults:
        raise UserError("\n".join([f"{path}: cyberslm cannot express this model", *(f"  {fault}" for fault in faults)]))
    return asdict(
        cyberslm.CyberSLMConfig(
            vocab_size=config.vocab_size,
            max_seq_len=config.max_position_embeddings,
            hidden_dim=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            ffn_hidden_dim=config.intermediate_size,
            rope_base=config.rope_theta,
            norm_eps=config.rms_norm_eps,
            tie_weights=config.tie_word_embeddings,
            bias=config.attention_bias,
            attn_dropout=config.attention_dropout,
            pad_token_id=tokenizer.pad_id,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eot_id,
        )
    )


def _inexpressible(config: ModelConfig) -> list[str]:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    faults = []
    if keys != heads:
        faults.append(f"num_key_value_heads {keys}: its {heads} heads have each their own keys (no grouped queries)")
    if config.head_dim * heads != config.hidden_size:
        faults.append(f"head_dim {config.head_dim}: it is hidden_size / num_attention_heads there")
    if config.qk_norm:
        faults.append("qk_norm: it does not norm queries and keys")
    if config.rope_scaling is not None:
        faults.append(f"rope_scaling {config.rope_scaling['rope_type']}: its rotary embedding is not scaled")
    if config.attention_bias != config.mlp_bias:
        faults.append("attention_bias and mlp_bias: one switch is both there, so set both or none")
    return faults
