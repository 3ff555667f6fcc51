"""The error of a tensor is that of its rows: a massive row hides no other one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmdebug_nb.comparison import metrics, rows
from llmdebug_nb.comparison.measured import error_of
from llmdebug_nb.core import constants

SHAPES = st.sampled_from([(12, 16), (1, 12, 16), (2, 3, 4, 16), (5, 9, 1), (40, 4), (30,), (1, 64)])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_torch(golden: torch.Tensor, mine: torch.Tensor) -> tuple[float, float]:
    """Return the error of the rows, and the largest of one, by another way."""
    width = rows.width(tuple(golden.shape)) or golden.numel()
    each = [x.reshape(-1, width) for x in (golden, mine - golden)]
    size, error = (x.square().sum(1).sqrt() for x in each)
    middle = float(np.median(size[size > 0].numpy()))
    sizes = size.clamp_min(middle)
    whole = (error / sizes).square().sum() / (size / sizes).square().sum()
    return float(whole.sqrt()), float((error / sizes).max())


@given(SHAPES, st.integers(0, 50), st.sampled_from([1e-7, 1e-3, 1.0]), st.integers(0, 3))
def test_the_error_is_that_of_the_rows_each_divided_by_its_size(shape, seed, size, zeros):
    golden = random(*shape, seed=seed)
    golden.view(-1)[: min(zeros * shape[-1], golden.numel() - 1)] = 0.0
    mine = golden + size * golden * random(*shape, seed=seed + 1)
    error, worst = by_torch(golden, mine)
    got = metrics.compare(golden, mine)
    assert got["row_error"] == pytest.approx(error, rel=1e-9)
    assert got["worst_row_error"] in (None, pytest.approx(worst, rel=1e-9))


@given(st.integers(0, 50), st.sampled_from([1e2, 1e4, 1e8]))
def test_a_massive_row_hides_no_error_of_the_others(seed, size):
    golden = random(40, 64, seed=seed)
    mine = golden + 1e-6 * random(40, 64, seed=seed + 1)
    ordinary = metrics.compare(golden, mine)
    for x in (golden, mine):
        x[0] *= size
    massive = metrics.compare(golden, mine)
    assert massive["row_error"] == pytest.approx(ordinary["row_error"], rel=0.05)
    mine[7] = golden[8]  # another token's values
    wrong = metrics.compare(golden, mine)
    assert float(wrong["relative_euclidean_distance"] or 0) < 5 / size + 2e-6
    assert error_of(wrong) > 0.2


def test_the_rounding_of_a_row_whose_terms_cancel_is_no_large_error():
    terms = random(40, 64)
    golden, mine = terms.clone(), terms + 1e-6 * random(40, 64, seed=1)
    for x in (golden, mine):
        x[3] -= terms[3] * (1 - 1e-5)
    assert error_of(metrics.compare(golden, mine)) < 2e-6


def test_a_figure_of_each_token_has_a_row_for_each_token():
    variance = random(1, 40, 1).abs() + 1
    wrong = variance.clone()
    variance[0, 0], wrong[0, 0] = 1e9, 1e9
    wrong[0, 5] *= 1.5
    assert error_of(metrics.compare(variance, wrong)) > 0.05


@pytest.mark.parametrize(
    "golden",
    [torch.zeros(0, 16), torch.zeros(4, 16), torch.full((4, 16), math.inf), torch.ones(1, 16)],
    ids=["no rows", "rows of zeros", "nothing finite", "one row"],
)
def test_unusual_rows_have_an_error_of_0_where_nothing_differs(golden):
    assert error_of(metrics.compare(golden, golden.clone())) == 0.0


def test_rows_that_are_zero_in_golden_alone_count_against_the_usual_row():
    golden = torch.ones(10, 16)
    golden[2] = 0.0
    mine = golden.clone()
    mine[2] = 1e-6
    assert metrics.compare(golden, mine)["worst_row_error"] == pytest.approx(1e-6, rel=1e-3)
    zeros = torch.zeros(10, 16)
    assert error_of(metrics.compare(zeros, mine)) == math.inf


def test_nan_in_one_row_is_a_difference_whatever_the_others_are():
    golden = random(10, 16)
    mine = golden.clone()
    mine[4, 3] = math.nan
    assert error_of(metrics.compare(golden, mine)) == math.inf


def test_a_million_rows_are_measured():
    golden = torch.ones(1_000_000, 9)
    mine = golden.clone()
    mine[123_456] *= 2
    got = metrics.compare(golden, mine)
    assert got["worst_row_error"] == 1.0
    assert got["row_error"] == pytest.approx(1e-3)


def test_one_token_may_be_off_by_a_factor_by_chance_and_many_may_not():
    golden = random(40, 64)
    one, all_rows = (metrics.compare(x, x * (1 + 1e-6)) for x in (golden[:1], golden))
    assert one["scale_t"] == 0.0
    assert all_rows["scale_t"] > constants.EVEN_ERRORS  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 50))
def test_each_element_of_a_weight_is_within_its_rounding_and_one_that_is_not_shows(dtype, seed):
    golden = random(576, seed=seed).float()
    stored = golden.to(dtype)
    limit = torch.finfo(dtype).eps
    assert error_of(metrics.of_weight(golden, stored)) <= limit / 2
    wrong = stored.clone()
    place = int(golden.abs().argmax())
    wrong[place] *= 1.2
    whole = metrics.compare(golden, wrong)
    assert error_of(whole | metrics.of_weight(golden, wrong)) > 0.19
