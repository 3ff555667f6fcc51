"""Runs a Python with a tool of upstream on its path, apart from ours: make test-upstream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def ran(paths: list[Path], *words: str | Path) -> str:
    """Return what a Python printed that has ``paths`` on its path. Skips without a module."""
    path = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    if "No module named" in done.stderr:
        pytest.skip(f"{paths[0]}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
