"""Dumps without values keep the sizes of rows, so that one large token hides no other."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.capture.tape import native
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.core import constants
from llmdebug_nb.core import row_sizes as sizes
from llmdebug_nb.core.kernels import row_sizes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store import waiting
from llmdebug_nb.store.catalog import process_folders
from llmdebug_nb.store.redact import redacted
from recordings import change_index, recorded
from test_look import tensors

needs_tape = pytest.mark.skipif(native.tape(False) is None, reason="the tape was not built")
CorruptDumpError = ld.errors.CorruptDumpError
MOST = constants.MOST_ROWS


def by_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Return norms and largest magnitudes, one row after the other."""
    rows = tensor.reshape(-1, tensor.shape[-1]).double()
    return torch.tensor([[row.norm(), row.abs().max()] for row in rows])


def summary(tensor: torch.Tensor) -> Summary:
    """Return the statistics of a tensor as a dump without values has them."""
    whole = summarize(tensor)
    figures = (whole.min, whole.max, whole.mean, whole.l2norm, whole.nan, whole.inf, whole.zero)
    return Summary(whole.dtype, whole.shape, *figures, whole.fingerprint, row_sizes.of(tensor))


def error(golden: torch.Tensor, mine: torch.Tensor, by_rows: bool = True) -> float:
    found = metrics.statistics(summary(golden), summary(mine), by_rows)["stat_error"]
    assert isinstance(found, float)
    return found


# -- what they are ------------------------------------------------------------------------------


@needs_tape
@given(tensors())
def test_c_and_torch_give_the_same_bytes(tensor):
    seen = native.eye(True).look(tensor)
    assert seen.row_sizes == row_sizes.of(tensor)
    assert native.eye().look(tensor).row_sizes is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1), (3, 5, 700), (2, 40_000), (MOST, 3)])
