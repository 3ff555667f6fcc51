"""Tensors of very many dimensions: PyTorch has no limit, NumPy and a dump do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.core.constants import MOST_DIMENSIONS
from llmdebug_nb.core.errors import TensorLookupError


class Deep(nn.Module):
    """Gives a tensor of many dimensions between two layers."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.dimensions = nn.Linear(4, 4), nn.Linear(4, 4), dimensions
        self.deep = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep = self.deep(self.first(x).reshape([1] * (self.dimensions - 1) + [4]))
        return self.last(deep.reshape(4))


def record(dimensions: int, name: str, folder, wrong=1.0, **options):
    model = Deep(dimensions)
    with torch.no_grad():
        model.first.weight *= wrong
    with ld.dump(model, name=name, path=str(folder), **options):
        model(torch.ones(4)).sum().backward()
    return ld.open_run(folder / name)


@pytest.mark.parametrize("mode", ["module", "module+api+aten"])
def test_a_tensor_of_more_dimensions_than_a_dump_holds_is_lost_alone(tmp_path, mode):
    golden, mine = (
        record(MOST_DIMENSIONS + 1, name, tmp_path, wrong, mode=mode, phase="both", weights=True)
        for name, wrong in (("golden", 1.0), ("mine", 1.5))
    )
    lost = [r for r in golden.records() if r.lost]
    assert {r.site.path.partition("/")[0] for r in lost} >= {"deep"}
    assert all("1,001 dimensions; at most 1,000" in str(r.lost) for r in lost)
    assert all(r.summary.shape == (-1,) and r.summary.dtype == "float32" for r in lost)
    for r in golden.records():
        if not r.lost:
            assert golden.load(r).shape == r.summary.shape
    assert golden.tensor("last").shape == (4,)
    assert golden.info()["lost"] == len(lost)
    report = ld.compare(golden, mine, progress=False)
    assert report.verdict == "diverged"
    report.to_html(tmp_path / "report.html")


@pytest.mark.parametrize("dimensions", [65, MOST_DIMENSIONS])
def test_what_numpy_has_no_array_for_is_recorded_compared_and_shown(tmp_path, dimensions):
    golden, mine = (
        record(dimensions, name, tmp_path, wrong, mode="module+api")
        for name, wrong in (("golden", 1.0), ("mine", 1.5))
    )
    assert not [r for r in golden.records() if r.lost]
    deep = golden.tensor("deep")
    assert deep.dim() == dimensions
    with pytest.raises(TensorLookupError, match=f"no arrays of {dimensions:,} dimensions"):
        golden.tensor("deep", as_numpy=True)
    report = ld.compare(golden, mine, progress=False)
    assert report.verdict == "diverged"
    report.to_html(tmp_path / "report.html")
    ld.export(report, str(tmp_path / "page.html"))
    ld.opcheck(golden, output=tmp_path / "checks", progress=False)
