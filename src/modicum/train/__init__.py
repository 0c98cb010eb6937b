"""Training: one loop for pretraining and fine-tuning, its optimizer, schedules, loss and metrics.

It takes a decoder and batches, and leaves metrics and checkpoints in a folder, from which it goes on bit for bit.
"""

from modicum.train.attention import AttentionShape
from modicum.train.loop import train
from modicum.train.loss import SupervisedLoss
from modicum.train.machine import Choices, Wishes, choose, prepared
from modicum.train.metrics import read_metrics
from modicum.train.optimizer import OptimizerSettings
from modicum.train.plan import Batches, Intervals, TrainResult
from modicum.train.ranks import ALONE, Ranks, joined
from modicum.train.schedule import Schedule
from modicum.train.stop import Interrupted
from modicum.train.update import make_update

__all__ = [
    "ALONE",
    "AttentionShape",
    "Batches",
    "Choices",
    "Interrupted",
    "Intervals",
    "OptimizerSettings",
    "Ranks",
    "Schedule",
    "SupervisedLoss",
    "TrainResult",
    "Wishes",
    "choose",
    "joined",
    "make_update",
    "prepared",
    "read_metrics",
    "train",
]
