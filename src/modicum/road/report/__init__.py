"""The report of a run: one self-contained page, its plots as PNG files, and a JSON file of every figure."""

from modicum.road.report.write import write_report

__all__ = ["write_report"]
