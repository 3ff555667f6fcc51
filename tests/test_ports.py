"""The port benchmark: ports compute what their model computes, bugs change it, grades are right."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import llmdebug_nb as ld

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import torch
from ports import packages, score
from ports.bugs import bugs
from ports.entry import WEIGHTS, Bug, Port, difference, fits, load
from ports.sets import PORTS, SETS
from ports.weights import renamed

EACH = [pytest.param(port, id=port.name) for port in PORTS.values()]
SOURCE = "def f(x):\n    y = x + 1\n    return g(\n        y,\n        x,\n    )\n"


@pytest.fixture(params=EACH)
def port(request: pytest.FixtureRequest) -> Port:
    """Yield each port that can run here."""
    port: Port = request.param
    if why := port.missing():
        pytest.skip(why)
    return port


def test_a_bug_changes_one_place_of_the_source(port: Port) -> None:
    text = port.text
    assert len({bug.name for bug in port.bugs}) == len(port.bugs)
    for bug in port.bugs:
        made_by = (bug.in_code, bug.convert is not None, bool(bug.settings))
        assert sum(made_by) == 1, bug.name
        assert bug.modules, bug.name
        if bug.in_code:
            assert bug.source(text) != text, bug.name
            assert bug.lines(text) or bug.golden, bug.name


def test_the_right_answers_are_modules_of_golden_or_mine(port: Port) -> None:
    golden = port.golden()
    models = (golden.model, port.mine(golden).model)
    paths = {path for model in models for path, _ in model.named_modules(remove_duplicate=False)}
    answers = {(bug.name, glob) for bug in port.bugs for glob in bug.modules}
    missing = {(name, glob) for name, glob in answers if not any(fits(p, glob) for p in paths)}
    assert missing == set()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_right_port_gives_the_logits_of_its_model(port: Port, weights: str) -> None:
    golden = port.golden(weights=weights)
    assert difference(golden(), port.mine(golden)()) < port.error


@pytest.mark.slow
def test_every_bug_changes_the_logits(port: Port) -> None:
    golden = port.golden()
    logits = port.mine(golden)()
    changes = [(bug, difference(logits, port.mine(golden, bug)())) for bug in port.bugs]
    assert {bug.name: error for bug, error in changes if not error > bug.least} == {}


@pytest.mark.slow
def test_outliers_change_the_weights_and_not_the_logits(port: Port) -> None:
    ordinary, outliers = port.golden(), port.golden(weights="outliers")
    largest = [
        max(float(p.detach().abs().max()) for p in program.model.parameters() if p.ndim == 1)
        for program in (ordinary, outliers)
    ]
    assert largest[1] > 10 * largest[0]
    assert difference(ordinary(), outliers()) < 1e-4


def test_a_bug_can_be_in_any_file_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "severalfiles"
    folder.mkdir()
    (folder / "a.py").write_text("class A:\n    size = 3\n")
    (folder / "b.py").write_text(
        "from math import (\n    pi,\n)\nfrom severalfiles.a import A\nfrom .gone import Gone\n\n\n"
        "class B(A):\n    def area(self, of: Gone):\n        return pi * self.size\n\n\n"
        "def lora_b(of=Gone):\n    return of\n"
    )
    monkeypatch.setenv("LLMDEBUG_PORTS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "severalfiles", raising=False)
    path = packages.joined("severalfiles", "a.py", "b.py", without="lora_")
    bug = Bug("b", "", "size = 3", "size = 5")
    code = load(bug.source(path.read_text()), "severalfiles_b.py", "severalfiles")
    assert code.B().area(None) == 5 * math.pi
    assert not hasattr(code, "lora_b")


def test_a_port_can_be_made_of_some_classes_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "someclasses"
    folder.mkdir()
    (folder / "a.py").write_text("import absent\n\n\nclass A:\n    size = 3\n")
    monkeypatch.setenv("LLMDEBUG_PORTS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "someclasses", raising=False)
    path = packages.taken("someclasses", {"a.py": ("A",)}, "import math")
    code = load(Bug("b", "", "size = 3", "size = 5").source(path.read_text()), "some.py", "")
    assert code.A.size == 5
    assert code.math is math


def test_stand_ins_are_gone_after_the_import() -> None:
    with packages.stand_ins(absent={}, absent__part={"name": 3}):
        from absent.part import name
    assert name == 3
    assert not {"absent", "absent.part"} & set(sys.modules)


TEXT = r"""
sign: the sign is wrong
    - y = x + 1
    + y = x - 1
    in (root) $PLACES a.*.$LAST
    golden $LAST/Tensor.add@f
    also return g(
    early
left_out: a line is left out
    -         x,
    in a
    least 1e-4
halved: a weight is halved
    weights each(lambda w: w / FACTOR, "a.*.{q,k}")
    in a
wide: another setting
    settings {"width": 3}
    in a
"""


def test_bugs_are_read_from_text() -> None:
    names = {"PLACES": ("b", ""), "LAST": "attn", "FACTOR": 2}
    sign, left_out, halved, wide = bugs(TEXT, names)
    assert sign == Bug(
        "sign", "the sign is wrong", "y = x + 1", "y = x - 1", modules=("", "b", "", "a.*.attn"),
        golden=("attn/Tensor.add@f",), also=("return g(",), early=True,
    )  # fmt: skip
    assert left_out.source(SOURCE) == SOURCE.replace("        x,\n", "")
    assert left_out.least == 1e-4
    state = {name: torch.ones(2) for name in ("a.0.q.weight", "a.1.k.bias", "a.0.v.weight")}
    halved.convert(state)
    assert {name: value[0].item() for name, value in state.items()} == {
        "a.0.q.weight": 0.5,
        "a.1.k.bias": 0.5,
        "a.0.v.weight": 1.0,
    }
    assert wide.settings == {"width": 3}
    assert [bug.in_code for bug in (sign, left_out, halved, wide)] == [True, True, False, False]


def test_weights_are_renamed_one_by_one_or_joined() -> None:
    given = {f"m.{n}.{kind}.weight": torch.full((1,), n) for n in (0, 1) for kind in "qkv"}
    names = {"b.*.kv": "m.*.{k,v}", "b.*.{query,key}.gain": "m.*.{q,k}.weight", "none": "m.2"}
    state = renamed(given, names)
    assert {name: value.tolist() for name, value in state.items()} == {
        f"b.{n}.{name}": [n] * count
        for n in (0, 1)
        for name, count in (("kv.weight", 2), ("query.gain", 1), ("key.gain", 1))
    }


def test_every_port_is_in_one_set() -> None:
    assert sum(map(len, SETS.values())) == len(PORTS)
    assert PORTS.keys() == set().union(*SETS.values())


def test_cases_of_held_out_ports_are_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, held_out = (next(iter(ports)) for ports in (SETS["known"], SETS["held-out"]))
    marks = [
        score.Mark(port, "modules", "fp32", "ordinary", 0, f"bug of {port}", "diverged", "wrong")
        for port in (known, held_out)
    ]
    monkeypatch.setattr(score, "run", lambda given: marks)
    monkeypatch.setattr(sys, "argv", ["score.py"])
    score.main()
    told = capsys.readouterr().out
    assert f"|{held_out}|modules|" in told
    assert f"bug of {known}" in told
    assert f"bug of {held_out}" not in told


# -- grades --------------------------------------------------------------------------------------

BUG = Bug(
    "b", "", "y = x + 1", "y = x - 1", modules=("a.*.attn",), golden=("a.1.attn/Tensor.add@f",)
)
ANSWER = score.Answer(BUG, "p.py", BUG.lines(SOURCE))


def seen(path: str, *lines: int, golden: str = "", region: tuple[int, ...] = ()) -> score.Named:
    frames = tuple(("p.py", line) for line in lines)
    named = frozenset([*frames[:1], *(("p.py", line) for line in region)])
    return score.Named((path,), frames, (golden, "f"), named, path)


@pytest.mark.parametrize(
    ("named", "modules", "functions"),
    [
        (seen("a.1.attn/Tensor.sub", 2), "exact", "exact"),
        (seen("a.1.attn/Tensor.sub", 3), "exact", "module"),
        (seen("a.1.attn/Tensor.sub", 9, 2), "exact", "exact"),  # a helper called from the line
        (seen("a.1.attn/Tensor.sub", 3, region=(2, 4)), "exact", "exact"),
        (seen("a.1.attn/Tensor.sub", 3, region=(2, 4, 5, 6, 7, 8)), "exact", "module"),
        (seen("a.1.attn", golden="a.1.attn/Tensor.add"), "exact", "exact"),
        (seen("a.1.attn", golden="a.1.attn/Tensor.mul"), "exact", "module"),
        (seen("a.1"), "module", "module"),
        (seen("a.1.attn.q"), "module", "module"),
        (seen("a.1.mlp", 5), "wrong", "wrong"),
        (seen("a"), "wrong", "wrong"),
    ],
)
def test_a_finding_is_graded_by_its_line_and_else_by_its_module(
    named: score.Named, modules: str, functions: str
) -> None:
    assert ANSWER.grade([named], "modules") == modules
    assert ANSWER.grade([named], "functions") == functions


def test_a_bug_before_the_recording_or_in_weights_is_graded_by_its_module() -> None:
    early = score.Answer(replace(BUG, early=True), "p.py", frozenset())
    assert early.grade([seen("a.1.attn/Tensor.sub", 9)], "functions") == "exact"
    assert early.grade([seen("a.1.attn.q", 9)], "functions") == "module"


def test_a_later_finding_is_late_and_none_is_wrong() -> None:
    assert ANSWER.grade([seen("a.1.mlp"), seen("a.1.attn", 2)], "functions") == "late"
    assert ANSWER.grade([], "functions") == "wrong"


def test_the_lines_of_a_bug_are_those_of_the_changed_statements() -> None:
    assert BUG.lines(SOURCE) == {2}
    assert Bug("b", "", "        y,\n", "        -y,\n").lines(SOURCE) == {3, 4, 5, 6}
    with pytest.raises(ValueError, match="occurs 2 times"):
        Bug("b", "", "y", "z").lines(SOURCE)


@pytest.mark.slow
def test_a_wrong_weight_is_found_in_a_port() -> None:
    group = score.Group("attention", "modules", "fp32", "ordinary", 0, ("correct", "k_heads"))
    right, bug = score.score(group)
    assert right.right
    assert bug.grade == "exact"


@pytest.mark.slow
def test_a_norm_that_is_left_out_before_a_fused_projection_of_a_table_is_named() -> None:
    bugs = ("correct", "distances_not_normed")
    right, bug = score.score(score.Group("disentangled", "functions", "fp32", "ordinary", 0, bugs))
    assert right.right
    assert bug.grade == "exact"
    assert "only golden calls Functional.layer_norm" in bug.blamed[0]


def test_the_listing_of_a_bug_marks_its_line_beside_goldens(tmp_path: Path) -> None:
    port = PORTS["attention"]
    program = port.golden()
    golden, _ = score.record(program, tmp_path / "golden", "functions")
    bug = port.bug("k_repeat")
    mine, _ = score.record(port.mine(program, bug), tmp_path / "mine", "functions")
    report = ld.compare(golden, mine, progress=False)
    listing = report.listing(report.findings[0])
    blamed = listing.lines[listing.at]
    assert blamed.mine.strip() == "k = k.repeat(1, self.groups, 1, 1)"
    assert blamed.mine_line in bug.lines(port.text)
    assert "repeat_kv(key" in blamed.golden
    states = [line.state for line in listing.lines if line.state]
    at = states.index("guilty")
    assert states.count("guilty") == 1
    assert set(states[:at]) == {"equal"}
    assert states[at + 1] == "equal"  # the values are repeated rightly
    assert set(states[at + 2 :]) == {"inherited"}


def test_a_clamp_that_mine_leaves_out_is_named_though_a_bias_has_the_shape_of_the_scores(
    tmp_path: Path,
) -> None:
    port = PORTS["alibi"]
    program = port.golden()
    golden, _ = score.record(program, tmp_path / "golden", "functions")
    mine = port.mine(program, port.bug("not_clipped"))
    run, _ = score.record(mine, tmp_path / "mine", "functions")
    found = ld.compare(golden, run, progress=False).findings[0]
    assert found.path == "transformer.blocks.0.attn/Tensor.clamp"
