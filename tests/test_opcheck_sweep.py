"""opcheck on torch's own samples of operators: right ones, and with a fault in each output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = Path(__file__).resolve().parents[1] / "benchmarks" / "sweep.py"
EVERY = 24  # `python benchmarks/sweep.py` takes all of them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_of_torch_are_right_and_faults_in_them_are_found(dtype):
    """In a process of its own: torch's samples, once imported, freeze the flags of its backends."""
    options = ["--every", str(EVERY), "--samples", "1", "--dtypes", dtype]
    swept = subprocess.run(
        [sys.executable, SWEEP, *options], capture_output=True, text=True, timeout=1200
    )
    assert swept.returncode == 0, swept.stdout + swept.stderr
    counts = dict(re.findall(r"^(fault (?:not )?found): ([\d,]+)$", swept.stdout, re.MULTILINE))
    found, missed = int(counts["fault found"]), int(counts["fault not found"])
    assert found > 20, swept.stdout
    assert missed < found / 5, swept.stdout  # near a pole or a jump, rounding explains a tenth
