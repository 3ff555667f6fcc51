"""Runs in remote stores: indexes are copied, values are read in place."""

import itertools
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.core.errors import (
    CorruptDumpError,
    MissingPackageError,
    NotADumpError,
    OptionError,
    RemoteError,
    UnknownRunError,
)
from llmdebug_nb.store.remote import stores
from llmdebug_nb.store.remote.stores import Place

_numbers = itertools.count()


def recorded(name: str, **options: object) -> ld.Run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    if name == "mine":
        with torch.no_grad():
            net[2].weight[0] *= 2
    with ld.dump(net, name=name, tokens="all", **options) as run:
        for step in range(6):
            net(torch.full((4, 64), 1.0 + step))
    return run


def uploaded(run: ld.Run) -> str:
    """Copy a run's folder into a store in memory; return its URL."""
    url = f"memory://bucket{next(_numbers)}/runs/{run.path.name}"
    fs, path = fsspec.url_to_fs(url)
    for file in run.path.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{path}/{file.relative_to(run.path).as_posix()}", file.read_bytes())
    return url


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that are read of files, in order."""
    ranges: list[tuple[int, int]] = []
    read = Place.read

    def noted(self: Place, start: int, end: int) -> bytes:
        ranges.append((start, end))
        return read(self, start, end)

    monkeypatch.setattr(Place, "read", noted)
    return ranges


def failing(monkeypatch: pytest.MonkeyPatch, url: str, times: int, error: Exception) -> list[int]:
    """Let reading payloads of the store fail so many times; return the list of the failures."""
    fs, _ = fsspec.url_to_fs(url)
    read, failures = type(fs).cat_file, list[int]()

    def cat_file(self, path, start=None, end=None, **more):
        if "tensors" in path and len(failures) < times:
            failures.append(1)
            raise error
        return read(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    return failures


def assert_same(found: ld.Run, expected: ld.Run) -> None:
    pairs = list(zip(found.records(), expected.records(), strict=True))
    assert pairs
    for one, other in pairs:
        assert (one.site, one.summary) == (other.site, other.summary)
        assert torch.equal(found.load(one), expected.load(other))


@pytest.mark.parametrize("options", [{}, {"last": 2}, {"mode": "module+aten", "weights": True}])
def test_a_remote_run_has_the_records_and_values_of_the_local_one(options):
    run = recorded("golden", **options)
    url = uploaded(run)
    found = ld.open_run(url)
    assert_same(found, run)
    assert found.info()["bytes"] == run.info()["bytes"]
    assert found.info()["path"] == url


def test_a_comparison_of_remote_runs_is_that_of_local_ones():
    golden, mine = recorded("golden"), recorded("mine")
    local = ld.compare(golden, mine)
    remote = ld.compare(uploaded(golden), uploaded(mine))
    assert local.verdict == remote.verdict == "diverged"
    assert [d.error for d in remote.differences] == [d.error for d in local.differences]
    assert [f.path for f in remote.findings] == [f.path for f in local.findings] == ["2"]


def test_values_are_read_by_ranges_and_near_ones_with_one_request(asked):
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024)
    with ld.dump(net, name="large", tokens="all", phase="forward") as run:
        for step in range(6):
            net(torch.full((1024, 1024), float(step)))
    found = ld.open_run(uploaded(run))
    asked.clear()  # marker and index
    first, second, *_ = found.records()
    found.load(first)
    found.load(second)
    assert sum(end - start for start, end in asked) < run.info()["bytes"] / 2
    small = recorded("golden")
    near = ld.open_run(uploaded(small))
    asked.clear()
    for record in near.records():
        near.load(record)
    assert len(asked) == 1


def test_a_run_that_is_still_written_is_read_as_far_as_it_is_there():
    net = nn.Linear(8, 8)
    recording = ld.dump(net, name="live", tokens="all")
    with recording as run:
        net(torch.ones(1, 8))
        url = uploaded(run)
        found = ld.open_run(url)
        assert [call.step for call in found.steps()] == [0]
        assert not found.info()["complete"]
        assert_same(found, ld.open_run(run.path))


def test_a_store_that_hiccups_is_asked_again(monkeypatch):
    run = recorded("golden")
    url = uploaded(run)
    failures = failing(monkeypatch, url, 2, ConnectionError("reset by peer"))
    assert_same(ld.open_run(url), run)
    assert len(failures) == 2


def test_a_store_that_fails_for_good_makes_rows_with_a_reason_and_no_silence(monkeypatch):
    golden, mine = recorded("golden"), recorded("mine")
    url = uploaded(mine)
    failing(monkeypatch, url, 10**6, ConnectionError("reset by peer"))
    opened = ld.open_run(url)
    with pytest.raises(RemoteError, match=r"can't read memory://.*tensors\.bin: ConnectionError"):
        opened.load(next(opened.records()))
    report = ld.compare(golden, opened)
    assert report.verdict != "match"
    assert any("reset by peer" in (d.reason or "") for d in report.differences)


def test_a_store_that_gives_fewer_bytes_than_asked_for_is_not_believed(monkeypatch):
    url = uploaded(recorded("golden"))
    fs, _ = fsspec.url_to_fs(url)
    read = type(fs).cat_file

    def short(self, path, start=None, end=None, **more):
        data = read(self, path, start=start, end=end, **more)
        return data[:-1] if "tensors" in path else data

    monkeypatch.setattr(type(fs), "cat_file", short)
    found = ld.open_run(url)
    with pytest.raises(RemoteError, match=r"it gave [\d,]+ of [\d,]+ bytes"):
        found.load(next(found.records()))


def test_a_payload_that_is_cut_short_is_said():
    run = recorded("golden")
    url = uploaded(run)
    fs, path = fsspec.url_to_fs(url)
    (file,) = fs.glob(f"{path}/rank*/tensors.bin")
    fs.pipe_file(file, fs.cat_file(file)[:600])
    found = ld.open_run(url)
    assert not found.info()["complete"]
    last = list(found.records())[-1]
    with pytest.raises(CorruptDumpError, match="cut short"):
        found.load(last)


def test_names_in_a_store_never_lead_out_of_the_copy(tmp_path, monkeypatch):
    run = recorded("golden")
    url = uploaded(run)
    fs, path = fsspec.url_to_fs(url)
    evil = {"rank0_1/../../evil": b"x", "rank0_99/index.sqlite-evil": b"x", "x/index.sqlite": b"x"}
    for name, data in evil.items():
        fs.pipe_file(f"{path}/{name}", data)
    found = ld.open_run(url)
    assert_same(found, run)
    names = {file.name for file in found.path.rglob("*") if file.is_file()}
    assert names == {"llmdebug.json", "index.sqlite"}


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("memory://nowhere/run", UnknownRunError, "nothing is there"),
        ("memory://", (NotADumpError, UnknownRunError), "run"),
        ("nosuch://bucket/run", OptionError, "names no place"),
        ("s3x4://user:secret@bucket/run", OptionError, "s3x4://bucket/run"),
    ],
)
def test_what_is_no_run_is_said_in_one_line(url, error, says):
    with pytest.raises(error, match=says) as raised:
        ld.open_run(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_store_whose_package_is_missing_names_it(monkeypatch):
    def missing(url: str, **more: object) -> None:
        raise ImportError("Install gcsfs")

    monkeypatch.setattr("fsspec.url_to_fs", missing)
    with pytest.raises(MissingPackageError, match="pip install gcsfs"):
        ld.open_run("gs://bucket/run")


def test_a_dump_of_another_tool_is_refused_with_what_to_do():
    fs, path = fsspec.url_to_fs("memory://foreign/dump")
    fs.pipe_file(f"{path}/step0/rank0/dump.json", b"{}")
    with pytest.raises(NotADumpError, match="copy it to a folder"):
        ld.open_run("memory://foreign/dump")


def test_a_remote_run_is_neither_deleted_nor_changed():
    url = uploaded(recorded("golden"))
    for change in (ld.delete_run, ld.reduce_run, ld.redact_run):
        with pytest.raises(OptionError, match="in a remote store"):
            change(url)
    assert len(ld.open_run(url))


def test_the_command_line_and_a_notebook_take_urls(tmp_path: Path, capsys):
    golden, mine = recorded("golden"), recorded("mine")
    urls = [f"file://{run.path}" for run in (golden, mine)]
    command = [sys.executable, "-m", "llmdebug_nb.cli", "compare", *urls]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "diverged" in done.stdout
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "llmdebug_nb")
    report = shell.run_cell(f"report = %llmcompare {urls[0]} {urls[1]}\nreport.verdict")
    assert report.success
    assert report.result == "diverged"
