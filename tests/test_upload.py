"""Recording into remote stores, copying runs to and from them, and what a bad store does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from moto.server import ThreadedMotoServer

import llmdebug_nb as ld
from llmdebug_nb.app import uploading
from llmdebug_nb.app.runs import describe_run
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import (
    EmptyDumpError,
    MissingPackageError,
    OptionError,
    RemoteError,
    UnknownRunError,
)
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import payload_files, privacy, writer
from llmdebug_nb.store.payload_files import name_of
from llmdebug_nb.store.remote import stores, upload
from llmdebug_nb.store.writer import Writer
from models import llama
from recordings import record_linear

SECRET = "verysecret"


class Faulty(MemoryFileSystem):
    """A store in memory whose requests fail, end early or lie, as ``faults`` says by method."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[tuple[str, Any]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def _do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((method, args))
        answer = lambda: getattr(MemoryFileSystem, method)(self, *args, **kwargs)  # noqa: E731
        fault = self.faults.get(method)
        return answer() if fault is None else fault(answer)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("cat_file", *args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("pipe_file", *args, **kwargs)

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("put_file", *args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("info", *args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("ls", *args, **kwargs)


fsspec.register_implementation("faulty", Faulty, clobber=True)


def raising(error: Exception, times: int = 10**9) -> Any:
    """Return a fault that raises so many times, then does what was asked."""
    left = [times]

    def fault(answer: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return answer()

    return fault


@pytest.fixture(autouse=True)
def at_once(monkeypatch, tmp_path) -> Iterator[None]:
    """Try again without pauses, in an empty store."""
    monkeypatch.setattr(stores, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(upload, "EVERY", 0.05)
    monkeypatch.setattr(upload, "_SHARE", 0)
    monkeypatch.setattr(uploading, "WAIT", 60.0)  # the machine may be busy
    monkeypatch.chdir(tmp_path)
    Faulty.faults.clear()
    Faulty.asked.clear()
    Faulty.store.clear()
    yield
    Faulty.faults.clear()


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    return record_linear(tmp_path, "golden"), record_linear(tmp_path, "mine", 1.5)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a folder in a bucket of a server like S3 on this machine."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
        fsspec.config.conf.pop("s3", None)
    server.stop()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())


def payload_of(run: Path | None) -> list[tuple[int, Path]]:
    assert run is not None
    (process,) = run.glob("rank*")
    return sorted(payload_files.places(process))


def same_values(a: Any, b: Any) -> bool:
    pairs = zip(a.records(), b.records(), strict=True)
    return all(a.load(x).numpy().tobytes() == b.load(y).numpy().tobytes() for x, y in pairs)


def in_a_thread(monkeypatch) -> None:
    """Upload to the faulty store, which lies in this process, by a thread."""
    monkeypatch.setattr(
        uploading, "_Process",
        lambda process, url: uploading._Thread(upload.Upload(process, stores.place(url))),
    )  # fmt: skip


def payload_names(url: str) -> list[str]:
    fs, path = fsspec.url_to_fs(url)
    names = [Path(name).name for name in fs.find(path)]
    return sorted(name for name in names if name.startswith("tensors"))


def live_folder(tmp_path: Path, name: str) -> Path:
    """Return the folder of a run that has a marker and nothing else."""
    marker = record_linear(tmp_path, "source") / fmt.MARKER
    folder = tmp_path / name
    folder.mkdir()
    details = {**json.loads(marker.read_text(encoding="utf-8")), "name": name, "id": name}
    (folder / fmt.MARKER).write_text(json.dumps(details), encoding="utf-8")
    return folder


# -- recording ------------------------------------------------------------------------------------


def test_a_recording_is_uploaded_by_its_end_and_stays_here(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMDEBUG_RUNS", str(tmp_path / "here"))
    one, threads = model(), set(threading.enumerate())
    state = random.getstate()
    with ld.dump(one, name="r", path=f"{bucket}/recorded", tokens="all") as run:
        for _ in range(3):
            one(torch.ones(2, 8))
        assert set(threading.enumerate()) <= threads  # those of other tests may end
    assert random.getstate() == state
    there = ld.open_run(f"{bucket}/recorded/r")
    assert there.info()["complete"]
    assert same_values(there, ld.open_run("r"))
    assert run.path == tmp_path / "here" / "r"
    assert f"uploaded to {bucket}/recorded/r" in describe_run(run)
    names = fsspec.filesystem("s3").find(f"{bucket}/recorded/r")
    assert {Path(name).name for name in names} == {fmt.INDEX, fmt.MARKER, fmt.PAYLOAD}
    # another run of that name has a place of its own
    monkeypatch.setenv("LLMDEBUG_RUNS", str(tmp_path / "elsewhere"))
    with ld.dump(one, name="r", path=f"{bucket}/recorded"):
        one(torch.zeros(2, 8))
    assert len(ld.open_run(f"{bucket}/recorded/r")) > len(ld.open_run(f"{bucket}/recorded/r.2"))


def test_a_recording_is_read_while_it_is_made():
    one, url = model(), f"memory://{uuid.uuid4()}"
    with ld.dump(one, name="live", path=url, tokens="all"):
        one(torch.ones(2, 8))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(ld.LLMDebugError):  # a round may be in the middle of it
                run = ld.open_run(f"{url}/live")
                break
            time.sleep(0.05)
        assert not run.info()["complete"]
        seen = len(run)
        assert seen
        assert all(run.load(record) is not None for record in run.records())
        one(torch.zeros(2, 8))
    done = ld.open_run(f"{url}/live")
    assert done.info()["complete"]
    assert len(done) > seen
    assert len(payload_names(f"{url}/live")) == 2


def test_a_recording_that_records_nothing_leaves_nothing_in_the_store():
    url = f"memory://{uuid.uuid4()}"
    with pytest.raises(EmptyDumpError), ld.dump(model(), name="empty", path=url):
        time.sleep(0.3)  # some rounds
    with pytest.raises(UnknownRunError):
        ld.open_run(url)


def test_a_store_that_fails_changes_nothing_and_the_rest_is_uploaded_later(capsys, monkeypatch):
    one, inputs = model(), torch.ones(2, 8)
    expected = one(inputs)
    Faulty.faults["pipe_file"] = raising(OSError("down"))
    monkeypatch.setattr(upload, "_AGAIN", 0.0)
    in_a_thread(monkeypatch)
    with (
        pytest.warns(UserWarning, match="not uploaded to faulty://b/x.*yet.*down.*llmdebug copy"),
        ld.dump(one, name="late", path="faulty://b/x") as run,
    ):
        result = one(inputs)
    assert torch.equal(result, expected)
    assert run.info()["complete"]
    assert "not uploaded" in describe_run(run)
    assert main(["info", "late"]) == 0
    assert re.search("^upload +late: .*not uploaded", capsys.readouterr().out, re.MULTILINE)
    Faulty.faults.clear()
    assert main(["copy", "late"]) == 0
    assert "faulty://b/x/late" in capsys.readouterr().out
    assert same_values(ld.open_run("faulty://b/x/late"), run)
    assert not uploading.unfinished(run.path)


@pytest.mark.parametrize("options", ["", " --log-level warning"])
def test_a_notebook_says_once_what_is_not_uploaded(capsys, monkeypatch, options):
    Faulty.faults["pipe_file"] = raising(OSError("down"))
    monkeypatch.setattr(upload, "_AGAIN", 0.0)
    in_a_thread(monkeypatch)
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "llmdebug_nb")
    shell.user_ns.update(one=model(), inputs=torch.ones(2, 8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cell = f"%%llmdump one --name late --path faulty://b/x{options}\none(inputs);"
        assert shell.run_cell(cell).success
    shown = capsys.readouterr()
    told = [*shown.out.splitlines(), *(str(each.message) for each in said)]
    assert sum("not uploaded to faulty://b/x" in line for line in told) == 1


def test_results_are_written_on_this_machine_and_a_store_is_refused():
    run = ld.open_run(record_linear(Path.cwd(), "here"))
    for write in (
        lambda to: ld.errcheck(output=to),
        lambda to: ld.opcheck(run, output=to),
        lambda to: ld.compare(run, run).to_csv(to),
        lambda to: ld.redact_run(run, to),
        on_this_machine,
    ):
        with pytest.raises(OptionError, match=r"^s3://b/x is in a remote store: .* this machine"):
            write("s3://user:secret@b/x")
    assert not Path("s3:").exists()


def test_a_store_that_hangs_holds_the_program_up_no_longer_than_said(monkeypatch):
    released, one = threading.Event(), model()
    Faulty.faults["pipe_file"] = lambda answer: released.wait(60) and answer()
    in_a_thread(monkeypatch)
    monkeypatch.setattr(uploading, "WAIT", 0.2)
    with (
        pytest.warns(UserWarning, match="hang: .* not uploaded"),
        ld.dump(one, name="hang", path="faulty://b/h") as run,
    ):
        one(torch.ones(2, 8))
    assert not released.is_set()
    assert run.info()["complete"]
    released.set()


def test_an_upload_whose_process_dies_is_said(monkeypatch):
    monkeypatch.setattr(uploading, "_CODE", "raise SystemExit(3)")
    one = model()
    with (
        pytest.warns(UserWarning, match=r"not uploaded .*the upload died, status 3"),
        ld.dump(one, name="dead", path="s3://bucket/x"),
    ):
        one(torch.ones(2, 8))


def test_what_can_not_be_recorded_to_a_store_is_refused_before_anything_runs(monkeypatch):
    url = f"s3://me:{SECRET}@bucket/runs"
    for options, words in [
        ({"path": url, "last": 3}, r"last=3 .* exclude each other.*llmdebug copy r s3://bucket"),
        ({"path": f"nonsense://me:{SECRET}@x"}, "nonsense://x names no place in a store"),
    ]:
        with pytest.raises(OptionError, match=words) as found:
            ld.dump(model(), name="r", **options)
        assert SECRET not in str(found.value)
        assert "\n" not in str(found.value)
        with pytest.raises(OptionError, match=words):
            ld.launch([sys.executable, "-c", "raise SystemExit(9)"], name="r", **options)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackageError, match="pip install gcsfs"):
        ld.dump(model(), path="gs://bucket/runs")
    assert not list(Path(os.environ["LLMDEBUG_RUNS"]).iterdir())


def test_what_a_killed_process_recorded_is_uploaded_and_read(bucket):
    script = (
        "import os, sys, torch, llmdebug_nb as ld\n"
        "model = torch.nn.Linear(4, 4)\n"
        f"recording = ld.dump(model, name='killed', path='{bucket}/k', tokens='all')\n"
        "recording.start()\n"
        "for _ in range(5): model(torch.ones(1, 4))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    (process,) = (Path(os.environ["LLMDEBUG_RUNS"]) / "killed").glob("rank*")
    deadline = time.monotonic() + 60
    while not getattr(upload.state_of(process), "complete", False):
        assert time.monotonic() < deadline, upload.state_of(process)
        time.sleep(0.1)
    there, here = ld.open_run(f"{bucket}/k/killed"), ld.open_run(process.parent)
    assert not there.info()["complete"]
    assert same_values(there, here)


def test_a_command_is_recorded_to_a_store(bucket, capsys):
    program = "import torch\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.ones(1, 4))\n"
    Path("program.py").write_text(program, encoding="utf-8")
    words = ["dump", "--name", "launched", "-o", f"{bucket}/l", "--", sys.executable, "program.py"]
    assert main(words) == 0
    assert f"uploaded to {bucket}/l/launched" in capsys.readouterr().err
    assert ld.open_run(f"{bucket}/l/launched").info()["complete"]


def test_an_index_that_is_closed_after_its_upload_is_uploaded_again(tmp_path):
    live, url = live_folder(tmp_path, "engine"), f"memory://{uuid.uuid4()}"
    one = Writer(live)
    one.note({"idle": True})
    folder = shutil.copytree(live, tmp_path / "killed" / "engine")  # between two steps
    one.close({})
    process = folder / one.folder.name
    state = upload.follow(upload.Upload(process, stores.place(url)), lambda _: True)
    assert state.complete
    assert not ld.open_run(f"{url}/engine").info()["complete"]
    assert not uploading.unfinished(folder)
    assert writer.finish(process)
    assert uploading.unfinished(folder)
    assert uploading.messages(folder, url) == [("info", f"uploaded to {url}/engine")]
    assert ld.open_run(f"{url}/engine").info()["complete"]


def test_frames_that_may_still_be_torn_are_not_uploaded(tmp_path):
    source = next(record_linear(tmp_path, "whole").glob("rank*"))
    shutil.copytree(source, tmp_path / "torn" / source.name)
    shutil.copy(source.parent / fmt.MARKER, tmp_path / "torn")
    process = tmp_path / "torn" / source.name
    size = (process / fmt.PAYLOAD).stat().st_size
    with open(process / fmt.PAYLOAD, "ab") as file:
        file.write(b"half a frame")
    with contextlib.closing(sqlite3.connect(process / fmt.INDEX)) as db:  # as its writer has it
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("UPDATE meta SET value = 'false' WHERE key = 'complete'")
        db.commit()
        one = upload.Upload(process, stores.place(f"memory://{uuid.uuid4()}"))
        one.round()
        assert one.sent == size
        one.round(ended=True)
        assert one.sent == size + len(b"half a frame")
        assert one.state(True).covers(process)


def test_the_process_that_uploads_does_not_load_torch():
    code = "import sys, llmdebug_nb.store.remote.upload; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 100, 333, 1 << 20])
def test_parts_are_read_wherever_their_borders_lie(tmp_path, monkeypatch, size):
    path, url = record_linear(tmp_path, "parts"), f"memory://{uuid.uuid4()}"
    monkeypatch.setattr(upload, "PART", size)
    there = ld.copy_run(path, url)
    (file,) = path.glob(f"rank*/{fmt.PAYLOAD}")
    nbytes = file.stat().st_size
    assert set(payload_names(there.where)) == set(map(name_of, range(0, nbytes, size)))
    assert same_values(there, ld.open_run(path))
    assert there.info()["bytes"] == nbytes


def test_a_run_of_several_files_with_gaps_is_copied_there_and_back(tmp_path, monkeypatch, bucket):
    one = torch.nn.Linear(8, 8)
    with ld.dump(one, name="ring", last=1, alarm="nan", tokens="all", weights=True) as run:
        for step in range(8):
            one(torch.full((1, 8), float("nan") if step == 3 else float(step)))
    assert run.path is not None
    files = [file for _, file in payload_of(run.path)]
    spans = upload._spans(next(run.path.glob("rank*")))
    assert len(files) > len(spans) > 1  # some follow each other, and some do not
    monkeypatch.setattr(upload, "PART", 200)
    there = ld.copy_run(run, f"{bucket}/rings")
    back = ld.copy_run(there, tmp_path / "back")
    assert same_values(there, run)
    assert same_values(back, run)
    assert back.info()["bytes"] == there.info()["bytes"] == run.info()["bytes"]
    assert len(payload_of(back.path)) == len(spans)


def test_an_upload_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "PART", 256)
    path = record_linear(tmp_path, "parts")
    Faulty.faults["pipe_file"] = lambda answer: (
        answer() if len(Faulty.store) < 4 else raising(OSError("cut"))(answer)
    )
    with pytest.raises(RemoteError, match="cut"):
        ld.copy_run(path, "faulty://b/cut")
    assert "not uploaded" in uploading.unfinished(path)
    there = [name for name in Faulty.store if "tensors" in name]
    assert there
    Faulty.faults.clear()
    Faulty.asked.clear()
    assert main(["copy", str(path)]) == 0  # it knows where to
    written = [args[0] for method, args in Faulty.asked if method == "pipe_file"]
    assert written
    assert not set(there) & set(written)
    assert same_values(ld.open_run("faulty://b/cut/parts"), ld.open_run(path))


def test_a_copy_that_is_interrupted_is_not_taken_for_whole(tmp_path):
    path = record_linear(tmp_path, "stopped")
    Faulty.faults["pipe_file"] = lambda answer: answer() or stop()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ld.copy_run(path, "faulty://b/stopped")
    assert "llmdebug copy" in uploading.unfinished(path)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> Path:
    return record_linear(tmp_path_factory.mktemp("one"), "mixed")


@settings(max_examples=25, deadline=None)
@given(
    st.integers(40, 400),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=6),
)
def test_whatever_parts_other_uploads_left_the_run_is_whole_in_the_end(one_run, size, others):
    Faulty.store.clear()
    (process,) = one_run.glob("rank*")
    data = (process / fmt.PAYLOAD).read_bytes()
    one = upload.Upload(process, stores.place("faulty://mixed"))
    there = one._place()
    for start, length in others:
        start, end = start * len(data) // 64, (start + length) * len(data) // 64
        if data[start:end]:
            (there / name_of(start)).write(data[start:end])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "PART", size)
        one.round(ended=True)
    assert same_values(ld.open_run("faulty://mixed/mixed"), ld.open_run(one_run))
    assert sum(
        len(Faulty.store[name].getvalue()) for name in Faulty.store if "tensors" in name
    ) == (len(data))


def test_what_only_the_store_has_is_left_there(tmp_path):
    path = record_linear(tmp_path, "cut")
    there = ld.copy_run(path, "faulty://b/more")
    before = payload_names(there.where)
    (file,) = path.glob(f"rank*/{fmt.PAYLOAD}")
    os.truncate(file, 100)
    with pytest.raises(RemoteError, match=r"values that are not on this machine.*another place"):
        ld.copy_run(path, "faulty://b/more")
    assert payload_names(there.where) == before
    assert there.info()["complete"]


def test_a_store_that_keeps_less_than_it_was_given_is_found_out(runs):
    def shortened(answer: Any) -> Any:
        answer()
        for name, file in Faulty.store.items():
            if fmt.PAYLOAD in name:
                file.truncate(10)

    Faulty.faults["pipe_file"] = shortened
    with pytest.raises(RemoteError, match="were written, and 10 are there"):
        ld.copy_run(runs[0], "faulty://b/short")


def test_a_part_that_vanishes_is_found_out(runs):
    def vanishing(answer: Any) -> Any:
        return [each for each in answer() if "tensors" not in each["name"]]

    Faulty.faults["ls"] = vanishing
    with pytest.raises(RemoteError, match="a part of the payload is gone"):
        ld.copy_run(runs[0], "faulty://b/gone")


# -- copying --------------------------------------------------------------------------------------


def test_a_run_is_copied_there_and_back(runs, tmp_path, bucket, capsys):
    there = ld.copy_run("golden", f"{bucket}/copies")
    assert there.where == f"{bucket}/copies/golden"
    assert main(["copy", there.where, str(tmp_path / "back")]) == 0
    back = tmp_path / "back" / "golden"
    assert same_values(ld.open_run(back), ld.open_run(runs[0]))
    (process,) = back.glob("rank*")
    assert {file.name for file in process.iterdir()} == {fmt.INDEX, fmt.PAYLOAD}
    assert (process / fmt.PAYLOAD).stat().st_mode & 0o777 == 0o600
    with pytest.raises(OptionError, match="name the place in a store"):
        ld.copy_run(runs[0])
    with pytest.raises(OptionError, match="from this machine"):
        ld.copy_run(there, "memory://x")
    report = ld.compare(there, ld.copy_run(runs[1], f"{bucket}/copies"), progress=False)
    assert report.verdict == ld.compare(*runs, progress=False).verdict == "diverged"


def test_a_copy_that_fails_leaves_nothing_behind(runs, tmp_path):
    run = ld.copy_run(runs[0], "faulty://b/half")
    Faulty.faults["cat_file"] = raising(OSError("gone"))
    with pytest.raises(RemoteError, match="gone"):
        ld.copy_run(run, tmp_path / "half")
    assert not list((tmp_path / "half").iterdir())


def test_a_run_is_deleted_and_described_with_what_its_upload_left(runs):
    ld.copy_run(runs[0], "memory://described")
    upload.note(next(runs[0].glob("rank*")), upload.State("memory://described"))
    assert "not uploaded to memory://described" in describe_run(ld.open_run(runs[0]))
    assert not privacy._other_files(ld.open_run(runs[0]))
    ld.delete_run(runs[0])
    assert not runs[0].exists()


def test_wrong_credentials_and_missing_buckets_are_said_in_one_line(runs, bucket):
    with pytest.raises(RemoteError, match="no-such-bucket") as found:
        ld.copy_run(runs[0], "s3://no-such-bucket/x")
    assert "\n" not in str(found.value)
    Faulty.faults["info"] = raising(OSError("no route to host"))
    with pytest.raises(RemoteError, match="not answered yet: check credentials and endpoint"):
        ld.copy_run(runs[0], "faulty://b/x")
    assert len(Faulty.asked) == 2  # its package asks again and again by itself
    with pytest.raises(OptionError, match="name the place in a store"):
        ld.copy_run(runs[0])  # what never answered is not remembered as the run's store
    Faulty.asked.clear()
    Faulty.faults["info"] = raising(PermissionError("Access Denied"))
    with pytest.raises(RemoteError, match=r"refuses it \(Access Denied\); check the credentials"):
        ld.copy_run(runs[0], f"faulty://me:{SECRET}@b/x")
    assert len(Faulty.asked) == 1  # asking again changes nothing
    texts = [file.read_text(errors="ignore") for file in runs[0].rglob("*") if file.is_file()]
    assert not any(SECRET in text for text in texts)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_store_that_can_not_be_used_is_said_while_the_program_runs(monkeypatch, capfd, recorded):
    quick = f"import {stores.__name__} as stores; stores.PAUSES = (); from"
    monkeypatch.setattr(uploading, "_CODE", uploading._CODE.replace("from", quick))
    model = torch.nn.Linear(4, 4)
    deadline = time.monotonic() + 60
    with ld.dump(model, name="golden", path="file:///dev/null/x"):
        if recorded:
            model(torch.ones(4))
        err = ""
        while "nothing can be uploaded" not in err and time.monotonic() < deadline:
            time.sleep(0.05)
            err += capfd.readouterr().err
        assert re.fullmatch(
            r"llmdebug: golden: nothing can be uploaded to \S+ now: can't look at .*/dev/null/x.*"
            r" It is recorded on this machine, and the upload is tried again\n", err
        ), err  # fmt: skip
        monkeypatch.setattr(uploading, "WAIT", 0.0)
        model(torch.ones(4))
        warnings.simplefilter("ignore")  # what is missing is said once more
    assert not capfd.readouterr().err


def test_who_reads_what_a_program_prints_does_not_wait_for_its_upload(tmp_path):
    code = (
        "import sys, time, warnings, torch, llmdebug_nb as ld;"
        "from llmdebug_nb.app import uploading; uploading.WAIT = 0.0;"
        "quick = 'from llmdebug_nb.store.remote import upload; upload._AGAIN = 100.0; from';"
        "uploading._CODE = uploading._CODE.replace('from', quick);"
        "warnings.simplefilter('ignore'); model = torch.nn.Linear(4, 4)\n"
        "with ld.dump(model, name='golden', path='file:///dev/null/x'): model(torch.ones(4))"
    )
    begun = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert not out.stdout
    assert time.monotonic() - begun < 90  # the upload goes on for 100 seconds and more


def test_the_examples_of_the_document_run(bucket, tmp_path, capsys):
    text = (Path(__file__).parent.parent / "docs" / "remote.md").read_text(encoding="utf-8")
    made = llama()
    names: dict[str, Any] = {
        "ld": ld, "model": made, "inputs": {"input_ids": torch.tensor([[5, 7, 9]])},
    }  # fmt: skip
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert names["report"].verdict == "match"
    shell = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(llmdebug .*?)(?:\s+#.*)?$", shell, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "copies" / "golden" / fmt.MARKER).is_file()
    assert ld.open_run("s3://bucket/others/golden").info()["complete"]
