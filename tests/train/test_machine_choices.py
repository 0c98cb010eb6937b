import os
import platform
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modicum.store import UserError, processor
from modicum.train import machine
from modicum.train.allocator import keep_freed_memory
from modicum.train.machine import COMPILE_PAYS_FLOPS, Wishes, choose, compiler_fault, has_fast_bfloat16, prepared


def chosen(wishes=None, *, flops=0.0, earlier=None, said=None):
    return choose(
        wishes or Wishes(device="cpu"), flops=flops, earlier=earlier, say=[].append if said is None else said.append
    )


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    def cpuinfo(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")

    return cpuinfo


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("amx_tile amx_bf16", True), ("asimd bf16 i8mm", True)],
)
def test_bf16_is_taken_where_the_processor_multiplies_it_and_fp32_elsewhere(cpuinfo, flags, fast):
    cpuinfo(f"processor : 0\nmodel name : Some CPU\nflags : {flags}\n")
    assert has_fast_bfloat16("cpu") == fast
    choices = chosen()
    assert choices.dtype == ("bfloat16" if fast else "float32")
    assert choices.torch_dtype == (torch.bfloat16 if fast else torch.float32)
    assert choices.machine == "Some CPU"


def test_a_clock_rate_is_no_ability_of_the_processor(cpuinfo):
    cpuinfo("processor : 0\nmodel name : Some CPU\ncpu MHz : 2596.134\nflags : avx2 fma\n")
    assert processor.processor_flags() == {"avx2", "fma"}


def test_a_wish_for_a_dtype_is_followed(cpuinfo):
    cpuinfo("flags : avx2")
    assert chosen(Wishes(device="cpu", dtype="bfloat16")).dtype == "bfloat16"


def test_only_a_run_long_enough_is_compiled(monkeypatch):
    monkeypatch.setattr(machine, "compiler_fault", lambda _: None)
    assert not chosen(flops=COMPILE_PAYS_FLOPS / 2).compile
    assert chosen(flops=COMPILE_PAYS_FLOPS * 2).compile
    assert chosen(Wishes(device="cpu", compile="on")).compile
    assert not chosen(Wishes(device="cpu", compile="off"), flops=COMPILE_PAYS_FLOPS * 2).compile


def test_without_a_compiler_training_goes_on_and_says_so(monkeypatch):
    monkeypatch.setattr(machine, "compiler_fault", lambda _: "no g++")
    said = []
    assert not chosen(flops=COMPILE_PAYS_FLOPS * 2, said=said).compile
    assert len(said) == 1
    assert "torch.compile is off" in said[0]
    assert "no g++" in said[0]


def test_a_missing_compiler_is_found_by_trying_it(monkeypatch, tmp_path):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    fault = compiler_fault("cpu")
    torch.compiler.reset()
    assert fault is not None
    assert "\n" not in fault


def test_what_was_chosen_is_not_decided_again_on_a_resume(cpuinfo):
    cpuinfo("model name : Some CPU\nflags : avx512_bf16")
    first = chosen(flops=COMPILE_PAYS_FLOPS / 2)
    cpuinfo("model name : Some CPU\nflags : avx2")
    said = []
    assert chosen(flops=COMPILE_PAYS_FLOPS * 2, earlier=first.plain(), said=said) == first
    assert said == []


def test_another_machine_goes_on_with_a_warning(cpuinfo):
    cpuinfo("model name : Some CPU")
    first = chosen()
    cpuinfo("model name : Other CPU")
    said = []
    earlier = {**first.plain(), "torch_version": "2.10.0"}
    assert chosen(earlier=earlier, said=said).dtype == first.dtype
    assert len(said) == 1
    assert "machine Some CPU -> Other CPU" in said[0]
    assert "torch_version 2.10.0 ->" in said[0]


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"device cuda: .* finds none here"):
        chosen(Wishes(device="cuda"))


@pytest.mark.parametrize(("flags", "dtype"), [("avx2", "float32"), ("avx512_bf16", "bfloat16")])
def test_a_run_begun_on_a_gpu_goes_on_without_one(monkeypatch, cpuinfo, flags, dtype):
    cpuinfo(f"model name : Some CPU\nflags : {flags}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    said = []
    found = chosen(Wishes(), earlier={"device": "cuda", "dtype": "bfloat16"}, said=said)
    assert (found.device, found.dtype) == ("cpu", dtype)
    assert "device cuda -> cpu" in said[0]


def test_threads_and_determinism_hold_inside_and_are_put_back():
    before = torch.get_num_threads()
    choices = chosen(Wishes(device="cpu", threads=before + 1))
    with prepared(choices):
        assert torch.get_num_threads() == before + 1
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_cuda_only_algorithms_that_repeat_are_taken(device):
    with prepared(replace(chosen(Wishes(device="cpu")), device=device)):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (device == "cpu")
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_allocator_is_left_alone_where_it_is_not_glibc_or_the_user_set_it(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert keep_freed_memory() is False
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert keep_freed_memory() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
@pytest.mark.parametrize(("refused", "listened"), [({-3}, True), ({-3, -4}, False), ({-1}, False)])
def test_an_allocator_that_knows_no_such_threshold_is_told_in_another_way(monkeypatch, refused, listened):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    asked = []

    def mallopt(parameter, value):
        asked.append((parameter, value))
        return int(parameter not in refused)

    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory() is listened
    assert (-1, 2**31 - 1) in asked
    assert ((-4, 0) in asked) == (-3 in refused)
