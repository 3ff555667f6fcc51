"""The C kernel of what two tensors differ by, beside NumPy, torch and exact sums."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmdebug_nb.comparison import metrics
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels import difference
from llmdebug_nb.core.kernels.narrow import rounding

KERNEL = difference.kernel()
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool)
SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 300)) | st.tuples(st.integers(0, 1200))
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="there is no C kernel")


@st.composite
def two(draw):
    shape, seed = draw(SHAPES), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    golden = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 1e-9, 1e30]))
    mine = golden * (
        1 + draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0])) * torch.randn(shape, generator=generator)
    )
    for x in (golden, mine):
        for value in draw(st.lists(st.floats(width=32), max_size=3)):
            x.view(-1)[draw(st.integers(0, 40)) :: draw(st.integers(1, 99))] = value
    return golden.to(draw(st.sampled_from(DTYPES))), mine.to(draw(st.sampled_from(DTYPES)))


def by_numpy(golden: torch.Tensor, mine: torch.Tensor) -> metrics.Metrics:
    with patch.object(difference, "kernel", lambda: None), np.errstate(all="ignore"):
        return metrics.compare(golden, mine)


@needs_kernel
@given(two())
def test_the_kernel_gives_the_bits_of_numpy(tensors):
    assert repr(metrics.compare(*tensors)) == repr(by_numpy(*tensors))


@needs_kernel
@pytest.mark.parametrize("golden", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mine", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_numpy_for_several_chunks(golden, mine, monkeypatch):
    monkeypatch.setattr(constants, "CHUNK", 1 << 14)
    numbers = torch.randn(1000, 67, generator=torch.Generator().manual_seed(0))
    other = numbers * 1.001
    other[5], other[700, 3] = math.nan, math.inf
    tensors = numbers.to(golden), other.to(mine)
    assert repr(metrics.compare(*tensors)) == repr(by_numpy(*tensors))


@needs_kernel
def test_the_kernel_takes_the_elements_of_a_strided_tensor():
    golden, mine = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    parts = golden[:, 3], mine[:, 3]  # flat, with strides
    assert repr(metrics.compare(*parts)) == repr(metrics.compare(*(x.clone() for x in parts)))
    narrow = golden.clone()
    narrow[:, 3] = narrow[:, 3].bfloat16()
    assert rounding(narrow[:, 3]) == torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("turned", [False, True])
def test_complex_numbers_are_not_measured_against_real_ones(turned):
    pair = torch.randn(4), torch.randn(4, dtype=torch.complex64)  # 4 and 8 numbers
    with pytest.raises(ValueError, match="shapes"):
        metrics.compare(*(reversed(pair) if turned else pair))


@needs_kernel
@given(hnp.arrays(np.float32, (2, 3, 50), elements=st.floats(-50, 50, width=32)))
def test_the_sums_are_those_of_exact_arithmetic(numbers):
    golden, mine = (torch.from_numpy(each) for each in numbers)
    assert KERNEL is not None
    found = KERNEL(golden.reshape(-1), mine.reshape(-1), torch.float32, 50, 50, 1e30, 0.0)
    assert found is not None
    (sums, _), pairs = found, list(zip(*numbers.astype(float).reshape(2, -1).tolist(), strict=True))
    exact = {
        "gd": math.fsum(g * (m - g) for g, m in pairs),
        "gg": math.fsum(g * g for g, _ in pairs),
        "mm": math.fsum(m * m for _, m in pairs),
        "gm": math.fsum(g * m for g, m in pairs),
        "dd": math.fsum((m - g) ** 2 for g, m in pairs),
        "abs_d": math.fsum(abs(m - g) for g, m in pairs),
        "relative": math.fsum(abs(m - g) / abs(g) for g, m in pairs if g),
        "most": max(abs(m - g) for g, m in pairs),
        "sizeable": sum(g != 0 for g, _ in pairs),
        "mismatched": sum(g != m for g, m in pairs),
    }
    size = math.fsum(g * g + m * m for g, m in pairs)
    for name, value in exact.items():
        room = 1e-12 * (value if name == "relative" else size)
        assert abs(getattr(sums, name) - value) <= room, name


def held_by(x: torch.Tensor) -> float:
    """Return what `rounding` does, by the conversions of torch."""
    if not bool((x != x[:1]).any()):
        return 0.0
    for dtype in (torch.bfloat16, torch.float16):
        if bool(((x.to(dtype).to(x.dtype) == x) | x.isnan()).all()):
            return torch.finfo(dtype).eps
    return 0.0


@pytest.mark.parametrize("kernel", [difference.narrow(), None], ids=["C", "torch"])
@given(hnp.arrays(np.uint32, st.integers(0, 5)), st.sampled_from([0, 8, 12, 13, 14, 15, 16, 20]))
def test_what_a_dtype_of_16_bits_holds_is_told_as_by_conversion(kernel, bits, cleared):
    cut = (bits >> cleared) << cleared
    single = torch.from_numpy(cut.view(np.float32).copy())
    for x in (single, single.double()):
        with patch.object(difference, "narrow", lambda: kernel):
            assert rounding(x) == held_by(x)


def test_every_number_of_float16_is_held_by_float16():
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = numbers.view(torch.float16).float()
    assert rounding(numbers) == torch.finfo(torch.float16).eps
    # half of the least one, and the next above the greatest one, are not
    for other in (2.0**-25, 65536.0):
        assert rounding(torch.tensor([1.0 + 2.0**-10, other])) == 0.0


def test_a_number_of_float64_that_overflows_float32_is_held_by_nothing():
    assert rounding(torch.tensor([1.0, 1e300], dtype=torch.float64)) == 0.0
