"""Triton kernels that Inductor writes for GPUs, run and recorded in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("triton_program.py")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    """Run the program in its own process: Triton is configured before its import."""
    folder = tmp_path_factory.mktemp("triton")
    env = {
        **os.environ,
        "LLMDEBUG_RUNS": str(folder / "runs"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, encoding="utf-8", timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_seeing_triton_kernels_changes_no_bit_of_output_and_gradients(program):
    assert program["faithful"]["equal"]
    assert program["faithful"]["problems"] == []


def test_every_buffer_of_triton_kernels_is_mapped_to_a_node_and_agrees_with_it_forward_and_backward(
    program,
):
    found = program["faithful"]
    assert found["verdict"] == "within_noise"
    assert found["phases"] == ["backward", "forward"]
    assert found["mapped"] == found["written"] > 20


def test_a_triton_kernel_is_kept_with_its_code(program):
    kernels = program["faithful"]["kernels"]
    silu = next(source for name, source in kernels.items() if "triton_" in name and "silu" in name)
    assert "@triton.jit" in silu
    assert "tl.store(" in silu


def test_a_wrong_triton_kernel_is_the_one_finding(program):
    found = program["spoilt"]
    assert (found["roots"], found["verdict"]) == (2, "diverged")
    ((path, cause, kernel, nodes),) = found["findings"]
    assert path in ("layers.1.norm/Aten.rsqrt", "layers.1.norm/Aten.mul.Tensor")
    assert cause == "introduced"
    assert "/triton_" in kernel
    assert "rsqrt_1" in nodes


def test_the_kernel_of_accelerators_measures_what_the_cpu_measures():
    program = PROGRAM.with_name("on_device_program.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, encoding="utf-8", timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 60
    for what, got, expected in found:
        for a, b in zip(got, expected, strict=True):
            same = a == b or (a != a and b != b)
            assert same or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9), (what, got, expected)
