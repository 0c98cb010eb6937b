"""The process that measures one system's training updates; reads its order from standard input, prints one line."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from modicum.data import Batch
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError, peak_memory_bytes
from modicum.train import OptimizerSettings, SupervisedLoss, Wishes, choose, make_update, prepared
from modicum.train.allocator import keep_freed_memory
from modicum.train.optimizer import Optimizer

_RATE = 1e-4
_ALWAYS = 1e18  # so much arithmetic that compiling pays in any case


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """system, mode, dtype, the seconds of each update that counts, and the peak of resident memory."""
    config = ModelConfig(**order["config"])
    prepare = {"modicum": _modicum, "transformers": _transformers}[order["system"]]
    batch = _batch(config, order["rows"], order["length"])
    seconds = []
    with ExitStack() as settings:
        update, mode, dtype = prepare(config, batch, order, settings)
        update()
        for _ in range(order["updates"]):
            start = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - start)
    peak = peak_memory_bytes() / 1e6
    speed = batch.documents.numel() / median(seconds)
    return {
        "system": order["system"],
        "mode": mode,
        "dtype": dtype,
        "seconds": seconds,
        "peak_rss_mb": peak,
        "said": f"{speed:,.0f} tokens/s, {peak:,.0f} MB",
    }


def _batch(config: ModelConfig, rows: int, length: int) -> Batch:
    """Random tokens, one document a row: the peer knows no borders of documents."""
    ids = torch.randint(config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    supervised = torch.ones(rows, length + 1, dtype=torch.bool)
    supervised[:, 0] = False
    positions = torch.arange(length).expand(rows, length).contiguous()
    return Batch(ids, positions, torch.zeros(rows, length, dtype=torch.int32), supervised)


def _modicum(
    config: ModelConfig, batch: Batch, order: dict[str, Any], settings: ExitStack
) -> tuple[Callable[[], object], str, str]:
    """Everything as the trainer does it, for a run that is long enough to compile. settings: holds PyTorch's for us."""
    wishes = Wishes("cpu", order["dtype"], activation_checkpointing=order["activation_checkpointing"])
    choices = choose(wishes, flops=_ALWAYS, earlier=None, say=lambda _: None)
    keep_freed_memory()
    settings.enter_context(prepared(choices))
    model = Decoder(config).train()
    model.activation_checkpointing = choices.activation_checkpointing
    loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=choices.torch_dtype, compiled=choices.compile)
    optimizer = Optimizer(model, OptimizerSettings())

    def update() -> None:
        make_update(loss, optimizer, batch, micro_batch_size=batch.rows, rate=_RATE, clip_norm=1.0)

    mode = f"{choices.dtype} {'compile' if choices.compile else 'eager'}"
    return update, mode + (", activation checkpointing" if choices.activation_checkpointing else ""), choices.dtype


def _transformers(
    config: ModelConfig,
    batch: Batch,
    order: dict[str, Any],
    settings: ExitStack,  # noqa: ARG001 (it needs none)
) -> tuple[Callable[[], object], str, str]:
    """The step of a plain PyTorch training script around a transformers model."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UserError("transformers is not installed here: pip install 'modicum[bench]'") from None

    if order["our_allocator"]:
        keep_freed_memory()
    written = {name: value for name, value in config.to_hf().items() if name != "use_cache"}
    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = from_config(AutoConfig.for_model(**written, use_cache=False), dtype=torch.float32).train()
    forward: Callable[..., Any] = torch.compile(model) if order["mode"] == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids, labels = batch.ids[:, :-1].contiguous(), batch.ids[:, 1:].contiguous()

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=order["dtype"] == "bfloat16"):
            # shift_labels: the labels stand where their inputs do, so that both systems learn from the same targets
            loss = forward(input_ids=ids, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    words = f"{order['dtype']} {order['mode']}" + (", our allocator settings" if order["our_allocator"] else "")
    return update, words, order["dtype"]


def main() -> None:
    """Exit status 2 with one line for what the user can mend."""
    try:
        print(json.dumps(measure(json.load(sys.stdin))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
