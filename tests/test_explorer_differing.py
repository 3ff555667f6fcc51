"""Which tokens differ, as a user sees it: in the answer, the list, the tensor and the timeline."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import Page, expect

import llmdebug_nb as ld
from browser import Mount
from explorer_page import row_at
from llmdebug_nb.notebook.widgets import Explorer
from models import llama, prompt
from recordings import recorded_both

TOKENS, FIRST = 40, 12
WHERE = "tokens 12-39 of 40"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ld.Report:
    """Layer 1 of mine is off from token 12 on."""

    def wrong(_module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :FIRST], out[:, FIRST:] * 1.3], 1)

    mine = llama()
    mine.get_submodule("model.layers.1.mlp.act_fn").register_forward_hook(wrong)
    folder = tmp_path_factory.mktemp("runs")
    runs = recorded_both(llama(), mine, lambda m: m(prompt(TOKENS)), path=folder)
    return ld.compare(*runs, progress=False)


def filled(page: Page, layer: int, layers: int) -> float:
    """Return which part of a cell has the colour at its foot, beside the cross in it."""
    column = page.locator(".llmdebug-cells").evaluate(
        """(el, [layer, layers]) => {
          const x = Math.round((layer + 0.15) * el.width / layers);
          const height = Math.round(16 * window.devicePixelRatio);
          return [...el.getContext('2d').getImageData(x, 0, 1, height).data];
        }""",
        [layer, layers],
    )
    colours = [tuple(column[i : i + 4]) for i in range(0, len(column), 4)]
    return colours.count(colours[-1]) / len(colours)


def test_the_answer_the_list_and_the_tensor_say_which_tokens_differ(
    mount: Mount, report: ld.Report
) -> None:
    page = mount(Explorer(report.view()))
    reasons = page.locator(".llmdebug-reasons")
    expect(reasons).to_contain_text("Tokens 12-39 of 40 differ.")
    differing = page.locator(".llmdebug-differing")
    expect(differing).to_have_text(f"differs at {WHERE}")
    expect(differing).to_have_attribute("title", re.compile("count from 0"))
    blamed = report.findings[0].difference
    assert blamed is not None
    cells = row_at(page, blamed.index).get_by_role("gridcell")
    expect(cells.filter(has_text="12-39")).to_have_attribute("title", WHERE)
    agreeing = next(d for d in report.differences if d.site.path == "model.embed_tokens")
    page.get_by_label("Filter records").fill("embed_tokens")
    expect(row_at(page, agreeing.index)).not_to_contain_text("12-39")


def test_a_cell_of_the_timeline_is_filled_as_far_as_its_tokens_differ(
    mount: Mount, report: ld.Report
) -> None:
    page = mount(Explorer(report.view()))
    cell = page.locator(".llmdebug-cell-cursor")
    expect(cell).to_have_attribute(
        "aria-label", re.compile(rf"^model\.layers\.1 .*made here.*, {WHERE}$")
    )
    names = [layer["path"] for layer in report.view().layer_errors.layers]
    share = (TOKENS - FIRST) / TOKENS
    assert filled(page, names.index("model.layers.1"), len(names)) == pytest.approx(share, abs=0.07)
    assert filled(page, names.index("model.norm"), len(names)) == pytest.approx(share, abs=0.07)
    assert filled(page, names.index("model.layers.0"), len(names)) == 1.0  # right throughout
    page.get_by_role("toolbar").get_by_role("button", name="act_fn").hover()
    expect(page.locator(".llmdebug-told")).to_have_text(re.compile(f"act_fn: .*, {WHERE}$"))
    expect(page.locator(".llmdebug-time-legend")).to_have_attribute(
        "title", "A cell is filled from below as far as its tokens differ"
    )
