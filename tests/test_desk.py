"""The kernel's side of the JupyterLab extension, without Jupyter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.notebook import desk
from llmdebug_nb.store import catalog
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import progress as progress_module
from llmdebug_nb.store.progress import progress
from recordings import record_linear


class Comm:
    """Stands in for a comm: `hear` is what the page sends, ``sent`` what it gets."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def on_msg(self, callback: Any) -> None:
        self.hear = lambda **content: callback({"content": {"data": content}})

    def send(self, data: dict[str, Any], buffers: object = None) -> None:
        self.sent.append(data)

    def ask(self, **content: object) -> dict[str, Any]:
        self.hear(re=7, **content)
        assert self.sent[-1]["re"] == 7
        return self.sent[-1]


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("LLMDEBUG_RUNS")
    return tmp_path


def opened(kind: type[desk.Desk] | type[desk.Tab], served: Path) -> Comm:
    comm = Comm()
    kind(served).attach(comm)
    return comm


def test_runs_are_listed_by_folder_with_the_newest_first(served):
    record_linear(served, "golden")
    record_linear(served, "golden")
    record_linear(served / "sub", "other")
    comm = opened(desk.Desk, served)
    answer = comm.ask(op="runs", folders=["", "sub", "nowhere", ""], name="")
    assert [(one["folder"], [run["name"] for run in one["runs"]]) for one in answer["folders"]] == [
        ("llmdebug_runs", ["golden.2", "golden"]),
        ("sub/llmdebug_runs", ["other"]),
    ]
    run = answer["folders"][1]["runs"][0]
    assert run["place"] == "sub/llmdebug_runs/other"
    assert (run["steps"], run["records"], run["state"]) == (1, 6, "complete")
    assert (
        run["bytes"]
        == (Path(run["path"]) / next(Path(run["path"]).glob("rank*")) / fmt.PAYLOAD).stat().st_size
    )


