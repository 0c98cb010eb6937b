"""A few real updates of a recipe's model on this machine, in a process of their own, whose peak memory is theirs alone.

Everything is the trainer's own: the choice of device and dtype, compiling, the loss, the optimizer, one update. Code
that is compiled here stays in torch's cache, where the run then finds it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import modicum.corpus.pipeline  # noqa: F401 (what a run has loaded before it trains counts as the program's memory)
from modicum.data import Batch
from modicum.evaluate.scoring import Scored, token_logprobs
from modicum.model import Decoder, KVCache, ModelConfig
from modicum.store import UserError, peak_memory_bytes
from modicum.train import AttentionShape, OptimizerSettings, SupervisedLoss, Wishes, choose, make_update, prepared
from modicum.train.allocator import keep_freed_memory
from modicum.train.optimizer import Kind, Optimizer

_UPDATES, _SECONDS = 4, 8.0  # after the first: at most so many, and none more after so long
_DECODE_ROWS, _DECODE_STEPS = 16, 8
_LESS = "make micro_batch_size or sequence_length smaller, or the model"


@dataclass(frozen=True)
class Trial:
    """What was measured with `rows` rows of `length` tokens.

    choices: as in a checkpoint's training state. program_bytes: resident before there was a model. first_seconds: the
    first update, which compiles; update_seconds: the fastest of the others, of which step_seconds are the optimizer's
    step; forward_seconds: the held-out loss of the same rows; score_seconds: the evaluation's fp32 pass, a token;
    decode_seconds: one token for each of 16 rows; both on the CPU, whatever trains. device_bytes: peak on a CUDA
    device, else 0.
    """

    rows: int
    length: int
    choices: dict[str, Any]
    program_bytes: int
    peak_bytes: int
    device_bytes: int
    first_seconds: float
    update_seconds: float
    step_seconds: float
    forward_seconds: float
    score_seconds: float
    decode_seconds: float


def try_updates(config: ModelConfig, *, rows: int, length: int, wishes: Wishes, optimizer: Kind, flops: float) -> Trial:
    """Run `measure` in a fresh process. flops: arithmetic of the whole stage, which decides whether compiling pays.

    Raises UserError when the process is killed, as happens where memory runs out.
    """
    order = {
        "config": asdict(config),
        "rows": rows,
        "length": length,
        "wishes": asdict(wishes),
        "optimizer": optimizer,
        "flops": flops,
    }
    command = [sys.executable, "-m", "modicum.road.trial"]
    answer = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    if answer.returncode < 0:
        raise UserError(
            f"one update of {rows} x {length} tokens was killed (signal {-answer.returncode}), as happens where memory "
            f"runs out; {_LESS}"
        )
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:] or ["no message"]
        if answer.returncode == 2:
            raise UserError(last[0])
        raise RuntimeError(f"the trial update failed:\n{answer.stderr}")
    return Trial(**json.loads(answer.stdout.splitlines()[-1]))


def measure(config: ModelConfig, *, rows: int, length: int, wishes: Wishes, optimizer: Kind, flops: float) -> Trial:
    """The trial itself, in this process."""
    shape = AttentionShape.of(config, length)
    choices = choose(wishes, flops=flops, earlier=None, say=lambda _: None, shape=shape)
    device = torch.device(choices.device)
    if choices.device == "cpu":
        keep_freed_memory()
    program = peak_memory_bytes()
    model = Decoder(config).to(device).train()
    model.activation_checkpointing = choices.activation_checkpointing
    model.attention_block = choices.attention_block
    moved = Optimizer(model, OptimizerSettings(optimizer), choices.torch_dtype)
    batch = synthetic_batch(config, rows=rows, length=length)
    with prepared(choices):
        loss = SupervisedLoss(model, device=device, dtype=choices.torch_dtype, compiled=choices.compile)

        def update() -> None:
            make_update(loss, moved, batch, micro_batch_size=rows, rate=1e-4, clip_norm=1.0)

        first = _seconds(update)
        updates = [_seconds(update)]
        while len(updates) < _UPDATES and sum(updates) < _SECONDS:
            updates.append(_seconds(update))
        loss(batch).backward()
        step = _fastest(moved.step)
        moved.zero_grad()
        forward = _fastest(lambda: loss.mean([batch]))
        loss.close()
        peak = peak_memory_bytes()
        device_peak = torch.cuda.max_memory_allocated() if choices.device == "cuda" else 0
        model.cpu()  # where the evaluate stage works
        return Trial(
            rows=rows,
            length=length,
            choices=choices.plain(),
            program_bytes=program,
            peak_bytes=peak,
            device_bytes=device_peak,
            first_seconds=first,
            update_seconds=min(updates),
            step_seconds=step,
            forward_seconds=forward,
            score_seconds=_score_seconds(model, batch),
            decode_seconds=_decode_seconds(model),
        )


def synthetic_batch(config: ModelConfig, *, rows: int, length: int) -> Batch:
    """Random ids in documents of a fifth of a row, all supervised: the masks are as in packed text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    places = torch.arange(length)
    size = max(1, length // 5)
    supervised = torch.ones(rows, length + 1, dtype=torch.bool)
    supervised[:, 0] = False
    return Batch(
        ids,
        (places % size).expand(rows, length).contiguous(),
        (places // size).int().expand(rows, length).contiguous(),
        supervised,
    )


def _score_seconds(model: Decoder, batch: Batch) -> float:
    rows = batch.ids[: max(1, 2048 // batch.ids.shape[1])].tolist()
    scored = [Scored(row, 1) for row in rows]
    return _fastest(lambda: token_logprobs(model, scored)) / sum(len(row) - 1 for row in rows)


@torch.inference_mode()
def _decode_seconds(model: Decoder) -> float:
    model.eval()
    weight = model.model.embed_tokens.weight
    capacity = min(64, model.config.max_position_embeddings)
    cache = KVCache(model.config, _DECODE_ROWS, capacity, dtype=weight.dtype, device=weight.device)
    ids = torch.zeros(_DECODE_ROWS, 1, dtype=torch.int64, device=weight.device)
    steps = min(_DECODE_STEPS, capacity - 1)
    model(ids, cache=cache)
    return _seconds(lambda: [float(model(ids, cache=cache).sum()) for _ in range(steps)]) / steps


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the faster of two: the first finds its memory, and something else may work here for a moment."""
    return min(_seconds(work) for _ in range(2))


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - start


def main() -> None:
    """Read an order from standard input, print the trial as the last line."""
    order = json.load(sys.stdin)
    order["config"] = ModelConfig(**order["config"])
    order["wishes"] = Wishes(**order["wishes"])
    try:
        print(json.dumps(asdict(measure(**order))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError:
        size = f"{order['rows']} x {order['length']} tokens"
        print(f"one update of {size} takes more memory than the device has free; {_LESS}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
