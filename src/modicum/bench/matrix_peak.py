"""The machine's own speed at matrix products of a training step's shape, which nothing built of them can pass."""

import json
import sys
import time
from statistics import median

import torch


def matrix_gflops(hidden: int, dtype: torch.dtype, *, rows: int = 4096, repeats: int = 12) -> float:
    """10^9 operations a second of (rows, hidden) by (hidden, 4 hidden), the median of `repeats`, output kept."""
    left = torch.randn(rows, hidden).to(dtype)
    right = torch.randn(4 * hidden, hidden).to(dtype)
    out = torch.empty(rows, 4 * hidden, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, right.T, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * hidden * 4 * hidden / median(seconds) / 1e9


def main() -> None:
    """Read {"hidden": ...} from standard input, print the speeds by dtype."""
    hidden = json.load(sys.stdin)["hidden"]
    found = {name: matrix_gflops(hidden, getattr(torch, name)) for name in ("bfloat16", "float32")}
    said = ", ".join(f"{name} {speed:.0f} GFLOP/s" for name, speed in found.items())
    print(json.dumps({"gflops": found, "said": said}))


if __name__ == "__main__":
    main()
