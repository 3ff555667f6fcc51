"""The allocator of the C library: whether freed memory is kept for what is allocated next."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_ASKED = "MALLOC_TRIM_THRESHOLD_"
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, see mallopt(3)
_USUAL = 128 << 10  # glibc's default for both, in bytes
_LARGEST = 32 << 20  # what glibc allows for M_MMAP_THRESHOLD
_users: list[ctypes.CDLL] = []  # one for each block that is open
_changing = threading.Lock()


@contextlib.contextmanager
def reused_memory() -> Iterator[None]:
    """Keep freed memory for the next allocation in the block, and give it back at its end.

    Dask starts its workers with MALLOC_TRIM_THRESHOLD_, with which glibc gives every larger piece
    back at once and takes it anew, page by page: work on large tensors then takes six times as
    long. Without that variable, or another C library, this does nothing.
    """
    library = _glibc()
    if library is None:
        yield
        return
    with _changing:
        _users.append(library)
        library.mallopt(_MMAP, _LARGEST)
        library.mallopt(_TRIM, 2**31 - 1)
    try:
        yield
    finally:
        with _changing:
            _users.pop()
            if not _users:  # no other thread is in such a block
                library.mallopt(_MMAP, _asked("MALLOC_MMAP_THRESHOLD_"))
                library.mallopt(_TRIM, _asked(_ASKED))
                library.malloc_trim(0)


def _asked(name: str) -> int:
    """Return the threshold that the environment asks for, in bytes."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else _USUAL


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, if it is glibc and was asked to give memory back soon."""
    if _ASKED not in os.environ or os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    names = "mallopt", "malloc_trim", "gnu_get_libc_version"
    return library if all(hasattr(library, name) for name in names) else None
