"""Keep freed memory in the process: what glibc gives back to the system has to be mapped and cleared again.

A training step frees and asks for the same large blocks each time. With a vocabulary of 32,000 that is 200,000 page
faults a step and an eighth to a fifth of its time; with 4,096 it is a fifth of the faults and no time to speak of
(docs/training-notes.md).
"""

import ctypes
import os
import platform

# <malloc.h>: parameter numbers of mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed; returns whether it listened.

    Does nothing on other systems and C libraries, and where the user has set the allocator's own variables.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    if set_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # some versions know no such high threshold, and can only be told to map no block by itself
    together = bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) or bool(mallopt(_M_MMAP_MAX, 0))
    return bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST)) and together


def set_by_user() -> bool:
    """Whether the environment holds the allocator's own variables."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
