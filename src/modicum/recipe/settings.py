"""What a recipe may say. Names are Hugging Face's where it has one; units stand in the names.

Every class forbids unknown keys and is immutable. A field marked `operates=True` may change between two parts of one
run (how it is carried out); every other field identifies the run and may not.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modicum.recipe.paths import InputPath
from modicum.recipe.presets import PRESETS

_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


def operating(default: Any, **limits: Any) -> Any:
    """A field that says how the run is carried out, not what it is: it may differ when the run goes on."""
    return Field(default=default, json_schema_extra={"operates": True}, **limits)


Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _set_otherwise(self, *names: str) -> str:
        """Those of the fields that have another value than their default, in words. (A resolved recipe names all.)"""
        fields = type(self).model_fields
        return ", ".join(name for name in names if getattr(self, name) != fields[name].default)


def of_muon(default: float) -> Any:
    """A positive number that says nothing of a run beside another optimizer (see identity.py)."""
    return Field(default=default, gt=0, json_schema_extra={"only_with": {"optimizer": "muon"}})


class FilterSettings(Settings):
    """Which filters a document must pass. Each can be switched off for a source or a language."""

    exact_duplicates: bool = True
    near_duplicates: bool = True
    length: bool = True
    min_characters: int = Field(default=40, ge=1)
    max_characters: int = Field(default=2_000_000, ge=1)
    repetition: bool = True


class FilterOverrides(Settings):
    """The filters that a source or a language sets otherwise; what is not named keeps the corpus's setting."""

    exact_duplicates: bool | None = None
    near_duplicates: bool | None = None
    length: bool | None = None
    min_characters: int | None = Field(default=None, ge=1)
    max_characters: int | None = Field(default=None, ge=1)
    repetition: bool | None = None


