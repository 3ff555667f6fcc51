"""Every metric, beside a plain NumPy calculation in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import error_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.summary import summarize

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
        "cosine_similarity": float(g @ m / norm_g / norm_m)
        if norm_g and norm_m
        else float(norm_g == norm_m),
        "relative_euclidean_distance": 0.0
        if distance == 0
        else distance / norm_g
        if norm_g
        else math.inf,
        "scale_error": float(g @ (m - g)) / norm_g**2 if norm_g else math.inf if norm_m else 0.0,
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
    got = metrics.compare(torch.from_numpy(g), torch.from_numpy(m), logits=True)
    for name, value in independent(g, m).items():
        assert got[name] == pytest.approx(value, rel=1e-7, abs=1e-9), name


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_chunks_do_not_change_the_figures(seed):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(5000, generator=generator)
    m = g + 1e-3 * torch.randn(5000, generator=generator)
    whole = metrics.compare(g, m)
    before, constants.CHUNK = constants.CHUNK, 137
    try:
        parts = metrics.compare(g, m)
    finally:
        constants.CHUNK = before
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
    assert error_of(got) == math.inf
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
    ids=[
        "fp32",
        "bf16",
        "int",
        "bool",
        "empty",
        "complex",
        "fp8",
        "nothing finite",
        "a nan",
        "0-d",
    ],
)
def test_identical_is_what_comparing_a_tensor_with_itself_gives(tensor):
    measured = metrics.compare(tensor, tensor)
    declared = metrics.identical(summarize(tensor))
    for name in metrics.FIELDS:
        if name in ("max_ulp", "mean_ulp") and measured[name] is None:
            continue  # no ulp in dtypes without one
        if name == "carriers":
            continue  # statistics do not tell them
        assert declared[name] == measured[name] or declared[name] == pytest.approx(
            measured[name]
        ), name


def test_statistics_alone_give_absolute_and_relative_errors():
    got = metrics.statistics(
        summarize(torch.tensor([1.0, 2.0])), summarize(torch.tensor([1.0, 3.0]))
    )
    assert got["max_stat_absolute_error"] == 1.0
    assert got["max_stat_relative_error"] == 0.5
    assert got["min_stat_relative_error"] == 0.0
    norm = math.sqrt(10 / 5) - 1  # the largest gap; of that of the maximum, 1 of 2, a fifth counts
    assert got["stat_error"] == pytest.approx(norm)
    large = torch.ones(10_000)
    large[0] = 2
    other = large.clone()
    other[0] = 3
    alone = metrics.statistics(summarize(large), summarize(other))["stat_error"]
    assert alone == pytest.approx(0.5 / (1 + constants.CARRIER_ERRORS))
    assert (
        metrics.statistics(summarize(torch.empty(0)), summarize(torch.empty(0)))[
            "max_stat_absolute_error"
        ]
        is None
    )
    tiny = metrics.statistics(
        summarize(torch.tensor([1e-9, 1.0])), summarize(torch.tensor([2e-9, 1.0]))
    )
    assert tiny["min_stat_relative_error"] == pytest.approx(1)
    assert tiny["stat_error"] < 1e-8


def test_an_error_in_one_token_does_not_drown_in_the_norm_of_the_whole():
    g = torch.randn(1, 2000, 64, generator=torch.Generator().manual_seed(0))
    m = g.clone()
    m[0, -1] = 0
    got = metrics.compare(g, m)
    assert got["relative_euclidean_distance"] < 0.05
    assert got["worst_row_error"] == pytest.approx(1, rel=0.3)
    assert error_of(got) > 0.2


def test_the_largest_numbers_of_a_dtype_count_as_infinite_so_that_masks_hide_nothing():
    low = torch.finfo(torch.float32).min
    g, m = torch.tensor([[low, 1.0], [0.0, low]]), torch.tensor([[low, 101.0], [0.0, 0.0]])
    got = metrics.compare(g, m)
    assert got["max_absolute_error"] == 100
    assert got["inf_mismatch"] == 1
    assert metrics.compare(g, g)["mismatched"] == 0


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0.01, 100))
def test_equal_elements_are_all_carriers_and_zeros_are_none(count, zeros, value):
    g = torch.cat([torch.full((count,), value), torch.zeros(zeros)])
    assert metrics.compare(g, g)["carriers"] == pytest.approx(count)


def test_an_even_factor_is_told_from_rounding_far_below_its_size():
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    even, rounded = metrics.compare(g, g * (1 + 1e-6)), metrics.compare(g, g.bfloat16())
    assert even["scale_error"] == pytest.approx(1e-6, rel=0.1)
    assert even["scale_t"] > 30
    assert abs(rounded["scale_error"]) < 1e-4
    assert rounded["scale_t"] < 5


@given(two(), st.integers(1, 5))
def test_rows_of_logits_equal_their_definitions(pair, rows):
    g32, m32 = (np.resize(x, (rows, x.size)) for x in pair)
    got = metrics.compare(torch.from_numpy(g32), torch.from_numpy(m32), logits=True)
    kl, flips = [], 0
    for g, m in zip(g32.astype(np.float64), m32.astype(np.float64), strict=True):
        log_p, log_q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (g, m))
        kl.append(max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum())))
        flips += int(np.argmax(g) != np.argmax(m))
    assert got["kl_row_mean"] == pytest.approx(np.mean(kl), rel=1e-7, abs=1e-9)
    assert got["kl_row_max"] == pytest.approx(max(kl), rel=1e-7, abs=1e-9)
    assert got["top1_flips"] == flips


def test_tokens_that_are_ruled_out_do_not_count_in_the_distribution():
    g = torch.tensor([[1.0, -math.inf, 2.0], [0.0, 0.0, -math.inf]])
    got = metrics.compare(g, g.clone(), logits=True)
    assert (got["kl_row_max"], got["top1_flips"], got["max_gap_ulp"]) == (0.0, 0, 0.0)
    nothing = metrics.compare(torch.full((1, 2), math.nan), torch.zeros(1, 2), logits=True)
    assert nothing["kl_row_mean"] is None


def test_the_gap_of_the_largest_logits_is_in_units_of_their_last_place():
    g = torch.tensor([[1.0, 4.0]], dtype=torch.bfloat16)
    m = torch.tensor(
        [[1.0, 4.03125]], dtype=torch.bfloat16
    )  # one bfloat16 above 4: eps 2**-7, times 4
    assert metrics.compare(g, m, logits=True)["max_gap_ulp"] == 1.0
