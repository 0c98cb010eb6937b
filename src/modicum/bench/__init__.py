"""Measurements, always with the peer in the same run: a process for each system, in turn, medians of all rounds."""

from modicum.bench.result import Bench, Row
from modicum.bench.systems import Ours, Peer
from modicum.bench.training import bench_training

__all__ = ["Bench", "Ours", "Peer", "Row", "bench_training"]