class SourceSettings(Settings):
    """One source of text: a file, a folder, or a Hub data set.

    weight is how often each document of the source is seen in one pass over the corpus (1: every token once).
    max_epochs bounds how often the whole run may see it; above 4 the gain of a repetition fades (Muennighoff et al.
    2023, "Scaling Data-Constrained Language Models") and a warning says so. subset, split and revision (a commit, a
    tag) are a Hub data set's.
    """

    name: Name
    path: InputPath | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    domain_field: str | None = None
    language: str = "en"
    weight: float = Field(default=1.0, gt=0, le=100)
    max_epochs: float = Field(default=4.0, gt=0)
    filters: FilterOverrides = FilterOverrides()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of path (a file or folder) and hub (a data set's name)")
        if self.path is not None and (unused := self._set_otherwise("subset", "split", "revision")):
            raise ValueError(f"{unused}: of a Hub data set alone; leave it out beside path")
        if self.hub is not None and (not _HUB_NAME.fullmatch(self.hub) or Path(self.hub).exists()):
            raise ValueError(
                f"hub {self.hub!r}: expected the name of a data set on the Hub, such as user/name; a file or folder of "
                "this machine goes by path"
            )
        return self


class CorpusSettings(Settings):
    sources: list[SourceSettings] = Field(min_length=1)
    filters: FilterSettings = FilterSettings()
    languages: dict[str, FilterOverrides] = {}
    near_duplicate_similarity: Share = 0.8
    decontaminate_words: int = Field(default=13, ge=0)
    heldout_fraction: float = Field(default=0.02, ge=0, lt=0.5)
    tasks: int = Field(default=4, ge=1)
    memory_mb: int = operating(1024, ge=64)
    workers: int = operating(1, ge=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [source.name.lower() for source in self.sources]  # files are called by them, on any disk
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source names must differ, in more than upper and lower case; twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _languages_are_used(self) -> Self:
        used = {source.language for source in self.sources}
        if unused := [name for name in self.languages if name not in used]:
            raise ValueError(
                f"languages: no source has the language {', '.join(unused)}; theirs are {', '.join(sorted(used))}"
            )
        return self


class TokenizerSettings(Settings):
    """Train one (vocab_size) or load one (path: a tokenizer.json, or a folder that holds it)."""

    path: InputPath | None = None
    vocab_size: int | None = Field(default=None, ge=320, le=1_000_000)
    sample_mb: int = Field(default=64, ge=1)
    min_frequency: int = Field(default=2, ge=1)
    missing_special_tokens: Literal["refuse", "extend"] = "refuse"

    @model_validator(mode="after")
    def _trained_or_loaded(self) -> Self:
        if self.path is not None and (unused := self._set_otherwise("vocab_size", "sample_mb", "min_frequency")):
            raise ValueError(f"{unused}: for training a tokenizer, and path loads one; leave it out, or path")
        if self.path is None and (unused := self._set_otherwise("missing_special_tokens")):
            raise ValueError(f"{unused}: for a tokenizer that path loads, and there is no path; leave it out")
        return self


class ChatSettings(Settings):
    """template: the user's own Jinja file; without one, ChatML."""

    template: InputPath | None = None


class ModelSettings(Settings):
    """A preset and what differs from it. The names and meanings are those of a Hugging Face Llama or Qwen3 config.

    checkpoint: a folder to begin with instead: its shape, weights and tokenizer. Beside it only attention_dropout may
    stand.
    """

    checkpoint: InputPath | None = None
    preset: Literal["nano", "micro", "mini", "cyberslm", "small", "base"] = "micro"
    hidden_size: int = Field(default=256, ge=2)
    num_hidden_layers: int = Field(default=8, ge=1)
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    ffn_dim_multiplier: float | None = Field(default=None, gt=0)
    multiple_of: int = Field(default=256, ge=1)
    vocab_size: int = Field(default=16_384, ge=1)
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    initializer_range: float = Field(default=0.02, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("checkpoint") is not None:
            others = [str(name) for name in values if name not in ("checkpoint", "attention_dropout")]
            if others:
                raise ValueError(
                    f"{', '.join(others)}: the shape is that of the checkpoint; beside checkpoint only "
                    "attention_dropout may stand"
                )
        elif isinstance(values, dict):
            preset = PRESETS.get(str(values.get("preset", "micro")), {})
            own_width = values.get("ffn_dim_multiplier") is not None or "multiple_of" in values
            filled = {k: v for k, v in preset.items() if not (k == "intermediate_size" and own_width)}
            return {**filled, **values}
        return values

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        faults = []
        heads, groups = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            faults.append(f"num_attention_heads {heads} does not divide hidden_size {self.hidden_size}")
        elif (self.head_dim or self.hidden_size // heads) % 2:
            faults.append("head_dim must be even: rotary embedding turns pairs")
        if heads % groups:
            faults.append(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
        if self.qk_norm and self.mlp_bias:
            faults.append("qk_norm with mlp_bias is neither a stock Llama nor a stock Qwen3; choose one of them")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class TrainSettings(Settings):
    """What pretraining and fine-tuning have in common. Batches count sequences; lengths count tokens.

    activation_checkpointing: what is computed again in the backward pass to save memory: nothing, all between linear
    layers, or all. parallel: in which way the ranks, where torchrun starts several, share the work: each with the whole
    model, or with a shard of it. micro_batch_size is that of one rank. momentum and embedding_learning_rate_factor go
    with muon, beside which AdamW moves embedding, head, gains and biases, at so many times the learning rate.
    """

    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int | None = operating(None, ge=1)
    sequence_length: int = Field(default=512, ge=2)
    separate_documents: bool = True
    learning_rate: float = Field(default=3e-3, gt=0)
    final_learning_rate_fraction: Share = 0.0
    schedule: Literal["cosine", "wsd"] = "wsd"
    warmup_fraction: Share = 0.02
    decay_fraction: Share = 0.5
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    epsilon: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    embedding_learning_rate_factor: float = of_muon(1.0)
    clip_norm: float = Field(default=1.0, gt=0)
    activation_checkpointing: Literal["none", "selective", "full"] = operating("none")
    parallel: Literal["ddp", "fsdp"] = operating("ddp")
    device: Literal["auto", "cpu", "cuda", "mps"] = operating("auto")
    dtype: Literal["auto", "float32", "bfloat16"] = operating("auto")
    compile: Literal["auto", "on", "off"] = operating("auto")
    threads: int | None = operating(None, ge=1)
    log_every_steps: int = operating(10, ge=1)
    evaluate_every_steps: int = operating(100, ge=1)
    evaluate_tokens: int = operating(65_536, ge=1)
    checkpoint_every_steps: int = operating(100, ge=1)
    keep_last: int = operating(2, ge=1)
    keep_every_steps: int | None = operating(None, ge=1)

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        faults = []
        micro = self.micro_batch_size or self.batch_size
        if self.batch_size % micro:
            faults.append(f"micro_batch_size {micro} does not divide batch_size {self.batch_size}")
        if self.warmup_fraction + (self.decay_fraction if self.schedule == "wsd" else 0) > 1:
            faults.append("warmup_fraction and decay_fraction together are more than the whole run")
        if not all(0 <= beta < 1 for beta in self.betas):
            faults.append("betas must be at least 0 and below 1")
        if self.optimizer == "adamw" and (unused := self._set_otherwise("momentum", "embedding_learning_rate_factor")):
            faults.append(f"{unused}: of optimizer muon alone; leave it out beside adamw")
        if self.schedule == "cosine" and (unused := self._set_otherwise("decay_fraction")):
            faults.append(f"{unused}: of schedule wsd alone; leave it out beside cosine")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class PretrainSettings(TrainSettings):
    """steps counts optimizer updates; 0, where the model begins with a checkpoint, leaves it as it is.

    optimizer, learning_rate and embedding_learning_rate_factor are what won the comparison in docs/training-notes.md,
    which was one of fresh weights: where the model begins with a checkpoint, the factor is 1 unless it is set.
    """

    steps: int = operating(1000, ge=0)
    optimizer: Literal["adamw", "muon"] = "muon"
    embedding_learning_rate_factor: float = of_muon(10.0)


class SftSettings(TrainSettings):
    """data: files of {"messages": [...]} lines. epochs counts passes over them."""

    data: list[InputPath] = Field(min_length=1)
    heldout_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    epochs: float = operating(2.0, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)


class EvaluateSettings(Settings):
    """items: files of multiple-choice questions; see docs/formats.md."""

    items: list[InputPath] = []
    bootstrap_samples: int = Field(default=1000, ge=10)
    heldout_tokens: int = Field(default=200_000, ge=1)
    prompts: int = Field(default=100, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
