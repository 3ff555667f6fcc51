"""Expected differences: they do not fail a comparison, and are always reported."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, OptionError
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Site
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.notebook.widgets import Explorer
from llmdebug_nb.show import html
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.text import notebook_text, report_text
from llmdebug_nb.store import expected as marks
from llmdebug_nb.store.expectation import Expectation
from llmdebug_nb.store.run import Run
from models import llama, prompt

KERNEL, BUG = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.act_fn"
HOSTILE = '<img src=x onerror="window.hacked=1">'


def _record(model, name, path=None, **options):
    with ld.dump(model, name=name, path=path, tokens="all", **options) as run:
        model(prompt())
        model(prompt())
    return run


def _broken(model, **factors):
    broken = copy.deepcopy(model)
    for path, factor in factors.items():
        module = broken.get_submodule(path.replace("__", "."))
        module.register_forward_hook(lambda _module, _args, out, factor=factor: out * factor)
    return broken


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture
def one(model, tmp_path):
    """Golden, and mine with one deviation."""
    return _record(model, "golden", tmp_path), _record(
        _broken(model, **{KERNEL: 1.003}), "mine", tmp_path
    )


@pytest.fixture
def two(model, tmp_path):
    """Golden, and mine with a second, larger deviation behind it."""
    broken = _broken(model, **{KERNEL: 1.003, BUG: 1.3})
    return _record(model, "golden", tmp_path), _record(broken, "mine", tmp_path)


def _verdicts(report):
    return {d.index: d.verdict for d in report.differences}


# --- the verdict ---


def test_a_marked_module_and_its_consequences_are_expected_and_counted_everywhere(one, tmp_path):
    report = ld.compare(*one, progress=False)
    before = _verdicts(report)
    bad = [i for i, verdict in before.items() if verdict == "diverged"]
    assert report.verdict == "diverged"
    mark = report.expect("model.layers.0.self_attn*", f"fused kernel {HOSTILE}")
    assert report.verdict == "expected"
    assert _verdicts(report) == before | dict.fromkeys(bad, "expected")
    assert report.first_divergence is None
    marked = [d for d in report.differences if d.expected == mark]
    assert {d.site.path for d in marked} == {KERNEL, "model.layers.0.self_attn"}
    counted = f"{len(bad):,} as expected"
    line = (
        f"{mark} (fused kernel {HOSTILE}): {len(marked)} rows; {len(bad) - len(marked)} rows "
        "more follow from that"
    )
    for text in (
        str(report),
        report_text(report.view()),
        report.summary(),
    ):
        assert "expected" in text
        assert "fused kernel" in text
    assert notebook_text(report.view()).endswith(": expected")
    assert counted in str(report)
    assert line in str(report)
    page = html.page(report.view())
    assert escape(line) in page
    assert HOSTILE not in page
    frame = report.differences.to_pandas()
    assert (frame.expected.dropna().index == bad).all()
    assert set(frame.loc[[d.index for d in marked], "expected"]) == {mark.comment}


def test_a_finding_that_is_expected_is_shown_as_such_and_nobody_else_is_blamed(one):
    report = ld.compare(*one, progress=False)
    (finding,) = report.findings
    mark = report.expect(finding, "fused kernel")
    assert mark == Expectation(KERNEL, "fused kernel")
    assert [(f.path, f.expected) for f in report.findings] == [(KERNEL, mark)]
    (line,) = [one for one in str(report).splitlines() if "expected (fused kernel): " in one]
    assert f" {KERNEL} (" in line
    assert "→" not in str(report)


def test_another_error_after_an_expected_one_is_found(two):
    report = ld.compare(*two, progress=False)
    report.expect(KERNEL)
    assert report.verdict == "diverged"
    assert [f.path for f in report.findings if f.expected is None] == [BUG]
    assert report.first_divergence is not None
    assert report.first_divergence.site.path == BUG
    assert "expected" in report.summary()
    report.expect(BUG)
    assert report.verdict == "expected"


def test_an_error_before_an_expected_one_is_found(two):
    report = ld.compare(*two, progress=False)
    report.expect(BUG)
    assert report.verdict == "diverged"
    assert [f.path for f in report.findings if f.expected is None] == [KERNEL]


def _marked(model, tmp_path, factor, **options):
    broken = _broken(model, **{KERNEL: factor})
    runs = [
        _record(each, name, tmp_path, **options)
        for each, name in ((model, "golden"), (broken, "mine"))
    ]
    report = ld.compare(*runs, progress=False)
    report.expect(report.findings[0])
    return report, broken


def test_a_size_below_half_of_the_tensor_explains_what_follows(model, tmp_path):
    report, _ = _marked(model, tmp_path, 1.3)
    assert report.verdict == "expected"
    assert all(finding.expected for finding in report.findings)


def test_not_a_number_explains_nothing_behind_it(model, tmp_path):
    report, _ = _marked(model, tmp_path, float("nan"))
    assert report.verdict == "diverged"
    assert [f.path for f in report.findings if f.expected] == [KERNEL]
    first = report.findings[0]
    assert first.path == "model.layers.0"  # its code takes the marked tensor
    assert "what enters differs as expected (error inf at model.layers.0" in first.evidence
    assert "no replay shows that it only follows" in first.evidence


@pytest.mark.parametrize("bug", [False, True])
def test_behind_a_large_expected_difference_a_replay_tells_a_bug_from_what_follows(tmp_path, bug):
    def program():
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def record(model, name):
        with ld.dump(model, name=name, path=tmp_path) as run, torch.no_grad():
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)))
        return run

    golden, mine = program(), _broken(program(), **{"1": -3.0})  # four times the tensor off
    if bug:
        with torch.no_grad():
            mine[3].weight.copy_(mine[3].weight.T.clone())
    report = ld.compare(record(golden, "golden"), record(mine, "mine"), progress=False)
    report.expect("1", "another sign")
    unexpected = [f for f in report.findings if f.expected is None]
    if bug:
        assert report.verdict == "diverged"
        assert unexpected[0].path == "3"
    else:
        assert (report.verdict, unexpected) == ("expected", [])
        reasons = {d.site.path: d.reason for d in report.differences if d.verdict == "expected"}
        assert reasons["3"] == "a replay shows that it follows from what is expected"


def test_a_marked_tensor_is_expected_wherever_it_is_seen(tmp_path):
    """Three projections take one tensor; only what the first one takes is marked."""

    class Block(nn.Module):
        def __init__(self, factor):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.factor = factor

        def forward(self, x):
            x = x.tanh() * self.factor
            return self.q(x) + self.k(x) + self.v(x)

    def record(factor, name):
        model = Block(factor)
        with ld.dump(model, name=name, path=tmp_path) as run, torch.no_grad():
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)))
        return run

    report = ld.compare(record(1.0, "golden"), record(1.01, "mine"), progress=False)
    (row,) = [d for d in report.differences if (d.site.path, d.site.role) == ("q", "input")]
    report.expect(row)
    assert report.verdict == "expected"
    assert all(finding.expected for finding in report.findings)


@pytest.mark.parametrize("weights", [False, True])
def test_recorded_weights_blame_no_module_behind_what_is_marked(tmp_path, weights):
    """A replay of the module shows that its code only passes the difference on."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.right(self.left(x).sigmoid() * x)

    def program():
        torch.manual_seed(7)
        return nn.Sequential(nn.LayerNorm(16), Gated(), Gated(), nn.Linear(16, 4))

    def record(model, name):
        with ld.dump(model, name=name, weights=weights, path=tmp_path) as run, torch.no_grad():
            model(torch.randn(6, 16, generator=torch.Generator().manual_seed(1)))
        return run

    golden, mine = program(), program()
    nn.init.constant_(mine[0].weight, 2.0)
    report = ld.compare(record(golden, "golden"), record(mine, "mine"), progress=False)
    report.expect("0", "stored with another offset")
    assert [f.path for f in report.findings if f.expected is None] == []
    assert report.verdict == "expected"


