"""The table of a check of operators in a real notebook: worst first, with buttons that work."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from lab_server import Lab, show_theme

SCREENSHOTS = Path(__file__).parent.parent / "out"
MODEL = """%load_ext llmdebug_nb
import torch, llmdebug_nb as ld
from llmdebug_nb.store.run import Run
from models import llama

model = llama()
load = Run.load
def planted(run, record):  # one lane of the activation is wrong
    value = load(run, record)
    if (record.op, record.site.role) == ("Functional.silu", "output"):
        value[..., 3::8] *= 1.01
    return value
Run.load = planted
with ld.dump(model, name="NAME", mode="api"):
    model(torch.arange(12).reshape(1, -1))
"""
# an operator whose name no table has room for
LONG = """import dataclasses
check = ld.opcheck("NAME")
more = "_of_a_name_that_goes_on" * 9
calls = [dataclasses.replace(call, op=call.op + more) for call in check.result.calls]
check.result = dataclasses.replace(check.result, calls=tuple(calls))
check
"""
CELLS = (MODEL, "%llmopcheck NAME -rerun", LONG)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_the_worst_operator_is_first_and_its_buttons_show_it(
    lab: Lab, page: Page, app: str
) -> None:
    page.set_viewport_size({"width": 1280, "height": 1700})
    sources = [cell.replace("NAME", f"ops_{app}") for cell in CELLS]
    notebook = lab.write_notebook(f"opcheck_{app}.ipynb", *sources)
    lab.open(page, notebook, app)
    lab.run_cell(page)
    lab.run_cell(page, 1)
    output = lab.finished(page, 1)
    grid = output.locator(".widget-gridbox")
    expect(output).to_contain_text(f"opcheck ops_{app}: wrong: 2 wrong")
    expect(output).to_contain_text("here the operator gives the right one")
    expect(grid.locator(".widget-html").nth(8)).to_have_text("Functional.silu")
    _is_whole(page, output)

    grid.get_by_role("button", name="repro").first.click()
    expect(output).to_contain_text("torch.nn.functional.silu")
    _picture(page, app, "repro")
    grid.get_by_role("button", name="open in explorer").first.click()
    expect(output.locator(".llmdebug-place")).to_contain_text("mlp.act_fn/Functional.silu")
    expect(output).not_to_contain_text("torch.nn.functional.silu")  # it takes the script's place
    _picture(page, app, "explorer")

    lab.run_cell(page, 2)
    long = lab.finished(page, 2)
    expect(long.locator(".widget-gridbox")).to_contain_text("Functional.silu_of_a_name")
    _is_whole(page, long)
    long.scroll_into_view_if_needed()
    _picture(page, app, "long")


def _is_whole(page: Page, output: Locator) -> None:
    """Check that no button is cut off, and that no name covers the figures beside it."""
    buttons = output.locator(".widget-gridbox button")
    expect(buttons.last).to_be_visible()
    assert _right(buttons.last) <= _right(page.locator(".jp-Notebook"))
    name, figure = (output.locator(".widget-gridbox .widget-html").nth(at) for at in (8, 9))
    assert name.evaluate("cell => getComputedStyle(cell).overflowX") == "hidden"
    assert _right(name) <= _left(figure)


def _left(what: Locator) -> float:
    return float(what.evaluate("cell => cell.getBoundingClientRect().left"))


def _right(what: Locator) -> float:
    return float(what.evaluate("cell => cell.getBoundingClientRect().right"))


def _picture(page: Page, app: str, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    for theme in ("dark", "light"):
        if app == "lab":
            show_theme(page, theme)
        page.screenshot(path=SCREENSHOTS / f"opcheck_{name}_{app}_{theme}.png")
