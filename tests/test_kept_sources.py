"""A recording keeps the text of the functions that ran, without secrets and within limits."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.core import constants
from llmdebug_nb.core.function_text import Function, block, first_line
from llmdebug_nb.core.masking import MASK
from llmdebug_nb.core.records import Frame
from recordings import change_index

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # the functions of this file are kept in its dumps, too
PROGRAM = '''\
import functools

import torch
from torch import nn

OUTSIDE = "before all functions"


def halved(x):
    """Return half of it, and
no less."""
    note = "A SECRET"
    return torch.mul(
        x,
        0.5,
    )


@functools.cache
def unused():
    return "never called"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x):
        return (lambda y: torch.neg(y))(halved(self.linear(x)))
'''


def loaded(file: Path, text: str):
    """Write a program to a file and import it."""
    file.write_text(text)
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def recorded(model: nn.Module, name: str = "a", **options) -> ld.Run:
    with ld.dump(model, name=name, mode="module+api", **options) as run, torch.no_grad():
        model(torch.ones(2, 4))
    return run


def functions(run: ld.Run) -> dict[str, Function]:
    """Return those of the program: what calls it (these tests, pytest) is kept, too."""
    rows = run.index.query(
        tuple[str, int, str, str],
        "SELECT file, line, function, text FROM all_functions WHERE file GLOB 'kept_*'",
    )
    return {
        name: Function(file, line, name, (*text.split("\n"),)) for file, line, name, text in rows
    }


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = loaded(tmp_path / "kept_program.py", PROGRAM.replace("A SECRET", f"sk-{LETTERS}"))
    yield module
    del sys.modules["kept_program"]


def test_the_functions_that_ran_and_the_forwards_are_kept_with_their_places(program):
    kept = functions(recorded(program.Model()))
    assert kept.keys() == {"halved", "Model.forward", "Model.forward.<locals>.<lambda>"} or (
        {"halved", "Model.forward"} <= kept.keys()
    )
    lines = PROGRAM.splitlines()
    for name in ("halved", "Model.forward"):
        function = kept[name]
        assert function.file == "kept_program.py"
        own = inspect.unwrap(getattr(program.Model, "forward", None))
        begins = (program.halved if name == "halved" else own).__code__.co_firstlineno
        text = lines[begins - 1 : begins - 1 + len(function.lines)]
        assert [line.replace("A SECRET", MASK) for line in text] == [*function.lines]
    assert kept["halved"].lines[-1].strip() == ")"  # to its end, whatever stands at the margin


def test_nothing_else_of_a_file_is_kept_and_no_function_of_torch(program):
    kept = functions(recorded(program.Model()))
    texts = "\n".join(line for function in kept.values() for line in function.lines)
    assert "never called" not in texts
    assert "before all functions" not in texts
    files = recorded(program.Model()).index.query(tuple[str], "SELECT file FROM all_functions")
    assert not any("/torch/" in file for (file,) in files)


def test_secrets_in_a_function_never_reach_the_disk_and_are_counted(program):
    run = recorded(program.Model())
    data = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert f"sk-{LETTERS}".encode() not in data
    assert run.info()["masked"] == 1
    assert f'note = "{MASK}"' in functions(run)["halved"].lines[3]


def test_a_function_with_a_secret_of_several_lines_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = f"MIIE{LETTERS}"
    key = f"-----BEGIN PRIVATE KEY-----\\\n{inner}\\\n-----END PRIVATE KEY-----"
    text = PROGRAM.replace("A SECRET", key)
    run = recorded(loaded(tmp_path / "kept_key.py", text).Model())
    assert "halved" not in functions(run)
    assert "Model.forward" in functions(run)
    data = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert inner.encode() not in data


def test_a_function_is_kept_once_however_often_it_runs(program):
    model = nn.Sequential(program.Model(), program.Model())
    with ld.dump(model, name="a", mode="module+api") as run, torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
    rows = run.index.query(tuple[str], "SELECT text FROM all_functions")
    assert len(rows) == len(set(rows))


def test_the_text_of_a_frame_is_that_of_its_function_where_the_program_is_gone(program, tmp_path):
    run = recorded(program.Model())
    (tmp_path / "kept_program.py").unlink()
    linecache.clearcache()
    again = ld.open_run(run.path)
    frame = Frame.read(again.stack("/Torch.mul")[0])
    function = again.index.function(frame)
    assert function.name == "halved"
    assert function.at(frame.line) == again.index.code(frame) == "return torch.mul("
    assert again.index.function(frame._replace(line=10_000)) is None
    assert again.index.function(frame._replace(file="other.py")) is None


def test_a_recording_without_sources_holds_no_code(program):
    run = recorded(program.Model(), sources=False)
    data = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert functions(run) == {}
    assert b"halved(" not in data
    assert b"def forward" not in data


def test_a_longer_function_is_kept_in_part_and_the_run_says_so(program, monkeypatch):
    monkeypatch.setattr(constants, "FUNCTION_LINES", 4)
    run = recorded(program.Model())
    kept = functions(run)["halved"]
    frame = Frame.read(run.stack("/Torch.mul")[0])
    assert len(kept.lines) == 4
    assert frame.line in kept
    notes = run.source.processes[0]["notes"]
    assert any(re.fullmatch(r"of \d+ longer functions, only 4 lines were kept", n) for n in notes)


def test_more_text_than_a_recording_takes_is_counted(program, monkeypatch):
    monkeypatch.setattr(constants, "FUNCTIONS_BYTES", 150)
    run = recorded(program.Model())
    kept = sum(len("\n".join(each.lines)) for each in functions(run).values())
    assert kept <= 150
    assert any("was not kept" in note for note in run.source.processes[0]["notes"])


def test_a_redacted_copy_has_no_functions_and_a_reduced_one_has_all(program, tmp_path):
    run = recorded(program.Model())
    assert functions(ld.redact_run(run, tmp_path / "shared")) == {}
    assert functions(ld.reduce_run(run, name="b")) == functions(run) != {}


def test_privacy_lists_the_functions(program):
    held = recorded(program.Model()).privacy().to_pandas().set_index("what")
    assert held.loc["text of functions", "count"] >= 2


def test_a_run_that_was_recorded_before_there_were_functions_opens(program):
    run = recorded(program.Model())
    change_index(run.path, "DROP TABLE functions")
    old = ld.open_run(run.path)
    assert functions(old) == {}
    assert old.index.function(Frame.read(old.stack("/Torch.mul")[0])) is None


@pytest.mark.parametrize(
    ("file", "line", "text"),
    [
        ("kept_program.py", 1, "x" * (5 << 20)),
        ("kept_program.py", 1, "\n" * (3 << 20)),
        ("kept_program.py", -(2**63), "def halved(x):"),
        ("kept_program.py", 2**63 - 1, "def halved(x):"),
        ("", 0, ""),
    ],
)
def test_wrong_rows_give_no_function_or_one_within_bounds(program, file, line, text):
    run = recorded(program.Model())
    change_index(run.path, "DELETE FROM functions")
    row = file, line, "halved", text
    for _ in range(99):
        change_index(run.path, "INSERT INTO functions VALUES(?, ?, ?, ?)", *row)
    opened = ld.open_run(run.path)
    function = opened.index.function(Frame.read(opened.stack("/Torch.mul")[0]))
    assert function is None or len(function.lines) <= constants.FUNCTION_LINES


def test_a_row_of_another_type_is_damage(program):
    run = recorded(program.Model())
    change_index(run.path, "UPDATE functions SET text = x'00ff', line = 1")
    opened = ld.open_run(run.path)
    with pytest.raises(ld.errors.CorruptDumpError):
        opened.index.function(Frame.read(opened.stack("/Torch.mul")[0]))


@given(st.lists(st.text(max_size=30).map(lambda text: text.replace("\n", "") + "\n"), max_size=9))
def test_any_text_has_a_function_or_none(lines):
    assert isinstance(block(lines, 1, "f"), tuple)
    assert first_line(lines, 3, "f") in (None, 1, 2, 3)


def test_a_file_that_changed_since_it_ran_gives_no_function():
    lines = ["def g(x):\n", "    return x\n", "y = 1\n"]
    assert block(lines, 1, "f") == ()
    assert block(lines, 1, "g") == ("def g(x):", "    return x")
    assert first_line(lines, 2, "g") == 1


def test_a_forward_that_a_module_was_given_is_quoted_in_place_of_its_class_s():
    def other(x):
        return x + 1

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].forward = other
    with ld.dump(model, name="given") as run:
        model(torch.ones(1, 2))
    sources = {node.path: node.source for node in run.nodes}
    assert sources["1"].file.endswith("test_kept_sources.py")
    assert sources["1"].line == other.__code__.co_firstlineno
    assert sources["0"].file.endswith("linear.py")
