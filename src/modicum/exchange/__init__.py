"""In and out: foreign checkpoints become ours, ours become foreign ones, and each passes the gate of `parity`.

Name maps and rotary layouts have their one place here. What comes from outside is read without executing anything.
"""

from modicum.exchange.exporting import ExportReport, export_checkpoint
from modicum.exchange.importing import ImportReport, import_checkpoint

__all__ = ["ExportReport", "ImportReport", "export_checkpoint", "import_checkpoint"]
