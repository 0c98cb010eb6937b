"""A program of its own: quantize rows with ggml's own kernels, which the gguf package has no writer for.

    python -P gguf_quantizer.py LIBRARY FOLDER

FOLDER holds request.json, a list of {"kind", "block", "bytes"}, and N.npy, float32 (rows, numbers), for the N-th of
them; N.out.npy, uint8 (rows, bytes), is written beside it. Imports nothing of ours.
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np


def main(library: str, folder: Path) -> None:
    """Answer the request in `folder`."""
    quantize = ctypes.CDLL(library).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    place, count = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int32, place, place, count, count, count, place]
    for number, wanted in enumerate(json.loads((folder / "request.json").read_text("utf-8"))):
        rows = np.ascontiguousarray(np.load(folder / f"{number}.npy"), dtype=np.float32)
        height, width = rows.shape
        out = np.zeros((height, width // wanted["block"] * wanted["bytes"]), np.uint8)
        written = quantize(wanted["kind"], rows.ctypes.data, out.ctypes.data, 0, height, width, None)
        if written != out.nbytes:
            sys.exit(f"ggml wrote {written} bytes where {out.nbytes} were expected")
        np.save(folder / f"{number}.out.npy", out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
