"""Memory that is freed is kept for what is allocated next, where the allocator gives it back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, resource, sys, threading
import numpy as np
from llmdebug_nb.core.allocator import reused_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work(context):
    before = faults()
    with context:
        for _ in range(200):
            np.ones(1 << 17)
    return faults() - before

print(work(contextlib.nullcontext()), work(reused_memory()), end=" ")
with reused_memory():
    thread = threading.Thread(target=work, args=(reused_memory(),))
    thread.start()
    thread.join()
    print(work(contextlib.nullcontext()), end=" ")  # the other thread has ended its own
print(work(contextlib.nullcontext()))
"""


def page_faults(**environment: str) -> list[int]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [int(count) for count in done.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is on Linux")
def test_in_the_block_memory_is_used_again_and_afterwards_as_before():
    if not hasattr(os, "confstr") or not os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("the C library is not glibc")
    outside, inside, nested, after = page_faults(MALLOC_TRIM_THRESHOLD_="65536")
    assert inside < outside / 10
    assert nested < outside / 10
    assert after > outside / 2


def test_without_the_variable_nothing_changes():
    outside, inside, nested, after = page_faults()
    assert max(outside, inside, nested, after) < 10_000  # 50,000 where pages are given back
