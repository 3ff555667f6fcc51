"""Runs that a stranger made: damaged, lying, endless, or with links and pipes in them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb import torchair
from llmdebug_nb.app import runs as app_runs
from llmdebug_nb.core.columns import COLUMNS, TABLES
from llmdebug_nb.core.constants import MOST_DIMENSIONS
from llmdebug_nb.core.paths import LONGEST
from llmdebug_nb.notebook import desk
from llmdebug_nb.store import connection, reader
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.checked import shape_of
from recordings import change_index, record_linear
from test_desk import opened

CorruptDumpError = ld.errors.CorruptDumpError


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("LLMDEBUG_RUNS")
    return tmp_path


@pytest.fixture
def run(served) -> Path:
    return record_linear(served, "golden")


def process_of(run: Path) -> Path:
    return next(run.glob("rank*"))


def mark(run: Path, **changes: object) -> None:
    marker = json.loads((run / fmt.MARKER).read_text(encoding="utf-8"))
    (run / fmt.MARKER).write_text(json.dumps({**marker, **changes}), encoding="utf-8")


# -- the schema ---------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize(
    "script",
    [
        f"DROP TABLE sources; CREATE VIEW sources AS SELECT x AS idx, '' AS frames, '' AS code,"
        f" 0 AS inside FROM ({ENDLESS})",
        "CREATE TABLE more(x)",
        "CREATE INDEX evil ON records(abs(id))",
        "DROP TABLE kernels; CREATE TABLE kernels(name TEXT, nodes TEXT,"
        " source TEXT AS (printf('%.*c', 1000000000, 'x')))",
        "DROP TABLE tilings; CREATE VIRTUAL TABLE tilings USING fts5(name, configuration)",
        "CREATE TRIGGER evil AFTER INSERT ON meta BEGIN DELETE FROM meta; END",
        "ALTER TABLE records ADD COLUMN evil",
    ],
)
def test_a_schema_other_than_ours_is_refused_at_once(run, script):
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        if (
            "fts5" in script
            and not db.execute("SELECT sqlite_compileoption_used('ENABLE_FTS5')").fetchone()[0]
        ):
            pytest.skip("this SQLite has no virtual tables of text")
    change_index(run, script)
    start = time.monotonic()
    with pytest.raises(CorruptDumpError, match="is none of this format"):
        len(ld.open_run(run))
    assert time.monotonic() - start < 2


def test_a_query_without_an_end_is_ended(run, monkeypatch):
    db = connection.connect(process_of(run) / fmt.INDEX)
    db.longest = 0.05
    with pytest.raises(CorruptDumpError, match="a query took more than"):
        db.rows(tuple[int], f"SELECT max(x) FROM ({ENDLESS})")
    assert db.rows(tuple[int], "SELECT 1") == [(1,)]


def test_an_opened_index_can_not_be_written(run):
    opened_run = ld.open_run(run)
    for statement in ("DELETE FROM records", "CREATE TABLE x(y)", "ATTACH ':memory:' AS other"):
        with pytest.raises(CorruptDumpError):
            opened_run.source.db.rows(tuple[int], statement)
    assert len(opened_run) > 0


# -- rows ---------------------------------------------------------------------------------------

WRONG = ("x'00ff'", "'x'", "1.5", "NULL", "-1", "9223372036854775807", "1e400", "'['", "''")


def use(run: Path) -> None:
    """Ask everything that reads the index."""
    other = ld.open_run(run)
    for look in (
        other.info,
        other.to_pandas,
        other.scalars,
        other.operators,
        other.ops,
        other.root_calls,
        other.steps,
        other.ids,
        lambda: [other.load(record) for record in other.records()],
        lambda: [other.id_of(record.site) for record in other.records()],
        lambda: other.nodes,
        lambda: ld.topology(other),
        lambda: other.tensor("nowhere"),
        lambda: str(ld.compare(other, other)),
        lambda: app_runs.describe_run(other),
    ):
        with contextlib.suppress(ld.LLMDebugError):
            look()


@pytest.mark.parametrize(
    ("table", "column"),
    [
        (table.name, column.name)
        for table in TABLES
        for column in table.columns
        if table.name in ("meta", "root_calls", "nodes", "records", "scalars", "calls")
    ],
)
def test_a_value_of_another_type_is_our_error_wherever_it_is_read(run, tmp_path, table, column):
    for number, value in enumerate(WRONG):
        copy = shutil.copytree(run, tmp_path / f"copy{number}")
        with contextlib.suppress(sqlite3.IntegrityError):
            change_index(copy, f"UPDATE {table} SET {column} = {value}")
        with contextlib.suppress(ld.LLMDebugError):
            use(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * MOST_DIMENSIONS + "1]",
        "[9223372036854775807, 3]",
        "[99999999999999999999]",
        "[-2]",
        "[1.0]",
        "[true]",
        "3",
        "[" * 100_000,
        "",
    ],
)
def test_no_tensor_has_this_shape(text):
    with pytest.raises((ValueError, RecursionError)):
        shape_of(text)


def test_shapes_at_the_limits_are_read():
    assert shape_of("[]") == ()
    assert shape_of("[-1, 3]") == (-1, 3)
    assert shape_of("[0, 9223372036854775807]") == (0, 2**63 - 1)
    assert len(shape_of(json.dumps([1] * MOST_DIMENSIONS))) == MOST_DIMENSIONS


def test_a_path_of_20_000_parts_is_refused_and_one_at_the_limit_is_shown_in_time(run):
    change_index(run, f"UPDATE records SET path = '{'.'.join('a' * 20_000)}'")
    with pytest.raises(CorruptDumpError, match="length"):
        list(ld.open_run(run).records())
    change_index(run, f"UPDATE records SET path = '{'.'.join('a' * (LONGEST // 2))}'")
    start = time.monotonic()
    assert "golden" in str(ld.compare(ld.open_run(run), ld.open_run(run)))
    assert time.monotonic() - start < 5


# -- markers ------------------------------------------------------------------------------------

MARKERS = [
    "{",
    "null",
    "[" * 1_000_000,
    '{"format": "llmdebug-run", "version": 1, "created": NaN}',
    '{"format": "llmdebug-run", "version": 1, "created": 1e999}',
    '{"format": "llmdebug-run", "version": 1, "created": 1e18}',
    '{"format": "llmdebug-run", "version": 1, "created": "x"}',
    '{"format": "llmdebug-run", "version": 1, "name": 3}',
    '{"format": "llmdebug-run", "version": 1, "name": "../../etc"}',
    '{"format": "llmdebug-run", "version": 1, "options": [1]}',
    '{"format": "llmdebug-run", "version": 1, "environment": {"torch": {}}}',
    '{"format": "llmdebug-run", "version": [[1]]}',
    '"\\ud800"',
    "\udce9",
]


@pytest.mark.parametrize("text", MARKERS)
def test_a_run_with_a_damaged_marker_is_listed_with_the_reason_and_can_be_deleted(
    served, run, text, monkeypatch
):
    good = record_linear(served, "good")
    (run / fmt.MARKER).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptDumpError, match="damaged") as error:
        ld.open_run(run)
    assert "\n" not in str(error.value)
    desk_ = opened(desk.Desk, served)
    [folder] = desk_.ask(op="runs", folders=[""], name="")["folders"]
    problems = {row["name"]: row["problem"] for row in folder["runs"]}
    assert problems["good"] == ""
    assert "damaged" in problems["golden"]
    monkeypatch.setenv("LLMDEBUG_RUNS", str(good.parent))
    with pytest.warns(UserWarning, match="damaged"):
        assert [one.name for one in ld.runs()] == ["good"]
    assert "error" not in desk_.ask(op="delete", path=str(run))
    assert not run.exists()
    assert good.exists()


# -- links and pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [fmt.MARKER, fmt.INDEX, fmt.PAYLOAD])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "hard link"])
def test_a_file_of_a_run_that_is_a_link_or_a_pipe_is_refused(run, tmp_path, name, kind):
    file = run / name if name == fmt.MARKER else process_of(run) / name
    outside = tmp_path / "outside"
    shutil.move(file, outside)
    if kind == "link":
        file.symlink_to(outside)
    elif kind == "hard link":
        os.link(outside, file)
    elif kind == "folder":
        file.mkdir()
    else:
        os.mkfifo(file)

    def read() -> torch.Tensor:
        opened_run = ld.open_run(run)
        return opened_run.load(next(opened_run.records(role="output")))

    if kind == "hard link":
        assert read().numel()
        return
    with pytest.raises(CorruptDumpError, match=r"link|regular"):
        read()
    desk_ = opened(desk.Desk, tmp_path)
    assert desk_.ask(op="runs", folders=[""], name="")["folders"]


def test_a_log_that_is_a_link_is_refused(run, tmp_path):
    (tmp_path / "log").write_bytes(b"")
    log = connection.log_of(process_of(run) / fmt.INDEX)
    log.symlink_to(tmp_path / "log")
    with pytest.raises(CorruptDumpError, match="link"):
        ld.open_run(run).info()


def test_a_pipe_among_reports_hangs_no_list(served, run):
    os.mkfifo(served / "page.html")
    (served / "more.html").symlink_to(served / "page.html")
    [folder] = opened(desk.Desk, served).ask(op="runs", folders=[""], name="")["folders"]
    assert folder["kind"] == "run"


# -- deleting -----------------------------------------------------------------------------------


def test_the_desk_deletes_nothing_outside_its_workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMDEBUG_RUNS")
    served = tmp_path / "served"
    inside, outside = record_linear(served, "mine"), record_linear(tmp_path / "other", "theirs")
    page = ld.compare(inside, outside).to_html(tmp_path / "page.html")
    link = served / "link"
    link.symlink_to(outside.parent, target_is_directory=True)
    (inside.parent / "alias").symlink_to(inside, target_is_directory=True)
    desk_ = opened(desk.Desk, served)
    for path in (
        outside,
        page,
        link / outside.name,
        served / ".." / "other" / "llmdebug_runs" / "theirs",
        inside.parent / "alias",
        "mine",
        "a\0b",
        "",
    ):
        assert "error" in desk_.ask(op="delete", path=str(path)), path
    assert [path.exists() for path in (outside, page, inside)] == [True] * 3
    assert desk_.ask(op="runs", folders=["../other", "link"], name="")["folders"] == []
    assert "error" not in desk_.ask(op="delete", path=str(inside))


def test_a_folder_that_holds_more_than_a_run_is_not_deleted(tmp_path, run):
    (tmp_path / fmt.MARKER).write_text("{}", encoding="utf-8")
    (tmp_path / "work").mkdir()
    with pytest.raises(ld.LLMDebugError, match="holds the folder"):
        ld.delete_run(tmp_path)
    assert run.exists()
    assert reader.native(run).info()["complete"]


# -- a run that was not closed -------------------------------------------------------------------


@pytest.fixture
def open_run_copy(tmp_path) -> Path:
    """A copy of a run that is still recorded: its index has a log."""
    model = torch.nn.Linear(4, 4)
    with ld.dump(model, name="live", path=str(tmp_path / "live"), tokens="all") as live:
        for _ in range(5):
            model(torch.ones(1, 4))
        return shutil.copytree(live.path, tmp_path / "copy")


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_index_with_a_log_is_read_from_a_copy_on_disk_that_vanishes(
    open_run_copy, tmp_path, monkeypatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = contents(open_run_copy)
    opened_run = ld.open_run(open_run_copy)
    assert len(opened_run) > 0
    ((_, _, file),) = opened_run.source.db.rows(
        tuple[int, str, str], "SELECT seq, name, file FROM pragma_database_list WHERE name = 'main'"
    )
    assert file  # "" is memory
    if os.name == "posix":
        assert not list(scratch.iterdir())
    assert [opened_run.load(record).shape for record in opened_run.records(n=1)]
    with pytest.raises(CorruptDumpError):
        opened_run.source.db.rows(tuple[int], "DELETE FROM records")
    del opened_run
    gc.collect()
    assert not list(scratch.iterdir())
    assert before == {
        file: file.read_bytes() for file in open_run_copy.rglob("*") if file.is_file()
    }


def test_an_index_that_there_is_no_room_to_copy_is_our_error(open_run_copy, monkeypatch):
    monkeypatch.setattr(connection, "_room", lambda folder: 1000)
    with pytest.raises(CorruptDumpError, match="TMPDIR names another folder"):
        len(ld.open_run(open_run_copy))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
def test_reading_an_index_with_a_log_takes_no_memory_for_its_rows(tmp_path):
    """An index of some 60 MB is counted in a process of its own."""
    model = torch.nn.Linear(2, 2)
    with ld.dump(model, name="live", path=str(tmp_path / "live")) as live:
        model(torch.ones(1, 2))
        copy = shutil.copytree(live.path, tmp_path / "copy")
    change_index(
        copy,
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)"
        " INSERT INTO kernels SELECT i, '', hex(zeroblob(500000)) FROM n",
    )
    (process_of(copy) / f"{fmt.INDEX}-wal").touch()
    assert (process_of(copy) / fmt.INDEX).stat().st_size > 50 << 20
    code = (
        "import resource, sys, llmdebug_nb as ld, torch, llmdebug_nb.store.run\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); assert len(ld.open_run(sys.argv[1])) > 0; print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 30 << 10, done.stdout  # KiB


# -- names that become files -----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["fx", "fx-old", "ge"])
def test_a_dump_that_is_converted_writes_nothing_outside_the_folder(tmp_path, to):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with ld.dump(model, name="graph", path=str(tmp_path), graph="fx") as run:
        model(torch.ones(2, 4))
    outside = tmp_path / "outside"
    outside.mkdir()
    change_index(run.path, "UPDATE scalars SET value = ? WHERE slot = 'fx'", f"{outside}/x")
    change_index(run.path, "UPDATE nodes SET type = '../../../../outside/y'")
    change_index(run.path, "UPDATE records SET op = 'Aten./../../../../outside/z'")
    before = set(tmp_path.rglob("*"))
    written = torchair.convert(run.path, tmp_path / "a/b/c/d/new", to)
    assert written.tensors > 0
    assert not list(outside.iterdir())
    made = set(tmp_path.rglob("*")) - before - {tmp_path / "a"}
    assert made
    assert all(file.is_relative_to(tmp_path / "a") for file in made)


def test_a_name_that_is_not_there_is_looked_for_in_some_of_very_many_long_ones(run):
    change_index(
        run,
        "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)"
        f" INSERT INTO records({', '.join(COLUMNS)}) SELECT i,"
        " root_call, replace(hex(zeroblob(220)), '00', 'abcd') || i,"
        f" {', '.join(COLUMNS[3:])} FROM n, (SELECT * FROM records LIMIT 1)",
    )
    start = time.process_time()
    with pytest.raises(ld.errors.TensorLookupError):
        ld.open_run(run).tensor("abcd" * 200)
    assert time.process_time() - start < 5
