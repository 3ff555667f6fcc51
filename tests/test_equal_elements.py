"""Equal elements may be sorted in any order: CPU and CUDA differ, and so may two versions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld


class Experts(nn.Module):
    """Sorts its tokens by expert, computes, and puts them back. ``factor``: 1 is right."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) * 0.3)
        self.factor = 1.0

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        chosen, order = torch.sort(chosen)
        given = x[order]
        made = torch.bmm(given.unsqueeze(1), self.weight[chosen]).squeeze(1) * self.factor
        out = torch.zeros_like(x)
        out[order] = torch.tanh(made)
        return x + out


def model():
    torch.manual_seed(0)
    return nn.Sequential(Experts(), nn.LayerNorm(16), Experts(), nn.LayerNorm(16), Experts())


def recorded(net, name, path=None):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    with ld.dump(net, name=name, path=path, mode=("module", "api")) as run, torch.no_grad():
        net(x)
    return run


OTHER_ORDER = """
    import sys
    import numpy as np
    import torch
    import test_equal_elements as test

    def sort(x, dim=-1, descending=False):
        values = x.numpy()
        order = values.shape[dim] - 1 - np.argsort(np.flip(values, dim), axis=dim, kind="stable")
        found = np.take_along_axis(values, order, dim)
        return torch.from_numpy(found), torch.from_numpy(order)

    library = torch.library.Library("aten", "IMPL")
    library.impl("sort", sort, "CPU")
    library.impl(
        "sort.stable", lambda x, stable=None, dim=-1, descending=False: sort(x, dim), "CPU"
    )
    net = test.model()
    net[int(sys.argv[3])].factor = float(sys.argv[2])
    test.recorded(net, "mine", sys.argv[1])
"""


def compared(folder, factor=1.0, layer=0):
    """Compare with a program in which equal elements are sorted in the opposite order."""
    golden = recorded(model(), "golden", folder)
    subprocess.run(
        [
            sys.executable, "-W", "ignore", "-c", textwrap.dedent(OTHER_ORDER), str(folder),
            str(factor), str(layer),
        ],
        check=True, timeout=100, cwd=Path(__file__).parent,
    )  # fmt: skip
    return ld.compare(golden, ld.open_run(folder / "mine"), progress=False)


def test_another_order_of_equal_elements_that_is_put_back_is_no_difference(tmp_path):
    report = compared(tmp_path)
    places = [d for d in report.differences if d.site.path.endswith("Torch.sort")]
    assert any(d.verdict == "unmatched" for d in places)  # else the order is the same here
    assert report.verdict in ("match", "within_noise"), report
    assert report.coverage.share == 1.0


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_an_error_among_reordered_tokens_is_found_where_it_is_made(layer, tmp_path):
    report = compared(tmp_path, factor=1.2, layer=layer)
    assert report.verdict == "diverged"
    assert report.findings[0].path.startswith(f"{layer}/")


def test_the_largest_error_is_that_of_a_row_that_is_compared(tmp_path):
    report = compared(tmp_path)
    rows = list(report.differences)
    assert max(d.error or 0.0 for d in rows) > 0.1  # of the places, which count no more
    named = [line for line in str(report).splitlines() if line.startswith("Largest error")]
    assert not any("equal in effect" in line for line in named)


class InOrder(nn.Module):
    """Computes each token where it is, as `Experts` does in another order."""

    def __init__(self, experts, put_back):
        super().__init__()
        self.router, self.weight = experts.router, experts.weight
        self.factor, self.put_back = experts.factor, put_back

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        made = torch.matmul(x[:, None], self.weight[chosen])[:, 0] * self.factor
        out = torch.tanh(made)
        return x + (out if self.put_back else out[chosen.sort().indices])


@pytest.mark.parametrize("put_back", [True, False])
def test_tokens_that_other_code_computes_in_another_order_count_where_they_end(put_back, tmp_path):
    net = model()
    golden = recorded(net, "golden", tmp_path)
    mine = recorded(
        nn.Sequential(InOrder(net[0], True), net[1], InOrder(net[2], put_back), *net[3:]),
        "mine", tmp_path,
    )  # fmt: skip
    report = ld.compare(golden, mine, progress=False)
    assert (report.verdict in ("match", "within_noise")) == put_back, report
    if not put_back:
        assert report.findings[0].path.startswith("2/")
