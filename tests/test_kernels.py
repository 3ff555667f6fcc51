"""Summaries, fingerprints and raw bytes, each beside an independent calculation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.kernels import on_device, raw
from llmdebug_nb.core.kernels.fingerprint import fingerprint, same
from llmdebug_nb.core.kernels.summary import figures, summarize

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=9, min_side=1),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=False),
)


def independent(values: np.ndarray) -> list[float]:
    """Return the seven figures, each from exactly rounded sums over Python floats."""
    flat = [float(v) for v in values.reshape(-1)]
    nan = sum(math.isnan(v) for v in flat)
    inf = sum(math.isinf(v) for v in flat)
    zero = sum(v == 0 for v in flat)
    if nan:
        return [math.nan] * 4 + [nan, inf, zero]
    if inf:
        total = (
            math.nan
            if math.inf in flat and -math.inf in flat
            else math.inf
            if math.inf in flat
            else -math.inf
        )
        return [min(flat), max(flat), total, math.inf, nan, inf, zero]
    return [
        min(flat),
        max(flat),
        math.fsum(flat) / len(flat),
        math.sqrt(math.fsum(v * v for v in flat)),
        nan,
        inf,
        zero,
    ]


def close(a: float, b: float, scale: float) -> bool:
    return (a != a and b != b) or a == b or abs(a - b) <= 1e-12 * scale


@given(FLOATS)
def test_figures_equal_an_exact_calculation(values):
    got, expected = figures(torch.from_numpy(values.copy())), independent(values)
    scale = float(np.abs(values[np.isfinite(values)]).sum()) + 1e-300
    assert all(close(a, b, scale) for a, b in zip(got, expected, strict=True)), (got, expected)


@settings(max_examples=50)
@given(FLOATS)
def test_torch_gives_the_same_figures_on_a_device_without_triton(values):
    tensor = torch.from_numpy(values.copy())
    (got,) = on_device.figures([on_device.Pages().measure(tensor)])
    scale = float(np.abs(values[np.isfinite(values)]).sum()) + 1e-300
    assert all(close(a, b, scale) for a, b in zip(got, figures(tensor), strict=True))


def test_a_tensor_of_many_chunks_gives_the_same_figures_as_numpy_in_float64():
    values = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    values[[5, 200_000, 500_000]] = 0
    wide = values.numpy().astype(np.float64)
    low, high, mean, norm, nan, inf, zero = figures(values)
    assert (low, high, nan, inf, zero) == (wide.min(), wide.max(), 0, 0, 3)
    assert mean == pytest.approx(wide.mean(), rel=1e-9)
    assert norm == pytest.approx(np.linalg.norm(wide), rel=1e-12)


def test_a_nan_in_any_chunk_shows_in_every_figure():
    for place in (0, 200_000, (1 << 18) - 1):
        values = torch.ones(1 << 18)
        values[place] = math.nan
        low, high, mean, norm, nan, inf, zero = figures(values)
        assert all(math.isnan(v) for v in (low, high, mean, norm))
        assert (nan, inf, zero) == (1, 0, 0)


def test_large_half_precision_values_do_not_overflow_the_norm():
    values = torch.full((4,), 60000.0, dtype=torch.float16)
    assert figures(values)[3] == pytest.approx(120000.0)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([True, False, True]), [0, 1, 2 / 3, math.sqrt(2), 0, 0, 1]),
        (torch.tensor([3, -4]), [-4, 3, -0.5, 5, 0, 0, 0]),
        (torch.tensor([3 + 4j, 0j]), [0, 5, 2.5, 5, 0, 0, 1]),
        (torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn), [-2, 1.5, -0.25, 2.5, 0, 0, 0]),
        (
            torch.tensor([1, 65535], dtype=torch.uint16),
            [1, 65535, 32768, math.hypot(1, 65535), 0, 0, 0],
        ),
        (torch.tensor(2.5), [2.5, 2.5, 2.5, 2.5, 0, 0, 0]),
        (torch.empty(0, 3), [None] * 7),
    ],
    ids=["bool", "int64", "complex", "fp8", "uint16", "0-d", "empty"],
)
def test_figures_of(tensor, expected):
    got = figures(tensor)
    assert [g if g is None else pytest.approx(g) for g in got] == expected


def test_unreadable_tensors_are_described_by_dtype_and_shape_alone():
    summary = summarize(torch.eye(3).to_sparse())
    assert (summary.dtype, summary.shape, summary.min, summary.fingerprint) == (
        "float32",
        (3, 3),
        None,
        None,
    )
    assert summarize(torch.randn(2, device="meta")).nan is None


@given(st.binary(max_size=64))
def test_a_fingerprint_is_xxh3_of_the_bytes(data):
    assert fingerprint(np.frombuffer(data, np.uint8)) == f"xxh3:{xxhash.xxh3_64(data).hexdigest()}"


def test_fingerprints_tell_order_and_answer_only_for_their_own_kind():
    a, b = (fingerprint(raw.to_bytes(torch.tensor(v))) for v in ([1.0, 2.0], [2.0, 1.0]))
    assert same(a, a) is True
    assert same(a, b) is False
    assert same(a, "crc32:00000000") is None
    assert same(None, a) is None


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 5), max_size=3),
    st.randoms(use_true_random=False),
)
def test_bytes_come_back_as_the_same_tensor(name, shape, random):
    dtype = DTYPES[name]
    size = math.prod(shape) * dtype.itemsize
    data = bytes(random.randrange(2 if name == "bool" else 256) for _ in range(size))
    tensor = raw.from_bytes(data, name, tuple(shape))
    assert tensor.dtype == dtype
    assert tensor.shape == torch.Size(shape)
    assert raw.to_bytes(tensor).tobytes() == data


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("float32", (2,), b"123"), ("float99", (0,), b""), ("int8", (-1,), b"")],
)
def test_bytes_that_make_no_tensor_are_refused(dtype, shape, data):
    with pytest.raises(ValueError, match=r"do not make|unknown dtype"):
        raw.from_bytes(data, dtype, shape)


class KnownPage:
    """A page whose rows were read back."""

    def __init__(self, rows):
        self._rows, self.used = rows, len(rows)

    def read(self, used):
        return self._rows[:used]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(1, 2)), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_rows_of_a_page_are_put_together_for_each_tensor(parts, seed):
    """Some rows are of tensors that nobody asks for now, and some tensors share their rows."""
    rng, used = np.random.default_rng(seed), sum(length for length, *_ in parts)
    rows = rng.standard_normal((used, on_device.COLUMNS))
    rows[:, 3] = rows[:, 3] ** 2
    rows[:, 4:] = rng.integers(0, 3, rows[:, 4:].shape)
    page, measured, first = KnownPage(rows), [], 0
    for length, wanted, times in parts:
        measured += [on_device.Measured(page, first, length, 10 * length)] * (wanted * times)
        first += length
    order = rng.permutation(len(measured))
    measured = [measured[at] for at in order]
    for each, found in zip(measured, on_device.figures(measured), strict=True):
        own = rows[each.first : each.first + each.length]
        nan, inf, zero = (int(count) for count in own[:, 4:7].sum(0))
        low, high = (own[:, 0].min(), own[:, 1].max()) if not nan else (math.nan, math.nan)
        expected = low, high, own[:, 2].sum() / each.size, math.sqrt(own[:, 3].sum())
        assert found[:4] == pytest.approx(expected, nan_ok=True)
        assert found[4:] == (nan, inf, zero)
