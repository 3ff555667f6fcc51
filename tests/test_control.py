"""Dynamic control: a file that selects the recorded calls while the program runs."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.control_file import ControlFile, read_settings
from models import hooks_left


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


class File:
    """A control file whose every change has a time of its own, as changes by hand have."""

    def __init__(self, path):
        self.path, self.time = path, 10**18

    def write(self, text):
        self.path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        self.time += 10**9
        os.utime(self.path, ns=(self.time, self.time))


@pytest.fixture
def control(tmp_path):
    return File(tmp_path / "control.json")


def test_an_alarm_in_the_file_keeps_the_last_steps_each_time_it_is_another(model, control):
    alarms = ["", "old", "old", "the validation loss rose", "", "again", "again", "", "", "", ""]
    control.write({"alarm": "left from yesterday"})
    with ld.dump(model, name="r", control=control.path, last=2) as run:
        for alarm in alarms:
            control.write({"alarm": alarm})
            model(torch.ones(1, 3))
    assert [(each.step, each.first, each.reason) for each in run.alarms()] == [
        (1, 0, "old"),
        (3, 2, "the validation loss rose"),
        (5, 4, "again"),
    ]
    assert sorted(run.to_pandas()["step"].unique()) == [0, 1, 2, 3, 4, 5, 9, 10]
    assert run.info()["complete"]


def test_an_alarm_in_the_file_of_a_recording_that_keeps_all_is_said(model, control, capsys):
    control.write({})
    with ld.dump(model, name="r", control=control.path) as run:
        control.write({"alarm": "now"})
        model(torch.ones(1, 3))
    assert "an alarm keeps the last steps: record with last=8" in capsys.readouterr().err
    assert run.meta["problems"] == {
        "control file control.json: an alarm keeps the last steps: record with last=8": 1
    }


def _obeyed(model, control, orders, **options):
    """Record a call behind each order."""
    control.write(orders[0])
    with ld.dump(model, name="r", control=control.path, **options) as run:
        for order in orders:
            control.write(order)
            model(torch.ones(1, 3))
    return run


def _paths(run):
    """Return the recorded paths of each step."""
    seen = run.to_pandas().groupby("step").path.unique()
    return {step: sorted(paths) for step, paths in seen.items()}


def test_orders_hold_from_the_next_call_on_and_a_half_written_file_changes_nothing(model, control):
    orders = [
        {"enable": False},
        {"enable": True, "ids": ["2"]},
        '{"enable": tr',
        {"enable": True, "steps": "4"},
        {"enable": True, "steps": "4"},
        {"enable": True, "ids": "1"},
    ]
    run = _obeyed(model, control, orders, tokens="all")
    assert _paths(run) == {
        1: ["2"],
        2: ["2"],
        4: ["", "0", "1", "2"],
        5: ["1"],
    }
    assert run.info()["complete"]
    assert hooks_left(model) == 0


def test_an_invalid_control_file_at_the_end_is_reported(model, control):
    control.write({})
    with ld.dump(model, name="r", control=control.path) as run:
        model(torch.ones(1, 3))
        control.write({"enabel": False})
        model(torch.ones(1, 3))
    assert set(run.to_pandas().step) == {0, 1}
    assert "field 'enabel' is not known; nearest: enable" in run.info()["ended_by"]


def test_a_file_that_vanishes_leaves_things_as_they_are(model, control):
    control.write({"steps": "0-9"})
    with ld.dump(model, name="r", control=control.path, tokens="0") as run:
        model(torch.ones(1, 3))
        control.path.unlink()
        model(torch.ones(1, 3))
    assert set(run.to_pandas().step) == {0, 1}


def test_modules_can_be_named_by_their_place_in_the_tree(control):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    control.write({"ids": ["1_1"]})
    with ld.dump(model, name="r", control=control.path) as run:
        model(torch.ones(1, 2))
    assert set(run.to_pandas().path) == {"1.1"}


def test_ranks_that_are_not_asked_for_record_nothing_and_say_so(model, control, monkeypatch):
    control.write({"ranks": "1-3"})
    with (
        pytest.raises(ld.errors.EmptyDumpError, match="rank"),
        ld.dump(model, name="r", control=control.path),
    ):
        model(torch.ones(1, 3))
    monkeypatch.setenv("RANK", "2")
    with ld.dump(model, name="r", control=control.path) as run:
        model(torch.ones(1, 3))
    assert len(run)


def test_a_file_that_is_not_read_again_costs_one_stat(control, monkeypatch):
    control.write({})
    watched = ControlFile(control.path)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: pytest.fail("read again"))
    assert not watched.changed()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "expected an object with enable, steps, ids, ranks, alarm, not list"),
        ('{"enable": 1}', "expected true or false"),
        ('{"enable": "true"}', "expected true or false"),
        ('{"steps": "3-1"}', "runs backwards"),
        ('{"ids": 3}', "expected module paths"),
        ('{"setps": "1"}', "nearest: steps"),
        ('{"dump_enable": true}', 'expected a text in quotes, such as "true"'),
        ('{"alarm": true}', "alarm True: expected a text that says why"),
        ('{"dump_enable": "true", "steps": "1"}', "known: dump_enable, er, ids, child, device"),
        ('{"er": "1"}', "er '1': expected pairs"),
        ('{"er": "0,0", "child": "maybe"}', 'expected "true" or "false"'),
        ('{"device": "!"}', "expected a device"),
    ],
)
def test_orders_that_make_no_sense_are_refused_at_the_start(model, control, text, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        read_settings(text)
    control.write(text)
    with pytest.raises(ld.errors.OptionError, match=message):
        ld.dump(model, control=control.path).start()
    assert hooks_left(model) == 0


def test_a_missing_file_is_refused_at_the_start(model, control):
    with pytest.raises(ld.errors.OptionError, match=r"No such file.*write one such as"):
        ld.dump(model, control=control.path).start()


def test_a_recording_that_was_never_enabled_says_so(model, control):
    control.write({"enable": False})
    with (
        pytest.raises(ld.errors.EmptyDumpError, match="switched the recording off"),
        ld.dump(model, name="r", control=control.path),
    ):
        model(torch.ones(1, 3))


def test_msits_file_is_obeyed_while_the_program_runs(control):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    orders = [
        {"dump_enable": "false", "er": "all"},
        {"dump_enable": "true", "er": "1,1", "ids": "1", "child": "true", "device": ""},
        {"dump_enable": "true", "er": "all", "ids": "1", "child": "false", "device": "cpu"},
        {"dump_enable": "true", "er": "all", "ids": "", "device": "cuda0"},
        {"er": "all"},
    ]
    run = _obeyed(model, control, orders, tokens="0")
    assert _paths(run) == {
        1: ["1", "1.0", "1.1"],
        2: ["1"],
    }


def test_a_mistake_is_reported_once_and_at_once_and_earlier_settings_still_hold(
    model, control, capsys
):
    control.write({"dump_enable": "true", "er": "all"})
    with ld.dump(model, name="r", control=control.path) as run:
        control.write({"dump_enable": "true", "er": "x"})
        for _ in range(3):
            model(torch.ones(1, 3))
        printed = capsys.readouterr().err
        control.write({"dump_enable": "true", "er": "0,3"})
        model(torch.ones(1, 3))
    assert printed.startswith("llmdebug: control file control.json: er 'x': expected pairs")
    assert printed.count("\n") == 1
    assert set(run.to_pandas().step) == {0, 1, 2, 3}
    assert run.info()["complete"]


def test_a_file_that_is_being_written_is_not_taken_for_a_mistake(control, capsys):
    control.write({})
    watched = ControlFile(control.path)
    control.path.write_text('{"enable": ', encoding="utf-8")  # this very moment
    assert not watched.changed()
    assert not watched.changed()
    assert capsys.readouterr().err == ""
    os.utime(control.path, ns=(1, 1))
    assert not watched.changed()
    assert "not JSON" in capsys.readouterr().err
