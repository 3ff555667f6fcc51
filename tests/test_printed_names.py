"""Whatever names a dump holds, what is printed has no control characters and no forged lines."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.cli.command import FAILED
from llmdebug_nb.core.printable import cell, file_part, printable, sentence
from llmdebug_nb.show.text import difference_text, finding_text

TITLE, CLEAR, BELL = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m"
FORGED = "forged line"
_BAR = re.compile(r"\[\d\d:\d\d[],<]")  # the time of a progress bar, which a busy machine shows
HOSTILE = f"{TITLE}{CLEAR}{BELL}\n{FORGED}\r\u202egnp\u2066\u200b\x85{FORGED}\u2028{FORGED}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two runs whose texts are all hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, factor in (("golden", 1.0), ("mine", 2.0)):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Tanh())
        model[0][0].weight.data.fill_(factor)
        with ld.dump(
            model, name=name, mode="module+api", path=folder, weights=True, profile="op+kernel+host"
        ) as run:
            model(torch.ones(1, 2))
        path = Path(run.path)
        db = sqlite3.connect(next(path.rglob("index.sqlite")))
        with db:
            for table, columns in (
                ("records", ("path", "slot", "op", "device", "argument")),
                ("nodes", ("path", "name", "type")),
                ("operators", ("path", "op", "within")),
                ("calls", ("path",)),
                ("scalars", ("path", "slot", "type", "value")),
                ("timings", ("path", "op")),
                ("launches", ("path", "op", "kernel")),
            ):
                for column in columns:
                    db.execute(f"UPDATE {table} SET {column} = {column} || ?", (HOSTILE,))
            texts = json.dumps([f"{HOSTILE}.py:3 {HOSTILE}"])
            db.execute("UPDATE sources SET frames = ?, code = ?", (texts, json.dumps([HOSTILE])))
        db.close()
        for file in path.rglob("llmdebug.json"):
            marker = json.loads(file.read_text())
            environment = {HOSTILE: HOSTILE}
            file.write_text(json.dumps({**marker, "name": HOSTILE, "environment": environment}))
    return folder / "golden", folder / "mine"


def _is_clean(text: str) -> bool:
    lines = text.split("\n")
    return all(line.isprintable() and not line.startswith(FORGED) for line in lines)


COMMANDS = [
    ["info", "golden"],
    ["info", "golden", "--json"],
    ["info", "golden", "--ids"],
    ["info", "golden", "--privacy"],
    ["compare", "golden", "mine", "-o", "out.csv"],
    ["compare", "golden", "mine", "--no-explain"],
    ["compare", "golden", f"{HOSTILE[:20]}mine"],
    ["report", "golden", "mine", "-o", "out.html"],
    ["export", "golden", "-o", "out.html"],
    ["export", "golden", "-o", "out.html", "--at", HOSTILE],
    ["reduce", "golden", "--name", "reduced"],
    ["redact", "golden"],
    ["convert", "golden", "-o", "converted"],
    ["tables", "golden", "-o", "tables"],
    ["timeline", "golden"],
    ["topology", "golden"],
    ["topology", "golden", "--json"],
    ["topology", "golden", "-o", "topology"],
    ["onnx", "golden", "-o", "out.onnx"],
    ["ranks", "golden"],
    ["copy", "golden", "memory://printed"],
    ["opcheck", "-i", "golden"],
    ["logits", "golden", "mine"],
    ["doctor", "golden", "mine", "--csv", "out.csv"],
    ["compare", "-gp", "golden", "-mp", "mine", "-o", "tables"],
    ["msit", "llm", "compare", "-gp", "golden", "-mp", "mine", "-o", "tables"],
]


FAILING = [
    ["compare", "golden", f"{HOSTILE[:20]}mine"], ["convert", "golden", "-o", "converted"],
    ["ranks", "golden"],
]  # fmt: skip


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv)[:30])
def test_no_command_prints_a_control_character_of_a_dump(
    argv, hostile, tmp_path, monkeypatch, capsys
):
    for path in hostile:
        shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    status = main(argv)
    assert (status == FAILED) == (argv in FAILING), capsys.readouterr().err
    printed = capsys.readouterr()
    assert printed.out or printed.err
    assert _is_clean(printed.out)
    errors = [line for line in printed.err.split("\n") if not _BAR.search(line)]
    assert _is_clean("\n".join(errors))


def test_every_command_is_walked():
    from llmdebug_nb.cli import _COMMANDS

    read_no_dump = {"build", "dump", "errcheck", "lockstep"}
    names = {argv[0] for argv in COMMANDS} | read_no_dump
    assert len(names) == len(_COMMANDS)


def test_no_object_shows_a_control_character(hostile):
    golden, mine = map(ld.open_run, hostile)
    report = ld.compare(golden, mine)
    assert report.findings
    shown = [repr(golden), repr(report), str(report), report.summary(), str(ld.topology(golden))]
    shown += [repr(ld.timeline(golden)), str(golden.privacy())]
    for finding in report.findings:
        shown += [repr(finding), finding_text(finding), str(finding.source)]
    for difference in report.differences:
        shown += [repr(difference), difference_text(difference), str(difference.site)]
    with pytest.raises(ld.errors.LLMDebugError) as error:
        golden.tensor(f"no {HOSTILE}")
    shown.append(str(error.value))
    for text in shown:
        assert _is_clean(text), text


def test_a_csv_has_one_line_for_each_row_and_no_formula(hostile, tmp_path):
    report = ld.compare(*map(str, hostile))
    file = report.to_csv(tmp_path / "out.csv")
    text = file.read_text(encoding="utf-8")
    assert _is_clean(text)
    assert len(list(csv.DictReader(text.splitlines()))) == len(report.differences)
    assert cell("=cmd|' /C calc'!A0") == "'=cmd|' /C calc'!A0"
    assert [cell(x) for x in ("@x", "+1", "-1", "model.layers.0", -1, None)] == [
        "'@x", "'+1", "'-1", "model.layers.0", -1, None,
    ]  # fmt: skip


@given(st.text())
def test_what_is_printed_is_printable_and_tells_what_was_there(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text
    elif "\\" not in text and text.isascii():
        assert shown.encode().decode("unicode_escape") == text


@pytest.mark.parametrize(
    ("clause", "expected"),
    [
        ("only the first token is right", "Only the first token is right."),
        ("golden's value is twice mine.", "Golden's value is twice mine."),
        ("model.layers.1.o_proj is the first call", "model.layers.1.o_proj is the first call."),
        ("lm_head: it has another weight", "lm_head: it has another weight."),
        ("transposed", "Transposed."),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_but_not_a_path(clause, expected):
    assert sentence(clause) == expected


@given(st.text(max_size=200))
def test_a_part_of_a_files_name_leads_nowhere(text):
    part = file_part(text)
    assert Path("folder", part, "x").resolve() == Path("folder").resolve() / part / "x"
    assert part.isascii()
    assert 0 < len(part) <= 120
    assert not part.startswith(".")
    assert file_part(part) == part


def test_a_csv_of_checked_operators_has_no_control_character(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["opcheck", "-i", str(hostile[0]), "-o", str(tmp_path / "out")]) != FAILED
    (file,) = (tmp_path / "out").rglob("*.csv")
    with open(file, encoding="utf-8", newline="") as opened:
        rows = list(csv.reader(opened))
    assert len(rows) > 1
    assert all(text.isprintable() and text[:1] != "=" for row in rows for text in row)
