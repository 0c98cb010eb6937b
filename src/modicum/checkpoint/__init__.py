"""Checkpoint folders: a Hugging Face model as it lies on disk, with what training needs to go on beside it.

Saved atomically, hashed file by file, free of pickle. What the numbers mean is model's and train's affair.
"""

from modicum.checkpoint.load import Checkpoint, load_checkpoint, newest
from modicum.checkpoint.opening import opening_of
from modicum.checkpoint.retention import best_of, mark_best, prune
from modicum.checkpoint.save import TrainingState, point, save_checkpoint, step_folder

__all__ = [
    "Checkpoint",
    "TrainingState",
    "best_of",
    "load_checkpoint",
    "mark_best",
    "newest",
    "opening_of",
    "point",
    "prune",
    "save_checkpoint",
    "step_folder",
]
