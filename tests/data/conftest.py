import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def without_fsync() -> Iterator[None]:
    """Hundreds of small folders are written; that they survive a power cut is the store's own test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
