"""Python's garbage collector, paused while many objects are made that are no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the collector.

    Rows make no garbage in cycles, and to go through all of them again and again takes a fifth of
    the time.
    """
    running = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if running:
            gc.enable()
