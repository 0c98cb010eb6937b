"""The systems that learn beside each other: modicum as its trainer runs it, and the peers as their users run them.

Each takes the same Batch, whose rows are then read as plain sequences by the peers: they know no borders of documents.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.data import Batch
from modicum.model import ActivationCheckpointing, Decoder, ModelConfig
from modicum.store import UserError
from modicum.train import AttentionShape, OptimizerSettings, SupervisedLoss, Wishes, choose, make_update, prepared
from modicum.train.allocator import keep_freed_memory
from modicum.train.machine import has_fast_bfloat16
from modicum.train.optimizer import Optimizer

Dtype = Literal["bfloat16", "float32"]
Mode = Literal["eager", "compile"]
PeerName = Literal["transformers", "litgpt"]

_ALWAYS = 1e18  # so much arithmetic that compiling pays in any case


def fast_dtype() -> Dtype:
    """What modicum multiplies in on this CPU when it is left to it."""
    return "bfloat16" if has_fast_bfloat16("cpu") else "float32"


@dataclass(frozen=True)
class Learner:
    """update(batch, rate): one optimizer update; its loss in nats a target. weights: in Hugging Face's names."""

    mode: str
    dtype: Dtype
    update: Callable[[Batch, float], float]
    weights: Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Ours:
    """modicum with these settings, on the CPU. micro_batch_size: rows at once, None for all."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    activation_checkpointing: ActivationCheckpointing = "none"
    micro_batch_size: int | None = None

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Ours":
        """What dataclasses.asdict made, back from JSON."""
        return cls(**{**values, "optimizer": OptimizerSettings(**values["optimizer"])})

    def learner(self, config: ModelConfig, length: int, settings: ExitStack) -> Learner:
        """length: tokens in a row. settings: holds PyTorch's global ones, which the trainer makes, until it is
        closed."""
        wishes = Wishes("cpu", self.dtype, activation_checkpointing=self.activation_checkpointing)
        shape = AttentionShape.of(config, length)
        choices = choose(wishes, flops=_ALWAYS, earlier=None, say=lambda _: None, shape=shape)
        keep_freed_memory()
        settings.enter_context(prepared(choices))
        model = Decoder(config).train()
        model.activation_checkpointing = choices.activation_checkpointing
        model.attention_block = choices.attention_block
        loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=choices.torch_dtype, compiled=choices.compile)
        optimizer = Optimizer(model, self.optimizer, choices.torch_dtype)

        def update(batch: Batch, rate: float) -> float:
            rows, clip = self.micro_batch_size or batch.rows, self.optimizer.clip_norm
            return make_update(loss, optimizer, batch, micro_batch_size=rows, rate=rate, clip_norm=clip).loss

        words = f"{choices.dtype} {'compile' if choices.compile else 'eager'}"
        if choices.activation_checkpointing != "none":
            words += f", {choices.activation_checkpointing} activation checkpointing"
        return Learner(words, choices.dtype, update, model.state_dict)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Peer:
    """A peer's network of the same sizes in a plain training script: AdamW, which decays what the peer's own training
    does, fp32 weights, autocast where the dtype is bfloat16. dtype: by default what modicum takes on this CPU.
    our_allocator: with the allocator settings that modicum makes for itself."""

    name: PeerName = "transformers"
    mode: Mode = "compile"
    dtype: Dtype = field(default_factory=fast_dtype)
    our_allocator: bool = False

    @property
    def words(self) -> str:
        return f"{self.dtype} {self.mode}" + (", our allocator settings" if self.our_allocator else "")

    def load(self, config: ModelConfig) -> None:
        """Import all that this network takes, as modicum's own is before any clock starts. Raises as `learner` does."""
        with torch.device("meta"):
            _BUILDERS[self.name](config, "eager")

    def learner(self, config: ModelConfig, length: int, settings: ExitStack) -> Learner:  # noqa: ARG002 (not its own)
        """Raises UserError when the peer's package is missing, or the peer cannot build this network."""
        if self.our_allocator:
            keep_freed_memory()
        torch.manual_seed(0)
        model, loss, weights = _BUILDERS[self.name](config, self.mode)
        groups = parameter_groups(self.name, model)
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

        def update(batch: Batch, rate: float) -> float:
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
                value = loss(batch.ids[:, :-1].contiguous(), batch.ids[:, 1:].contiguous())
            value.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(value.detach())

        return Learner(self.words, self.dtype, update, weights)


