"""The names of arguments: from signatures, kept in the dump, absent in older dumps."""

from __future__ import annotations

import functools
import json
import sqlite3
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.signatures import Signatures, argument_of, parameters_of
from llmdebug_nb.core.columns import AT, TABLES
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.writer import Writer, create_run
from recordings import add_process, record


class Inner(nn.Module):
    def forward(self, hidden, pair, /, mask=None, *more, scale=None):
        return hidden + pair[0] + pair[1]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        one = torch.ones(2, 2)
        hidden = self.inner(x, (one, one + 1), one + 2, one + 3, scale=one + 4)
        return self.linear(F.softmax(torch.add(hidden, 1.0), -1).matmul(one))


def _arguments(run, path, role="input", phase="forward"):
    found = run.records(path=path, role=role, phase=phase)
    return {record.site.slot: record.argument for record in found}


def _recorded(mode="module", grad=False):
    model = Outer()

    def work():
        with torch.set_grad_enabled(grad):
            loss = model(torch.ones(2, 2, requires_grad=grad)).sum()
        if grad:
            loss.backward()

    return record(model, work, mode=mode)


def test_an_argument_by_position_has_the_name_of_its_parameter_and_keeps_its_slot():
    run = _recorded()
    assert _arguments(run, "inner") == {
        "0": "hidden", "1.0": "pair", "1.1": "pair", "2": "mask", "3": None,
        "kwargs.scale": "scale",
    }  # fmt: skip
    assert _arguments(run, "linear") == {"0": "input"}
    assert _arguments(run, "linear", "output") == {"0": None}


def test_operators_have_the_names_of_their_signature_or_their_schema():
    run = _recorded("module+api+aten")
    assert _arguments(run, "/Functional.softmax") == {"0": "input"}
    assert _arguments(run, "/Torch.add") == {"0": "input"}
    assert _arguments(run, "/Tensor.matmul") == {"0": "self", "1": "other"}
    linear = _arguments(run, "linear/Functional.linear")
    assert linear == {"0": "input", "1": "weight", "2": "bias"}
    assert _arguments(run, "/Aten.mm") == {"0": "self", "1": "mat2"}


def test_a_gradient_has_the_name_of_the_argument_it_is_for():
    run = _recorded("module+aten", grad=True)
    assert _arguments(run, "inner", "output", "backward") == {"0": "hidden"}
    assert _arguments(run, "inner", "input", "backward") == {"0": None}
    assert _arguments(run, "/Aten.mm", "input", "backward") == {"0": "self", "1": "mat2"}


def test_a_forward_put_on_one_module_gives_the_names_and_not_its_class():
    model = Outer()
    original = model.linear.forward

    def forward(states):
        return original(states)

    model.linear.forward = forward
    names = Signatures()
    assert (names.of(model.linear), names.of(nn.Linear(1, 1))) == (("states",), ("input",))


@pytest.mark.parametrize(
    "function", [functools.partial(print), type, torch.add, 3, lambda *args, **more: None]
)
def test_a_signature_that_cannot_be_read_or_has_no_places_names_nothing_or_its_own(function):
    assert all(isinstance(name, str) for name in parameters_of(function))


class _Raising:
    @property
    def __signature__(self):
        raise KeyError("no")

    def __call__(self): ...


def test_a_signature_that_raises_names_nothing():
    assert parameters_of(_Raising()) == ()


@given(
    st.lists(st.text("abc_", min_size=1), unique=True),
    st.lists(st.text("ab.\\"), max_size=2),
    st.integers(0, 5),
)
def test_a_slot_is_named_by_its_first_part_alone(parameters, rest, place):
    more = "".join("." + part.replace("\\", "").replace(".", "\\.") for part in rest)
    expected = parameters[place] if place < len(parameters) else None
    assert argument_of(f"{place}{more}", tuple(parameters)) == expected
    assert argument_of(f"kwargs.mask{more}", tuple(parameters)) == "mask"


# -- older dumps --------------------------------------------------------------------------------


def _made_older(run: Path) -> None:
    """Take away what columns and tables were added later."""
    with sqlite3.connect(next(run.glob("rank*")) / fmt.INDEX) as db:
        for table in TABLES:
            for name in table.names[len(table.first_names) :]:
                db.execute(f'ALTER TABLE {table.name} DROP COLUMN "{name}"')
            if table.added_later:
                db.execute(f"DROP TABLE {table.name}")
    db.close()


def test_a_dump_from_before_a_column_was_added_opens_without_it():
    run = _recorded("module+api")
    before = list(run.records())
    assert any(record.argument for record in before)
    _made_older(run.path)
    opened = ld.open_run(run.path)
    assert [record.site for record in opened.records()] == [record.site for record in before]
    assert {record.argument for record in opened.records()} == {None}
    assert {record.views for record in opened.records()} == {()}
    assert {node.source for node in opened.nodes} == {None}
    key = next(record.site.key for record in before if record.site.path == "/Tensor.matmul")
    frames = opened.index.frames(key)
    assert [frame.function for frame in frames] == ["forward"]
    assert opened.index.code(frames[0]) == ""
    assert torch.equal(opened.load(next(opened.records())), run.load(before[0]))


def test_two_older_processes_are_merged_without_the_column():
    run = _recorded()
    _made_older(run.path)
    add_process(run.path, "rank1_1")
    opened = ld.open_run(run.path)
    assert {record.argument for record in opened.records()} == {None}
    assert {record.site.rank for record in opened.records()} == {0, 1}


def test_the_tail_of_a_killed_older_recording_is_read(tmp_path):
    run = create_run(tmp_path, "older", {})
    writer = Writer(run)
    row = [None] * len(AT)
    given_ = {
        "id": 0, "root_call": 0, "path": "a", "call": 0, "phase": "forward", "role": "input",
        "slot": "0", "op": "A", "dtype": "float32", "shape": "[1]", "device": "cpu",
    }  # fmt: skip
    for name, value in given_.items():
        row[AT[name]] = value
    index = writer.folder / fmt.INDEX
    _made_older(run)
    older = row[: len(next(t for t in TABLES if t.name == "records").first_names)]
    text = json.dumps(json.dumps(older))
    tensor = '"tensor":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"__metadata__":{{"record":{text}}},{tensor}}}'.encode()
    header += b" " * (-len(header) % 8)
    frame = struct.pack("<Q", len(header)) + header + struct.pack("<f", 7.0) + bytes(4)
    with open(writer.folder / fmt.PAYLOAD, "ab") as file:
        file.write(frame)
    assert index.with_name(index.name + "-wal").is_file()  # it was never closed
    opened = ld.open_run(run)
    (record_,) = opened.records()
    assert (record_.site.path, record_.argument, opened.load(record_).item()) == ("a", None, 7.0)
