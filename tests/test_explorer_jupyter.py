"""The explorer in JupyterLab and in Notebook 7, with a real kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import llmdebug_nb as ld
from browser import click_value, violations
from lab_server import CONNECTED, Lab, show_theme

SCREENSHOTS = Path(__file__).parent.parent / "out"
CELL = """\
from fake_view import FakeView
from llmdebug_nb.notebook.widgets import Explorer
explorer = Explorer(FakeView(report=True, layers=8, steps=12))
explorer"""
TURN_SAVING_OF_WIDGETS = (
    "() => window.jupyterapp.commands.execute("
    "'@jupyter-widgets/jupyterlab-manager:saveWidgetState')"
)
COMPARED = """\
import llmdebug_nb as ld
ld.compare("llmdebug_runs/first", "llmdebug_runs/second")"""
RUN = """\
import llmdebug_nb as ld
run_explorer = ld.explore("llmdebug_runs/small")
run_explorer"""


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_cell_shows_an_explorer_that_page_and_kernel_share(
    lab: Lab, page: Page, app: str
) -> None:
    outside: list[str] = []
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((lab.url, lab.url.replace("http", "ws"), "data:", "blob:"))
            else outside.append(request.url)
        ),
    )
    notebook = lab.write_notebook(
        f"explorer_{app}.ipynb",
        CELL,
        "explorer.position = 4; explorer.path = ''",
        "assert False, 'do not delete me'",
    )
    lab.open(page, notebook, app)
    lab.run_cell(page)
    SCREENSHOTS.mkdir(exist_ok=True)

    page.get_by_role("button", name="Records and model tree").click(timeout=60_000)
    page.locator(".llmdebug-time-names span", has_text="2 decode").click()
    expect(page.locator(".llmdebug-time-now")).to_have_text("2 decode")
    lab.kernel_comes_to(notebook, "explorer.position", "3")

    page.get_by_role("treeitem", name="model").click()
    page.get_by_role("treeitem", name="layers").click()
    page.get_by_role("treeitem", name="1 DecoderLayer").click()
    expect(page.locator(".llmdebug-total")).to_have_text("22 records")
    lab.kernel_comes_to(notebook, "explorer.path", "'model.layers.1'")

    page.get_by_label("Filter records").fill("down_proj")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    record = page.locator(".llmdebug-record", has_text="down_proj out[0]")
    selected = record.get_attribute("data-row") or ""
    record.click()
    expect(page.locator(".llmdebug-place")).to_contain_text("model.layers.1.mlp.down_proj")
    expect(page.locator(".llmdebug-place")).to_contain_text(f"#{selected} ·")
    expect(page.locator(".llmdebug-record[aria-selected=true]")).to_have_attribute(
        "data-row", selected
    )
    lab.kernel_comes_to(notebook, "explorer.selected", selected)
    page.get_by_role("tab", name="difference").click()
    click_value(page, r"\[0, 0, \d+\] = ")
    page.screenshot(path=SCREENSHOTS / f"explorer_{app}.png")

    # keys of the notebook's command mode: the cell stays, and the explorer moves
    page.get_by_role("grid", name="Records").press("d")
    page.get_by_role("grid", name="Records").press("d")
    page.get_by_role("grid", name="Records").press("x")
    page.get_by_role("grid", name="Records").press("N")
    expect(page.locator(".llmdebug-record[aria-selected=true]")).not_to_have_attribute(
        "data-row", selected
    )
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 3

    lab.run_cell(page, 1)
    expect(page.locator(".llmdebug-time-now")).to_have_text("3 decode")
    show_theme(page, "dark")
    page.locator(".llmdebug-main").scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"explorer_{app}_dark.png")
    show_theme(page, "light")
    assert outside == []


def test_an_answer_comes_while_a_cell_runs(lab: Lab, page: Page) -> None:
    notebook = lab.write_notebook(
        "busy.ipynb", CELL, "import time\nprint('started')\nwhile True: time.sleep(0.05)"
    )
    lab.open(page, notebook)
    lab.run_cell(page)
    # the first requests of a widget may wait for the running cell; later ones are answered
    page.get_by_role("button", name="Records and model tree").click(timeout=60_000)
    page.get_by_role("treeitem", name="down_proj").click(timeout=60_000)
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    lab.run_cell(page, 1)
    expect(page.locator(".jp-OutputArea-output", has_text="started")).to_be_visible()
    page.get_by_role("treeitem", name="1 DecoderLayer").click()
    expect(page.locator(".llmdebug-total")).to_have_text("22 records")


@pytest.fixture(scope="module")
def small(lab: Lab) -> None:
    """Record 3 tokens, the last one with NaN, in the folder that Jupyter serves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with ld.dump(model, name="small", tokens="all", path=str(lab.root / "llmdebug_runs")):
        for scale in (1.0, 2.0, float("nan")):
            model(scale * torch.ones(2, 8))


