"""Every metric, beside a plain NumPy calculation in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmdebug_nb.comparison import metrics, tolerance
from llmdebug_nb.kernels.summary import summarize

FINITE = st.floats(-50, 50, width=32, allow_subnormal=False)


@st.composite
def two(draw):
    n = draw(st.integers(1, 40))
    arrays = hnp.arrays(np.float32, n, elements=FINITE)
    return draw(arrays), draw(arrays)


def independent(g32: np.ndarray, m32: np.ndarray) -> dict[str, float]:
    """Return the metrics straight from their definitions."""
    g, m = g32.astype(np.float64), m32.astype(np.float64)
    d = np.abs(m - g)
    norm_g, norm_m = np.linalg.norm(g), np.linalg.norm(m)
    large = np.abs(g) > 2.0**-23
    rel = np.where(large, np.abs(m / np.where(large, g, 1) - 1), 0)
    softmax = [np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (g, m)]
    with np.errstate(divide="ignore"):
        kl = float((softmax[0] * (np.log(softmax[0]) - np.log(softmax[1]))).sum())
    distance = float(np.linalg.norm(d))
    return {
        "cosine_similarity": float(g @ m / norm_g / norm_m) if norm_g and norm_m else float(norm_g == norm_m),
        "relative_euclidean_distance": 0.0 if distance == 0 else distance / norm_g if norm_g else math.inf,
        "rmse": float(np.sqrt((d**2).mean())),
        "max_absolute_error": float(d.max()),
        "mean_absolute_error": float(d.mean()),
        "max_relative_error": float(rel.max()),
        "mean_relative_error": float(rel.mean()),
        "one_thousandth_err_ratio": float((rel[large] < 1e-3).mean()) if large.any() else 1.0,
        "five_thousandths_err_ratio": float((rel[large] < 5e-3).mean()) if large.any() else 1.0,
        "euclidean_distance": distance,
        "kl_divergence": max(0.0, kl),
        "mismatched": int((g != m).sum()),
        "nan_mismatch": 0,
        "inf_mismatch": 0,
    }


@given(two())
def test_metrics_equal_their_definitions(pair):
    g, m = pair
    got = metrics.compare(torch.from_numpy(g), torch.from_numpy(m))
    for name, value in independent(g, m).items():
        assert got[name] == pytest.approx(value, rel=1e-7, abs=1e-9), name


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_chunks_do_not_change_the_figures(seed):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(5000, generator=generator)
    m = g + 1e-3 * torch.randn(5000, generator=generator)
    whole = metrics.compare(g, m)
    before, metrics._CHUNK = metrics._CHUNK, 137
    try:
        parts = metrics.compare(g, m)
    finally:
        metrics._CHUNK = before
    assert whole["worst_row_error"] is None
    for name in metrics.FIELDS.keys() - {"worst_row_error"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-13), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulp_distance_counts_the_numbers_in_between(dtype):
    start = torch.tensor([1.0, -1.0, 0.0, 1e-3], dtype=dtype)
    moved = start.clone()
    for _ in range(3):
        moved = torch.nextafter(moved, torch.full_like(moved, math.inf))
    got = metrics.compare(start, moved)
    assert got["max_ulp"] == 3
    assert got["mean_ulp"] == 3
    zero = metrics.compare(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))
    assert zero["max_ulp"] == 0


def test_ulp_distance_is_measured_in_the_coarser_dtype():
    g = torch.tensor([1.0])
    assert metrics.compare(g, torch.tensor([1.0078125], dtype=torch.bfloat16))["max_ulp"] == 1
    assert metrics.compare(torch.tensor([1, 2]), torch.tensor([1, 3]))["max_ulp"] is None


def test_nan_and_infinity_are_counted_where_they_differ_and_left_out_of_the_figures():
    inf, nan = math.inf, math.nan
    g = torch.tensor([1.0, nan, nan, inf, inf, -inf, 2.0])
    m = torch.tensor([1.0, nan, 0.0, inf, -inf, 0.0, 3.0])
    got = metrics.compare(g, m)
    assert (got["nan_mismatch"], got["inf_mismatch"], got["mismatched"]) == (1, 2, 4)
    assert got["max_absolute_error"] == 1.0
    assert tolerance.error_of(got) == math.inf
    same = metrics.compare(g, g)
    assert (same["nan_mismatch"], same["inf_mismatch"], same["mismatched"]) == (0, 0, 0)


def test_a_golden_zero_does_not_hide_an_absolute_error():
    got = metrics.compare(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 1.0]))
    assert got["max_absolute_error"] == 5.0
    assert got["max_relative_error"] == 0.0


def test_all_zero_tensors_are_alike_and_a_single_zero_one_is_not():
    zero, one = torch.zeros(3), torch.ones(3)
    assert metrics.compare(zero, zero)["cosine_similarity"] == 1.0
    assert metrics.compare(zero, one)["cosine_similarity"] == 0.0
    assert metrics.compare(zero, one)["relative_euclidean_distance"] == math.inf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.empty(0, 2),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor([math.nan, math.inf]),
        torch.tensor([1.0, math.nan]),
        torch.tensor(2.0),
    ],
    ids=["fp32", "bf16", "int", "bool", "empty", "complex", "fp8", "nothing finite", "a nan", "0-d"],
)
def test_identical_is_what_comparing_a_tensor_with_itself_gives(tensor):
    measured = metrics.compare(tensor, tensor)
    declared = metrics.identical(summarize(tensor))
    for name in metrics.FIELDS:
        if name in ("max_ulp", "mean_ulp") and measured[name] is None:
            continue  # no ulp in dtypes without one
        assert declared[name] == measured[name] or declared[name] == pytest.approx(measured[name]), name


def test_statistics_alone_give_absolute_and_relative_errors():
    got = metrics.statistics(summarize(torch.tensor([1.0, 2.0])), summarize(torch.tensor([1.0, 3.0])))
    assert got["max_stat_absolute_error"] == 1.0
    assert got["max_stat_relative_error"] == 0.5
    assert got["min_stat_relative_error"] == 0.0
    assert got["stat_error"] == 0.5  # of the four gaps that of the maximum, 1 of 2
    assert metrics.statistics(summarize(torch.empty(0)), summarize(torch.empty(0)))["max_stat_absolute_error"] is None
    tiny = metrics.statistics(summarize(torch.tensor([1e-9, 1.0])), summarize(torch.tensor([2e-9, 1.0])))
    assert tiny["min_stat_relative_error"] == pytest.approx(1)
    assert tiny["stat_error"] < 1e-8


def test_limits_follow_the_coarser_dtype():
    def limit(golden, mine):
        return tolerance.Rounding().limit(golden, mine)

    assert limit("float32", "float32") == 64 * 2.0**-23
    assert limit("float32", "bfloat16") == 8 * 2.0**-7 == limit("bfloat16", "float32")
    assert limit("float16", "float32") == 8 * 2.0**-10
    assert limit("int64", "int64") == 0.0
    assert limit("complex64", "complex64") == limit("float32", "float32")


def test_what_follows_a_coarse_dtype_carries_its_rounding_but_integers_never_round():
    rounding = tolerance.Rounding()
    assert rounding.limit("float32", "float32") == tolerance.limit("float32")
    assert rounding.limit("float32", "bfloat16") == tolerance.limit("bfloat16")
    assert rounding.limit("float32", "float32") == tolerance.limit("bfloat16")
    assert rounding.limit("int64", "int64") == 0.0


def test_an_error_in_one_token_does_not_drown_in_the_norm_of_the_whole():
    g = torch.randn(1, 2000, 64, generator=torch.Generator().manual_seed(0))
    m = g.clone()
    m[0, -1] = 0
    got = metrics.compare(g, m)
    assert got["relative_euclidean_distance"] < 0.05
    assert got["worst_row_error"] == pytest.approx(1, rel=0.3)
    assert tolerance.error_of(got) > tolerance.limit("bfloat16")


def test_the_largest_numbers_of_a_dtype_count_as_infinite_so_that_masks_hide_nothing():
    low = torch.finfo(torch.float32).min
    g, m = torch.tensor([[low, 1.0], [0.0, low]]), torch.tensor([[low, 101.0], [0.0, 0.0]])
    got = metrics.compare(g, m)
    assert got["max_absolute_error"] == 100
    assert got["inf_mismatch"] == 1
    assert metrics.compare(g, g)["mismatched"] == 0


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.0, "match"), (1e-7, "within_noise"), (1e-3, "diverged"), (math.inf, "diverged")]
)
def test_verdicts(error, verdict):
    assert tolerance.verdict(error, tolerance.limit("float32")) == verdict
