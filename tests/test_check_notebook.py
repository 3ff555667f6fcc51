"""The tables of `%llmperturb` and `%llmdoctor` in a real notebook: whole, without markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from lab_server import Lab, show_theme

SCREENSHOTS = Path(__file__).parent.parent / "out"
MODEL = """%load_ext llmdebug_nb
import torch
from models import llama

golden, mine, ids = llama(), llama(), torch.arange(12).reshape(1, -1)
mine.config.rms_norm_eps = 1e-3
mine.config.architectures = ["<b>no markup" + "Name" * 60]
with torch.no_grad():
    mine.model.layers[0].mlp.up_proj.weight[3] = 0
"""
PERTURB, DOCTOR = "%llmperturb golden ids --kinds ulp", "%llmdoctor golden mine"
WRONG = "%llmperturb golden nothing_of_that_name"
# columns of figures and of text: how they are aligned, and whether they are broken
LOOK = """cells => cells.map(cell => {
  const style = getComputedStyle(cell);
  return [style.textAlign, style.whiteSpace === 'nowrap'];
})"""


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_the_tables_of_checks_are_whole(lab: Lab, page: Page, app: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 1200})
    notebook = lab.write_notebook(f"checks_{app}.ipynb", MODEL, PERTURB, DOCTOR, WRONG)
    lab.open(page, notebook, app)
    for index in range(4):
        lab.run_cell(page, index)
    perturbed, doctored, refused = (lab.finished(page, index) for index in (1, 2, 3))

    expect(perturbed).to_contain_text("perturb: how far the result (logits) moves")
    row = perturbed.locator("table tr").nth(1).locator("td")
    text, figure = ["left", False], ["right", True]
    assert row.evaluate_all(LOOK) == [text, figure, figure, figure, text]
    expect(row.last).to_contain_text("modeling_llama.py")
    _is_whole(page, perturbed)
    _picture(page, perturbed, app, "perturb")

    expect(doctored).to_contain_text("doctor: suspicious: 2 suspicious differences, 1 that is")
    heads = doctored.locator("table tr").first.locator("th")
    assert heads.evaluate_all(LOOK) == [["left", True]] * 6
    expect(doctored.locator("table")).to_contain_text("config: rms_norm_eps")
    expect(doctored.locator("table")).to_contain_text("<b>no markup")
    assert doctored.locator("table b").count() == 0
    _is_whole(page, doctored)
    _picture(page, doctored, app, "doctor")

    expect(refused).to_contain_text("nothing_of_that_name")
    assert len(refused.inner_text().strip().splitlines()) <= 2


def _is_whole(page: Page, output: Locator) -> None:
    """Check that no cell is cut off at the right."""
    room = _right(page.locator(".jp-Notebook"))
    cells = output.locator("td, th")
    assert all(_right(cells.nth(at)) <= room for at in range(cells.count()))
    assert output.evaluate("it => it.scrollWidth <= it.clientWidth")


def _right(what: Locator) -> float:
    return float(what.evaluate("cell => cell.getBoundingClientRect().right"))


def _picture(page: Page, output: Locator, app: str, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    output.scroll_into_view_if_needed()
    for theme in ("dark", "light"):
        if app == "lab":
            show_theme(page, theme)
        page.screenshot(path=SCREENSHOTS / f"check_{name}_{app}_{theme}.png")
