"""Values that one program keeps to itself: equal in effect if what is made of them agrees."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import llmdebug_nb as ld
from llmdebug_nb.comparison.differences import Coverage
from llmdebug_nb.comparison.rules import Rule
from recordings import AGREED, record


class Gated(nn.Module):
    """A gated unit, which also computes a number that it does not use."""

    def __init__(self, act):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.act = act

    def forward(self, x):
        acted = self.act(self.gate(x))
        torch.tanh(acted)
        return self.down(acted * self.up(x))


class Fused(nn.Module):
    """The same, with one projection for both parts and the activation inside the product."""

    def __init__(self, source, act=functional.silu):
        super().__init__()
        self.gate_up, self.down, self.inner = nn.Linear(16, 32, bias=False), source.down, act
        self.gate_up.weight = nn.Parameter(torch.cat([source.gate.weight, source.up.weight]))

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.inner(gate) * up)


@pytest.fixture
def compare(tmp_path):
    def compared(golden, mine, **options):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
        runs = (
            record(model, lambda model=model: model(x), name, path=tmp_path, **options)
            for model, name in ((golden, "golden"), (mine, "mine"))
        )
        return ld.compare(*runs, progress=False)

    return compared


def _reasons(report, path, role="output"):
    """Return which rules say why golden's tensors at a place have no partner."""
    rows = (d for d in report.differences if d.pair.golden and d.pair.mine is None)
    return {d.rule for d in rows if (d.site.path, d.site.role) == (path, role)}


@pytest.mark.parametrize("options", [{}, {"weights": True}], ids=str)
def test_a_value_inside_of_mines_fused_call_is_equal_in_effect_if_what_is_made_of_it_agrees(
    compare, options
):
    golden = Gated(nn.SiLU())
    report = compare(golden, Fused(golden), **options)
    assert report.verdict in AGREED
    assert _reasons(report, "act") == {Rule.REJOINED}
    assert report.coverage.rejoined


def test_what_nothing_is_made_of_stays_without_a_partner(compare):
    golden = Gated(nn.SiLU())
    report = compare(golden, Fused(golden), mode="module+api")
    assert report.verdict in AGREED
    (reason,) = _reasons(report, "/Torch.tanh")
    assert reason is not Rule.REJOINED


def test_a_value_of_which_something_else_is_made_is_not_equal_in_effect(compare):
    golden = Gated(nn.SiLU())
    report = compare(golden, Fused(golden, functional.gelu))
    assert report.verdict == "diverged"
    (reason,) = _reasons(report, "act")
    assert reason is not Rule.REJOINED


def test_a_verdict_that_rests_on_few_values_says_so_however_many_are_equal_in_effect():
    assert Coverage(1, 1, 10, 4, 6).share == 1
    assert "only 40 % of golden's values" in Coverage(1, 1, 10, 4, 6).caution
    assert Coverage(1, 1, 10, 5, 0).caution == ""
