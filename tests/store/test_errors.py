import errno

import numpy as np
import pytest

from modicum.store import UserError, written_by_numpy


def test_a_full_disk_that_numpy_gives_no_number_is_the_users_to_mend(full_at, tmp_path):
    path = tmp_path / "numbers.npy"
    with (
        full_at(4096),
        pytest.raises(UserError, match=r"numbers\.npy: could not be written .*; make room on the disk"),
        written_by_numpy(path),
    ):
        np.save(path, np.zeros(10**5))


def test_what_the_operating_system_numbers_passes_as_it_is(tmp_path):
    fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left") as told, written_by_numpy(tmp_path):
        raise fault
    assert told.value is fault
