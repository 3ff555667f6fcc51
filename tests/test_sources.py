"""Sources of a finding: the lines of both programs."""

import inspect
import re

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.comparison.differences import Coverage
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import Frame
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.sources import of_call
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.source.lines import Source
from recordings import compared


def sigmoid(x):
    return torch.sigmoid(x)  # mine's line


class Squashed(nn.Module):
    def __init__(self, squash):
        super().__init__()
        self.linear, self.squash = nn.Linear(4, 4), squash

    def forward(self, x):
        return self.squash(self.linear(x))  # both call here


def line_of(what, comment):
    lines, start = inspect.getsourcelines(what)
    return start + next(i for i, line in enumerate(lines) if comment in line)


@pytest.fixture
def side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Squashed(sigmoid)
    with ld.dump(model, name="mine", mode="module+api"), torch.no_grad():
        model(torch.ones(3, 4))
    return Side(ld.open_run("mine"))


def call(side, op):
    return next(r.site.key for r in side.run.records(op=op, role="output"))


def test_an_operators_source_is_the_line_that_calls_it_with_code_and_frames(side):
    source = of_call(side, call(side, "Torch.sigmoid"), "Torch.sigmoid")
    line = line_of(sigmoid, "# mine's line")
    assert (source.path, source.op) == ("/Torch.sigmoid", "Torch.sigmoid")
    assert (source.file, source.line) == (shown(__file__), line)
    assert source.code == "return torch.sigmoid(x)  # mine's line"
    assert str(source) == f"{shown(__file__)}:{line} sigmoid"


def test_the_frames_end_at_the_modules_forward(side):
    source = of_call(side, call(side, "Torch.sigmoid"), "Torch.sigmoid")
    assert source.frames == (
        Frame(shown(__file__), line_of(sigmoid, "# mine's line"), "sigmoid"),
        Frame(shown(__file__), line_of(Squashed, "# both call here"), "forward"),
    )


def test_the_source_of_a_module_is_where_its_forward_begins(side):
    source = of_call(side, call(side, "Squashed"), "Squashed")
    assert (source.file, source.line) == (shown(__file__), line_of(Squashed, "def forward"))
    assert source.code == "def forward(self, x):"


def test_the_source_of_a_finding_is_mines_line_else_goldens():
    golden, mine = Source("a", "A", "g.py", 3), Source("b", "B", "m.py", 5)
    both = Finding("a", "A", 0, "introduced", "", golden=golden, mine=mine)
    assert both.source == "m.py:5"
    assert Finding("a", "A", 0, "introduced", "", golden=golden).source == "g.py:3"
    unknown = Source("b", "B")
    assert Finding("a", "A", 0, "introduced", "", golden=golden, mine=unknown).source == "g.py:3"
    assert Finding("a", "A", 0, "introduced", "", mine=unknown).source is None


def test_coverage_says_what_was_found_and_its_share():
    coverage = Coverage(2, 1, 200, 150, 30)
    assert coverage.share == (150 + 30) / 200
    assert Coverage().share == 1.0
    assert str(coverage) == (
        "90 % of golden's 200 values (30 written otherwise, equal in effect) and 1 of 2 results "
        "agree."
    )


class Mixed(nn.Module):
    """Mixes a doubled stream with what a layer adds to it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.mix, self.leave = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        stream = torch.mul(self.enter(x), 2.0)
        return self.leave(torch.tanh(torch.add(self.mix(stream), stream)))


def added(x, layer):
    return torch.addmm(layer.bias, x, layer.weight.t()) + x


class MixedToo(Mixed):
    """Writes the layers out, and leaves the doubling out."""

    def forward(self, x):
        stream = x @ self.enter.weight.t() + self.enter.bias  # the last line that agrees
        stream = added(stream, self.mix)  # takes what was not doubled
        return torch.tanh(stream) @ self.leave.weight.t() + self.leave.bias


class MixedTwice(MixedToo):
    """Doubles it twice."""

    def forward(self, x):
        stream = (x @ self.enter.weight.t() + self.enter.bias) * 2.0
        stream = torch.tanh(added(stream, self.mix) * 2.0)  # doubles once more
        return stream @ self.leave.weight.t() + self.leave.bias


def mixed(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    return compared(Mixed(), mine(), x, mode="module+api")


def test_what_mine_leaves_out_has_a_place_behind_the_last_line_that_agrees(monkeypatch, tmp_path):
    report = mixed(MixedToo, monkeypatch, tmp_path)
    (finding,) = report.findings
    assert finding.golden.op == "Torch.mul"
    assert (finding.mine.lacks, finding.mine.op, finding.mine.path) == (True, "", "")
    assert finding.mine.line == line_of(MixedToo, "# the last line that agrees")
    guilty = [pair.mine.line for pair in finding.pairs if pair.state == "guilty"]
    assert guilty == [line_of(MixedToo, "# takes what was not doubled")]
    headline = report.headlines()[0]
    assert headline.head == "Missing behind"
    assert headline.where == "the model · Torch.mul, not so in mine"
    assert f"mine:   not so, behind {finding.mine}" in str(report)
    assert "the module is not in the other run" not in finding.evidence


class Halved(nn.Module):
    """Halves what a layer gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.enter(x)
        x = x * 0.5
        return self.leave(torch.tanh(x))


class NotHalved(Halved):
    def forward(self, x):
        x = self.enter(x)
        return self.leave(torch.tanh(x))


def test_lines_around_what_mine_leaves_out_stand_beside_each_other(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = str(compared(Halved(), NotHalved(), torch.ones(2, 8), mode="module+api"))
    assert re.search(r"=  +\d+  +x = self\.enter\(x\)  +\d+  +x = self\.enter\(x\)", text)
    assert re.search(r"✗  +\d+  +x = x \* 0\.5  +\d+  +return self\.leave", text)


def test_what_mine_adds_has_a_place_in_golden(monkeypatch, tmp_path):
    (finding,) = mixed(MixedTwice, monkeypatch, tmp_path).findings
    assert finding.mine.line == line_of(MixedTwice, "# doubles once more")
    assert finding.golden.lacks
    assert finding.golden.code.startswith("return self.leave(torch.tanh(torch.add(")


class Shifted(Mixed):
    """Adds one vector at two places."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(8))

    def forward(self, x):
        stream = torch.add(self.enter(x), self.shift)
        return self.leave(torch.add(torch.exp(stream), self.shift))


class ShiftedOnce(Shifted):
    """Adds it at one of them, behind another function."""

    def forward(self, x):
        stream = x @ self.enter.weight.t() + self.enter.bias + self.shift
        grown = torch.mul(torch.cosh(stream), 2.0)
        return grown @ self.leave.weight.t() + self.leave.bias


def test_of_a_tensor_that_mine_does_not_take_it_is_not_said_that_the_call_is_missing(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    (finding,) = compared(Shifted(), ShiftedOnce(), x, mode="module+api").findings
    assert "only golden calls" not in finding.evidence
    assert "Torch.add in golden is made with " in finding.evidence
    assert "which mine does not take there" in finding.evidence
    assert finding.mine.lacks
