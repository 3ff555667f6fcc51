"""The explorer's map of layers and tokens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect

from browser import Mount
from explorer_page import row_at, shown, step
from fake_view import FakeView
from llmdebug_nb.notebook.widgets import Explorer


def at_cell(page: Page, layer: int, step: int, layers: int, steps: int) -> dict[str, float]:
    """Return where to click in the map of layers."""
    box = page.locator(".llmdebug-layer-body").bounding_box()
    assert box
    return {"x": (step + 0.5) * box["width"] / steps, "y": (layer + 0.5) * box["height"] / layers}


def test_a_click_in_the_map_goes_to_the_worst_row_of_that_layer_and_token(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    body = page.locator(".llmdebug-layer-body")
    expect(
        page.get_by_role("gridcell", name="model.layers.1 · 1 decode: diverged")
    ).to_be_attached()
    body.click(position=at_cell(page, 4, 3, 6, 4))  # model.norm in the second decode step
    worst = next(
        row["id"]
        for row in view.data
        if row["path"] == "model.norm" and row["step"] == 3 and row["reason"]
    )
    shown(page, worst)
    assert (explorer.position, explorer.selected, explorer.path) == (3, worst, "model.norm")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    expect(
        page.get_by_role("treeitem", name=re.compile("^norm RMSNorm diverged"))
    ).to_have_attribute("aria-selected", "true")


def test_the_map_obeys_arrow_keys_and_enter_and_says_where_they_stand(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    grid = page.get_by_role("grid", name="Error over limit, layer by token")
    expect(grid).to_have_attribute("aria-rowcount", "6")
    expect(grid).to_have_attribute("aria-colcount", "4")
    cell = page.locator(f"[id='{grid.get_attribute('aria-activedescendant')}']")
    expect(cell).to_have_attribute(
        "aria-label",
        re.compile(r"^model.layers.1 · 1 decode: diverged, error 0.31, limit 0.012, 26 ×"),
    )
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown"):
        grid.press(key)
    expect(cell).to_have_attribute("aria-label", re.compile("^lm_head · 2 decode: diverged"))
    expect(page.locator(".llmdebug-told")).to_contain_text("lm_head · 2 decode: diverged")
    grid.press("Enter")
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    expect(step(page, 3)).to_have_attribute("aria-current", "step")
    assert (explorer.position, explorer.path) == (3, "lm_head")
    grid.press("Home")
    expect(cell).to_have_attribute("aria-label", re.compile("^lm_head · warm-up: match"))


def colours(page: Page, layer: int, step: int, layers: int, steps: int) -> set[tuple[int, ...]]:
    """Return the colours in a cell of the map."""
    pixels = page.locator(".llmdebug-layer-cells").evaluate(
        """(el, [layer, step, layers, steps]) => {
          const [w, h] = [el.width / steps, el.height / layers];
          return [...el.getContext('2d').getImageData(step * w, layer * h, w, h).data];
        }""",
        [layer, step, layers, steps],
    )
    return {tuple(pixels[i : i + 4]) for i in range(0, len(pixels), 4)}


class Sparse(FakeView):
    """The first layer was not recorded in the warm-up, and is unmatched in the prefill."""

    def layers(self, request: Any) -> Any:
        answer, buffers = super().layers(request)
        error, limit, row, state = (bytearray(buffer) for buffer in buffers)
        row[0:4], state[0] = (-1).to_bytes(4, "little", signed=True), 0
        state[1] = 1
        error[0:8] = limit[0:8] = np.full(2, np.nan, "<f4").tobytes()
        return answer, [memoryview(part) for part in (error, limit, row, state)]


def test_diverged_unmatched_and_unrecorded_cells_differ_by_more_than_colour(mount: Mount) -> None:
    explorer = Explorer(Sparse(report=True))
    page = mount(explorer)
    expect(page.get_by_role("gridcell", name="model.layers.1 · 1 decode")).to_be_attached()
    nothing, unmatched, fine, bad = (
        colours(page, *cell, 6, 4) for cell in ((0, 0), (0, 1), (1, 1), (2, 2))
    )
    assert {colour[3] for colour in nothing} == {0}
    assert (0, 0, 0, 0) in unmatched  # a frame around nothing
    assert len(unmatched) > 1
    assert len({colour for colour in fine if colour[3] == 255}) == 1
    assert len({colour for colour in bad if colour[3] == 255}) > 1  # a cross in it
    page.locator(".llmdebug-layer-body").hover(position=at_cell(page, 0, 0, 6, 4))
    expect(page.locator(".llmdebug-told")).to_have_text(
        "model.embed_tokens · warm-up: nothing recorded"
    )
    page.locator(".llmdebug-layer-body").click(position=at_cell(page, 0, 0, 6, 4))
    expect(step(page, 0)).to_have_attribute("aria-current", "step")
    page.locator(".llmdebug-layer-body").hover(position=at_cell(page, 0, 1, 6, 4))
    expect(page.locator(".llmdebug-told")).to_have_text("model.embed_tokens · 0 prefill: unmatched")


class Deep(FakeView):
    """A hundred layers and a thousand tokens; the last layer is off in the last one."""

    def layers(self, request: Any) -> Any:
        self.calls.append(("layers", 0))
        state = np.full((100, 1000), 2, "u1")
        state[-1, -1] = 5
        error = np.where(state == 5, 0.5, 0.001).astype("<f4")
        row = np.full(state.shape, 4711, "<i4")
        row[-1, -1] = 3
        arrays = error, np.full(state.shape, 0.01, "<f4"), row, state
        layers = [{"path": f"model.layers.{n}", "type": "Layer", "node": 0} for n in range(100)]
        return {"layers": layers, "steps": 1000}, [memoryview(array.tobytes()) for array in arrays]


def test_a_hundred_layers_and_a_thousand_tokens_come_at_once_and_stay_few_elements(
    mount: Mount,
) -> None:
    view = Deep(report=True, layers=0, steps=1000)
    explorer = Explorer(view)
    page = mount(explorer)
    grid = page.get_by_role("grid", name="Error over limit")
    expect(
        page.get_by_role("gridcell", name="model.layers.99 · 998 decode: diverged")
    ).to_be_attached()
    assert [call for call in view.calls if call[0] == "layers"] == [("layers", 0)]
    assert page.locator(".llmdebug-layers *").count() < 500
    cursor = page.locator(".llmdebug-layer-cursor")
    expect(cursor).to_be_in_viewport()  # the first that diverged
    assert grid.evaluate("el => el.scrollLeft > 0 && el.scrollTop > 0")
    grid.press("Home")
    expect(cursor).to_be_in_viewport()
    assert grid.evaluate("el => el.scrollLeft") == 0
    grid.press("End")
    expect(cursor).to_be_in_viewport()
    width = page.locator(".llmdebug-layer-cells").evaluate("el => el.width")
    assert width < 1300
    grid.press("Enter")
    shown(page, 3)


def test_the_growth_of_the_error_has_a_line_for_each_token_and_a_click_goes_there(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    plot = page.get_by_role(
        "img", name="Error along depth, 1 decode: 3 layers diverged, first model.layers.1"
    )
    expect(plot).to_be_visible()
    expect(plot.locator(".llmdebug-growth-point")).to_have_count(6)
    expect(plot.locator(".llmdebug-growth-bad")).to_have_count(3)
    others = plot.locator(".llmdebug-growth-others").get_attribute("d") or ""
    assert others.count("M") == 3  # four tokens
    expect(plot.locator(".llmdebug-growth-limit")).to_have_attribute("d", re.compile("^M.*L"))
    point = plot.locator(".llmdebug-growth-point[data-layer='5']").bounding_box()
    assert point
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    expect(page.locator(".llmdebug-told")).to_contain_text(
        "lm_head · 1 decode: diverged, error 0.31"
    )
    page.mouse.click(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    assert (explorer.position, explorer.path) == (2, "lm_head")
    step(page, 0).click()
    expect(
        page.get_by_role("img", name="Error along depth, warm-up: no layer diverged")
    ).to_be_visible()


def test_a_run_has_no_map_of_errors(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 72)).to_be_visible()
    expect(page.locator(".llmdebug-layers")).to_have_count(0)
