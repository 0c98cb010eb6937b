import numpy as np
import pytest

from modicum.exchange.continuing import parted


def test_the_first_token_that_is_another_is_told_with_its_margin():
    def speak(ids):
        said = np.zeros((len(ids), 5))
        said[:, 3] = 1.0  # always 3, and 2 a little less
        said[:, 2] = 0.995
        return said

    start = np.array([1, 1])
    assert parted(speak, [start], [[3, 3, 3]], clear=0.01) == ()
    near, far = parted(speak, [start, start], [[3, 2, 3], [4, 3, 3]], clear=0.01)
    assert (near.continuation, near.step, near.ours, near.theirs, near.near) == (0, 1, 3, 2, True)
    assert (far.continuation, far.step, far.ours, far.theirs, far.near) == (1, 0, 3, 4, False)
    assert (near.margin, far.margin) == (pytest.approx(0.005), 1.0)
    assert not parted(speak, [start], [[3, 2, 3]], clear=0.001)[0].near