def save(page: Page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


def reload(page: Page, widget: Locator) -> None:
    """Load the page anew until a widget of the notebook is shown, three times at most.

    On a busy machine, Jupyter's widget manager may draw an output before it has read the models
    that the notebook holds. Then it says so, and does not try again.
    """
    for _ in range(3):
        page.reload()
        lost = page.get_by_text("Error displaying widget: model not found")
        expect(widget.or_(lost).first).to_be_visible(timeout=60_000)
        if not lost.is_visible():
            return


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_runs_explorer_follows_the_theme_survives_a_reload_and_says_if_its_kernel_is_gone(
    lab: Lab, page: Page, app: str
) -> None:
    notebook = lab.write_notebook(f"run_{app}.ipynb", RUN)
    lab.open(page, notebook, app)
    lab.run_cell(page)
    status, total = (
        page.get_by_role("status").filter(has_text="kernel"),
        page.locator(".llmdebug-total"),
    )

    # the main path: token, filter by a figure, module, tensor, value
    expect(total).to_have_text("8 records", timeout=60_000)
    page.get_by_role("toolbar", name="Token stepper").get_by_text("2 forward").click()
    page.get_by_label("Filter records").fill("nan")
    expect(total).to_have_text("8 records")
    page.get_by_label("Filter records").fill("")
    page.get_by_role("treeitem", name="2 Linear").click()
    expect(total).to_have_text("2 records")
    page.locator(".llmdebug-record", has_text="out[0]").click()
    expect(page.locator(".llmdebug-place")).to_contain_text("output[0]")
    click_value(page, r"\[\d, \d\] = nan")

    explorer = page.locator(".llmdebug")
    light = explorer.evaluate("el => getComputedStyle(el).backgroundColor")
    show_theme(page, "dark")
    expect(explorer).not_to_have_css("background-color", light)
    show_theme(page, "light")
    expect(explorer).to_have_css("background-color", light)

    save(page)
    page.reload()
    expect(page.locator(".llmdebug-step[aria-current]")).to_contain_text(
        "2 forward", timeout=60_000
    )
    # until its kernel is connected, the notebook shows what it was saved with
    expect(page.locator(".llmdebug-saved")).to_have_count(0, timeout=60_000)
    expect(total).to_have_text("2 records")
    expect(page.locator(".llmdebug-place")).to_contain_text("output[0]")

    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )
    expect(status).to_contain_text(
        "the kernel was restarted or shut down: run this cell again", timeout=60_000
    )
    expect(page.get_by_role("button", name="Next record")).to_be_disabled()
    expect(page.get_by_label("Filter records")).to_be_disabled()
    expect(page.locator("h2", has_text="Run small")).to_be_visible()
    page.wait_for_function(CONNECTED, timeout=60_000)
    lab.run_cell(page)
    expect(total).to_have_text("8 records", timeout=60_000)
    expect(page.get_by_role("button", name="Next record")).to_be_enabled()