class _Level(nn.Module):
    """Gives a constant in the shape of what it takes."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def forward(self, x):
        return torch.full_like(x, self.level)


class _Sums(nn.Module):
    """Adds a level to each half of what it takes."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        left, right = x.chunk(2)
        return left + self.first(left), right + self.second(right)


def _compared(golden, mine, path, **options):
    """Return the report on two models that take the same numbers."""

    def record(model, name):
        with ld.dump(model, name=name, path=path, **options) as run, torch.no_grad():
            model(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
        return run

    return ld.compare(record(golden, "golden"), record(mine, "mine"), progress=False)


def _unexpected(report):
    return [finding.path for finding in report.findings if finding.expected is None]


@pytest.mark.parametrize("mode", ["module", ("module", "api")])
def test_two_bugs_that_give_one_constant_are_two_and_a_mark_on_one_leaves_the_other(tmp_path, mode):
    golden, mine = (_Sums(_Level(level), _Level(level)) for level in (0.5, 0.6))
    report = _compared(golden, mine, tmp_path, mode=mode)
    found = sorted(path.partition("/")[0] for path in _unexpected(report))
    assert found == ["first", "second"]
    report.expect("first", "wanted")
    assert report.verdict == "diverged"
    assert [path.partition("/")[0] for path in _unexpected(report)] == ["second"]
    report.expect("second", "wanted as well")
    assert (report.verdict, _unexpected(report)) == ("expected", [])


def test_weights_that_are_the_same_constants_are_two_findings(tmp_path):
    """As a converter makes them that adds one to what a norm was stored with."""

    def program(weight):
        torch.manual_seed(2)
        model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))
        for norm in (model[0], model[2]):
            nn.init.constant_(norm.weight, weight)
        return model

    golden, mine = program(1.0), program(2.0)
    report = _compared(golden, mine, tmp_path, weights=True)
    assert sorted(_unexpected(report)) == ["0", "2"]
    report.expect("0", "wanted")
    assert (report.verdict, _unexpected(report)) == ("diverged", ["2"])


