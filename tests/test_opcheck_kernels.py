"""Kernels of compiled code: the nodes of the graph, computed again in float64."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.opcheck.checking import Checker, How
from llmdebug_nb.app.opcheck.choosing import Choice, calls_of
from llmdebug_nb.replay import checks
from llmdebug_nb.store.run import Run
from models import llama
from test_opcheck import _adds_up

pytestmark = pytest.mark.usefixtures("inductor")


class Norm(nn.Module):
    """A norm and a gate: two kernels, one of them a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return nn.functional.silu(y) + x


def _fused(model, given, tmp_path, dtype=torch.float32, backward=False, name="k"):
    torch.manual_seed(0)
    model = model.to(dtype)
    with ld.dump(model, name=name, graph="fused", path=tmp_path) as run:
        made = model(given)
        if backward:
            made.sum().backward()
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_a_model_are_checked_and_right(dtype, tmp_path):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    model = llama().to(dtype).eval()
    with torch.no_grad(), ld.dump(model, name="k", graph="fused", path=tmp_path) as run:
        model(ids)
    result = ld.opcheck(run, output=tmp_path).result
    assert _adds_up(result)
    assert [(c.key, [o.why for o in c.outputs]) for c in result.wrong] == []
    assert result.checked >= 0.9 * result.total, [(c.op, c.detail) for c in result.calls]
    assert set(result.not_checked) <= {checks.GAP, checks.UNKNOWN, checks.FAILS}


@pytest.mark.parametrize(
    "fault", [lambda x: x * 1.001, lambda x: x.index_fill(-1, torch.tensor([3]), 0.0)]
)
def test_a_wrong_kernel_is_found_and_no_other(fault, tmp_path, monkeypatch):
    run = _fused(Norm(), torch.randn(8, 16, 32), tmp_path)
    last = calls_of(run, Choice())[-1]
    load = Run.load

    def spoilt(self, record):
        x = load(self, record)
        mine = record.site.key == last.key and record.site.role == "output"
        return fault(x) if mine else x

    assert ld.opcheck(run, output=tmp_path).result.not_checked == {}
    monkeypatch.setattr(Run, "load", spoilt)
    check = ld.opcheck(run, rerun=True, output=tmp_path)
    assert [each.key for each in check.wrong] == [last.key]
    assert check.wrong[0].again == checks.RECORD_IS_WRONG


def test_the_reference_of_a_kernel_is_the_program_in_float64(tmp_path):
    model, given = Norm(), torch.randn(8, 16, 32)
    run = _fused(model, given, tmp_path)
    expected = model.double()(given.double()).detach()
    checker = Checker(run, How(trusted=True))
    exact = [checker._computed(call).exact() for call in calls_of(run, Choice())]
    found = [x for each in exact for x in each.values() if x.shape == expected.shape]
    # what a kernel reads is rounded to float32
    assert min(float((x - expected).norm() / expected.norm()) for x in found) < 1e-6


def test_the_kernels_of_a_backward_pass_are_checked(tmp_path):
    run = _fused(Norm(), torch.randn(8, 16, 32), tmp_path, backward=True)
    result = ld.opcheck(run, output=tmp_path).result
    backward = [each for each in result.calls if each.key.phase == "backward"]
    assert result.wrong == []
    assert backward
    assert any(not each.reason for each in backward), [each.detail for each in backward]


def test_sizes_that_change_raise_no_alarm_and_the_totals_add_up(tmp_path):
    model = Norm()
    with ld.dump(model, name="k", graph="fused", path=tmp_path, tokens="all") as run:
        for length in (3, 4, 5):
            model(torch.randn(2, length, 32))
    result = ld.opcheck(run, output=tmp_path).result
    assert _adds_up(result)
    assert result.wrong == []
    assert result.checked > 0


def test_a_formula_is_recorded_once_and_hostile_ones_run_nothing(tmp_path, monkeypatch):
    model, given = Norm(), torch.randn(8, 16, 32)
    with ld.dump(model, name="k", graph="fused", path=tmp_path) as run:
        for _ in range(3):
            model(given)
    rows = [row for row in run.index.scalars(role="graph") if row.slot == "formula"]
    assert len(rows) == len({row.value for row in rows}) > 0
    assert ld.opcheck(run, output=tmp_path).result.not_checked == {}
    query = type(run.index).scalars
    bad = [
        "[", "[" * 10**5, "{}", json.dumps({"node": "x", "reads": {}, "steps": []}),
        json.dumps({"node": "x", "reads": {}, "steps": [["x", "Aten.as_strided", [1], {}]]}),
        json.dumps({"node": "x", "reads": {}, "steps": [["x", "getitem", [{}, 0], {}]]}),
        json.dumps({"node": "x", "reads": {}, "steps": [["x", "os.system", ["true"], {}]]}),
        json.dumps({"node": "x", "reads": {},
                    "steps": [["x", "Aten.full", [[10**6, 10**6], 1.0], {}]]}),
    ]  # fmt: skip
    for text in bad:
        monkeypatch.setattr(
            type(run.index),
            "scalars",
            lambda self, text=text, **columns: [
                row._replace(value=text) if row.slot == "formula" else row
                for row in query(self, **columns)
            ],
        )
        result = ld.opcheck(run, output=tmp_path).result
        assert result.checked == 0
        assert _adds_up(result)
