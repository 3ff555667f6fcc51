"""opcheck on torch's own samples of operators: right ones, and with a fault in each output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from sweep import Seen, operators, sweep

EVERY = 24  # `python benchmarks/sweep.py` takes all of them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_of_torch_are_right_and_faults_in_them_are_found(dtype):
    seen = Seen()
    sweep(operators(EVERY), (dtype,), 1, seen)
    assert seen.wrong == []
    assert seen.missed == []
    assert seen.counts["fault found"] > 20