@pytest.mark.parametrize("change", [1.2, 3.0])
@pytest.mark.parametrize("mode", ["module", ("module", "api")])
def test_a_marked_constant_is_expected_wherever_modules_hand_it_on(tmp_path, mode, change):
    golden, mine = (
        nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Sequential(_Level(level))), nn.Identity())
        for level in (0.5, 0.5 * change)
    )
    mine[0].load_state_dict(golden[0].state_dict())
    report = _compared(golden, mine, tmp_path, mode=mode)
    report.expect("1.0.0", "wanted")
    assert (report.verdict, _unexpected(report)) == ("expected", [])


def test_a_mark_on_a_constant_of_unseen_code_covers_all_calls_that_are_given_it(tmp_path):
    class Scaled(nn.Module):
        def forward(self, x, scale):
            return x * scale

    class Scales(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.one, self.two, self.scale = Scaled(), Scaled(), scale

        def forward(self, x):
            scale = torch.full((16,), self.scale)
            return self.one(x, scale), self.two(x.sin(), scale)

    report = _compared(Scales(1.0), Scales(1.2), tmp_path)
    rows = [d for d in report.differences if (d.site.path, d.site.slot) == ("one", "1")]
    report.expect(rows[0])
    assert (report.verdict, _unexpected(report)) == ("expected", [])


def test_a_pattern_does_not_cover_what_is_large_or_no_float(one, model, tmp_path):
    large = _record(_broken(model, **{KERNEL: 1.003, BUG: 2.0}), "large", tmp_path)
    report = ld.compare(one[0], large, progress=False)
    report.expect("model.layers.*", "fused kernels")
    assert report.verdict == "diverged"
    assert [f.path for f in report.findings if f.expected is None] == [BUG]
    assert "model.layers.* is a pattern, which covers only small differences" in str(report)
    report.expect(BUG)  # its error of 1 explains nothing behind it
    assert [f.path for f in report.findings if f.expected is None] == ["model.layers.1.mlp"]
    report.expect("model.layers.1.mlp")
    assert report.verdict == "expected"


def test_operators_of_only_one_run_are_expected_with_their_consequences(model, tmp_path):
    options = {"path": tmp_path, "mode": "module+aten"}
    runs = (
        _record(model, "golden", **options),
        _record(_broken(model, **{KERNEL: 1.003}), "mine", **options),
    )
    report = ld.compare(*runs, progress=False)
    finding = report.findings[0]
    assert finding.path == f"{KERNEL}/Aten.mul.Tensor"
    report.expect(finding)
    assert report.verdict == "expected"
    made = [d for d in report.differences if d.site.path == KERNEL and d.site.role == "output"]
    assert {d.reason for d in made} == {"explained by what is expected"}


def test_a_row_is_one_tensor_in_all_steps_and_can_be_narrowed_to_one(one):
    report = ld.compare(*one, progress=False)
    row = next(d for d in report.differences if d.site.path == KERNEL and d.site.role == "output")
    mark = report.expect(row, "known")
    assert [d.site.step for d in report.differences if d.expected == mark] == [0, 1]
    report.unexpect(report.differences[row.index])
    assert report.verdict == "diverged"
    mark = report.expect(KERNEL, role="output", slot="0", phase="forward", step=1)
    assert [d.site.step for d in report.differences if d.expected == mark] == [1]
    assert [(f.path, f.step) for f in report.findings if f.expected is None] == [(KERNEL, 0)]
    assert report.verdict == "diverged"


def test_fixed_limits_do_not_excuse_consequences_of_expected_errors(one):
    report = ld.compare(*one, progress=False, limits={"*": {"relative_l2": 1e-6}})
    assert report.verdict == "diverged"
    report.expect(KERNEL)
    assert report.verdict == "expected"


def test_taking_a_mark_back_restores_the_report_and_removes_the_file(one):
    report = ld.compare(*one, progress=False)
    before, text = _verdicts(report), str(report)
    mark = report.expect(KERNEL, "fused kernel")
    file = marks.file_of(one[1])
    assert file.is_file()
    assert report.unexpect(KERNEL) == [mark]
    assert (_verdicts(report), str(report)) == (before, text)
    assert not file.exists()
    with pytest.raises(OptionError, match="not marked as expected; marks: none"):
        report.unexpect(KERNEL)


def test_a_mark_that_nothing_is_like_is_refused_with_the_nearest_paths(one):
    report = ld.compare(*one, progress=False)
    with pytest.raises(OptionError, match=r"no such tensor; nearest: model\.layers"):
        report.expect("model.layers.9.self_attn")
    for wrong, why in (("", "a glob"), (7, "a glob over module paths, a row or a finding")):
        with pytest.raises(OptionError, match=why):
            report.expect(wrong)
    with pytest.raises(OptionError, match="role 'out' is not known; known: input, output"):
        report.expect(KERNEL, role="out")
    assert report.expected == []


# --- where it is kept ---


def test_the_next_comparison_and_a_new_recording_of_that_name_know_it(model, one, tmp_path):
    ld.compare(*one, progress=False).expect(KERNEL, "fused kernel")
    again = ld.compare(*one, progress=False)
    assert again.verdict == "expected"
    assert [mark.comment for mark in again.expected] == ["fused kernel"]
    anew = _record(_broken(model, **{KERNEL: 1.003}), "mine", tmp_path)
    assert anew.path != one[1].path
    assert ld.compare(one[0], anew, progress=False).verdict == "expected"
    other = _record(model, "another", tmp_path)
    assert (
        ld.compare(other, anew, progress=False).verdict == "diverged"
    )  # held against another golden
    good = _record(model, "mine", tmp_path)
    mended = ld.compare(one[0], good, progress=False)
    assert mended.verdict == "match"
    assert f"marked as expected, but does not differ now: {KERNEL}" in str(mended)


def test_two_reports_keep_each_others_marks(two):
    first, second = (ld.compare(*two, progress=False) for _ in range(2))
    first.expect(KERNEL)
    second.expect(BUG)
    assert [mark.path for mark in second.expected] == [KERNEL, BUG]
    assert second.verdict == "expected"
    assert ld.compare(*two, progress=False).verdict == "expected"


def test_the_command_line_marks_and_then_exits_with_0(one, capsys):
    golden, mine = (str(run.path) for run in one)
    assert main(["compare", golden, mine]) == 1
    assert main(["compare", golden, mine, "--expect", KERNEL, "--comment", "fused kernel"]) == 0
    capsys.readouterr()
    assert main(["compare", golden, mine]) == 0
    out = capsys.readouterr().out
    assert ": expected\n" in out
    assert re.search(r"[\d,]+ as expected", out)
    assert "fused kernel" in out
    assert main(["compare", golden, mine, "--unexpect", KERNEL]) == 1
    assert main(["compare", golden, mine, "--expect", "nowhere"]) == 3
    assert "no such tensor" in capsys.readouterr().err


DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    '{"format": "llmdebug-expected", "version": 2, "expected": []}',
    '{"format": "llmdebug-expected", "version": 1, "expected": {}}',
    '{"format": "llmdebug-expected", "version": 1, "expected": [{"golden": "golden", "path": 7}]}',
    '{"format": "llmdebug-expected", "version": 1, "expected": [{"golden": "golden", "path": '
    '"x", "step": true}]}',
    '{"format": "llmdebug-expected", "version": 1, "expected": [{"golden": "golden", "path": '
    '"x", "more": 1}]}',
    "[" * 100_000,
    '{"format": "llmdebug-expected", "version": 1, "expected": [{"golden": "golden", "path": '
    '"\\ud800"}]}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_reported_in_one_line_and_ignored_and_left_unchanged(one, text):
    file = marks.file_of(one[1])
    file.write_text(text, encoding="utf-8")
    report = ld.compare(*one, progress=False)
    assert report.verdict == "diverged"
    (line,) = [line for line in str(report).splitlines() if str(file) in line]
    assert "is damaged, so nothing counts as expected" in line
    with pytest.raises(CorruptDumpError, match="is damaged"):
        report.expect(KERNEL)
    assert file.read_text(encoding="utf-8") == text
    assert report.expected == []


def test_a_mark_that_can_not_be_kept_has_no_effect(one, monkeypatch):
    report = ld.compare(*one, progress=False)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(marks.os, "replace", full)
    with pytest.raises(DumpWriteError, match="No space left"):
        report.expect(KERNEL)
    assert (report.verdict, report.expected) == ("diverged", [])
    assert [path.name for path in one[1].path.parent.iterdir() if "expected" in path.name] == []


def test_a_dump_that_calls_itself_by_a_path_writes_nowhere_else(tmp_path):
    folder = tmp_path / "runs" / "mine.1"
    for name in ("../../evil", "a/b", "", "x" * 500):
        run = Run(name, folder, lambda: pytest.fail("not opened"))
        assert marks.file_of(run) == tmp_path / "runs" / "mine.1.expected.json"


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
MARKS = st.builds(
    Expectation, TEXTS.filter(bool), TEXTS, st.sampled_from([None, "input", "output", "weight",
        "grad"]),
    st.none() | TEXTS.filter(bool), st.sampled_from([None, "forward", "backward"]),
        st.none() | st.integers(0, 10**6),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(MARKS, max_size=5), st.lists(MARKS, max_size=5), st.booleans())
def test_marks_are_read_as_they_were_written_beside_those_of_other_goldens(
    tmp_path_factory, first, second, twice
):
    folder = tmp_path_factory.mktemp("marks")
    golden, other, mine = (
        Run(name, folder / name, lambda: None) for name in ("golden", "other", "mine")
    )
    marks.write(other, mine, second)
    for _ in range(1 + twice):
        marks.write(golden, mine, first)
    assert marks.read(golden, mine) == first
    assert marks.read(other, mine) == second


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["format", "version", "expected", "golden", "path", "comment", "step"]),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON, JSON)
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, whole, entry):
    folder = tmp_path_factory.mktemp("marks")
    golden, mine = (Run(name, folder / name, lambda: None) for name in ("golden", "mine"))
    for data in (whole, {"format": marks.FORMAT, "version": marks.VERSION, "expected": [entry]}):
        marks.file_of(mine).write_text(json.dumps(data), encoding="utf-8")
        said, found = "", []
        try:
            found = marks.read(golden, mine)
        except CorruptDumpError as error:
            said = str(error)
        assert "\n" not in said
        assert all(isinstance(mark.path, str) for mark in found)