def test_the_environment_variable_goes_before_the_setting(served, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    record_linear(elsewhere, "golden")
    monkeypatch.setenv("LLMDEBUG_RUNS", str(elsewhere / "llmdebug_runs"))
    [folder] = opened(desk.Desk, served).ask(op="runs", folders=["", "sub"], name="other")[
        "folders"
    ]
    assert folder["folder"] == str(elsewhere / "llmdebug_runs")
    assert folder["runs"][0]["place"] == ""


def test_a_folder_of_runs_is_listed_itself_and_each_run_once(served):
    record_linear(served, "golden")
    comm = opened(desk.Desk, served)
    for folders in (["llmdebug_runs"], ["", "llmdebug_runs"]):
        [group] = comm.ask(op="runs", folders=folders, name="")["folders"]
        assert (group["folder"], [run["name"] for run in group["runs"]]) == (
            "llmdebug_runs",
            ["golden"],
        )
        assert group["runs"][0]["model"] == "Sequential"


def test_the_verdict_of_a_comparison_is_remembered_with_mine(served):
    golden, mine = record_linear(served, "golden"), record_linear(served, "mine", scale=2.0)
    comm = opened(desk.Desk, served)
    before = comm.ask(op="runs", folders=[""], name="")["folders"][0]["runs"]
    assert {(run["verdict"], run["against"]) for run in before} == {("", "")}
    opened(desk.Tab, served).ask(op="open", golden=str(golden), mine=str(mine))
    after = comm.ask(op="runs", folders=[""], name="")["folders"][0]["runs"]
    assert {run["name"]: (run["verdict"], run["against"]) for run in after} == {
        "golden": ("", ""),
        "mine": ("diverged", "golden"),
    }


def test_a_damaged_run_is_listed_and_stops_nothing(served):
    good = record_linear(served, "good")
    bad = record_linear(served, "bad")
    (bad / fmt.MARKER).write_text("{", encoding="utf-8")
    for index in bad.glob("rank*/index.sqlite"):
        index.write_bytes(b"no database")
    [folder] = opened(desk.Desk, served).ask(op="runs", folders=[""], name="")["folders"]
    by_name = {run["name"]: run for run in folder["runs"]}
    assert by_name["bad"]["state"] == "incomplete"
    assert by_name["bad"]["records"] is None
    assert by_name["good"]["path"] == str(good)


def test_our_html_pages_are_listed_as_reports_and_no_others(served):
    report = ld.compare(record_linear(served, "golden"), record_linear(served, "mine", scale=2.0))
    report.to_html(served / "report.html")
    (served / "page.html").write_text("<h1>of someone else</h1>", encoding="utf-8")
    comm = opened(desk.Desk, served)
    runs, reports = comm.ask(op="runs", folders=["", "sub"], name="")["folders"]
    assert (runs["kind"], reports["kind"], reports["folder"]) == ("run", "report", "/")
    assert [(one["name"], one["place"]) for one in reports["runs"]] == [
        ("report.html", "report.html")
    ]
    assert "error" in comm.ask(op="delete", path=str(served / "page.html"))
    assert (served / "page.html").exists()
    comm.ask(op="delete", path=str(served / "report.html"))
    assert not (served / "report.html").exists()


def test_a_reports_file_opens_as_its_page_and_runs_no_script_but_ours(served):
    report = ld.compare(record_linear(served, "golden"), record_linear(served, "mine", scale=2.0))
    plain, saved = report.to_html(served / "plain.html"), ld.export(report, served / "saved.html")
    comm = opened(desk.Tab, served)
    answer = comm.ask(op="open", golden="plain.html", mine="")
    assert (answer["title"], answer["page"], answer["scripts"]) == (
        "plain.html",
        plain.read_text(encoding="utf-8"),
        False,
    )
    text = saved.read_text(encoding="utf-8").replace("<main>", "<script>alert(1)</script><main>")
    saved.write_text(text, encoding="utf-8")
    answer = comm.ask(op="open", golden="saved.html", mine="")
    assert answer["scripts"]
    assert "alert(1)" not in answer["page"]
    assert (
        re.search('id="saved">(.*?)<', answer["page"])[1] == re.search('id="saved">(.*?)<', text)[1]
    )
    (served / "page.html").write_text("<h1>of someone else</h1>", encoding="utf-8")
    answer = comm.ask(op="open", golden="page.html", mine="")
    assert answer["error"] == "page.html was not written by llmdebug"


def test_delete_takes_a_run_from_disk_and_nothing_else(served):
    path = record_linear(served, "golden")
    comm = opened(desk.Desk, served)
    assert comm.ask(op="delete", path=str(path)) == {"re": 7, "path": str(path)}
    assert not path.exists()
    (served / "mine").mkdir()
    (served / "mine" / "work.npy").write_bytes(b"")
    assert "error" in comm.ask(op="delete", path=str(served / "mine"))
    assert (served / "mine" / "work.npy").exists()


def test_a_tab_opens_a_run_and_then_speaks_the_explorers_language(served):
    path = record_linear(served, "golden")
    comm = opened(desk.Tab, served)
    assert "error" in comm.ask(op="rows")
    answer = comm.ask(op="open", golden=path.relative_to(served).as_posix(), mine="")
    assert answer["title"] == "Run golden"
    assert answer["traits"]["snapshot"]["kind"] == "run"
    assert answer["code"].strip()
    assert comm.ask(op="children", parent=-1, start=0, n=9)["total"] == 1


def test_a_tab_compares_two_runs(served):
    golden, mine = record_linear(served, "golden"), record_linear(served, "mine", scale=2.0)
    answer = opened(desk.Tab, served).ask(op="open", golden=str(golden), mine=str(mine))
    assert answer["traits"]["snapshot"]["verdict"] == "diverged"
    assert answer["traits"]["selected"] == answer["traits"]["snapshot"]["first_bad"]


def test_what_can_not_be_opened_is_said_in_one_line(served):
    (served / "empty").mkdir()
    answer = opened(desk.Tab, served).ask(op="open", golden="empty", mine="")
    assert "empty" in answer["error"]
    assert "\n" not in answer["error"]


def test_listing_loads_no_torch():
    code = (
        "import sys, llmdebug_nb.notebook.desk; sys.exit('torch' in sys.modules or "
        "'ipywidgets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- how far a run is ---------------------------------------------------------------------------


def test_progress_agrees_with_the_run(served):
    path = record_linear(served, "golden")
    info, now = ld.open_run(path).info(), progress(path)
    assert (now.bytes, now.records, now.steps) == (info["bytes"], info["records"], info["steps"])


def test_progress_follows_a_recording(served, monkeypatch):
    monkeypatch.setattr(progress_module, "_COPY_RATE", float("inf"))
    model = torch.nn.Linear(4, 4)
    with ld.dump(model, name="live", tokens="all", path=str(served)) as run:
        assert run.path is not None
        assert progress(run.path).state == "recording"
        model(torch.ones(2, 4))
        first = progress(run.path)
        model(torch.zeros(2, 4))
        second = progress(run.path)
    assert (first.steps, second.steps) == (1, 2)
    assert second.bytes > first.bytes
    assert progress(run.path).state == "complete"


def test_a_large_index_that_is_being_written_is_not_read_at_every_look(served, monkeypatch):
    model = torch.nn.Linear(4, 4)
    with ld.dump(model, name="live", tokens="all", path=str(served)) as run:
        assert run.path is not None
        model(torch.ones(2, 4))
        monkeypatch.setattr(progress_module, "_COPY_RATE", 1)
        first = progress(run.path)
        model(torch.zeros(2, 4))
        second = progress(run.path)
    assert (first.steps, second.steps) == (1, 1)
    assert second.bytes > first.bytes
    assert progress(run.path).steps == 2


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_killed_recording_is_incomplete(served):
    code = f"""
import os, signal, torch, llmdebug_nb as ld
model = torch.nn.Linear(4, 4)
with ld.dump(model, name="killed", tokens="all", path={str(served)!r}):
    model(torch.ones(2, 4))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    [run] = catalog.runs_in(served)
    old = run.stat().st_mtime - 100
    for file in run.glob("rank*/*"):
        os.utime(file, (old, old))
    now = progress(run)
    assert now.state == "incomplete"
    assert now.steps == 1


def test_the_marker_may_be_hostile(served):
    path = record_linear(served, "golden")
    marker = json.loads((path / fmt.MARKER).read_text(encoding="utf-8"))
    (path / fmt.MARKER).write_text(
        json.dumps({**marker, "created": "<img>", "name": "<b>"}), encoding="utf-8"
    )
    [folder] = opened(desk.Desk, served).ask(op="runs", folders=[""], name="")["folders"]
    assert folder["runs"][0]["name"] == "golden"
    assert folder["runs"][0]["created"] == 0.0
