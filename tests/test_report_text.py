"""The short form of a report: for terminals, logs, and notebooks shown without scripts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.show import html
from llmdebug_nb.show.words import verdicts_text
from recordings import compared


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = torch.nn.functional.silu(y)
        return y * 2


class Port(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = torch.nn.functional.gelu(y)
        return y * 2


@pytest.fixture
def report() -> ld.Report:
    models = []
    for kind in (Gate, Port):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(kind() if at == 2 else Gate() for at in range(6))))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    return compared(*models, x, mode="module+api")


def test_the_short_form_is_the_answer_the_lines_three_rows_and_where_the_rest_is(report) -> None:
    lines = str(report).splitlines()
    headline = report.headlines()[0]
    assert lines[0] == "golden against mine: diverged"
    assert lines[1].startswith(f"→ {headline.head} {headline.place}")
    assert lines[2].strip() == headline.what
    guilty = next(line for line in lines if "✗" in line)
    assert "silu(y)" in guilty
    assert "gelu(y)" in guilty
    before = lines[lines.index(guilty) - 1].split()
    assert before[0] == "="
    assert "self.up(x)" in " ".join(before)
    first = next(at for at, line in enumerate(lines) if line.startswith("step "))
    shown = lines[first + 1 : first + 4]
    assert all(line.startswith("0 ") for line in shown)
    mismatches = sum(d.is_mismatch for d in report.differences)
    agreeing = sum(line.endswith(("match", "within_noise")) for line in shown)
    more = mismatches + agreeing - 3
    assert lines[first + 4] == f"… {more:,} more mismatches: report.differences.to_pandas()"


def test_an_output_cell_without_scripts_says_the_same_once(report) -> None:
    page, headline = html.fragment(report.view()), report.headlines()[0]
    assert "<script" not in page
    assert page.count(headline.where) == 1
    assert page.index(headline.place) < page.index("silu(y)") < page.index("<table")


def test_findings_that_are_left_out_are_counted(report) -> None:
    report.findings = report.findings * 8
    text = str(report)
    assert text.count(report.headlines()[0].where) == 5
    assert "… 3 more findings: report.findings" in text


def test_a_verdict_that_no_value_shows_does_not_stand_beside_a_bare_zero():
    pair = Pair(Record(0, Site("fc"), 0, "Linear", Summary("float32", (2,))), None, "same site")
    rows = [Difference(0, pair, "within_noise", 1e-7, 1e-6)]
    assert verdicts_text(rows, hidden=False).endswith("0 diverged")
    assert "0 diverged (the findings are differences" in verdicts_text(rows, hidden=True)