PATHS = [
    "",
    "model",
    "model.layers.1",
    "model.layers.1.mlp",
    "model.layers.10",
    "model.layers.1/Aten.add",
    "lm_head",
]


@given(
    st.sampled_from(PATHS[1:]),
    st.sampled_from(PATHS),
    st.sampled_from(["input", "output", "weight"]),
)
def test_a_mark_on_a_module_covers_its_outputs_and_its_inside_but_not_its_inputs(
    marked, path, role
):
    covered = Expectation(marked).covers(Site(path, role=role))
    assert covered == (within(path, marked) and (path != marked or role != "input"))


# --- the views ---


def _ask(view):
    bridge = Bridge(view)

    def ask(op, **request):
        answer, _ = bridge.answer({"op": op, "re": 1, **request})
        assert "error" not in answer, answer
        json.dumps(answer, allow_nan=False)
        return answer

    return ask, bridge


@pytest.mark.parametrize(
    ("scope", "covers"), [("tensor", [0, 1]), ("step", [1]), ("module", [0, 1])]
)
def test_the_explorer_marks_a_row_and_takes_it_back(one, scope, covers):
    report = ld.compare(*one, progress=False)
    ask, bridge = _ask(report.view())
    row = [
        d.index for d in report.differences if d.site.path == KERNEL and d.site.role == "output"
    ][-1]
    overview = ask("expect", row=row, finding=-1, scope=scope, comment="fused kernel")
    (mark,) = overview["marks"]
    assert (mark["rows"], mark["comment"]) == (len(covers), "fused kernel")
    assert overview["kept"] == str(marks.file_of(one[1]))
    assert overview["verdict"] == ("expected" if len(covers) == 2 else "diverged")
    shown = ask("row", row=row, **EVERYTHING)["row"]
    assert (shown["verdict"], shown["expected"], shown["mark"]) == ("expected", "fused kernel", 0)
    ids = ask("path", path=KERNEL)["ids"]
    nodes = ask("children", parent=ids[-2], start=0, n=99)["nodes"]
    assert (
        next(n["note"] for n in nodes if n["path"] == KERNEL)
        == f"{len(covers)} expected: fused kernel"
    )
    assert (
        "no longer marked"
        in bridge.answer({"op": "unexpect", "re": 1, "mark": 0, "text": "else"})[0]["error"]
    )
    assert ask("unexpect", mark=0, text=mark["text"])["marks"] == []
    assert report.verdict == "diverged"


