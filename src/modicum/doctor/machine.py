"""What this machine offers to training: versions, cores, bf16, a compiler that works, memory, disk, the allocator."""

import platform
import time
from pathlib import Path

import torch

from modicum.doctor.finding import Finding, judged
from modicum.road.machine import describe_machine, free_disk
from modicum.road.words import size, three_figures
from modicum.store import free_memory, memory_limit
from modicum.train.allocator import keep_freed_memory, set_by_user
from modicum.train.compiler import compiler_fault
from modicum.train.machine import Wishes, choose, has_fast_bfloat16

_LITTLE_MEMORY, _LITTLE_DISK = 2 * 10**9, 2 * 10**9
_SIDE = 1024  # of the square matrices that are multiplied


def device_here() -> torch.device:
    """The device that a run with `device: auto` takes."""
    return torch.device(choose(Wishes(compile="off"), flops=0.0, earlier=None, say=lambda _: None).device)


def examine_machine(disk: Path) -> list[Finding]:
    """disk: where runs are to lie."""
    device = device_here()
    return [versions(), bfloat16(device), compiler(device), memory(), disk_space(disk), allocator()]


def versions() -> Finding:
    machine = describe_machine()
    threads = torch.get_num_threads()
    return Finding("machine", "ok", f"{machine.line()}; torch uses {threads} thread{'s' if threads != 1 else ''}")


def bfloat16(device: torch.device) -> Finding:
    """Rates of one matrix product in fp32 and bf16, beside what training would take for granted."""
    rates = {dtype: _product_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    fast = has_fast_bfloat16(device.type)
    figures = ", ".join(f"{str(dtype).removeprefix('torch.')} {three_figures(rate)}" for dtype, rate in rates.items())
    kind = "bf16 in hardware: training uses it" if fast else "no bf16 in hardware: training uses fp32"
    return Finding("bf16", "told", f"{kind}; a product of {_SIDE}x{_SIDE} matrices runs at {figures} GFLOP/s")


def _product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """GFLOP/s of the product of two square matrices, for about so many seconds."""
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    float((matrix @ matrix)[0, 0])
    start, products = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
        products += 1
    return 2 * _SIDE**3 * products / (time.perf_counter() - start) / 1e9


def compiler(device: torch.device) -> Finding:
    """Whether torch.compile makes code here that runs, and computes the right thing."""
    fault = compiler_fault(device.type)
    if fault is not None:
        return Finding("compiler", "told", f"torch.compile is of no use, so training is slower: {fault}")
    numbers = torch.linspace(-3, 3, 257, device=device)
    found = torch.compile(_curve, dynamic=False)(numbers)
    difference = float((found - _curve(numbers)).abs().max())
    return judged("compiler", difference < 1e-5, f"torch.compile works; compiled and not differ by {difference:.0e}")


def _curve(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * x.exp().sin()


def memory() -> Finding:
    free, limit = free_memory(), memory_limit()
    detail = f"{size(free)} free of {size(limit)}"
    little = free < _LITTLE_MEMORY
    return judged("memory", not little, f"{detail}{'; close other programs' if little else ''}", yours=True)


def disk_space(path: Path) -> Finding:
    free = free_disk(path.resolve())
    little = free < _LITTLE_DISK
    return judged("disk", not little, f"{size(free)} free at {path}{'; make room' if little else ''}", yours=True)


def allocator() -> Finding:
    if keep_freed_memory():
        return Finding("allocator", "ok", "glibc keeps freed memory while training, which saves page faults")
    if set_by_user():
        told = "left as it is: set by your own MALLOC_ or GLIBC_ variables"
    elif platform.libc_ver()[0] == "glibc":
        told = "this glibc refused to keep freed memory"
    else:
        told = "left as it is: not glibc"
    return Finding("allocator", "told", told)
