"""Runs, reports, findings and differences as a cell's value: in terminals and notebooks."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import llmdebug_nb as ld
from llmdebug_nb.notebook import display
from llmdebug_nb.show import bundle
from models import llama, prompt

BROKEN = "model.layers.1.mlp.act_fn"
WIDGET = "application/vnd.jupyter.widget-view+json"
RECORD = f"""
import copy, llmdebug_nb as ld
from models import llama, prompt
model = llama(); broken = copy.deepcopy(model)
broken.get_submodule("{BROKEN}").register_forward_hook(lambda module, args, out: out * 1.01)
with ld.dump(model, name="golden") as golden: model(prompt())
with ld.dump(broken, name="mine") as mine: broken(prompt())
report = ld.compare(golden, mine)
"""
SHOWN = {
    "golden": "Run golden",
    "report": "golden against mine: diverged",
    "report.findings[0]": f"{BROKEN} (SiLUActivation), step 0: introduced",
    "report.first_divergence": f"diverged: {BROKEN} output[0] step 0, error 0.01 (limit ",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMDEBUG_RUNS", str(tmp_path_factory.mktemp("shown")))
        exec(RECORD, names)
    return names["report"]


@pytest.fixture
def shell(report):
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "llmdebug_nb")  # as if no cell had imported it yet
        shell.run_cell("import llmdebug_nb")
    shell.user_ns.update(report=report, golden=report.golden)
    yield shell
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(("cell", "text"), SHOWN.items())
def test_a_terminal_shows_text_without_any_magic_loaded(shell, capsys, cell, text):
    assert shell.run_cell(cell).success
    assert text in capsys.readouterr().out


def test_lists_of_them_are_a_line_each(shell, capsys):
    shell.run_cell("[report, *report.findings, *report.differences[:3]]")
    _, *lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 5
    assert lines[0] == "[<Report: golden against mine, diverged, 1 finding>,"
    assert f"<introduced: {BROKEN} (SiLUActivation), step 0; " in lines[1]


def test_a_difference_has_both_sides_and_its_metrics(report):
    data, _ = display.bundle(report.first_divergence)
    assert data["text/plain"].count(BROKEN) == 3
    for text in data.values():
        assert "cosine_similarity" in text
        assert "float32" in text
    alone = next((d for d in report.differences if d.verdict == "unmatched"), report.differences[0])
    assert set(display.bundle(alone)[0]) == {"text/plain", "text/html"}


@pytest.mark.slow
def test_a_notebook_shows_the_explorer_and_keeps_text_and_html(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMDEBUG_RUNS", str(tmp_path / "runs"))
    cells = [RECORD, *SHOWN, "report.findings"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    here = {"metadata": {"path": str(Path(__file__).parent)}}
    NotebookClient(notebook, timeout=240, resources=here).execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells[1:]]
    states = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    for output, text in zip(outputs, SHOWN.values(), strict=False):
        assert text in output.data["text/plain"]
        assert BROKEN in output.data["text/html"] or text == "Run golden"
        assert "<script" not in output.data["text/html"]
        assert output.data[WIDGET]["model_id"] in states
    finding, row = (states[outputs[at].data[WIDGET]["model_id"]]["state"] for at in (2, 3))
    assert finding["selected"] == row["selected"] == row["snapshot"]["first_bad"]
    assert "text/html" not in outputs[4].data  # a list is text


def test_a_row_finds_its_report_while_there_is_one(report):
    row = report.differences[3]
    assert row.comparison.report is report
    model = llama()
    with ld.dump(model, name="a") as run:
        model(prompt())
    other = ld.compare(run, run)
    row = other.differences[3]
    assert row.comparison.report is other
    del other
    gc.collect()
    assert row.comparison.report is None
    assert set(display.bundle(row)[0]) == {"text/plain", "text/html"}


def test_without_the_front_end_text_and_html_are_left(report, monkeypatch, tmp_path):
    monkeypatch.setattr(display, "_has_kernel", lambda: True)
    monkeypatch.setattr(bundle.bundle, "__defaults__", (tmp_path / "widget.js",))
    data, _ = display.bundle(report)
    assert set(data) == {"text/plain", "text/html"}
    assert "widget.js is missing" in data["text/plain"]
