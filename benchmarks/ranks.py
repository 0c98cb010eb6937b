"""Tokens a second of whole updates: one process, and the ranks that torchrun starts, in turn, as one table.

    python benchmarks/ranks.py                        two ranks of one thread beside one process of two, on the CPU
    python benchmarks/ranks.py --device cuda --ranks 1 --preset small --batch 64 --length 1024

Each system trains the same network on the same synthetic rows with the trainer's own parts, compiled, in processes of
its own. MFU is model FLOPs over the chip's published dense bf16 peak, where its name is known.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch

from modicum.data import Batch
from modicum.model import Decoder, ModelConfig, training_flops_per_token
from modicum.recipe.settings import ModelSettings
from modicum.road.chips import CHIPS
from modicum.road.trial import synthetic_batch
from modicum.train import OptimizerSettings, SupervisedLoss, Wishes, choose, joined, make_update, prepared
from modicum.train.allocator import keep_freed_memory
from modicum.train.optimizer import Optimizer
from modicum.train.parallel import spread

COMPILE = 1e18  # so much arithmetic that compiling pays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="cyberslm")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro", type=int, default=None, help="rows at once on each rank (default: its share)")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--parallel", default=None, choices=["ddp", "fsdp"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parallel is None:
        compare(options)
    else:
        measure(options)


def compare(options: argparse.Namespace) -> None:
    """Run each system, `rounds` times in turn, and print the table."""
    systems = {"one process": None, f"{options.ranks} ranks, DDP": "ddp", f"{options.ranks} ranks, FSDP2": "fsdp"}
    found: dict[str, list[dict[str, float | str]]] = {name: [] for name in systems}
    for _ in range(options.rounds):
        for name, parallel in systems.items():
            found[name].append(answer(options, parallel))
    print("| system | tokens/s | of one process | TFLOP/s | MFU | peak MB of a rank | loss |")
    print("|---|---|---|---|---|---|---|")
    first = statistics.median(float(a["tokens_per_second"]) for a in found["one process"])
    for name, answers in found.items():
        speed = statistics.median(float(a["tokens_per_second"]) for a in answers)
        last = answers[-1]
        flops = speed * float(last["flops_per_token"])
        peak = peak_flops(str(last["machine"])) * (1 if name == "one process" else options.ranks)
        share = f"{flops / peak:.1%}" if peak and options.device == "cuda" else ""
        print(
            f"| {name} | {speed:,.0f} | {speed / first:.2f} × | {flops / 1e12:.2f} | {share} "
            f"| {float(last['peak_mb']):,.0f} | {float(last['loss']):.4f} |"
        )
    print(f"{last['machine']}, torch {torch.__version__}, {options.preset}, {options.batch} x {options.length} tokens")
    losses = [float(answers[-1]["loss"]) for answers in found.values()]
    if max(losses) - min(losses) > 0.01 * max(losses):
        sys.exit("the systems do not learn the same: their losses differ by more than 1 %")


def answer(options: argparse.Namespace, parallel: str | None) -> dict[str, float | str]:
    """What one system measured, in processes of its own. Threads are shared out evenly."""
    words = [f"--{name}={value}" for name, value in vars(options).items() if value is not None and name != "parallel"]
    command = [sys.executable]
    threads = os.cpu_count() or 1
    if parallel is not None:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        threads = max(1, threads // options.ranks)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # without torchrun `joined` gives one process, whatever the engine is called
    command += [__file__, *words, f"--parallel={parallel or 'ddp'}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, float | str] = json.loads(line)
    return found


def measure(options: argparse.Namespace) -> None:
    """Train in this process, or this rank; the first rank prints the figures as JSON."""
    with joined() as ranks:
        wishes = Wishes(options.device, "auto", parallel=options.parallel)
        choices = ranks.by_first(lambda: choose(wishes, flops=COMPILE, earlier=None, say=say, ranks=ranks))
        if options.device == "cpu":
            keep_freed_memory()
        settings = ModelSettings(preset=options.preset)
        config = ModelConfig.from_settings(settings, settings.vocab_size)
        config = replace(config, max_position_embeddings=max(options.length, config.max_position_embeddings))
        share = options.batch // ranks.world_size
        batch = synthetic_batch(config, rows=options.batch, length=options.length)
        own = slice(ranks.rank * share, (ranks.rank + 1) * share)
        batch = Batch(batch.ids[own], batch.positions[own], batch.documents[own], batch.supervised[own])
        with prepared(choices):
            model = Decoder(config).to(choices.device).train()
            loss = SupervisedLoss(
                model, device=torch.device(choices.device), dtype=choices.torch_dtype, compiled=choices.compile
            )
            engine = spread(loss, options.parallel, ranks)
            optimizer = Optimizer(model, OptimizerSettings(options.optimizer), choices.torch_dtype)
            rows = min(options.micro or share, share)
            seconds = []
            for _ in range(2 + options.updates):  # the first compiles, the second finds its memory
                start = time.monotonic()
                # the loss is read in each, so a device has finished when it returns
                update = make_update(
                    engine, optimizer, batch, micro_batch_size=rows, rate=1e-4, clip_norm=1.0, ranks=ranks
                )
                seconds.append(time.monotonic() - start)
        if ranks.is_first:
            found = {
                "tokens_per_second": update.tokens / statistics.median(seconds[2:]),
                "flops_per_token": training_flops_per_token(config, options.length),
                "peak_mb": peak_mb(options.device),
                "loss": update.loss,
                "machine": choices.machine,
            }
            print(json.dumps(found), flush=True)


def peak_mb(device: str) -> float:
    """The largest memory of this process, on the device where that has its own."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    from modicum.store import peak_memory_bytes

    return peak_memory_bytes() / 1e6


def peak_flops(machine: str) -> float:
    """The chip's published dense bf16 peak; 0 where the name is not known."""
    words = machine.upper().replace("RTX ", "RTX").replace("-", " ").split()
    return next((chip.flops for name, chip in CHIPS.items() if name.upper() in words), 0.0)


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
