"""In and out: foreign checkpoints become ours, ours become foreign ones, and each passes the gate of `parity`.

Name maps and rotary layouts have their one place here. What comes from outside is read without executing anything.
"""

from modicum.evaluate.divergence import Limits
from modicum.exchange.exporting import ExportReport, export_checkpoint
from modicum.exchange.gguf_exporting import GgufReport, export_gguf
from modicum.exchange.gguf_gate import LIMITS
from modicum.exchange.gguf_weights import Quant
from modicum.exchange.hf_exporting import HF_LIMITS, Dtype, HfReport, export_hf
from modicum.exchange.hf_shards import size_of
from modicum.exchange.importing import ImportReport, import_checkpoint
from modicum.exchange.onnx_exporting import ONNX_LIMITS, OnnxReport, export_onnx
from modicum.exchange.onnx_weights import OnnxQuant
from modicum.exchange.scope import Scope

__all__ = [
    "HF_LIMITS",
    "LIMITS",
    "ONNX_LIMITS",
    "Dtype",
    "ExportReport",
    "GgufReport",
    "HfReport",
    "ImportReport",
    "Limits",
    "OnnxQuant",
    "OnnxReport",
    "Quant",
    "Scope",
    "export_checkpoint",
    "export_gguf",
    "export_hf",
    "export_onnx",
    "import_checkpoint",
    "size_of",
]
