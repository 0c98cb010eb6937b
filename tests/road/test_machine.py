"""What the system says of the machine."""

import os

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


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path):
    assert machine.free_disk(tmp_path / "runs" / "new") > 0
