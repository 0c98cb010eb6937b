"""What the system says of the machine."""

import os

import pytest

from modicum.road import machine
from modicum.store import memory


def test_the_machine_is_described_in_one_line():
    here = machine.describe_machine()
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.memory_bytes > 10**8
    line = here.line()
    assert "\n" not in line
    assert here.torch in line
    assert here.processor in line


def test_a_containers_limit_counts_when_it_is_below_the_machines(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (limit,))
    whole = memory.memory_limit()
    limit.write_text("1000000000\n")
    assert memory.memory_limit() == 10**9
    assert memory.free_memory() <= 10**9
    limit.write_text("max\n")
    assert memory.memory_limit() == whole


@pytest.mark.parametrize(
    ("limit", "use", "droppable"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_container_uses_already_is_not_free(tmp_path, monkeypatch, limit, use, droppable):
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (tmp_path / limit,))
    (tmp_path / limit).write_text("1000000000\n")
    (tmp_path / use).write_text("900000000\n")
    (tmp_path / "memory.stat").write_text(f"anon 100\n{droppable} 150000000\n")
    assert memory.free_memory() == 250_000_000
    (tmp_path / use).write_text("2000000000\n")
    assert memory.free_memory() == 0


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path):
    assert machine.free_disk(tmp_path / "runs" / "new") > 0
