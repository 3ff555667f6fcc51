"""The explorer's tensor panel: tabs, heat map, heads, histograms, curves and errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from browser import Mount, from_python
from explorer_page import SELECTED, clipboard, more, row_at, shown
from fake_view import HOSTILE, FakeView
from llmdebug_nb.notebook.widgets import Explorer


def test_the_producer_is_one_click_away(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    more(page)
    at = int(page.locator(SELECTED).get_attribute("data-row") or 0)
    page.locator(".llmdebug-producer").click()
    shown(page, at - 1)


def test_the_dataflow_is_walked_forwards_link_by_link(mount: Mount) -> None:
    explorer = Explorer(FakeView(), selected=74)
    page = mount(explorer)
    page.get_by_role("list", name="used to compute").get_by_role("button").click()
    shown(page, 75)
    takers = page.get_by_role("list", name="read by", exact=True)
    expect(takers).to_contain_text("and 7 more")
    takers.get_by_role("button").press("Enter")
    shown(page, 76)
    page.locator(".llmdebug-producer").click()
    shown(page, 75)
    assert explorer.selected == 75


@pytest.mark.parametrize("report", [False, True])
def test_the_curve_over_steps_leads_to_the_same_tensor_at_another_step(
    mount: Mount, report: bool
) -> None:
    view = FakeView(report=report, steps=7)
    at = [row["id"] for row in view.data if row["path"] == "lm_head" and row["role"] == "output"]
    explorer = Explorer(view, selected=at[3])
    page = mount(explorer)
    if report:
        more(page)
    curve = page.get_by_role("slider", name="over all steps")
    expect(curve).to_have_attribute("aria-valuetext", re.compile("^2 decode: "))
    expect(curve).to_have_attribute("aria-valuemax", "6")
    curve.press("ArrowRight")
    shown(page, at[4])
    assert explorer.position == 4
    expect(curve).to_be_focused()
    curve.press("Home")
    shown(page, at[0])
    box = curve.bounding_box()
    assert box
    curve.click(position={"x": box["width"] * (4 + 392 * 5 / 6) / 400, "y": 10})
    shown(page, at[5])
    expect(curve).to_have_attribute("aria-valuenow", "5")
    assert explorer.position == 5


def test_a_curve_over_thousands_of_steps_has_few_points(mount: Mount) -> None:
    page = mount(Explorer(FakeView(layers=0, steps=5000), selected=9))
    expect(page.get_by_role("slider", name="over all steps")).to_have_attribute(
        "aria-valuemax", re.compile("^3[0-9][0-9]$")
    )


def test_a_tensor_of_one_step_has_no_curve(mount: Mount) -> None:
    page = mount(Explorer(FakeView(steps=1), selected=9))
    shown(page, 9)
    expect(page.get_by_role("slider", name="over all steps")).to_have_count(0)


def test_a_part_is_called_one(mount: Mount) -> None:
    view = FakeView()
    view.part = "slice[0,:]"
    page = mount(Explorer(view))
    page.get_by_text("model.embed_tokens out").first.click()
    expect(page.locator(".llmdebug-part")).to_have_text(
        "only slice[0,:] was kept; the statistics describe the whole tensor"
    )


def test_the_kernel_of_compiled_code_is_beside_its_buffer_and_open_where_that_diverges(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    view.kernel = {
        "name": "graph0/cpp_fused_mul_1",
        "nodes": ["mul_1", HOSTILE],
        "code": f"out[0] = 2; // {HOSTILE}",
    }
    explorer = Explorer(view)
    page = mount(explorer)
    kernel = page.locator(".llmdebug-kernel")
    diverged = next(row for row in view.data if row["verdict"] == "diverged")
    from_python(page, explorer, "selected", diverged["id"])
    expect(kernel.locator("summary")).to_have_text("mine: kernel graph0/cpp_fused_mul_1")
    expect(kernel).to_have_attribute("open", "")
    expect(kernel).to_contain_text(f"computes 2 nodes: mul_1, {HOSTILE}")
    expect(page.get_by_label("Kernel code")).to_have_text(f"out[0] = 2; // {HOSTILE}")
    view.kernel = {"name": "graph0/extern:mm", "nodes": ["mm"], "code": ""}
    fine = next(
        row for row in view.data if row["verdict"] == "match" and row["id"] > diverged["id"]
    )
    from_python(page, explorer, "selected", fine["id"])
    expect(kernel.locator("summary")).to_have_text("mine: kernel graph0/extern:mm")
    expect(kernel).not_to_have_attribute("open", "")
    kernel.locator("summary").click()
    expect(kernel).to_contain_text("a PyTorch kernel")


# --- tensor ---


def test_tabs_switch_between_golden_mine_and_difference(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    expect(page.get_by_role("tab")).to_have_text(["golden", "mine", "difference", "side by side"])
    everything = page.get_by_role("tab", name="side by side")
    expect(everything).to_have_attribute("aria-selected", "true")
    everything.press("ArrowLeft")
    expect(page.get_by_role("tab", name="difference")).to_have_attribute("aria-selected", "true")
    high = page.locator(".llmdebug-legend span").nth(2)
    expect(high).not_to_be_empty()
    before = high.text_content()
    page.get_by_role("tab", name="difference").press("ArrowLeft")
    expect(page.get_by_role("tab", name="mine")).to_be_focused()
    expect(page.get_by_role("tab", name="mine")).to_have_attribute("aria-selected", "true")
    expect(high).not_to_have_text(before or "")


def test_a_run_has_no_tabs_no_verdicts_and_no_mismatch_controls(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    row_at(page, 74).click()
    expect(page.locator(".llmdebug-canvas")).to_be_visible()
    expect(page.get_by_role("tab")).to_have_count(0)
    expect(page.locator(".llmdebug-verdict")).to_have_count(0)
    expect(page.get_by_label("mismatches only")).to_have_count(0)
    expect(page.get_by_role("grid", name="Records").get_by_role("columnheader")).to_have_text(
        ["#", "tensor", "op", "type", "shape", "min", "max", "mean", "l2 norm"]
    )
    page.get_by_role("grid", name="Records").press("N")
    expect(page.get_by_role("status")).to_contain_text("compare it with another one")


# --- what differs most ---


def test_the_worst_elements_lead_to_their_place_in_the_heat_map(mount: Mount) -> None:
    view = FakeView(report=True)
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax")
    page = mount(Explorer(view, selected=softmax))
    more(page)
    page.get_by_role("tab", name="difference").click()
    difference = view.tensor(softmax, "mine").astype(float) - view.tensor(softmax, "golden")
    worst = np.unravel_index(np.argsort(-np.abs(difference), axis=None)[:10], difference.shape)
    places = [
        f"[{', '.join(map(str, at))}]"
        for at in zip(*(axis.tolist() for axis in worst), strict=True)
    ]
    expect(page.locator(".llmdebug-worst button")).to_have_text(places)
    page.locator(".llmdebug-worst button").nth(3).click()
    expect(page.locator(".llmdebug-value")).to_have_text(re.compile(rf"^{re.escape(places[3])} = "))
    value = (page.locator(".llmdebug-value").text_content() or "").split(" = ")[1]
    assert np.float32(value) == view.tensor(softmax, "difference")[tuple(axis[3] for axis in worst)]
    expect(page.get_by_label("Index on axis head").last).to_have_value(str(worst[1][3]))


class Turned(FakeView):
    """Mine is twice as long along an axis."""

    def _side(self, row: Any, which: Any) -> Any:
        side = super()._side(row, which)
        if which == "mine":
            shape = [2 * size for size in row["shape"]]
            axes = [
                {"name": name, "size": size}
                for name, size in zip(("a", "b", "c"), shape, strict=False)
            ]
            side.update(shape=shape, axes=axes)
        return side


def test_a_side_that_lies_differently_has_its_own_slice_and_is_not_put_beside_the_others(
    mount: Mount,
) -> None:
    page = mount(Explorer(Turned(report=True), selected=100))
    more(page)
    expect(page.get_by_role("combobox", name="rows")).to_have_value("1")
    expect(page.get_by_role("combobox", name="rows").locator("option:checked")).to_have_text(
        "token (12)"
    )
    expect(page.get_by_role("tab")).to_have_text(["golden", "mine", "difference"])
    page.get_by_role("tab", name="mine").click()
    expect(page.get_by_role("combobox", name="rows").locator("option:checked")).to_have_text(
        "b (24)"
    )
    page.locator(".llmdebug-worst button").first.click()
    expect(page.get_by_role("tab", name="difference")).to_have_attribute("aria-selected", "true")
    place = page.locator(".llmdebug-worst button").first.text_content() or ""
    expect(page.locator(".llmdebug-value")).to_have_text(re.compile(rf"^{re.escape(place)} = "))


def test_side_by_side_links_pointer_window_and_click_of_all_three(mount: Mount) -> None:
    view = FakeView(report=True)
    row = next(row["id"] for row in view.data if row["path"] == "lm_head" and row["step"] == 1)
    page = mount(Explorer(view, selected=row))
    more(page)
    maps = page.locator(".llmdebug-trio .llmdebug-canvas[aria-busy=false]")
    expect(maps).to_have_count(3)
    box = maps.first.bounding_box()
    assert box
    maps.first.hover(position={"x": 10.5 * box["width"] / 64, "y": 3.5 * box["height"] / 12})
    golden, mine, difference = (
        view.tensor(row, which)[0, 3, 10] for which in ("golden", "mine", "difference")
    )
    line = page.locator(".llmdebug-linked")
    expect(line).to_contain_text("[0, 3, 10]: golden ")
    figures = [
        float(part.rpartition(" ")[2])
        for part in (line.text_content() or "").partition(": ")[2].split(" · ")
    ]
    assert figures == pytest.approx([float(golden), float(mine), float(difference)], rel=1e-4)
    maps.first.click(position={"x": 10.5 * box["width"] / 64, "y": 3.5 * box["height"] / 12})
    expect(page.locator(".llmdebug-value")).to_have_text([re.compile(r"^\[0, 3, 10\] = ")] * 3)
    maps.nth(1).press("+")
    expect(page.locator(".llmdebug-trio .llmdebug-caption")).to_have_text(
        ["token 3–8 ↓, hidden 16–47 →"] * 3
    )
    high = page.locator(".llmdebug-trio .llmdebug-legend span:nth-child(3)")
    assert high.nth(0).text_content() == high.nth(1).text_content()  # one scale for golden and mine
    page.locator(".llmdebug-worst button").first.click()
    place = page.locator(".llmdebug-worst button").first.text_content() or ""
    expect(page.locator(".llmdebug-value")).to_have_text(
        [re.compile(rf"^{re.escape(place)} = ")] * 3
    )


def test_a_comparison_opens_at_the_worst_head_with_one_scale_for_all_heads(mount: Mount) -> None:
    view = FakeView(report=True)
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax" and row["step"] == 1)
    golden = np.zeros((1, 4, 12, 12), np.float32)
    mine = golden.copy()
    mine[0, 0, 1, 1], mine[0, 2, 3, 7] = 0.25, -2.0
    tensors = {"golden": golden, "mine": mine, "difference": mine - golden}
    view.tensor = lambda number, which: tensors[which]  # type: ignore[method-assign]
    plain = view._side

    def side(row: Any, which: Any) -> Any:
        low, high = float(tensors[which].min()), float(tensors[which].max())
        return plain(row, which) | {"min": low, "max": high}

    view._side = side  # type: ignore[method-assign]
    page = mount(Explorer(view, selected=softmax))
    maps = page.locator(".llmdebug-trio .llmdebug-canvas[aria-busy=false]")
    expect(maps).to_have_count(3)
    heads = page.get_by_role("radiogroup", name="All slices along head").get_by_role("radio")
    expect(heads.nth(2)).to_have_attribute("aria-checked", "true")
    ends = page.locator(".llmdebug-trio .llmdebug-legend span:nth-child(odd):not([style])")
    expect(ends.nth(0)).to_have_text("-2")  # golden has the scale of mine
    heads.nth(0).click()
    for map_at in range(3):
        expect(page.locator(".llmdebug-trio .llmdebug-legend").nth(map_at)).to_contain_text("-2")


def test_no_difference_is_the_palest_colour(mount: Mount) -> None:
    view = FakeView(report=True)
    same = np.full((1, 12, 64), 0.5, np.float32)
    none = {"golden": same, "mine": same, "difference": same - same}
    view.tensor = lambda number, which: none[which]  # type: ignore[method-assign]
    page = mount(Explorer(view, selected=100))
    page.get_by_role("tab", name="difference").click()
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_have_count(1)
    assert min(pixel(page, 0.5, 0.5)) > 235


def pixel(page: Page, fx: float, fy: float) -> list[int]:
    return page.locator(".llmdebug-canvas").evaluate(
        """(el, [fx, fy]) => {
          const [x, y] = [Math.floor(fx * el.width), Math.floor(fy * el.height)];
          return [...el.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3);
        }""",
        [fx, fy],
    )


def click_at(page: Page, fx: float, fy: float) -> None:
    canvas = page.locator(".llmdebug-canvas[aria-busy=false]")
    box = canvas.bounding_box()
    assert box
    canvas.click(position={"x": fx * box["width"], "y": fy * box["height"]})


def picked(page: Page) -> list[str]:
    """Return the index and the value that the last click showed."""
    value = page.locator(".llmdebug-value")
    expect(value).to_contain_text(" = ")
    return (value.text_content() or "").split(" = ")


def test_a_click_on_the_heat_map_shows_index_and_value(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view, selected=100))
    expect(page.locator(".llmdebug-caption").first).to_have_text("token 0–11 ↓, hidden 0–63 →")
    click_at(page, 10.5 / 64, 3.5 / 12)
    index, value = picked(page)
    assert index == "[0, 3, 10]"
    assert np.float32(value) == view.tensor(100, "golden")[0, 3, 10]


class Large(FakeView):
    """One outlier in 2000 x 3000."""

    def tensor(self, number: int, which: Any) -> np.ndarray:
        tensor = np.full((1, 2000, 3000), 0.5, np.float32)
        tensor[0, 1234, 2345] = -7.25
        return tensor


def test_an_outlier_among_millions_is_seen_and_found(mount: Mount) -> None:
    page = mount(Explorer(Large(), selected=100))
    expect(page.locator(".llmdebug-caption").first).to_have_text(
        "token 0–1999 ↓, hidden 0–2999 →, each cell shows the largest magnitude of 8 × 12"
    )
    click_at(page, 2345 / 3000, 1234 / 2000)
    expect(page.locator(".llmdebug-value")).to_have_text("[0, 1234, 2345] = -7.25")


def test_the_heat_map_zooms_to_numbers_by_key_and_wheel_and_pans(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=100))
    canvas, caption = page.locator(".llmdebug-canvas"), page.locator(".llmdebug-caption").first
    expect(canvas).to_have_attribute("data-numbers", "false")
    canvas.press("+")
    expect(caption).to_have_text("token 3–8 ↓, hidden 16–47 →")
    canvas.press("+")
    canvas.press("+")
    expect(canvas).to_have_attribute("data-numbers", "true")
    canvas.press("0")
    expect(caption).to_have_text("token 0–11 ↓, hidden 0–63 →")
    canvas.hover(position={"x": 1, "y": 1})
    page.mouse.wheel(0, -100)
    expect(caption).to_have_text("token 0–5 ↓, hidden 0–31 →")
    canvas.press("ArrowRight")
    expect(caption).to_have_text("token 0–5 ↓, hidden 8–39 →")
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20, steps=4)
    page.mouse.up()
    expect(caption).to_have_text("token 0–5 ↓, hidden 0–31 →")
    expect(page.locator(".llmdebug-value")).to_have_text("")  # a drag is no click


def test_colours_are_around_zero_for_both_signs_and_magenta_for_nan(mount: Mount) -> None:
    view = FakeView(report=True)
    broken = next(row for row in view.data if row["nan"])
    page = mount(Explorer(view, selected=broken["id"]))
    page.get_by_role("tab", name="difference").click()
    expect(page.locator(".llmdebug-caption").first).to_have_text("hidden 0–63 →")
    assert pixel(page, 1 / 64, 0.5) == [255, 0, 255]
    low, high = (page.locator(".llmdebug-legend span").nth(n).text_content() for n in (0, 2))
    assert low == f"-{high}"
    assert page.locator(".llmdebug-histogram").text_content()
    assert "NaN 3" in (page.locator(".llmdebug-histogram").text_content() or "")


def test_values_of_one_sign_get_a_scale_from_lowest_to_highest(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax")
    page = mount(Explorer(view, selected=softmax))
    plane = view.tensor(softmax, "golden")[0, 0]
    expect(page.locator(".llmdebug-legend span").nth(0)).to_have_text(
        f"{float(f'{plane.min():.3g}')}"
    )


def test_any_two_axes_make_the_slice_and_the_others_have_an_index(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax")
    page = mount(Explorer(view, selected=softmax))
    page.get_by_label("Index on axis head").last.fill("2")
    page.get_by_label("Index on axis head").last.press("Enter")
    click_at(page, 5.5 / 12, 3.5 / 12)
    expect(page.locator(".llmdebug-value")).to_have_text(re.compile(r"^\[0, 2, 3, 5\] = "))
    page.get_by_role("combobox", name="rows").select_option(label="head (4)")
    expect(page.locator(".llmdebug-caption").first).to_have_text("head 0–3 ↓, key 0–11 →")
    page.get_by_role("combobox", name="columns").select_option(label="head (4)")
    expect(page.get_by_role("combobox", name="rows")).to_have_value("3")
    click_at(page, 1.5 / 4, 7.5 / 12)
    index, value = picked(page)
    assert index == "[0, 1, 0, 7]"
    assert np.float32(value) == view.tensor(softmax, "golden")[0, 1, 0, 7]


def test_the_heads_of_an_attention_are_seen_at_once_and_a_click_opens_one(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax" and row["step"] == 1)
    page = mount(Explorer(view, selected=softmax))
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_be_visible()
    assert ("heads", softmax) not in view.asked  # nobody looks
    page.locator(".llmdebug-heads summary").press("Enter")
    heads = page.get_by_role("radiogroup", name="All slices along head").get_by_role("radio")
    expect(heads).to_have_count(4)
    expect(heads.nth(0)).to_have_attribute("aria-checked", "true")
    heads.nth(2).click()
    expect(page.get_by_label("Index on axis head").last).to_have_value("2")
    expect(heads.nth(2)).to_have_attribute("aria-checked", "true")
    click_at(page, 0.5, 0.5)
    place, value = picked(page)
    assert place.startswith("[0, 2, ")
    assert (
        np.float32(value)
        == view.tensor(softmax, "golden")[tuple(int(i) for i in place.strip("[]").split(","))]
    )
    heads.nth(2).press("ArrowRight")
    expect(heads.nth(3)).to_be_focused()
    expect(page.get_by_label("Index on axis head").last).to_have_value("3")
    assert (
        view.asked.count(("heads", softmax)) == 1
    )  # another head is another frame, not another answer
    page.get_by_role("combobox", name="rows").select_option(label="head (4)")
    expect(
        page.get_by_role("radiogroup", name="All slices along query").get_by_role("radio")
    ).to_have_count(12)


def test_more_heads_than_a_page_holds_are_turned_by_button_and_by_key(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax" and row["step"] == 1)
    view.data[softmax]["shape"] = [1, 150, 12, 12]
    tensor = np.random.default_rng(0).random((1, 150, 12, 12), np.float32)
    view.tensor = lambda number, which: tensor  # type: ignore[method-assign]
    page = mount(Explorer(view, selected=softmax))
    page.locator(".llmdebug-heads summary").press("Enter")
    heads = page.get_by_role("radiogroup", name="All slices along head").get_by_role("radio")
    pager = page.locator(".llmdebug-pager")
    expect(pager).to_contain_text("0 to 63 of 150")
    expect(page.get_by_role("button", name="Previous slices")).to_be_disabled()
    heads.nth(63).click()
    heads.nth(63).press("ArrowRight")
    expect(pager).to_contain_text("64 to 127 of 150")
    expect(heads.first).to_be_focused()
    expect(heads.first).to_have_attribute("aria-checked", "true")
    page.get_by_role("button", name="Next slices").click()
    expect(pager).to_contain_text("128 to 149 of 150")
    expect(heads).to_have_count(22)
    expect(page.get_by_role("button", name="Next slices")).to_be_disabled()
    expect(page.get_by_label("Index on axis head").last).to_have_value("128")
    heads.last.press("End")
    expect(heads.last).to_be_focused()
    expect(page.get_by_label("Index on axis head").last).to_have_value("149")
    heads.last.press("Home")
    expect(pager).to_contain_text("0 to 63 of 150")
    expect(heads.first).to_be_focused()


def test_each_head_is_drawn_with_its_values_in_one_scale(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax" and row["step"] == 1)
    peak = np.zeros((1, 4, 12, 12), np.float32)
    peak[0, 1, 3, 7], peak[0, 2, 5, 5] = 1.0, np.nan
    view.tensor = lambda number, which: peak  # type: ignore[method-assign]
    page = mount(Explorer(view, selected=softmax))
    page.locator(".llmdebug-heads summary").click()
    expect(page.locator(".llmdebug-thumb")).to_have_count(4)
    found = page.locator(".llmdebug-thumb canvas").evaluate_all(
        """all => all.map(el => {
          const { data } = el.getContext('2d').getImageData(0, 0, el.width, el.height);
          const colour = (_, i) => [...data.slice(4 * i, 4 * i + 3)].join();
          return Array.from({ length: el.width * el.height }, colour);
        })"""
    )
    least, most, nan = "68,1,84", "253,231,37", "255,0,255"
    for head, (where, colour) in {1: (3 * 12 + 7, most), 2: (5 * 12 + 5, nan)}.items():
        assert found[head][where] == colour
        assert found[head].count(least) == 143
    assert set(found[0]) == set(found[3]) == {least}


def test_a_tensor_without_a_further_axis_has_no_heads(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=100))
    shown(page, 100)
    expect(page.locator(".llmdebug-heads")).to_be_hidden()


def test_the_histogram_counts_every_element(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=100))
    expect(page.locator(".llmdebug-histogram rect")).to_have_count(64)
    expect(page.locator(".llmdebug-histogram")).to_contain_text("768 finite")
    titles = page.locator(".llmdebug-histogram rect title").all_text_contents()
    assert sum(int(title.rpartition(": ")[2]) for title in titles) == 768


def test_values_that_were_not_kept_say_why(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view, selected=next(row["id"] for row in view.data if not row["kept"])))
    expect(page.locator(".llmdebug-why")).to_contain_text("run again with values")
    expect(page.locator(".llmdebug-canvas")).to_be_hidden()
    expect(page.locator(".llmdebug-summary")).to_be_visible()


def test_the_code_that_gets_the_tensor_is_copied(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=100))
    clipboard(page)
    page.get_by_role("button", name="Copy as code").click()
    expect(page.get_by_role("status")).to_contain_text("copied")
    assert page.evaluate("window.clip") == "run[100].tensor()"


# --- the errors of a tensor ---


def test_the_differences_have_a_histogram_with_the_limit_in_it(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    more(page)
    figure = page.locator(".llmdebug-error-histogram")
    expect(figure.locator("rect")).to_have_count(64)
    expect(figure).to_contain_text(
        "64 of 64 elements differ · dashed: the limit, spread evenly over the elements (0.012)"
    )
    x = float(figure.locator("line").get_attribute("x1") or "nan")
    left, _, width, _ = map(float, (figure.locator("svg").get_attribute("viewBox") or "").split())
    assert left <= x <= left + width
    expect(figure.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("64 bins from .*; 64 of 64 elements differ")
    )


@pytest.mark.parametrize(("points", "kind"), [(4096, "points"), (10, "density")])
def test_golden_against_mine_is_points_or_where_they_are_many_a_density(
    mount: Mount, points: int, kind: str
) -> None:
    view = FakeView(report=True)
    view.points = points
    page = mount(Explorer(view))
    more(page)
    plot = page.locator(".llmdebug-scatter-plot")
    expect(plot).to_have_attribute("data-kind", kind)
    expect(plot).to_have_attribute(
        "aria-label", re.compile("^Golden against mine, 64 elements from ")
    )
    drawn = """el => {
      const {width, height} = el;
      const data = el.getContext('2d').getImageData(0, 0, width, height).data;
      const words = new Set(new Uint32Array(data.buffer)); return words.size; }"""
    page.wait_for_function(
        f"(() => {{ const el = document.querySelector('.llmdebug-scatter-plot'); return "
        f"({drawn})(el) > 3; }})()"
    )
    plot.hover(position={"x": 5, "y": 5})
    expect(page.locator(".llmdebug-scatter-told")).to_have_text(
        re.compile(
            r"^golden -?[\d.e-]+ · mine -?[\d.e-]+"
            + (r" · \d+ elements?$" if kind == "density" else "$")
        )
    )


def test_a_run_has_no_errors_to_show(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    from_python(page, explorer, "selected", 80)
    shown(page, 80)
    expect(page.locator(".llmdebug-errors")).to_be_hidden()