def test_they_are_norm_and_largest_magnitude_of_each_row(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[0] = 0
    tensor[1].fill_(float("nan")) if len(shape) == 3 else tensor[1, :1].fill_(float("inf"))
    norms, largest = row_sizes.read(row_sizes.of(tensor))
    expected = by_torch(tensor)
    torch.testing.assert_close(
        torch.tensor(np.stack([norms, largest], axis=1)), expected, rtol=1e-6, atol=0,
        equal_nan=True,
    )  # fmt: skip
    assert norms[0] == largest[0] == 0


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (torch.ones(8), 0),
        (torch.ones(1, 1, 8), 0),
        (torch.ones(2, 3, 8), 6),
        (torch.ones(MOST, 2), MOST),
        (torch.ones(MOST + 1, 2), 0),
        (torch.ones(3, 0), 0),
        (torch.ones(0, 3), 0),
        (torch.tensor(1.0), 0),
        (torch.ones(4, 4, dtype=torch.int64), 0),
        (torch.ones(4, 4, dtype=torch.complex64), 0),
    ],
    ids=str,
)
def test_a_single_row_too_many_rows_and_other_numbers_have_none(tensor, rows):
    found = row_sizes.of(tensor)
    assert (0 if found is None else len(found) // sizes.OF_ROW) == rows
    seen = native.eye(True).look(tensor)
    assert seen is None or seen.row_sizes == found


@needs_tape
def test_equal_bytes_in_another_shape_have_their_own():
    look = native.eye(True).look
    x = torch.arange(4096.0)
    for shape in ((64, 64), (1, 4096), (128, 32), (64, 64)):
        assert look(x.view(shape)).row_sizes == row_sizes.of(x.view(shape))


# -- what keeps them ----------------------------------------------------------------------------


class Net(nn.Module):
    """Gets a tensor, gives some more: of one row, of many, with NaN, strided, of a large weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(96, 400)
        self.small = nn.Linear(400, 8)

    def forward(self, x):
        y = self.large(x)
        hurt = y.clone()
        hurt[0, 1] = float("nan")
        return self.small(y), hurt, y.transpose(0, 1), y[:1, :1], y.long(), y.new_ones(MOST + 1, 2)


X = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", ["module", "module+api", "module+aten"])
def test_all_ways_of_recording_keep_the_same(mode, tmp_path, monkeypatch):
    def run(name):
        model = Net()
        with torch.no_grad(), ld.dump(model, name=name, path=tmp_path, **options) as found:
            for _ in range(2):  # the weights are known the second time
                model(X)
        return [(record.site, record.summary) for record in found.records()]

    options = {"stats_only": True, "mode": mode, "tokens": "all"}
    first = run("first")
    monkeypatch.setattr(native, "_make", lambda: None)
    assert str(run("second")) == str(first)  # NaN is not equal to itself
    weights = {tuple(w.shape) for w in Net().parameters()}
    for _, each in first:
        is_weight = mode != "module" and {each.shape, each.shape[::-1]} & weights
        rows = 0 if is_weight or each.dtype != "float32" else sizes.count(each.shape)
        assert len(each.row_sizes or b"") == rows * sizes.OF_ROW
    assert sum(each.row_sizes is not None for _, each in first) > 6


def test_a_dump_with_values_has_none_since_the_values_tell(tmp_path):
    run = recorded(Net(), X, path=tmp_path)
    assert all(record.summary.row_sizes is None for record in run.records())


def test_a_copy_without_statistics_has_none(tmp_path):
    run = recorded(Net(), X, path=tmp_path, stats_only=True)
    copy = ld.open_run(redacted(run.path, tmp_path / "copies", lambda _: None))
    assert [r.summary.shape for r in copy.records()] == [r.summary.shape for r in run.records()]


def test_more_than_a_reader_takes_at_once_does_not_wait(tmp_path):
    class Wide(nn.Module):
        def forward(self, x):
            return [x + n for n in range(600)]  # 4.9 MB of sizes

    wide = Wide()
    with torch.no_grad(), ld.dump(wide, name="wide", path=tmp_path, stats_only=True) as run:
        wide(torch.ones(MOST, 2))
        (folder,) = process_folders(run.path)
        with closing(sqlite3.connect(folder / "index.sqlite")) as db:
            longest = db.execute("SELECT coalesce(max(length(rows)), 0) FROM waiting").fetchone()
        assert longest[0] <= waiting._MOST
    assert sum(record.summary.row_sizes is not None for record in run.records()) == 601


# -- hostile dumps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blob", ["x''", "x'00'", "zeroblob(32)", "zeroblob(1000000)", "'text'", "7"]
)
def test_sizes_that_are_not_those_of_the_rows_are_refused(blob, tmp_path):
    run = recorded(Net(), X, path=tmp_path, stats_only=True)
    change_index(run.path, f"UPDATE records SET row_sizes = {blob}")
    with pytest.raises(CorruptDumpError):
        list(ld.open_run(run.path).records())


def test_an_older_dump_has_none_and_is_compared_by_the_whole(tmp_path):
    runs = [recorded(Net(), X, path=tmp_path, name=name, stats_only=True) for name in "ab"]
    change_index(runs[0].path, "ALTER TABLE records DROP COLUMN row_sizes")
    old = ld.open_run(runs[0].path)
    assert all(record.summary.row_sizes is None for record in old.records())
    assert ld.compare(old, runs[1], progress=False).verdict == "match"


# -- what they tell -----------------------------------------------------------------------------


def massive(seed: int = 0) -> torch.Tensor:
    """Return 40 tokens, the first of which is thousands of times as large as the others."""
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 3] = 25_000
    return x


def test_an_error_of_ordinary_tokens_is_not_hidden_by_a_massive_one():
    golden, mine = massive(), massive()
    mine[0, 1:] *= 1.01
    assert error(golden, mine, by_rows=False) < 1e-6
    assert error(golden, mine) == pytest.approx(0.01, rel=0.1)  # rows below the median count less


def test_one_wrong_token_of_many_counts_by_its_own_size():
    golden, mine = massive(), massive()
    mine[0, 7] *= 2
    assert error(golden, mine) == pytest.approx(1 / constants.WORST_ROW, rel=0.5)


def test_other_signs_are_seen_though_no_size_changes():
    golden = massive()
    assert error(golden, -golden) > 1e-3


@given(st.integers(0, 2**32 - 1), st.floats(-6, 0), st.booleans())
def test_the_error_is_at_most_that_of_the_values(seed, scale, is_massive):
    generator = torch.Generator().manual_seed(seed)
    golden = massive(seed) if is_massive else torch.randn(6, 50, generator=generator)
    noise = torch.randn(golden.shape, generator=generator) * golden.norm(dim=-1, keepdim=True) / 8
    mine = golden + 10**scale * noise
    values = metrics.compare(golden, mine)
    judged = max(values["row_error"], values["worst_row_error"] / constants.WORST_ROW)
    assert error(golden, mine) <= judged + 2.0**-23  # float32 rounds each size


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_on_one_side_alone_is_an_infinite_error(value):
    golden, mine = massive(), massive()
    mine[0, 5, 0] = value
    assert error(golden, mine) == float("inf") == error(mine, golden)
    assert error(mine, mine.clone()) == 0


def test_rows_of_zeros_on_both_sides_have_no_part_in_it():
    golden, mine = torch.ones(4, 8), torch.ones(4, 8) * 1.5
    alone = error(golden, mine)
    zeros = torch.zeros(96, 8)
    assert error(torch.cat([golden, zeros]), torch.cat([mine, zeros])) == pytest.approx(alone)
    assert error(zeros, zeros) == 0
    assert error(zeros, torch.cat([zeros[:-1], torch.ones(1, 8)])) == float("inf")


def test_the_whole_is_judged_where_shapes_differ_or_rows_are_elsewhere():
    golden, mine = massive(), massive()
    mine[0, 1:] *= 1.01
    assert error(golden, mine.view(20, 128)) == error(golden, mine, by_rows=False)


class Trained(nn.Module):
    """The residual of a trained model: a massive first token, which norms bring to size."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(4))
        self.scale = scale

    def forward(self, x):
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            step = layer(norm(x))
            x = x + (step * self.scale if number == 2 else step)
        return x


def test_the_bug_of_a_residual_is_found_where_it_is(tmp_path):
    runs = [
        recorded(Trained(scale), massive(), path=tmp_path, name=f"s{scale}", stats_only=True)
        for scale in (1.0, 1.002)
    ]
    report = ld.compare(*runs, progress=False)
    assert report.verdict == "diverged"
    assert "scale is 1.0 in golden and 1.002 in mine" in report.summary(), report.summary()


@pytest.mark.parametrize(("shape", "draws"), [((1, 8), 1), ((5, 8), 5), ((2, 3, 8), 6)])
def test_the_error_is_made_of_as_many_draws_as_there_are_rows(shape, draws, tmp_path):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    runs = [
        recorded(nn.Softmax(-1), each, path=tmp_path, name=name, stats_only=True)
        for name, each in (("a", x), ("b", x * 1.1))
    ]
    pair = Pair(*([*run.records()][-1] for run in runs), "same site")
    by_statistics = metrics.statistics(pair.golden.summary, pair.mine.summary)
    assert Measured(0, pair, by_statistics).draws == draws
    values = metrics.compare(x, x * 1.1)
    assert Measured(0, pair, values).draws == values["carriers"]
