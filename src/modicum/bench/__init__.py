"""Measurements, always with the peer in the same run: a process for each system, in turn, medians of all rounds."""

from modicum.bench.result import Bench, Row
from modicum.bench.training import Peer, bench_training

__all__ = ["Bench", "Peer", "Row", "bench_training"]