def test_the_explorer_marks_a_finding_and_lists_the_remaining_ones(two):
    report = ld.compare(*two, progress=False)
    ask, _ = _ask(report.view())
    overview = ask("expect", row=-1, finding=0, scope="module", comment="")
    assert [(f["path"], f["expected"], f["mark"]) for f in overview["findings"]] == [
        (BUG, "", -1),
        (KERNEL, KERNEL, 0),
    ]
    mismatches = ask("rows", step=-1, start=0, n=999, **{**EVERYTHING, "mismatch": True})
    assert mismatches["total"] == sum(
        d.verdict in ("diverged", "unmatched") for d in report.differences
    )
    assert overview["first_bad"] == mismatches["rows"][0]["id"]


def test_an_open_explorer_follows_marks_made_in_python(one):
    report = ld.compare(*one, progress=False)
    explorer = Explorer(report.view())
    assert explorer.snapshot["verdict"] == "diverged"
    report.expect(KERNEL, "fused kernel")
    assert explorer.snapshot["verdict"] == "expected"
    assert explorer.snapshot["marks"][0]["comment"] == "fused kernel"


def test_a_comparison_without_marks_is_judged_once(one, monkeypatch):
    report = ld.compare(*one, progress=False)
    assert list(report.differences) == report._judging.plain
    assert all(d.expected is None for d in report.differences)
    assert torch.tensor([d.verdict == "expected" for d in report.differences]).sum() == 0
