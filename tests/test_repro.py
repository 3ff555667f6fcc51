"""A repro script holds what a dump says as data. No text of a dump becomes code."""

from __future__ import annotations

import ast
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import CallKey, Record, Site, Summary
from llmdebug_nb.findings import repro
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.runs import Runs, Side

# what ends a line, a literal, a comment or a template
_ENDS = ["\r", "\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x00", "\\", "'", '"']
_ENDS += ['"""', "'''", "#", "{0}", "{path}", "%s", ")", "(", "\ud800", "\u202e", "\x1b[2J"]
_CODE = "import os; open('canary', 'w')"
HOSTILE = st.lists(st.sampled_from([*_ENDS, _CODE, "x", " ", "kwargs.", "0"]), max_size=12).map(
    "".join
) | st.text(max_size=30)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# kinds of syntax that the templates have; anything else is code that a dump brought
_ALLOWED = _words(
    """Module Import alias Assign Tuple Name Load Store Attribute Call keyword Constant FunctionDef
    arguments arg Return Expr BinOp BoolOp Or Gt Sub Div IfExp JoinedStr FormattedValue If Compare
    Eq For With withitem Is IsNot Subscript List Dict Lambda UnaryOp USub Raise Starred"""
)
_CALLED = _words(
    """print ld.open_run run.tensor golden.tensor mine.tensor dict wide recorded_input float
    golden.double mine.double golden.dim golden.double().reshape mine.double().reshape golden.norm
    size.median size.clamp_min ((mine-golden)/size).norm (golden/size).norm exact.double made.double
    (made-exact).norm exact.norm list isinstance x.double
    show error x.is_floating_point first golden_call my_call call module slice complex torch.device
    result.values NotImplementedError torch.no_grad torch.clamp torch.sum torch.nn.functional.pad"""
)
_OPERATORS = ("Torch.clamp", "Torch.sum", "Functional.pad")


class _Run:
    """A run with one call, whose texts are all given."""

    path = None

    def __init__(self, label, records, scalars):
        self.label, self._records, self._scalars = label, records, scalars
        self.index = SimpleNamespace(scalars=lambda **_: self._scalars)

    def records(self, role, **_):
        return [record for record in self._records if record.site.role == role]


def _statements(script: str) -> tuple[set[str], set[str], int]:
    """Return the kinds of syntax of a script, the functions that it calls, and its statements."""
    tree = ast.parse(script)
    nodes = list(ast.walk(tree))
    called = {
        ast.unparse(node.func).replace(" ", "") for node in nodes if isinstance(node, ast.Call)
    }
    return {type(node).__name__ for node in nodes}, called, len(tree.body)


def _script(path, op, slot, scalars, texts):
    key = CallKey(0, 0, 0, "forward", path, 0)

    def record(number, role, slot):
        site = Site(path, role=role, slot=slot)
        return Record(number, site, number, op, Summary("float32", (2,)), payload="0,0,8")

    rows = [
        SimpleNamespace(
            generation=0,
            step=0,
            path=path,
            call=0,
            role="input",
            slot=slot,
            type=kind,
            value=text,
            phase=None,
        )
        for slot, kind, text in scalars
    ]
    records = [record(1, "input", "0"), record(2, "input", slot), record(3, "output", "0")]
    runs = Runs(
        Side(_Run(texts[0], records, rows)), Side(_Run(texts[1], records, rows)), lambda a, b: 0.0
    )
    row = Difference(0, Pair(records[2], records[2], "same"), "diverged", 1.0, 0.1)
    inputs = [Difference(1, Pair(records[1], records[1], "same"), "match")]
    call = ComparedCall(key, key, inputs=inputs, outputs=[row])
    return repro.script(call, runs, texts[2], texts[3])


_SCALARS = st.lists(
    st.tuples(
        HOSTILE | st.sampled_from(["1", "2", "kwargs.dim", "kwargs.class", "kwargs.__import__"]),
        st.sampled_from(
            ["int", "float", "str", "Size", "dtype", "device", "None", "complex", "bool"]
        )
        | HOSTILE,
        HOSTILE
        | st.none()
        | st.sampled_from(
            ["nan", "-inf", "nanj", "(1, slice(None, 2), ...)", "torch.float32", "1e999"]
        ),
    ),
    max_size=3,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTILE, HOSTILE | st.sampled_from(_OPERATORS), HOSTILE, _SCALARS, st.tuples(*[HOSTILE] * 4))
def test_whatever_a_dump_says_the_script_has_only_its_own_statements(
    path, op, slot, scalars, texts
):
    for at in (path.replace("/", "."), f"m/{op}"):
        script = _script(at, op, slot, scalars, texts)
        if script is not None:
            kinds, called, statements = _statements(script)
            assert kinds <= _ALLOWED, kinds - _ALLOWED
            assert called <= _CALLED, called - _CALLED
            assert statements <= 20
            assert script.isascii()


def test_the_check_of_scripts_sees_code_that_a_comment_let_out():
    kinds, called, _ = _statements("module = None  # 'Foo\rimport os; os.system('true')\r#'")
    assert not called <= _CALLED
    kinds, _, _ = _statements("class A: pass")
    assert not kinds <= _ALLOWED


def test_a_script_from_a_hostile_dump_runs_none_of_its_code(tmp_path):
    canary = tmp_path / "canary"
    touch = f"import pathlib; pathlib.Path({str(canary)!r}).touch()"
    ends = ["\r", "\x0c", "\x85", "\u2028", '"""\n', "')\n"]
    code = "".join(f"Foo{end}{touch}{end}#" for end in ends)
    runs = []
    for name, factor in (("golden", 1.0), ("mine", 2.0)):
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        model[0].weight.data.fill_(factor)
        with ld.dump(model, name=name) as run:
            model(torch.ones(1, 2))
        runs.append(run)
        db = sqlite3.connect(next(Path(run.path).rglob("index.sqlite")))
        with db:
            db.execute(
                "INSERT INTO scalars VALUES(0, '0', 0, 'input', '1', ?, ?, 'forward')", (code, code)
            )
            db.execute("UPDATE records SET op = ? WHERE path = '0'", (code,))
            db.execute("UPDATE meta SET value = ? WHERE key = 'name'", (json.dumps(code),))
        db.close()
    report = ld.compare(*(str(run.path) for run in runs))
    script = report.findings[0].save_repro(tmp_path / "repro.py")
    assert "import pathlib" in script.read_text()
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "output, mine against golden:" in done.stdout
    assert not canary.exists()


def test_a_number_that_is_none_is_a_text_and_no_error():
    for kind, text in (("int", "x"), ("float", "1e"), ("int", "1.5"), ("float", None)):
        row = SimpleNamespace(
            generation=0,
            step=0,
            path="m",
            call=0,
            role="input",
            slot="0",
            type=kind,
            value=text,
            phase=None,
        )
        side = Side(_Run("run", [], [row]))
        ((found, _),) = side.scalars(CallKey(0, 0, 0, "forward", "m", 0)).values()
        assert found == ("float" if text is None else "str")
        assert side.attributes["m"]["0"][0] == found
