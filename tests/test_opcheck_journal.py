"""A check goes on from a journal that may be torn or hostile, and gives what a whole one gives."""

from __future__ import annotations

import json
import os

import pytest
import torch

import llmdebug_nb as ld
from interruption import small
from llmdebug_nb.app.opcheck import journal as journals
from llmdebug_nb.app.opcheck.checking import Checker, How
from llmdebug_nb.app.opcheck.choosing import Choice, calls_of
from llmdebug_nb.replay.checks import WRONG, CallCheck, OutputCheck


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    model = small()
    with ld.dump(model, name="run", path=str(tmp_path_factory.mktemp("runs")), mode="api") as run:
        model(torch.ones(2, 4))
    return ld.open_run(run.path)


def begun(run, folder):
    """Return the calls, a sound line of each and the file of an interrupted check."""
    calls, how = calls_of(run, Choice()), How(trusted=True)
    with journals.Journal(folder, run, how, calls) as journal:
        pass
    return calls, [Checker(run, how).check(call) for call in calls], journal.path


def read(run, file, calls):
    with journals.Journal(file.parent, run, How(), calls) as journal:
        return journal.done


def changed(line, **facts):
    return json.dumps(json.loads(line) | facts)


BAD = {
    "torn": lambda line: line[: len(line) // 2],
    "no JSON": lambda line: "\0\xff",
    "deep": lambda line: "[" * 100_000,
    "deep in a text's place": lambda line: changed(line, detail=0).replace(
        '"detail": 0', '"detail": ' + "[" * 50_000 + "]" * 50_000
    ),
    "another type": lambda line: changed(line, record="1"),
    "no object": lambda line: "[1, 2]",
    "a giant number": lambda line: changed(line, record=0).replace(
        '"record": 0', '"record": ' + "9" * 10_000
    ),
    "no key": lambda line: changed(line, key=[1, 2]),
    "an output of nonsense": lambda line: changed(line, outputs=[{"slot": "0"}]),
    "half a surrogate pair": lambda line: changed(line, detail="\ud800"),
    "an unknown reason": lambda line: changed(line, reason="\x1b[2J"),
    "too long": lambda line: changed(line, detail="x" * (1 << 20)),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_line_ends_what_is_taken_over_and_the_rest_is_checked_again(recorded, tmp_path, how):
    calls, checks, file = begun(recorded, tmp_path)
    lines = [check.line() for check in checks]
    file.write_text("\n".join([lines[0], BAD[how](lines[1]), *lines[1:]]) + "\n", "utf-8")
    assert list(read(recorded, file, calls)) == [calls[0].record]
    assert file.read_text("utf-8") == lines[0] + "\n"


def test_checks_of_calls_that_this_run_does_not_have_are_passed_over(recorded, tmp_path):
    calls, checks, file = begun(recorded, tmp_path)
    lie = OutputCheck("0", "float32", (2,), why="a lie")
    key = list(checks[0].key)
    lies = [
        {"record": 10**6}, {"record": -1}, {"op": "Functional.other"}, {"id": "9_9"},
        {"key": [7, *key[1:]]}, {"key": [*key[:4], "elsewhere", 0]},
    ]  # fmt: skip
    sound = CallCheck(**(vars(checks[0]) | {"outputs": (lie,)})).line()
    file.write_text("".join(f"{changed(sound, **facts)}\n" for facts in lies), "utf-8")
    assert read(recorded, file, calls) == {}
    file.write_text(sound + "\n", "utf-8")
    assert [each.verdict for each in read(recorded, file, calls).values()] == [WRONG]


def test_a_check_goes_on_from_a_hostile_journal_to_the_same_result(recorded, tmp_path):
    whole = ld.opcheck(recorded, output=tmp_path / "whole", progress=False).result
    calls, checks, _ = begun(recorded, tmp_path)
    how = How(("rel",), trusted=False)
    with journals.Journal(tmp_path, recorded, how, calls) as journal:
        journal.path.write_text(f"{checks[0].line()}\n{BAD['deep']('')}\n", "utf-8")
    again = ld.opcheck(recorded, output=tmp_path, progress=False)
    assert again.result.calls == whole.calls
    str(again), again._repr_html_()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder"])
def test_a_journal_that_is_no_file_of_its_own_is_refused_and_not_written_to(
    recorded, tmp_path, kind
):
    calls, _, file = begun(recorded, tmp_path / "out")
    file.unlink()
    other = tmp_path / "mine.txt"
    other.write_text("keep\n")
    if kind == "link":
        file.symlink_to(other)
    elif kind == "dangling link":
        file.symlink_to(tmp_path / "new.txt")
    elif kind == "hard link":
        os.link(other, file)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(ld.errors.DumpWriteError, match="choose another folder"):
        read(recorded, file, calls)
    assert other.read_text() == "keep\n"
    assert not (tmp_path / "new.txt").exists()


def test_a_large_journal_of_others_takes_no_memory(recorded, tmp_path):
    calls, checks, file = begun(recorded, tmp_path)
    line = changed(checks[0].line(), record=10**6) + "\n"
    file.write_text(line * 20_000 + checks[0].line() + "\n", "utf-8")
    assert list(read(recorded, file, calls)) == [calls[0].record]
