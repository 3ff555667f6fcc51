"""Rows of tensors on devices, without a device: those that C packs are those that Python makes."""

from __future__ import annotations

import math
import sqlite3

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import test_operator_tape
from fake_device import fake_device
from llmdebug_nb.capture.tape import native
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.core.columns import AT
from llmdebug_nb.core.kernels import on_device
from llmdebug_nb.store.process import process_folders
from test_playing import PLANS, Guarded, Repeats, Step, both, counting, recorded

pytestmark = pytest.mark.skipif(native.player_in_c() is None, reason="the tape was not built")
MODES = ["module", "module+aten", "api", "module+api+aten"]
NAME = "cuda:0"
STATISTICS = slice(AT["min"], AT["zero"] + 1)


@pytest.fixture
def device():
    with pytest.MonkeyPatch.context() as patch, fake_device(patch) as made:
        yield made


def there(records):
    found = [row for row in records if row[AT["device"]] == NAME]
    assert found
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_model_has_the_rows_that_python_makes(mode, device, tmp_path):
    in_c, other = both(
        tmp_path, test_operator_tape.llama(), torch.tensor([[5, 7, 9, 11]]), mode=mode
    )
    assert in_c == other
    assert len(there(in_c["records"])) > 50
    assert device.launches > 100


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=PLANS, mode=st.sampled_from(MODES))
def test_any_program_has_the_rows_that_python_makes(plan, mode, device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = torch.nn.Sequential(Step([*plan, ["add", plan]]))
    in_c, other = both(folder, Guarded(model), torch.arange(16.0).view(4, 4) - 7, mode=mode)
    assert in_c == other


def test_c_plays_all_events(device, tmp_path):
    with counting() as played:
        recorded(tmp_path, "run", test_operator_tape.llama(), torch.tensor([[5, 7, 9, 11]]))
    assert played["C"] > 500
    assert played["Python"] <= 5


SPECIAL = [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan]


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(-9, 9)), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_figures_are_those_of_the_host(values, dtype, tmp_path_factory):
    """They come from another sum, so means and norms agree up to rounding."""
    x, model = torch.tensor(values, dtype=dtype), torch.nn.Sequential(Repeats(2))
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, fake_device(patch):
        one = recorded(folder, "device", model, x, mode="module")
    other = recorded(folder, "host", model, x, mode="module")
    found, expected = (
        [r for r in run.records() if r.site.path.endswith("act")] for run in (one, other)
    )
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        a, b = one.summary, other.summary
        assert (a.nan, a.inf, a.zero) == (b.nan, b.inf, b.zero)
        for name in ("min", "max", "mean", "l2norm"):
            assert getattr(a, name) == pytest.approx(
                getattr(b, name), rel=1e-12, abs=1e-12, nan_ok=True
            )


def test_a_tensor_that_is_seen_twice_is_measured_once(device, tmp_path):
    model = torch.nn.Sequential(Repeats(50))
    run = recorded(tmp_path, "run", model, torch.arange(6.0), mode="module")
    rows = there(rows_of(run))
    assert len(rows) > 150
    assert device.launches < 10
    assert len({tuple(row[STATISTICS]) for row in rows}) == 1


def test_rows_on_several_pages_have_their_own_figures(device, tmp_path, monkeypatch):
    monkeypatch.setattr(on_device, "ROWS", 5)
    model = test_operator_tape.llama()
    in_c, other = both(tmp_path, model, torch.tensor([[5, 7, 9, 11]]), mode="module+aten")
    assert in_c == other


def test_figures_that_cannot_be_read_back_are_counted_and_the_rows_are_kept(device, tmp_path):
    device.reads = 0
    in_c, other = both(tmp_path, Repeats(3), torch.arange(6.0), mode="module")
    assert in_c == other
    rows = there(in_c["records"])
    assert len(rows) > 10
    for row in rows:
        assert row[STATISTICS] == (None,) * 7
        assert "illegal memory access" in row[AT["lost"]]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.9])
def test_a_device_that_breaks_later_loses_only_what_it_still_had(
    share, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(on_device, "ROWS", 5)
    model, ids = test_operator_tape.llama(), torch.tensor([[5, 7, 9, 11]])
    device.reads = most = 10**6
    recorded(tmp_path, "all", model, ids, mode="module")
    device.reads = int(share * (most - device.reads))
    rows = there(rows_of(recorded(tmp_path, "run", model, ids, mode="module")))
    whole = [row for row in rows if None not in row[STATISTICS]]
    lost = [row for row in rows if row[STATISTICS] == (None,) * 7]
    assert len(whole) + len(lost) == len(rows)
    assert whole
    assert lost
    assert all("illegal memory access" in row[AT["lost"]] for row in lost)
    assert all(row[AT["nan"]] >= 0 for row in whole)


def test_a_row_that_cannot_be_appended_costs_that_row(device, tmp_path, monkeypatch):
    """So it is without memory: here, somebody holds the array."""
    held, play = [], Player._play_in_c

    def play_in_c(self):
        if not held and self._recorder.hand.packed:
            held.append(memoryview(self._recorder.hand.packed))
        return play(self)

    monkeypatch.setattr(Player, "_play_in_c", play_in_c)
    model = torch.nn.Sequential(Repeats(3))
    run = recorded(tmp_path, "run", model, torch.arange(6.0), mode="module")
    held[0].release()
    assert any("BufferError" in problem for problem in run.meta["problems"])


class Finalized:
    """Calls a model when it is thrown away."""

    def __init__(self, model):
        self.model = model

    def __del__(self):
        self.model(torch.full((3,), 7.0))


def test_rows_that_a_finalizer_adds_while_figures_are_read_have_their_own(
    device, tmp_path, monkeypatch
):
    model = torch.nn.Sequential(Repeats(3))
    waiting = [Finalized(model[0].act)]
    read = on_device.Page.read

    def reading(self, used):
        waiting.clear()
        return read(self, used)

    monkeypatch.setattr(on_device.Page, "read", reading)
    run = recorded(tmp_path, "run", model, torch.arange(6.0), mode="module")
    rows = there(rows_of(run))
    assert not waiting
    assert all(None not in row[STATISTICS] and row[AT["nan"]] == 0 for row in rows)
    assert {row[AT["max"]] for row in rows} <= {5.0, 7.0}


def rows_of(run):
    (folder,) = process_folders(run.path)
    with sqlite3.connect(folder / "index.sqlite") as db:
        return db.execute("SELECT * FROM records").fetchall()
