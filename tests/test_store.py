"""The native format: golden bytes, crashes, hostile files, size."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, COLUMNS, OPERATORS, SOURCES, TABLES
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import payload_files, process, reader
from llmdebug_nb.store.writer import Writer, create_run
from models import generate, llama, prompt
from recordings import add_process, change_index


def _row(number=0, path="a", dtype="float32", shape="[2, 3]", **more):
    row = [None] * len(COLUMNS)
    given_ = {
        "id": number, "root_call": 0, "path": path, "call": 0, "phase": "forward",
            "role": "output", "slot": "0", "op": "Linear",
        "dtype": dtype, "shape": shape, "device": "cpu", **more,
    }  # fmt: skip
    for name, value in given_.items():
        row[AT[name]] = value
    return row


def _process(run: ld.Run | Path) -> Path:
    path = run if isinstance(run, Path) else run.path
    return next(path.glob("rank*_*"))


@pytest.fixture
def recorded():
    model = llama()
    with ld.dump(model, name="golden", tokens="0-2") as run:
        generate(model, new=3)
    return run


# -- bytes ------------------------------------------------------------------------------------


def test_a_frame_is_these_bytes():
    header = fmt.encode_header(_row(7, path='x"y'), 24)
    text = (
        '{"__metadata__":{"record":"[7,0,\\"x\\\\\\"y\\",0,\\"forward\\",\\"output\\",'
        '\\"0\\",\\"Linear\\",\\"float32\\",'
        '\\"[2, 3]\\",null,null,null,null,null,null,null,null,\\"cpu\\",null,null,'
        'null,null,null,null,null,null,null,null]"},'
        '"tensor":{"dtype":"F32","shape":[2, 3],"data_offsets":[0,24]}}'
    )
    padded = text + " " * (-len(text) % 8)
    assert header == struct.pack("<Q", len(padded)) + padded.encode()


def test_a_frame_of_a_part_holds_its_shape_and_the_figures_of_the_whole():
    figures = {"min": -1.0, "max": math.inf, "mean": math.nan, "l2norm": 2.5}
    figures |= {"nan": 1, "inf": 1, "zero": 0}
    header = fmt.encode_header(_row(7, kept="slice[0,:2]", kept_shape="[2]", **figures), 8)
    text = (
        '{"__metadata__":{"record":"[7,0,\\"a\\",0,\\"forward\\",\\"output\\",\\"0\\",'
        '\\"Linear\\",\\"float32\\",'
        '\\"[2, 3]\\",-1.0,Infinity,NaN,2.5,1,1,0,null,\\"cpu\\",null,null,null,'
        'null,\\"slice[0,:2]\\",\\"[2]\\",null,null,null,null]"},'
        '"tensor":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    padded = text + " " * (-len(text) % 8)
    assert header == struct.pack("<Q", len(padded)) + padded.encode()
    reduced = fmt.encode_header(_row(7, kept="minmax", kept_shape="[2]"), 16)
    assert b'"tensor":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}' in reduced


def test_each_payload_is_a_safetensors_document_that_others_can_read(recorded):
    record = recorded.find("lm_head")
    file = _process(recorded) / fmt.PAYLOAD
    data = file.read_bytes()
    at, found = 0, {}
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        header = json.loads(data[at + 8 : at + 8 + size])
        nbytes = header.get("tensor", {"data_offsets": [0, 0]})["data_offsets"][1]
        document = data[at : at + 8 + size + nbytes]
        if "tensor" in header:
            site = json.loads(header["__metadata__"]["record"])
            found[site[0]] = safetensors.torch.load(document)["tensor"]
        at += len(document) + -len(document) % 8
    assert torch.equal(found[record.id], recorded.load(record))


@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    figure=st.floats(allow_subnormal=False),
    kept=st.sampled_from([None, "minmax"]),
)
def test_a_frame_holds_any_text_and_figure(tmp_path_factory, text, figure, kept):
    tmp_path = tmp_path_factory.mktemp("frame")
    row = _row(7, path=text, slot=text, min=figure, argument=text, kept=kept)
    frame = fmt.encode_header(row, None)
    (tmp_path / "frame").write_bytes(frame)
    with open(tmp_path / "frame", "rb") as file:
        (found,) = fmt.scan_frames(file, 0, len(frame))
    given_back = figure if kept else None
    assert repr(found[AT["min"]]) == repr(given_back)
    found[AT["min"]] = row[AT["min"]] = None
    assert found == row


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["payload", "duplicate"]), st.integers(0, 40)), max_size=12)
)
def test_frames_come_back_in_order_and_stop_at_a_torn_one(tmp_path_factory, steps):
    run = create_run(tmp_path_factory.mktemp("frames"), "r", {})
    writer = Writer(run)
    import numpy as np

    rows, last = [], None
    for number, (kind, size) in enumerate(steps):
        row = _row(number, dtype="uint8", shape=f"[{size}]")
        if kind == "payload" or last is None:
            writer.payload(row, np.arange(size, dtype=np.uint8))
            last = row[AT["offset"]], row[AT["length"]]
        else:
            writer.duplicate(row, *last)
        rows.append(row)
    writer.commit()
    file = writer.folder / fmt.PAYLOAD
    size = file.stat().st_size
    with open(file, "rb") as stream:
        assert list(fmt.scan_frames(stream, 0, size)) == rows
        for end in range(0, size, max(1, size // 17)):
            assert (
                list(fmt.scan_frames(stream, 0, end))
                == rows[: len(list(fmt.scan_frames(stream, 0, end)))]
            )
    assert size % fmt.ALIGN == 0
    writer.close({"complete": True})


def test_the_layout_on_disk_is_as_documented(recorded):
    assert sorted(p.name for p in recorded.path.iterdir()) == [fmt.MARKER, _process(recorded).name]
    assert sorted(p.name for p in _process(recorded).iterdir()) == [fmt.INDEX, fmt.PAYLOAD]
    # sqlite.org/fileformat: 1 is a database without a log beside it, which any medium can hold
    assert (_process(recorded) / fmt.INDEX).read_bytes()[18:20] == b"\1\1"
    marker = json.loads((recorded.path / fmt.MARKER).read_text(encoding="utf-8"))
    assert (marker["format"], marker["version"], marker["name"]) == ("llmdebug-run", 1, "golden")
    assert marker["options"]["tokens"] == "0-2"
    document = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
    for name in (*COLUMNS, *(table.name for table in TABLES), fmt.MARKER, fmt.INDEX, fmt.PAYLOAD):
        assert f"`{name}`" in document, name
    for table, columns in (("operators", OPERATORS.names), ("sources", SOURCES.names)):
        assert f"`{table}`({', '.join(columns)})" in document


# -- crashes ----------------------------------------------------------------------------------

_KILLED = """
import os, sys, torch, llmdebug_nb as ld
sys.path.insert(0, {tests!r})
from models import llama, prompt
model = llama()
calls = []
def die(module, args):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), 9)
model.model.layers[1].mlp.register_forward_pre_hook(die)
with ld.dump(model, name="killed", tokens="all", {options}):
    for seed in range(5):
        model(prompt(seed=seed))
