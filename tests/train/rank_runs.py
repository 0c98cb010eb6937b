"""Small runs one after the other in the same ranks: what torchrun is told to start.

    torchrun --nproc-per-node N rank_runs.py PREPARED JOBS

JOBS: JSON, folder to settings of `small_run`. Beside those: begin_with, a checkpoint to go on from; poison, the rank
whose third update loses its loss; seconds, how long each update takes at least.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from training_runs import small_run

from modicum.store import UserError
from modicum.train import Intervals, OptimizerSettings, joined
from modicum.train import run as run_module
from modicum.train.loss import SupervisedLoss


def main():
    try:
        with joined() as ranks:
            for out, settings in json.loads(sys.argv[2]).items():
                Path(out).mkdir(parents=True, exist_ok=True)
                (Path(out) / f"pid-{ranks.rank}").write_text(str(os.getpid()))
                job(Path(sys.argv[1]), Path(out), ranks, **settings)
    except (UserError, KeyboardInterrupt) as error:
        print(f"told: {error}", file=sys.stderr)
        sys.exit(2)


def job(prepared, out, ranks, *, optimizer="adamw", begin_with=None, poison=None, seconds=0.0, **settings):
    if begin_with is not None:
        folder = out / "checkpoints" / Path(begin_with).name
        ranks.by_first(lambda: None if folder.exists() else shutil.copytree(begin_with, folder))
    if poison == ranks.rank:
        poison_third_update()
    if seconds:
        slow_down(seconds)
    intervals = Intervals(log=1, evaluate=4, checkpoint=2, keep_last=10)
    small_run(
        prepared, out, optimizer=OptimizerSettings(optimizer), intervals=intervals, ranks=ranks,
        **{"batch_size": 8, "micro_batch_size": 2, **settings},
    )  # fmt: skip


def poison_third_update():
    forward, calls = SupervisedLoss.forward, 0

    def poisoned(self, batch):
        nonlocal calls
        calls += self.training and batch.rows > 0
        return forward(self, batch) * (float("inf") if calls == 5 else 1.0)  # two micro-batches an update

    SupervisedLoss.forward = poisoned


def slow_down(seconds):
    make_update = run_module.make_update

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return make_update(*args, **kwargs)

    run_module.make_update = slow


if __name__ == "__main__":
    main()
