"""Where the error goes: layers by tokens, and the calls of a layer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect

from browser import Mount
from explorer_page import row_at, shown, token
from fake_view import BROKEN, FakeView
from llmdebug_nb.notebook.widgets import Explorer

LAYERS, STEPS = 6, 4  # of the view


def at_cell(page: Page, layer: int, step: int) -> dict[str, float]:
    """Return where to click."""
    box = page.locator(".llmdebug-time-body").bounding_box()
    assert box
    return {"x": (layer + 0.5) * box["width"] / LAYERS, "y": (step + 0.5) * box["height"] / STEPS}


def test_a_click_on_a_cell_goes_to_the_worst_row_of_that_layer_and_token(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    expect(
        page.get_by_role("gridcell", name="model.layers.1 · 1 decode: diverged, made here")
    ).to_be_attached()
    page.locator(".llmdebug-time-body").click(position=at_cell(page, 4, 3))
    worst = next(
        row["id"]
        for row in view.data
        if row["path"] == "model.norm" and row["step"] == 3 and row["reason"]
    )
    shown(page, worst)
    assert (explorer.position, explorer.selected) == (3, worst)
    expect(token(page)).to_have_text("2 decode")


def test_arrow_keys_and_enter_say_where_they_stand_and_go_there(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    grid = page.get_by_role("grid", name="Where the error goes")
    expect(grid).to_have_attribute("aria-rowcount", str(STEPS))
    expect(grid).to_have_attribute("aria-colcount", str(LAYERS))
    cell = page.locator(f"[id='{grid.get_attribute('aria-activedescendant')}']")
    expect(cell).to_have_attribute(
        "aria-label",
        re.compile(
            r"^model.layers.1 · 1 decode: diverged, made here, error 0.31, limit 0.012, 26 ×"
        ),
    )
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"):
        grid.press(key)
    says = re.compile("^lm_head · 2 decode: diverged, inherited")
    expect(cell).to_have_attribute("aria-label", says)
    expect(page.locator(".llmdebug-told")).to_have_text(says)
    grid.press("Enter")
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    expect(token(page)).to_have_text("2 decode")
    assert explorer.position == 3
    grid.press("Home")
    expect(cell).to_have_attribute("aria-label", re.compile("^model.embed_tokens · 2 decode: "))


def test_the_layer_that_makes_the_error_is_unrolled_and_a_call_leads_to_its_tensor(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    calls = page.get_by_role("toolbar", name="Calls of the layer").get_by_role("button")
    expect(calls.last).to_have_text("down_proj ✗")
    expect(calls.last).to_have_attribute("aria-label", re.compile(f"^{BROKEN}: .*made here"))
    expect(page.locator(".llmdebug-strip-name")).to_have_text("layer 1")
    calls.filter(has_text="up_proj").click()
    expect(page.locator(".llmdebug-place")).to_contain_text("model.layers.1.mlp.up_proj output[0]")
    expect(calls.filter(has_text="up_proj")).to_have_attribute("aria-current", "true")
    calls.filter(has_text="up_proj").press("ArrowRight")
    expect(calls.filter(has_text="act_fn")).to_be_focused()


def test_the_calls_follow_a_tensor_that_is_selected_elsewhere(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    wanted = next(
        row["id"]
        for row in view.data
        if row["path"] == "model.layers.2.mlp.act_fn" and row["step"] == 2
    )
    expect(page.locator(".llmdebug-strip-name")).to_have_text("layer 1")
    page.get_by_label("Filter records").fill("layers.2.mlp.act_fn")
    row_at(page, wanted).click()
    expect(page.locator(".llmdebug-strip-name")).to_have_text("layer 2")
    expect(page.locator(".llmdebug-call[aria-current]")).to_contain_text("act_fn")


def colours(page: Page, layer: int, step: int) -> set[tuple[int, ...]]:
    """Return the colours in a cell."""
    pixels = page.locator(".llmdebug-cells").evaluate(
        """(el, [layer, step, layers, steps]) => {
          const [w, h] = [el.width / layers, el.height / steps];
          const box = [layer * w + 1, step * h + 1, w - 5, h - 5].map(Math.round);
          return [...el.getContext('2d').getImageData(...box).data];
        }""",
        [layer, step, LAYERS, STEPS],
    )
    return {tuple(pixels[i : i + 4]) for i in range(0, len(pixels), 4)}


class Sparse(FakeView):
    """The first layer: not recorded in the warm-up, then unmatched, rewritten, inherited."""

    def layers(self, request: Any) -> Any:
        answer, buffers = super().layers(request)
        error, limit, row, state = (bytearray(buffer) for buffer in buffers[:4])
        row[0:4] = (-1).to_bytes(4, "little", signed=True)
        state[0:4] = bytes((0, 1, 2, 6))
        error[0:12] = limit[0:12] = np.full(3, np.nan, "<f4").tobytes()
        return answer, [*map(memoryview, (error, limit, row, state)), *buffers[4:]]


def test_states_differ_by_more_than_colour(mount: Mount) -> None:
    page = mount(Explorer(Sparse(report=True)))
    expect(page.get_by_role("gridcell", name="model.layers.1 · 1 decode")).to_be_attached()
    nothing, unmatched, rewritten, inherited = (colours(page, 0, step) for step in range(4))
    fine, made = colours(page, 1, 1), colours(page, 2, 2)
    assert {colour[3] for colour in nothing} == {0}
    assert len(unmatched) > 1  # hatched
    assert len(rewritten) > 1  # striped
    assert len(fine) == len(inherited) == 1
    assert fine != inherited
    assert len(made) > 1  # a cross in it
    body = page.locator(".llmdebug-time-body")
    body.hover(position=at_cell(page, 0, 0))
    told = page.locator(".llmdebug-told")
    expect(told).to_have_text("model.embed_tokens · warm-up: nothing recorded")
    body.click(position=at_cell(page, 0, 0))
    expect(token(page)).to_have_text("warm-up")
    body.hover(position=at_cell(page, 0, 2))
    expect(told).to_have_text("model.embed_tokens · 1 decode: written otherwise, equal in effect")


class Deep(FakeView):
    """A thousand layers and a hundred tokens; the last layer is off in the last one."""

    def layers(self, request: Any) -> Any:
        self.asked.append(("layers", 0))
        state = np.full((1000, 100), 3, "u1")
        state[-1, -1] = 6
        error = np.where(state == 6, 0.5, 0.001).astype("<f4")
        row = np.full(state.shape, 2, "<i4")
        row[-1, -1] = 3
        share, differing = np.full(state.shape, np.nan, "<f4"), np.zeros(state.shape, "<i4")
        arrays = error, np.full(state.shape, 0.01, "<f4"), row, state, share, differing
        layers = [{"path": f"model.layers.{n}", "type": "Layer", "node": 0} for n in range(1000)]
        answer = {"layers": layers, "steps": 100, "differing": [""]}
        return answer, [memoryview(array.tobytes()) for array in arrays]

    def calls(self, request: Any) -> Any:
        return {"cells": [], "total": 0}


def test_a_hundred_thousand_cells_come_at_once_zoom_and_stay_few_elements(mount: Mount) -> None:
    view = Deep(report=True, layers=0, steps=100)
    page = mount(Explorer(view))
    grid = page.get_by_role("grid", name="Where the error goes")
    cell = page.get_by_role("gridcell", name="model.layers.999 · 98 decode: diverged")
    expect(cell).to_be_attached()
    assert [call for call in view.asked if call[0] == "layers"] == [("layers", 0)]
    assert page.locator(".llmdebug-timeline *").count() < 400
    cursor = page.locator(".llmdebug-cell-cursor")
    expect(cursor).to_be_in_viewport()  # the first that diverged
    assert grid.evaluate("el => el.scrollLeft > 0 && el.scrollTop > 0")
    grid.press("Home")
    expect(cursor).to_be_in_viewport()
    assert grid.evaluate("el => el.scrollLeft") == 0
    grid.press("End")
    width = "el => el.scrollWidth"
    before = grid.evaluate(width)
    for _ in range(3):
        grid.press("+")
    assert grid.evaluate(width) > 7 * before
    expect(cursor).to_be_in_viewport()
    assert page.locator(".llmdebug-cells").evaluate("el => el.width") < 1300
    grid.press("0")
    assert grid.evaluate(width) == before
    grid.press("Enter")
    shown(page, 3)


def test_a_run_has_no_timeline_of_errors(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 72)).to_be_visible()
    expect(page.locator(".llmdebug-timeline")).to_have_count(0)


def test_another_theme_repaints_the_cells(mount: Mount, page: Page) -> None:
    page.emulate_media(color_scheme="light")
    mount(Explorer(FakeView(report=True)))
    expect(page.get_by_role("gridcell", name="model.layers.1 · 1 decode")).to_be_attached()
    expect(page.locator(".llmdebug-call").first).to_be_visible()
    before = colours(page, 1, 1)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        """before => {
          const el = document.querySelector('.llmdebug-cells');
          const x = 1.5 * el.width / 6, y = 1.3 * el.height / 4;
          return [...el.getContext('2d').getImageData(x, y, 1, 1).data].join() !== before;
        }""",
        arg=",".join(map(str, next(iter(before)))),
    )