@pytest.mark.usefixtures("small")
def test_a_notebook_that_was_saved_with_its_widgets_opens_without_their_kernel(
    lab: Lab, page: Page
) -> None:
    notebook = lab.write_notebook("saved.ipynb", RUN)
    lab.open(page, notebook)
    lab.run_cell(page)
    expect(page.locator(".llmdebug-total")).to_have_text("8 records", timeout=60_000)
    page.evaluate(TURN_SAVING_OF_WIDGETS)
    save(page)
    page.evaluate(TURN_SAVING_OF_WIDGETS)  # off again: the setting is of all notebooks
    lab.shut_down("notebook")
    title = page.locator("h2", has_text="Run small")
    reload(page, title)
    expect(title).to_be_visible()
    expect(
        page.get_by_role("toolbar", name="Token stepper").get_by_text("2 forward")
    ).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="run this cell again")).to_be_visible()
    expect(page.get_by_role("button", name="Next record")).to_be_disabled()
    lab.run_cell(page)
    expect(page.locator(".llmdebug-total")).to_have_text("8 records", timeout=60_000)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_saved_notebook_shows_its_explorer_without_a_kernel_and_a_run_makes_it_live(
    lab: Lab, page: Page, app: str
) -> None:
    folder = lab.root / "llmdebug_runs"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    for name in ("first", "second"):
        shutil.rmtree(folder / name, ignore_errors=True)
        with ld.dump(model, name=name, path=str(folder)):
            model(torch.ones(2, 8))
        model[0].weight.data[3] = 2.0
    notebook = lab.write_notebook(f"reopened_{app}.ipynb", COMPARED)
    lab.open(page, notebook, app)
    lab.run_cell(page)
    head, calls = page.locator(".llmdebug-answer h2"), page.locator(".llmdebug-call")
    expect(head).to_contain_text("0 (Linear)", timeout=60_000)
    expect(page.get_by_role("button", name="Prove")).to_be_visible()
    said = head.text_content() or ""
    save(page)
    lab.shut_down("notebook")

    page.reload()
    expect(head).to_have_text(said, timeout=60_000)
    expect(calls.first).to_be_visible()
    expect(page.locator(".llmdebug-trio .llmdebug-canvas[aria-busy=false]")).to_have_count(3)
    expect(page.get_by_text("Error displaying widget")).to_be_hidden()
    expect(page.get_by_role("button", name="Prove")).to_be_hidden()  # there is no model
    page.get_by_role("button", name="Records and model tree").click()
    page.locator(".llmdebug-record", has_text="out[0]").first.click()
    expect(page.locator(".llmdebug-place")).to_contain_text("output[0]")
    assert violations(page, ".llmdebug") == []
    page.screenshot(path=SCREENSHOTS / f"reopened_{app}.png")

    page.wait_for_function(CONNECTED, timeout=60_000)
    lab.run_cell(page)
    expect(page.get_by_role("button", name="Prove")).to_be_visible(timeout=60_000)


def test_the_blamed_line_opens_in_the_editor_and_the_explorer_pops_out_into_a_tab(
    lab: Lab, page: Page
) -> None:
    (lab.root / "port.py").write_text("".join(f"line_{n} = {n}\n" for n in range(1, 61)))
    lab.open(page, lab.write_notebook("opened.ipynb", CELL))
    lab.run_cell(page)
    page.get_by_role("button", name="Pop out").click(timeout=60_000)
    tab = page.locator(".jp-llmdebug-tab")
    expect(tab.locator(".llmdebug-answer h2")).to_contain_text("Made in port.py:30")
    tab.get_by_role("radio", name="lm_head").click()
    inside = page.locator(".jp-Notebook .llmdebug-place")
    expect(inside).to_contain_text("lm_head output[0]")  # both views show one explorer
    tab.get_by_role("radio", name="port.py:30").click()
    tab.get_by_role("button", name="Open line").click()
    expect(page.locator(".jp-FileEditor")).to_contain_text("line_30 = 30", timeout=60_000)
    expect(page.get_by_text("Ln 30, Col 1")).to_be_visible()
