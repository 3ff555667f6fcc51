"""The table of a comparison: narrowed and sorted by the kernel."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.show import tensors
from llmdebug_nb.show.columns import Columns

VERDICTS = ["diverged", "unmatched", "expected", "within_noise", "match"]
PATHS = [
    "",
    "model",
    "layers.2.mlp",
    "layers.10.mlp",
    "layers.2",
    "layers.2/Aten.add",
    "<img src=x>",
]
FIGURES = st.none() | st.just(math.nan) | st.floats(0)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(PATHS), st.integers(0, 2), st.sampled_from(VERDICTS), FIGURES, FIGURES
    )
)
SORTS = ["step", "seq", "path", "op", "dtype", "shape", "error", "limit", "verdict"]


def _differences(rows):
    return [
        Difference(i, Pair(Record(i, Site(path, step=step), 100 - i, f"Op{i % 3}",
            Summary(f"float{16 << i % 2}", (i % 4,))), None, ""), verdict, error, limit)
        for i, (path, step, verdict, error, limit) in enumerate(rows)
    ]  # fmt: skip


def _natural(path):
    return [(0, int(name)) if name.isdigit() else (1, name) for name in re.split(r"[./]", path)]


def _value(d, sort):
    """The sort key of a row in Python; None comes last."""
    if sort in ("error", "limit"):
        value = getattr(d, sort)
        return None if value is None or math.isnan(value) else value
    record = d.pair.either
    return {
        "step": d.site.step,
        "seq": record.seq,
        "path": _natural(d.site.path),
        "op": d.op,
        "dtype": record.summary.dtype,
        "shape": record.summary.numel,
        "verdict": VERDICTS.index(d.verdict),
    }[sort]


@settings(deadline=None)
@given(ROWS, st.sampled_from(SORTS), st.booleans())
@example([], "path", False)
def test_a_column_sorts_as_python_would_and_missing_figures_come_last(rows, sort, descending):
    differences = _differences(rows)
    order = list(Columns(differences, [d.site.step for d in differences]).order(sort, descending))
    assert sorted(order) == list(range(len(rows)))
    values = [_value(differences[i], sort) for i in order]
    known = [value for value in values if value is not None]
    assert values == known + [None] * (len(values) - len(known))
    assert known == sorted(known, reverse=descending)
    for i, j, a, b in zip(order, order[1:], values, values[1:], strict=False):
        assert i < j or a != b  # equal ones stay in execution order


@settings(deadline=None)
@given(ROWS, st.sampled_from([*PATHS, "layers"]))
def test_rows_are_narrowed_to_a_module_and_to_mismatches(rows, path):
    differences = _differences(rows)
    columns = Columns(differences, [d.site.step for d in differences])
    assert list(columns.under(path)) == [within(d.site.path, path) for d in differences]
    assert list(columns.mismatch) == [d.verdict in ("diverged", "unmatched") for d in differences]


# --- errors of the elements ---

VALUES = hnp.arrays(
    np.float32,
    (3, 5),
    elements=st.floats(-(2.0**99), 2.0**99, width=32)
    | st.sampled_from([np.nan, np.inf, -np.inf, 0.0]),
)


@settings(deadline=None)
@given(VALUES, VALUES, st.integers(1, 40))
def test_every_element_is_counted_once_by_the_size_of_its_error(golden, mine, bins):
    found = tensors.errors(golden, mine, bins)
    a, b = golden.astype(float), mine.astype(float)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        size = np.abs(b - a)
    broken = ~same & ~np.isfinite(size)
    assert (found["same"], found["broken"], found["total"]) == (same.sum(), broken.sum(), 15)
    assert len(found["counts"]) == bins
    assert sum(found["counts"]) == 15 - same.sum() - broken.sum()
    decades = np.log10(size[~same & ~broken])
    if decades.size:
        assert (found["lo"], found["hi"]) == (
            decades.min(),
            max(decades.max(), decades.min() + 1e-6),
        )
        edges = np.linspace(found["lo"], found["hi"], bins + 1)
        wide = 1e-9 * max(
            1.0, abs(found["lo"]), abs(found["hi"])
        )  # what lies on an edge may fall either way
        for bar, count in enumerate(found["counts"]):
            inside = (decades > edges[bar] + wide) & (decades < edges[bar + 1] - wide)
            near = (decades >= edges[bar] - wide) & (decades <= edges[bar + 1] + wide)
            assert inside.sum() <= count <= near.sum()


@settings(deadline=None)
@given(VALUES, VALUES, st.integers(1, 20), st.sampled_from([0, 14, 15]))
def test_the_scatter_plot_holds_every_finite_pair_as_a_point_or_in_its_cell(
    golden, mine, size, points
):
    view, buffers = tensors.scatter(golden, mine, points, size)
    fine = np.isfinite(golden) & np.isfinite(mine)
    assert (view["count"], view["broken"]) == (fine.sum(), 15 - fine.sum())
    if fine.sum() <= points:
        assert view["size"] == 0
        assert [list(buffer) for buffer in buffers] == [list(golden[fine]), list(mine[fine])]
        return
    (cells,) = buffers
    assert (view["size"], cells.dtype, cells.size) == (size, np.dtype("<u4"), size * size)
    assert cells.sum() == fine.sum()
    assert view["lo"] <= min(golden[fine].min(), mine[fine].min())
    assert view["hi"] >= max(golden[fine].max(), mine[fine].max())
    grid = cells.reshape(size, size)
    if np.array_equal(golden[fine], mine[fine]):
        assert grid.sum() == np.trace(grid)  # on the diagonal


def test_large_tensors_are_looked_at_in_pieces_with_the_same_result(monkeypatch):
    draw = np.random.default_rng(0)
    golden = draw.normal(size=(300, 70)).astype(np.float32)
    mine = golden + draw.normal(scale=1e-3, size=golden.shape).astype(np.float32)
    whole = tensors.errors(golden, mine, 32), tensors.scatter(golden, mine, 10, 16)
    monkeypatch.setattr(tensors, "_PIECE", 1000)
    parts = tensors.errors(golden, mine, 32), tensors.scatter(golden, mine, 10, 16)
    assert whole[0] == parts[0]
    assert whole[1][0] == parts[1][0]
    assert np.array_equal(whole[1][1][0], parts[1][1][0])


@pytest.mark.parametrize(
    "values", [[0.0, 5e-324], [-1.7e308, 1.7e308], [4e15, 4e15], [1.797e308] * 2, [np.nan, np.inf]]
)
def test_the_scatter_plot_has_axes_for_any_float64(values):
    array = np.array(values)
    view, (cells,) = tensors.scatter(array, array, -1, 4)
    assert math.isfinite(view["lo"])
    assert view["lo"] < view["hi"] < math.inf
    assert cells.sum() == np.isfinite(array).sum() == np.trace(cells.reshape(4, 4))