def parameter_groups(name: PeerName, model: nn.Module) -> list[dict[str, Any]]:
    """transformers' Trainer decays neither gains of norms nor biases; litgpt's pretraining decays all."""
    decayed = [p for p in model.parameters() if p.ndim > 1 or name == "litgpt"]
    others = [p for p in model.parameters() if p.ndim < 2 and name != "litgpt"]
    return [{"params": decayed}, *([{"params": others, "weight_decay": 0.0}] if others else [])]


Loss = Callable[[Tensor, Tensor], Tensor]
Built = tuple[nn.Module, Loss, Callable[[], dict[str, Tensor]]]


def _transformers(config: ModelConfig, mode: Mode) -> Built:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UserError("transformers is not installed here: pip install 'modicum[bench]'") from None

    written = {name: value for name, value in config.to_hf().items() if name != "use_cache"}
    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = from_config(AutoConfig.for_model(**written, use_cache=False), dtype=torch.float32).train()
    forward: Callable[..., Any] = torch.compile(model) if mode == "compile" else model

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        # shift_labels: the labels stand where their inputs do, so that all systems learn from the same targets
        value: Tensor = forward(input_ids=ids, labels=labels, shift_labels=labels).loss
        return value

    def weights() -> dict[str, Tensor]:
        state = model.state_dict()
        return {name: state[name] for name in state if name != "lm_head.weight" or not config.tie_word_embeddings}

    return model, loss, weights


def _litgpt(config: ModelConfig, mode: Mode) -> Built:
    try:
        from litgpt.config import Config
        from litgpt.model import GPT
    except ImportError:
        raise UserError(
            "litgpt is not installed here: pip install --no-deps litgpt lightning pytorch-lightning "
            "lightning-utilities torchmetrics jsonargparse (its own requirements would take transformers back)"
        ) from None

    unsupported = [
        name for name in ("attention_bias", "mlp_bias", "rope_scaling", "attention_dropout") if getattr(config, name)
    ]
    if unsupported:
        raise UserError(f"litgpt's network is compared without {', '.join(unsupported)}")
    model = GPT(
        Config(
            name="same sizes",
            block_size=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            n_layer=config.num_hidden_layers,
            n_embd=config.hidden_size,
            n_head=config.num_attention_heads,
            n_query_groups=config.num_key_value_heads,
            head_size=config.head_dim,
            rotary_percentage=1.0,
            rope_base=int(config.rope_theta),
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.rms_norm_eps,
            norm_qk=config.qk_norm,
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.intermediate_size,
        )
    ).train()
    for name, module in model.named_modules():  # as initialize_weights of its own pretraining does
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".attn.proj", ".mlp.proj"))
            scale = 1 / config.num_hidden_layers if last else sqrt(2 / 5)
            nn.init.normal_(module.weight, std=scale / sqrt(config.hidden_size))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    forward: Callable[..., Any] = torch.compile(model) if mode == "compile" else model

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(forward(ids).flatten(0, 1), labels.flatten())

    return model, loss, lambda: _from_litgpt(model.state_dict(), config)


_BUILDERS: dict[PeerName, Callable[[ModelConfig, Mode], Built]] = {"transformers": _transformers, "litgpt": _litgpt}


def _from_litgpt(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """litgpt's weights in Hugging Face's names; its query, key and value rows lie in one matrix, in this order."""
    queries, groups = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    found = {"model.embed_tokens.weight": state["transformer.wte.weight"]}
    found["model.norm.weight"] = state["transformer.ln_f.weight"]
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = state["lm_head.weight"]
    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.proj": "self_attn.o_proj",
        "mlp.fc_1": "mlp.gate_proj",
        "mlp.fc_2": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    }
    if config.qk_norm:
        names |= {"attn.norm_q": "self_attn.q_norm", "attn.norm_k": "self_attn.k_norm"}
    for layer in range(config.num_hidden_layers):
        here, there = f"transformer.h.{layer}.", f"model.layers.{layer}."
        joined = state[f"{here}attn.qkv.weight"].split((queries, groups, groups))  # type: ignore[no-untyped-call]
        for part, rows in zip("qkv", joined, strict=True):
            found[f"{there}self_attn.{part}_proj.weight"] = rows
        found |= {f"{there}{ours}.weight": state[f"{here}{theirs}.weight"] for theirs, ours in names.items()}
    return found