"""


@pytest.mark.parametrize("options", ["", "stats_only=True"], ids=["tensors", "statistics only"])
def test_kill_9_loses_nothing_that_had_been_written(options):
    script = _KILLED.format(tests=str(Path(__file__).parent), options=options)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    run = ld.open_run("killed")
    model = llama()
    with ld.dump(model, name="whole", tokens="0-2") as whole:
        for seed in range(3):
            model(prompt(seed=seed))
    info = run.info()
    assert not info["complete"]
    columns = [
        "step",
        "path",
        "call",
        "role",
        "slot",
        "op",
        "dtype",
        "shape",
        "min",
        "max",
        "mean",
        "l2norm",
        "fingerprint",
    ]
    got, expected = run.to_pandas()[columns], whole.to_pandas()[columns]
    done = len(expected[expected.step < 2])
    assert got[got.step < 2].equals(expected[expected.step < 2])
    if not options:
        # of the call that was cut short: everything up to the module where the process died
        dead = expected.reset_index(drop=True)
        cut = dead[
            (dead.step == 2) & (dead.path == "model.layers.1.mlp") & (dead.role == "input")
        ].index[0]
        assert len(got) == cut > done
        assert got.equals(expected.iloc[:cut])
        assert torch.equal(
            run.tensor("model.layers.0.mlp", step=2), whole.tensor("model.layers.0.mlp", step=2)
        )
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    ld.open_run("killed").to_pandas()
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert "incomplete" in repr(run)
    assert ld.compare(run, whole).verdict == "match"


def test_a_run_can_be_read_while_it_is_recorded():
    model = llama()
    with ld.dump(model, name="live", tokens="all") as run:
        model(prompt())
        first = len(run)
        assert first > 0
        model(prompt())
        assert len(run) == 2 * first
        assert not run.info()["complete"]
        assert torch.equal(run.tensor("lm_head", step=1), run.tensor("lm_head", step=0))
    assert run.info()["complete"]


def test_a_killed_run_is_opened_once_for_many_looks(monkeypatch):
    script = _KILLED.format(tests=str(Path(__file__).parent), options="")
    subprocess.run([sys.executable, "-c", script], check=False)
    opened = []
    original = process.Process._add_tail
    monkeypatch.setattr(
        process.Process, "_add_tail", lambda self: (opened.append(1), original(self))[1]
    )
    run = ld.open_run("killed")
    for record in run.records():
        run.load(record)
    assert len(opened) == 1


def test_a_newer_run_of_the_same_name_is_found_whoever_recorded_it():
    model = llama()
    with ld.dump(model, name="shared") as mine:
        model(prompt())
    script = (
        "import torch, llmdebug_nb as ld\nmodel = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        "with ld.dump(model, name='shared'): model(torch.ones(1, 3))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert ld.open_run("shared").path.name == "shared.2"
    assert mine.path.name == "shared"


@pytest.mark.parametrize("name", ["", "a" * 300, "no/such/place"])
def test_names_that_cannot_be_runs_are_unknown_runs(name):
    with pytest.raises(ld.errors.UnknownRunError, match="no run"):
        ld.open_run(name)


# -- places -----------------------------------------------------------------------------------


def test_a_name_used_again_never_overwrites_and_opens_the_newest():
    model = llama()
    for seed in (0, 1):
        with ld.dump(model, name="twice") as run:
            model(prompt(seed=seed))
    assert run.path.name == "twice.2"
    assert torch.equal(ld.open_run("twice").tensor("", role="input"), prompt(seed=1))
    assert torch.equal(
        ld.open_run(run.path.parent / "twice").tensor("", role="input"), prompt(seed=0)
    )


def test_runs_open_by_name_by_path_by_the_folder_that_holds_them_and_as_they_are(
    tmp_path, recorded
):
    for where in ("golden", recorded.path, str(recorded.path), recorded.path.parent, recorded):
        assert len(ld.open_run(where)) == len(recorded)
    model = llama()
    with ld.dump(model, name="elsewhere", path=tmp_path / "deep" / "er"):
        model(prompt())
    assert ld.open_run("elsewhere").path == tmp_path / "deep" / "er" / "elsewhere"
    assert ld.open_run(tmp_path / "deep" / "er").path == tmp_path / "deep" / "er" / "elsewhere"
    with ld.dump(model, name="second", path=tmp_path / "deep" / "er"):
        model(prompt())
    with pytest.raises(
        ld.errors.NotADumpError, match=r"several runs; name one of elsewhere, second"
    ):
        ld.open_run(tmp_path / "deep" / "er")


def test_an_unknown_run_is_an_error_that_lists_the_known_ones(recorded):
    with pytest.raises(ld.errors.UnknownRunError, match=r"no run 'goldne'.*golden"):
        ld.open_run("goldne")
    with pytest.raises(ld.errors.NotADumpError, match="not by int"):
        ld.open_run(3)


def test_a_folder_that_is_no_dump_is_refused(tmp_path):
    (tmp_path / "readme.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ld.errors.NotADumpError, match=r"is not a dump.*known: "):
        ld.open_run(tmp_path)


def test_a_read_only_place_is_an_error_before_the_model_runs(tmp_path):
    target = tmp_path / "file"
    target.write_text("in the way", encoding="utf-8")
    ran = []
    with (
        pytest.raises(ld.errors.DumpWriteError, match="can't write the dump"),
        ld.dump(llama(), path=target / "below"),
    ):
        ran.append(1)
    assert not ran


@given(
    st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=4), max_size=4),
    st.integers(0, 12), st.booleans(),
)  # fmt: skip
def test_all_is_written_where_the_system_takes_a_part_at_a_time(
    tmp_path_factory, frames, limit, gathers
):
    def writev(file, parts):
        return os.write(file, b"".join(parts)[:limit])

    write, folder = os.write, tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_files, "_GATHERS", gathers)
        patch.setattr(payload_files.os, "writev", writev)
        writer = payload_files.PayloadWriter(folder)
        with contextlib.closing(writer):
            patch.setattr(payload_files.os, "write", lambda file, data: write(file, data[:5]))
            starts = [writer.append([memoryview(part) for part in frame]) for frame in frames]
    sizes = [sum(map(len, frame)) for frame in frames]
    assert starts == [sum(sizes[:number]) for number in range(len(frames))]
    assert (folder / fmt.PAYLOAD).read_bytes() == b"".join(map(b"".join, frames))


def test_a_full_disk_never_stops_the_program_and_is_reported(monkeypatch):
    import errno

    model = llama()
    expected = model(prompt()).logits
    writev, calls = os.writev, []

    def full(*args):
        calls.append(1)
        if len(calls) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(*args)

    monkeypatch.setattr(os, "writev", full)
    with (
        pytest.raises(ld.errors.DumpWriteError, match="no space left"),
        ld.dump(model, name="full") as run,
    ):
        got = model(prompt()).logits
    assert torch.equal(got, expected)
    run = ld.open_run("full")
    info = run.info()
    assert not info["complete"]
    assert info["payloads"] + info["lost"] == info["records"]
    assert 0 < info["payloads"] < info["records"]
    assert run.meta["lost"]
    assert torch.equal(run.tensor("", role="input"), prompt())


def test_deleting_a_run_removes_it_and_nothing_else(recorded, tmp_path):
    assert ld.delete_run("golden") == recorded.path
    assert ld.runs() == []
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(ld.LLMDebugError):
        ld.delete_run(tmp_path)
    assert (tmp_path / "x.npy").exists()


# -- hostile files ----------------------------------------------------------------------------


def _copy(recorded, tmp_path):
    return Path(shutil.copytree(recorded.path, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / fmt.MARKER).write_bytes(b"{"), "damaged"),
        (lambda p: (p / fmt.MARKER).write_bytes(b'{"format": "other"}'), "does not say format"),
        (lambda p: (p / fmt.MARKER).write_bytes(b'{"format": "llmdebug-run", "version": 99}'),
            "format version 99"),
        (lambda p: (_process(p) / fmt.INDEX).write_bytes(b"not a database at all" * 99), "damaged"),
        (lambda p: (_process(p) / fmt.INDEX).write_bytes(
            (_process(p) / fmt.INDEX).read_bytes()[:3000]), "damaged|can't be read"),
        (lambda p: (_process(p) / fmt.INDEX).unlink(), "no recording"),
        (lambda p: change_index(p, "DROP TABLE scalars"), "the table scalars is missing"),
        (lambda p: change_index(p, "CREATE VIEW evil AS SELECT 1"), "the view 'evil' is none of"),
        (lambda p: change_index(
            p, "CREATE TRIGGER evil AFTER INSERT ON meta BEGIN DELETE FROM meta; END"
        ), "the trigger 'evil' is none of"),
        (lambda p: change_index(p, "UPDATE meta SET value = 'nonsense'"), "damaged"),
        (lambda p: change_index(p, "UPDATE meta SET value = '[]' WHERE key = 'bytes'"), "damaged"),
        (lambda p: change_index(p, "UPDATE records SET min = 'x'"), "Expected `float"),
    ],
)  # fmt: skip
def test_a_damaged_dump_is_refused_in_one_line(recorded, tmp_path, damage, message):
    path = _copy(recorded, tmp_path)
    damage(path)
    with pytest.raises(ld.errors.CorruptDumpError, match=message) as error:
        ld.open_run(path).to_pandas()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE records SET length = 1 << 60",
        "UPDATE records SET offset = -5",
        "UPDATE records SET offset = 1 << 50",
        "UPDATE records SET dtype = 'object'",
        "UPDATE records SET shape = '[1000000000000, 1000000000000]'",
        "UPDATE records SET shape = '[-1]'",
        "UPDATE records SET shape = '{\"a\": 1}'",
        "UPDATE records SET shape = 'x'",
    ],
)
def test_lying_fields_are_refused_before_anything_is_allocated(recorded, tmp_path, sql):
    path = _copy(recorded, tmp_path)
    change_index(path, sql)
    with pytest.raises(ld.errors.CorruptDumpError):
        ld.open_run(path).tensor("lm_head")


def test_a_process_folder_that_is_a_link_out_of_the_run_is_not_followed(recorded, tmp_path):
    path = _copy(recorded, tmp_path)
    shutil.move(_process(path), tmp_path / "outside")
    (path / "rank0_1").symlink_to(tmp_path / "outside", target_is_directory=True)
    with pytest.raises(ld.errors.CorruptDumpError, match="no recording"):
        ld.open_run(path).to_pandas()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 8))
def test_arbitrary_bytes_as_frames_are_refused_or_ignored(tmp_path_factory, data, start):
    file = tmp_path_factory.mktemp("bytes") / "tensors.bin"
    file.write_bytes(data)
    with open(file, "rb") as stream:
        try:
            frames = list(fmt.scan_frames(stream, start, len(data)))
        except ld.errors.CorruptDumpError:
            return
    assert frames == []  # no frame of ours is made by chance


# -- operators --------------------------------------------------------------------------------

_LINEAR, _ADD = "model.norm/Functional.linear", "model.norm/Functional.linear/Aten.add"
_STACK = ["model.py:12 forward", "train.py:3 <module>"]


@pytest.fixture
def with_operators(tmp_path):
    run = create_run(tmp_path, "operators", {})
    sink = Writer(run)
    recorder = Recorder(sink, DumpOptions())
    for step in range(2):
        call = OpenCall(_LINEAR, "linear", "api", "model.norm", 0, step)
        recorder.record_tensor(call, "output", "0", torch.ones(2))
        source = recorder.sources.stack_number(list(_STACK))
        recorder.record_operator(
            [step, _LINEAR, 0, "forward", "api", "linear", source, "model.norm", 0, None, None]
        )
        recorder.record_operator(
            [step, _ADD, 0, "forward", "aten", "aten.add", None, _LINEAR, 0, None, None]
        )
        recorder.end_call([RootCall(step, step=step)])
    other = recorder.sources.stack_number(["engine.py:1 backward"])
    recorder.record_operator(
        [1, _LINEAR, 0, "backward", "api", "linear", other, None, None, _LINEAR, 0]
    )
    recorder.end_call([])
    sink.close({"complete": True})
    return reader.native(run)


def test_operator_calls_come_back_in_execution_order_with_their_source_lines(with_operators):
    table = with_operators.operators()
    assert list(table.columns) == [
        "rank", "generation", "step", "path", "call", "phase", "level", "op", "source", "within",
            "within_call",
        "forward_path", "forward_call",
    ]  # fmt: skip
    assert list(table.step) == [0, 0, 1, 1, 1]
    assert list(table.path) == [_LINEAR, _ADD, _LINEAR, _ADD, _LINEAR]
    assert table.source.fillna("").tolist() == [
        _STACK[0],
        "",
        _STACK[0],
        "",
        "engine.py:1 backward",
    ]
    assert list(table.within)[:2] == ["model.norm", _LINEAR]
    assert table.within_call.isna().tolist() == [False] * 4 + [True]
    assert (table.forward_path[4], table.forward_call[4]) == (_LINEAR, 0)
    assert with_operators.stack(_LINEAR, step=1) == _STACK
    assert with_operators.stack(_LINEAR, step=1, phase="backward") == ["engine.py:1 backward"]


def test_a_call_stack_is_written_once(with_operators):
    assert with_operators.index.query(tuple, "SELECT count(*) FROM all_sources") == [(2,)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"path": "model.norm/Functional.linaer"},
            r"no path 'model.norm/Functional.linaer'; nearest: model.norm/Functional.linear"),
        ({"path": _LINEAR, "step": 7}, "no step 7 at .*; there is 0, 1"),
        ({"path": _LINEAR, "call": 3}, "no call 3 at .*; there is 0"),
        ({"path": _LINEAR, "phase": "backward"}, "no phase 'backward' at .*; there is forward"),
        ({"path": _ADD}, "recorded with sources=False"),
    ],
)  # fmt: skip
def test_an_unknown_operator_is_an_error_that_lists_the_known_ones(with_operators, asked, message):
    with pytest.raises(ld.errors.TensorLookupError, match=message):
        with_operators.stack(**asked)


def test_a_run_of_modules_and_a_foreign_dump_have_no_operators(recorded, tmp_path):
    import numpy as np

    np.save(tmp_path / "x.npy", np.ones(3))
    for run in (recorded, ld.open_run(tmp_path)):
        assert run.operators().empty
        assert "source" in run.operators().columns
        with pytest.raises(ld.errors.TensorLookupError, match="recorded without operators"):
            run.stack("lm_head")


def test_operators_of_several_processes_keep_their_own_stacks(with_operators):
    second = add_process(with_operators.path, "rank1_99999")
    change_index(second, "UPDATE sources SET frames = '[\"elsewhere.py:1 f\"]' WHERE idx = 0")
    run = reader.native(with_operators.path)
    assert list(run.operators()["rank"]) == [0] * 5 + [1] * 5
    assert run.stack(_LINEAR) == _STACK
    assert run.stack(_LINEAR, rank=1) == ["elsewhere.py:1 f"]


def test_rows_of_any_table_are_one_transaction(tmp_path):
    sink = Writer(create_run(tmp_path, "tables", {}))
    said = []
    sink._db.set_trace_callback(said.append)
    rows = [[0, row, "a", row, None, 0, None] for row in range(100)]
    sink.table("token_rows", rows)
    assert sum(text.startswith("INSERT") for text in said) == 100
    assert [text for text in said if not text.startswith("INSERT")] == ["BEGIN", "COMMIT"]
    with pytest.raises(ZeroDivisionError):
        sink.table("token_rows", ([0, row, "b", 1 // (1 - row), None, 0, None] for row in range(2)))
    assert said[-1] == "ROLLBACK"
    sink.close({})
    with contextlib.closing(sqlite3.connect(sink.folder / fmt.INDEX)) as db:
        assert db.execute("SELECT request, count(*) FROM token_rows").fetchall() == [("a", 100)]


def test_threads_add_rows_at_the_same_time(tmp_path):
    sink = Writer(create_run(tmp_path, "threads", {}))

    def work(name):
        for number in range(50):
            sink.table("token_rows", ([0, row, name, row, None, 0, None] for row in range(20)))
            sink.commit(Batch(called=[(0, name, number, "0")]))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, name) for name in "abcd"]:
            done.result()
    sink.close({})
    with contextlib.closing(sqlite3.connect(sink.folder / fmt.INDEX)) as db:
        counts = "SELECT count(*) FROM token_rows UNION ALL SELECT count(*) FROM calls"
        assert db.execute(counts).fetchall() == [(4000,), (200,)]


def test_operators_are_there_while_the_recording_goes_on(tmp_path):
    sink = Writer(create_run(tmp_path, "live", {}))
    recorder = Recorder(sink, DumpOptions())
    run = reader.native(sink.folder.parent)
    for number in range(2):
        source = recorder.sources.stack_number([f"a.py:{number} f"])
        recorder.record_operator(
            [0, _LINEAR, number, "forward", "api", "linear", source, None, None, None, None]
        )
        recorder.end_call([RootCall(0)])
        assert run.stack(_LINEAR, call=number) == [f"a.py:{number} f"]
    sink.close({})


def test_stacks_that_could_not_be_written_are_written_with_the_next_rows(tmp_path, monkeypatch):
    sink = Writer(create_run(tmp_path, "again", {}))
    recorder = Recorder(sink, DumpOptions())
    source = recorder.sources.stack_number(_STACK)
    commit = sink.commit

    def full(*args, **more):
        raise ld.errors.DumpWriteError("no space left for the dump; free some")

    monkeypatch.setattr(sink, "commit", full)
    recorder.end_call([RootCall(0)])
    monkeypatch.setattr(sink, "commit", commit)
    recorder.record_operator(
        [0, _LINEAR, 0, "forward", "api", "linear", source, None, None, None, None]
    )
    recorder.end_call([RootCall(0)])
    sink.close({})
    assert reader.native(sink.folder.parent).stack(_LINEAR) == _STACK


@pytest.mark.parametrize("frames", ["x", "{}", "[1]", "[[]]", "3", "[" * 100_000])
def test_call_stacks_that_are_none_are_refused(with_operators, frames):
    change_index(with_operators.path, "UPDATE sources SET frames = ?", frames)
    run = reader.native(with_operators.path)
    for look in (run.operators, lambda: run.stack(_LINEAR)):
        with pytest.raises(ld.errors.CorruptDumpError, match="a call stack is damaged"):
            look()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE operators SET within_call = 'x'",
        "UPDATE operators SET forward_call = 1.5",
        "DELETE FROM sources",
        "UPDATE operators SET source = 'x'",
        "UPDATE operators SET source = 99, path = x'ff', op = 3",
        "UPDATE operators SET root_call = 'x'",
    ],
)
def test_operators_of_nonsense_are_shown_or_refused_and_never_a_crash(with_operators, sql):
    change_index(with_operators.path, sql)
    run = reader.native(with_operators.path)
    for look in (run.operators, lambda: run.stack(_LINEAR)):
        with contextlib.suppress(ld.errors.CorruptDumpError, ld.errors.TensorLookupError):
            look()


# -- several processes, size ------------------------------------------------------------------


def test_several_processes_are_one_run(recorded):
    path, alone = recorded.path, len(recorded)
    add_process(path, "rank1_99999")
    run = ld.open_run(path)
    info = run.info()
    assert (info["processes"], info["ranks"], info["records"]) == (2, [0, 1], 2 * alone)
    assert torch.equal(run.tensor("lm_head", rank=1), run.tensor("lm_head", rank=0))
    assert run.to_pandas().index.is_unique
    assert ld.compare(run, run).verdict == "match"


def test_opening_100_000_records_reads_a_page_and_not_all(tmp_path):
    run = create_run(tmp_path, "large", {})
    writer = Writer(run)
    from llmdebug_nb.core.records import RootCall

    figures = {"min": 0.0, "max": 1.0, "mean": 0.5, "l2norm": 1.0, "nan": 0, "inf": 0, "zero": 0}
    rows = [_row(i, path=f"model.layers.{i % 500}", **figures) for i in range(100_000)]
    writer.commit(Batch(records=rows, calls=[RootCall(0)]))
    writer.close({"complete": True})
    read = []
    opened = ld.open_run(run)
    opened.source.db.set_progress_handler(
        lambda: read.append(1), 1000
    )  # called once per 1000 steps of SQLite's engine
    assert len(list(opened.records(n=100))) == 100
    assert len(read) < 30
    assert len(opened) == 100_000


def test_dumps_of_one_moment_and_process_do_not_clash(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    module = nn.Sequential(nn.Linear(2, 2))
    runs = []
    for _ in range(3):
        with ld.dump(module, name="same", stats_only=True) as run:
            module(torch.ones(1, 2))
        runs.append(run.path)
    assert len(set(runs)) == 3
    assert (
        json.loads((runs[-1] / fmt.MARKER).read_text(encoding="utf-8"))["created"]
        == 1_700_000_000.0
    )
    assert reader.native(runs[0]).info()["complete"]
