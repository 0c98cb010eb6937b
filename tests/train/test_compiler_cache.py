import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_runs
from training_runs import digests, small_run

from modicum.train import Wishes, compiler
from modicum.train.compiler import being_written, compiler_fault, cut_off, mend_cache


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A compiler's cache that no other test and no other process uses."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "cache"))
    (tmp_path / "cache" / "ab").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library():
    """The bytes of a real shared library."""
    import _ctypes

    with open(_ctypes.__file__, "rb") as file:
        return file.read()


def test_a_library_that_is_cut_off_anywhere_is_told_from_a_whole_one(tmp_path, library):
    sizes = {0, 1, 3, 4, 40, 63, 64, 1000, len(library) // 2, len(library) - 1, len(library)}
    files = {size: tmp_path / f"{size}.so" for size in sizes}
    for size, file in files.items():
        file.write_bytes(library[:size])
    (tmp_path / "holes.so").write_bytes(bytes(len(library)))
    found = set(cut_off([*files.values(), tmp_path / "holes.so"]))
    assert found == {tmp_path / "holes.so", *(file for size, file in files.items() if size < len(library))}


def test_only_what_is_cut_off_leaves_the_cache(own_cache, library):
    (own_cache / "ab" / "whole.so").write_bytes(library)
    (own_cache / "ab" / "part.so").write_bytes(library[:5000])
    (own_cache / "ab" / "empty.o").write_bytes(b"")
    (own_cache / "ab" / "header.h.gch").write_bytes(b"any")
    assert mend_cache()
    assert sorted(file.name for file in (own_cache / "ab").iterdir()) == ["header.h.gch", "whole.so"]


def test_what_another_process_is_writing_stays_until_it_has_ended(own_cache):
    part = own_cache / "ab" / "part.so"
    script = "import sys, time; f = open(sys.argv[1], 'wb', 0); f.write(b'\\x7fELF'); print(flush=True); time.sleep(60)"
    linker = subprocess.Popen([sys.executable, "-c", script, str(part)], stdout=subprocess.PIPE)
    linker.stdout.readline()
    assert not mend_cache()
    assert part.exists()
    linker.kill()
    linker.wait()
    linker.stdout.close()
    if not Path("/proc/self/fd").is_dir():
        os.utime(part, (0, 0))  # there only its age tells
    assert mend_cache()
    assert not part.exists()


def test_a_process_whose_other_files_come_and_go_is_seen_all_the_same(tmp_path):
    part = tmp_path / "part.so"
    script = "import sys, os; f = open(sys.argv[1], 'wb', 0); print(flush=True)\nwhile True: open(os.devnull).close()"
    busy = subprocess.Popen([sys.executable, "-c", script, str(part)], stdout=subprocess.PIPE)
    busy.stdout.readline()
    try:
        assert all(being_written([part]) == {part} for _ in range(40))
    finally:
        busy.kill()
        busy.wait()
        busy.stdout.close()


def test_a_library_that_is_finished_between_two_looks_stays(own_cache, library, monkeypatch):
    part = own_cache / "ab" / "part.so"
    part.write_bytes(library[:5000])

    def finished_meanwhile(_):
        part.write_bytes(library)
        return set()

    monkeypatch.setattr(compiler, "being_written", finished_meanwhile)
    assert not mend_cache()
    assert part.read_bytes() == library


def test_what_is_no_file_is_left_alone(own_cache):
    (own_cache / "ab" / "folder.so").mkdir()
    assert not mend_cache()


def test_precompiled_headers_go_when_no_library_is_at_fault(own_cache, library):
    (own_cache / "ab" / "whole.so").write_bytes(library)
    (own_cache / "ab" / "header.h.gch").write_bytes(b"any")
    assert not mend_cache()
    assert mend_cache(headers=True)
    assert not mend_cache(headers=True)
    assert [file.name for file in (own_cache / "ab").iterdir()] == ["whole.so"]


def test_a_tool_chain_that_works_after_mending_has_no_fault(monkeypatch):
    calls = []

    def compiled(*_, **__):
        calls.append(0)
        if len(calls) == 1:
            raise ImportError("x.so: file too short")
        return lambda x: x

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(compiler, "mend_cache", lambda **_: True)
    assert compiler_fault("cpu") is None
    calls.clear()
    monkeypatch.setattr(compiler, "mend_cache", lambda **_: False)
    assert "file too short" in compiler_fault("cpu")


def test_a_first_update_that_cannot_be_compiled_is_made_again_after_mending(prepared_data, tmp_path, monkeypatch):
    from modicum.train import run as run_module

    original, calls, said = run_module.make_update, [], []

    def failing(loss, optimizer, batch, **parts):
        calls.append(0)
        if len(calls) == 1:
            loss(batch).backward()  # half of an update, with its gradients and random numbers
            torch.rand(7)
            raise ImportError("x.so: file too short")
        return original(loss, optimizer, batch, **parts)

    class Eager(run_module.SupervisedLoss):
        def __init__(self, model, **parts):
            super().__init__(model, **{**parts, "compiled": False})

    wishes = Wishes(device="cpu", dtype="float32", compile="on")
    monkeypatch.setattr("modicum.train.machine.compiler_fault", lambda _: None)
    monkeypatch.setattr(run_module, "SupervisedLoss", Eager)
    expected = digests(small_run(prepared_data, tmp_path / "straight", steps=3, dropout=0.2, wishes=wishes).last)
    monkeypatch.setattr(run_module, "make_update", failing)
    monkeypatch.setattr(run_module, "mend_cache", lambda **_: True)
    mended = small_run(prepared_data, tmp_path / "mended", steps=3, dropout=0.2, wishes=wishes, say=said.append)
    assert digests(mended.last) == expected
    assert any("compiling failed (ImportError)" in line for line in said)
    calls.clear()
    monkeypatch.setattr(run_module, "mend_cache", lambda **_: False)
    with pytest.raises(ImportError):
        small_run(prepared_data, tmp_path / "hopeless", steps=3, wishes=wishes)


@pytest.mark.slow
def test_a_run_goes_on_over_a_cache_in_which_every_library_is_cut_off(prepared_data, tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}

    def run(out):
        command = [sys.executable, training_runs.__file__, prepared_data, out, '{"steps": 2, "compile": "on"}']
        subprocess.run(command, env=environment, check=True)
        return digests(out / "checkpoints" / "last")

    expected = run(tmp_path / "first")
    libraries = list((tmp_path / "cache").rglob("*.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    assert run(tmp_path / "second") == expected
    assert not cut_off((tmp_path / "cache").rglob("*.so"))
