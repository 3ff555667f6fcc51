"""The explorer in a bare page: what a user does, and what the page and the kernel then show."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from browser import Mount, from_python, hold, release
from browser import mount as mount_in
from fake_view import BROKEN, HOSTILE, SCRIPT, FakeView
from llmdebug_nb.notebook.widgets import Explorer

SELECTED = ".llmdebug-record[aria-selected=true]"


def row_at(page: Page, row: int) -> Locator:
    return page.locator(f".llmdebug-record[data-row='{row}']")


def shown(page: Page, row: int) -> None:
    """The record is selected in the list and its tensor is in the panel."""
    expect(page.locator(SELECTED)).to_have_attribute("data-row", str(row))
    expect(page.locator(".llmdebug-place")).to_contain_text(f"#{row} ·")


def step(page: Page, index: int) -> Locator:
    return page.locator(f".llmdebug-step[data-index='{index}']")


# --- stepper ---


def test_a_click_on_a_token_shows_its_records_and_tells_the_kernel(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    expect(row_at(page, 72)).to_be_visible()  # behind the warm-up
    page.get_by_role("toolbar", name="Token stepper").get_by_text("2 decode").click()
    expect(row_at(page, 216)).to_be_visible()
    assert explorer.position == 3
    expect(step(page, 3)).to_have_attribute("aria-current", "step")


def test_arrow_keys_and_buttons_move_by_one_token(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    page.get_by_role("button", name="Next token").click()
    step(page, 2).press("ArrowRight")
    expect(step(page, 3)).to_be_focused()
    expect(page.get_by_role("button", name="Next token")).to_be_disabled()
    step(page, 3).press("Home")
    expect(step(page, 0)).to_be_focused()
    expect(page.get_by_role("button", name="Previous token")).to_be_disabled()
    assert explorer.position == 0


def test_a_warm_up_looks_different_and_a_diverged_token_has_its_count(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    expect(step(page, 0)).to_have_class(re.compile("llmdebug-warmup"))
    expect(step(page, 1)).not_to_have_class(re.compile("llmdebug-warmup"))
    expect(step(page, 2).locator(".llmdebug-badge")).to_have_text("3")
    expect(step(page, 1).locator(".llmdebug-badge")).to_have_count(0)


def test_thousands_of_tokens_stay_few_elements(mount: Mount) -> None:
    page = mount(Explorer(FakeView(layers=0, steps=5000)))
    step(page, 1).press("End")
    expect(step(page, 4999)).to_be_in_viewport()
    assert page.locator(".llmdebug-step").count() < 40


def test_a_token_shows_its_text_and_hostile_text_stays_text(mount: Mount) -> None:
    view = FakeView()
    view.steps[1]["text"], view.steps[2]["text"] = "The capital\nof France is", HOSTILE
    page = mount(Explorer(view))
    expect(step(page, 1).locator(".llmdebug-step-text")).to_have_text("“…↵ of France is”")
    assert (step(page, 1).get_attribute("title") or "").endswith("\nThe capital\nof France is")
    expect(step(page, 2).locator(".llmdebug-step-text")).to_have_text(f"“…{HOSTILE[-14:]}”")
    expect(step(page, 3).locator(".llmdebug-step-text")).to_have_count(0)
    boxes = [step(page, index).bounding_box() for index in (1, 2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[1]["x"] >= boxes[0]["x"] + boxes[0]["width"]


def play(page: Page) -> Locator:
    return page.get_by_role("button", name="Play tokens")


@pytest.mark.parametrize(
    ("motion", "seconds"), [("no-preference", "0.25s, 0.25s"), ("reduce", "0s")]
)
def test_play_passes_token_by_token_and_stops_at_the_end(
    page: Page, motion: Any, seconds: str
) -> None:
    page.emulate_media(reduced_motion=motion)
    explorer = Explorer(FakeView(steps=5))
    mount_in(page, explorer)
    seen = [explorer.position]
    explorer.observe(lambda change: seen.append(change["new"]), "position")
    expect(play(page)).to_have_attribute("aria-pressed", "false")
    play(page).press("Enter")
    expect(play(page)).to_have_attribute("aria-pressed", "true")
    assert step(page, 2).evaluate("el => getComputedStyle(el).transitionDuration") == seconds
    expect(step(page, 4)).to_have_attribute("aria-current", "step")
    expect(play(page)).to_have_attribute("aria-pressed", "false")
    assert seen == [1, 2, 3, 4]
    play(page).click()  # from the end: anew
    expect(step(page, 0)).to_have_attribute("aria-current", "step")
    play(page).click()
    expect(play(page)).to_have_attribute("aria-pressed", "false")


@pytest.mark.parametrize("action", ["key", "click", "arrow"])
def test_any_key_and_any_click_stop_the_play(mount: Mount, action: str) -> None:
    explorer = Explorer(FakeView(steps=50))
    page = mount(explorer)
    play(page).click()
    expect(play(page)).to_have_attribute("aria-pressed", "true")
    if action == "key":
        page.get_by_role("grid", name="Records").press("Shift")
    elif action == "click":
        page.locator("h2").click()
    else:
        play(page).press("ArrowRight")
    expect(play(page)).to_have_attribute("aria-pressed", "false")
    at = explorer.position
    page.wait_for_timeout(1000)
    assert explorer.position == at


def test_play_waits_for_a_slow_kernel_and_ends_with_the_view(mount: Mount) -> None:
    explorer = Explorer(FakeView(steps=50))
    page = mount(explorer)
    expect(row_at(page, 72)).to_be_visible()
    hold(page)
    play(page).click()
    expect(step(page, 2)).to_have_attribute("aria-current", "step")
    page.wait_for_timeout(1600)
    assert explorer.position == 2
    release(page)
    expect(step(page, 3)).to_have_attribute("aria-current", "step")
    page.evaluate("window.unmount()")
    at = explorer.position
    page.wait_for_timeout(1000)
    assert explorer.position == at


# --- tree ---


def test_the_tree_fetches_children_when_a_module_is_opened(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view))
    expect(page.get_by_role("treeitem")).to_have_count(3)  # the lone root is open
    assert [call for call in view.calls if call[0] == "children"] == [
        ("children", -1),
        ("children", 0),
    ]
    page.get_by_role("treeitem", name="model").locator(".llmdebug-chevron").click()
    expect(page.get_by_role("treeitem", name="layers")).to_be_visible()
    assert [call for call in view.calls if call[0] == "children"][2:] == [("children", 1)]


def test_a_click_on_a_module_narrows_the_list_and_opens_it_the_first_time(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    expect(page.locator(".llmdebug-total")).to_have_text("72 records")
    page.get_by_role("treeitem", name="lm_head").click()
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    assert explorer.path == "lm_head"
    page.get_by_role("treeitem", name="model").click()
    expect(page.get_by_role("treeitem", name="embed_tokens")).to_be_visible()
    expect(page.locator(".llmdebug-total")).to_have_text("70 records")
    page.get_by_role("button", name="under model").click()
    expect(page.locator(".llmdebug-total")).to_have_text("72 records")
    assert explorer.path == ""


def test_the_tree_obeys_the_keys_of_the_aria_pattern(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    tree = page.get_by_role("tree")

    def active() -> str | None:
        node = tree.get_attribute("aria-activedescendant")
        return page.locator(f"[id='{node}'] .llmdebug-node-label").text_content()

    expect(page.get_by_role("treeitem")).to_have_count(3)
    tree.press("ArrowDown")
    tree.press("ArrowRight")
    expect(page.get_by_role("treeitem", name="embed_tokens")).to_be_visible()
    tree.press("ArrowRight")
    assert active() == "embed_tokens"
    tree.press("ArrowLeft")
    assert active() == "model"
    tree.press("End")
    assert active() == "lm_head"
    tree.press("Enter")
    expect(page.get_by_role("treeitem", name="lm_head")).to_have_attribute("aria-selected", "true")
    assert explorer.path == "lm_head"
    tree.press("Home")
    tree.press("ArrowLeft")
    expect(page.get_by_role("treeitem")).to_have_count(1)
    expect(page.get_by_role("treeitem")).to_have_attribute("aria-expanded", "false")


def test_ten_thousand_children_come_in_pages_as_they_are_scrolled_to(mount: Mount) -> None:
    view = FakeView(layers=0, steps=1, records=10_000)
    page = mount(Explorer(view))
    page.get_by_role("treeitem", name="model").click()
    page.get_by_role("treeitem", name="many").click()
    expect(page.locator(".llmdebug-node-label", has_text=re.compile("^7$"))).to_be_visible()
    expect(page.get_by_role("treeitem", name="497")).to_have_count(0)
    tree = page.get_by_role("tree")
    tree.press("End")
    expect(page.get_by_text("more…")).to_have_count(0)
    tree.evaluate("el => { el.scrollTop = 0; el.scrollTop = 500 * 22; }")
    expect(page.locator(".llmdebug-node-label", has_text=re.compile("^510$"))).to_be_visible()
    assert page.get_by_role("treeitem").count() < 60


# --- records ---


def test_a_hundred_thousand_records_are_paged_and_stay_few_elements(mount: Mount) -> None:
    view = FakeView(layers=2, steps=1, records=100_000)
    explorer = Explorer(view)
    page = mount(explorer)
    expect(page.locator(".llmdebug-total")).to_have_text("100,000 records")
    grid = page.get_by_role("grid", name="Records")
    expect(grid).to_have_attribute("aria-rowcount", "100001")
    grid.press("End")
    expect(row_at(page, 99_999)).to_be_in_viewport()
    shown(page, 99_999)
    assert explorer.selected == 99_999
    grid.evaluate("el => { el.scrollTop = el.scrollHeight / 2; }")
    expect(row_at(page, 50_000)).to_be_visible()
    assert page.locator(".llmdebug-record").count() < 80
    assert len([call for call in view.calls if call[0] == "rows"]) <= 5


def test_arrow_keys_walk_the_list(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    row_at(page, 74).click()
    shown(page, 74)
    page.get_by_role("grid", name="Records").press("ArrowDown")
    shown(page, 75)
    page.get_by_role("grid", name="Records").press("ArrowUp")
    page.get_by_role("grid", name="Records").press("ArrowUp")
    shown(page, 73)
    assert explorer.selected == 73


def test_n_and_p_walk_in_execution_order_across_tokens(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    expect(row_at(page, 72)).to_be_visible()
    page.get_by_role("grid", name="Records").press("n")
    shown(page, 72)  # nothing was selected: the first of this token
    page.get_by_role("tree").press("n")
    shown(page, 73)
    page.get_by_role("grid", name="Records").press("p")
    shown(page, 72)
    page.get_by_role("grid", name="Records").press("p")
    shown(page, 71)
    assert explorer.position == 0
    from_python(page, explorer, "selected", 287)
    shown(page, 287)
    page.get_by_role("grid", name="Records").press("n")
    expect(page.get_by_role("status")).to_contain_text("no further record")


def test_capital_n_and_p_walk_from_mismatch_to_mismatch(mount: Mount) -> None:
    view = FakeView(report=True)
    bad = [row["id"] for row in view.data if row["verdict"] == "diverged"]
    explorer = Explorer(view)
    page = mount(explorer)
    shown(page, bad[0])
    for row in bad[1:]:
        page.get_by_role("grid", name="Records").press("N")
        shown(page, row)
    assert explorer.position == 3
    page.get_by_role("grid", name="Records").press("N")
    expect(page.get_by_role("status")).to_contain_text("no further mismatch")
    page.get_by_role("grid", name="Records").press("P")
    shown(page, bad[-2])


def test_mismatches_only_hides_the_rest_and_keeps_the_selected_one_in_view(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    only = page.get_by_label("mismatches only")
    only.check()
    expect(page.locator(".llmdebug-total")).to_have_text("3 records")
    expect(page.locator(".llmdebug-record .llmdebug-diverged")).to_have_count(3)
    page.locator(".llmdebug-rows").scroll_into_view_if_needed()
    only.uncheck()
    expect(page.locator(".llmdebug-total")).to_have_text("72 records")
    expect(page.locator(SELECTED)).to_be_in_viewport()


def test_letters_typed_into_the_filter_filter_and_do_not_walk(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    page.get_by_label("Filter records").press_sequentially("up_proj")
    expect(page.locator(".llmdebug-total")).to_have_text("6 records")
    assert explorer.selected == -1
    page.get_by_label("Filter records").fill("nothing like this")
    expect(page.locator(".llmdebug-total")).to_have_text("0 records")


def test_a_bound_typed_into_the_filter_keeps_the_tensors_that_reach_it(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view))
    box = page.get_by_label("Filter records")
    box.fill("up_proj >3.1")
    wanted = [
        r["id"]
        for r in view.data
        if r["step"] == 1 and "up_proj" in r["path"] and float(r["max"] or 0) > 3.1
    ]
    expect(page.locator(".llmdebug-total")).to_have_text(f"{len(wanted)} records")
    expect(row_at(page, wanted[0])).to_be_visible()
    assert "largest magnitude" in (box.get_attribute("title") or "")


def test_a_filter_that_can_not_be_read_says_why_and_a_jump_drops_it(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    box, grid = page.get_by_label("Filter records"), page.get_by_role("grid", name="Records")
    box.fill("abs><img")
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(grid).to_have_attribute(
        "data-none", re.compile("^can't read the filter 'abs><img': a number belongs")
    )
    box.fill("abs>1")
    expect(box).to_have_attribute("aria-invalid", "false")
    box.fill("abs>")
    expect(box).to_have_attribute("aria-invalid", "true")
    page.get_by_text("op-differs").click()
    expect(box).to_have_value("")
    expect(box).to_have_attribute("aria-invalid", "false")
    expect(page.locator(SELECTED)).to_be_visible()


def test_a_jump_drops_the_filters_that_hide_its_target(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    page.get_by_role("treeitem", name="lm_head").click()
    page.get_by_label("Filter records").fill("lm_head")
    page.get_by_text("op-differs").click()
    shown(page, explorer.snapshot["findings"][0]["row"])
    assert explorer.path == ""
    expect(page.get_by_label("Filter records")).to_have_value("")


def test_the_producer_is_one_click_away(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    at = int(page.locator(SELECTED).get_attribute("data-row") or 0)
    page.locator(".llmdebug-producer").click()
    shown(page, at - 1)


def test_the_dataflow_is_walked_forwards_link_by_link(mount: Mount) -> None:
    explorer = Explorer(FakeView(), selected=74)
    page = mount(explorer)
    page.get_by_role("list", name="makes").get_by_role("button").click()
    shown(page, 75)
    takers = page.get_by_role("list", name="taken by")
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
        "only slice[0,:] was kept; the figures are those of the whole tensor"
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
    expect(page.get_by_label("Code of the kernel")).to_have_text(f"out[0] = 2; // {HOSTILE}")
    view.kernel = {"name": "graph0/extern:mm", "nodes": ["mm"], "code": ""}
    fine = next(
        row for row in view.data if row["verdict"] == "match" and row["id"] > diverged["id"]
    )
    from_python(page, explorer, "selected", fine["id"])
    expect(kernel.locator("summary")).to_have_text("mine: kernel graph0/extern:mm")
    expect(kernel).not_to_have_attribute("open", "")
    kernel.locator("summary").click()
    expect(kernel).to_contain_text("one of PyTorch’s own")


# --- tensor ---


def test_tabs_switch_between_golden_mine_and_difference(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    expect(page.get_by_role("tab")).to_have_text(["golden", "mine", "difference", "side by side"])
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


def test_a_report_shows_verdict_findings_errors_and_metrics(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    expect(page.locator(".llmdebug-title .llmdebug-verdict")).to_have_text("✗ diverged")
    expect(page.locator(".llmdebug-finding")).to_contain_text([BROKEN])
    expect(page.get_by_role("grid", name="Records").get_by_role("columnheader")).to_have_text(
        ["#", "tensor", "op", "type", "shape", "error", "limit", "verdict"]
    )
    expect(page.locator(".llmdebug-metrics")).to_contain_text("cosine")
    expect(page.locator(".llmdebug-summary tr.llmdebug-differs th[scope=row]")).to_have_text(
        ["fingerprint"]
    )


# --- layers and tokens ---


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


def test_the_tree_says_each_verdict_by_mark_and_rolls_mismatches_up(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    expect(page.locator(SELECTED)).to_be_visible()

    def badge(name: str) -> Locator:
        return page.get_by_role("treeitem", name=re.compile(f"^{name}")).locator(".llmdebug-badge")

    expect(badge("LlamaForCausalLM")).to_have_text("6")
    expect(badge("layers ModuleList")).to_have_text("2")
    expect(badge("norm RMSNorm diverged")).to_have_text("2")
    expect(page.get_by_role("treeitem", name="1 DecoderLayer diverged")).to_be_visible()
    expect(page.get_by_role("treeitem", name="0 DecoderLayer within noise")).to_be_visible()
    expect(
        page.get_by_role("treeitem", name="layers ModuleList").locator(".llmdebug-node-verdict")
    ).to_have_text("✗")


def test_a_module_whose_rows_have_no_partner_says_how_many(mount: Mount) -> None:
    view = FakeView(report=True)
    node = next(node for node in view.tree if node["path"] == "lm_head")
    node.update(bad=0, unmatched=1234, verdict="unmatched")
    page = mount(Explorer(view))
    head = page.get_by_role("treeitem", name=re.compile("^lm_head Linear unmatched"))
    expect(head.locator(".llmdebug-alone")).to_have_text("? 1,234")
    expect(head.locator(".llmdebug-badge")).to_have_count(0)


# --- findings ---


def test_a_finding_opens_to_evidence_sentences_candidates_and_its_script(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    first, second = (page.get_by_role("button", name="Details").nth(n) for n in (0, 1))
    assert ("finding", 0) not in view.calls
    first.click()
    expect(first).to_have_attribute("aria-expanded", "true")
    body = page.locator(".llmdebug-finding-body").first
    for text in (
        "op-differs",
        "step 1 decode",
        "noise floor 0.012",
        "It differs. The error is made there.",
        "weight differs",
        "model.py:12",
    ):
        expect(body).to_contain_text(text)
    expect(body.locator("pre")).to_have_text(SCRIPT)
    expect(body).to_contain_text('report.findings[0].save_repro("repro.py")')
    page.evaluate(
        """() => {
          const clipboard = {writeText: async text => { window.clip = text; }};
          Object.defineProperty(navigator, 'clipboard', {value: clipboard});
        }"""
    )
    body.get_by_role("button", name="Copy script").click()
    expect(page.get_by_role("status")).to_contain_text("copied")
    assert page.evaluate("window.clip") == SCRIPT
    body.get_by_role("button", name="weight differs").click()
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    first.click()
    expect(body).to_be_hidden()
    first.click()
    expect(body).to_be_visible()
    assert view.calls.count(("finding", 0)) == 1
    second.click()
    expect(page.locator(".llmdebug-finding-body").last).to_contain_text(
        "no repro script: its tensors were not recorded in both runs"
    )


def test_a_finding_keeps_its_words_where_the_script_could_not_be_read_and_asks_for_it_again(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    finding = view.finding
    view.finding = lambda request: 1 / 0  # type: ignore[method-assign,assignment]
    details = page.get_by_role("button", name="Details").first
    details.click()
    expect(page.get_by_role("status")).to_contain_text("ZeroDivisionError")
    expect(page.locator(".llmdebug-finding-body").first).to_contain_text("noise floor 0.012")
    view.finding = finding  # type: ignore[method-assign]
    details.click()
    details.click()
    expect(page.locator(".llmdebug-script")).to_have_text(SCRIPT)


# --- what differs most ---


def test_the_worst_elements_lead_to_their_place_in_the_heat_map(mount: Mount) -> None:
    view = FakeView(report=True)
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax")
    page = mount(Explorer(view, selected=softmax))
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
    page.get_by_role("tab", name="side by side").click()
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
        ["rows 3–8, columns 16–47"] * 3
    )
    high = page.locator(".llmdebug-trio .llmdebug-legend span:nth-child(3)")
    assert high.nth(0).text_content() == high.nth(1).text_content()  # one scale for golden and mine
    page.locator(".llmdebug-worst button").first.click()
    place = page.locator(".llmdebug-worst button").first.text_content() or ""
    expect(page.locator(".llmdebug-value")).to_have_text(
        [re.compile(rf"^{re.escape(place)} = ")] * 3
    )


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
    expect(page.locator(".llmdebug-caption").first).to_have_text("rows 0–11, columns 0–63")
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
        "rows 0–1999, columns 0–2999, a cell is the extreme of 8 × 12"
    )
    click_at(page, 2345 / 3000, 1234 / 2000)
    expect(page.locator(".llmdebug-value")).to_have_text("[0, 1234, 2345] = -7.25")


def test_the_heat_map_zooms_to_numbers_by_key_and_wheel_and_pans(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=100))
    canvas, caption = page.locator(".llmdebug-canvas"), page.locator(".llmdebug-caption").first
    expect(canvas).to_have_attribute("data-numbers", "false")
    canvas.press("+")
    expect(caption).to_have_text("rows 3–8, columns 16–47")
    canvas.press("+")
    canvas.press("+")
    expect(canvas).to_have_attribute("data-numbers", "true")
    canvas.press("0")
    expect(caption).to_have_text("rows 0–11, columns 0–63")
    canvas.hover(position={"x": 1, "y": 1})
    page.mouse.wheel(0, -100)
    expect(caption).to_have_text("rows 0–5, columns 0–31")
    canvas.press("ArrowRight")
    expect(caption).to_have_text("rows 0–5, columns 8–39")
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20, steps=4)
    page.mouse.up()
    expect(caption).to_have_text("rows 0–5, columns 0–31")
    expect(page.locator(".llmdebug-value")).to_have_text("")  # a drag is no click


def test_colours_are_around_zero_for_both_signs_and_magenta_for_nan(mount: Mount) -> None:
    view = FakeView(report=True)
    broken = next(row for row in view.data if row["nan"])
    page = mount(Explorer(view, selected=broken["id"]))
    expect(page.locator(".llmdebug-caption").first).to_have_text("elements 0–63")
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
    expect(page.locator(".llmdebug-caption").first).to_have_text("rows 0–3, columns 0–11")
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
    assert ("heads", softmax) not in view.calls  # nobody looks
    page.locator(".llmdebug-heads summary").press("Enter")
    heads = page.get_by_role("radiogroup", name="head by head").get_by_role("radio")
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
        view.calls.count(("heads", softmax)) == 1
    )  # another head is another frame, not another answer
    page.get_by_role("combobox", name="rows").select_option(label="head (4)")
    expect(
        page.get_by_role("radiogroup", name="query by query").get_by_role("radio")
    ).to_have_count(12)


def test_more_heads_than_a_page_holds_are_turned_by_button_and_by_key(mount: Mount) -> None:
    view = FakeView()
    softmax = next(row["id"] for row in view.data if row["op"] == "Softmax" and row["step"] == 1)
    view.data[softmax]["shape"] = [1, 150, 12, 12]
    tensor = np.random.default_rng(0).random((1, 150, 12, 12), np.float32)
    view.tensor = lambda number, which: tensor  # type: ignore[method-assign]
    page = mount(Explorer(view, selected=softmax))
    page.locator(".llmdebug-heads summary").press("Enter")
    heads = page.get_by_role("radiogroup", name="head by head").get_by_role("radio")
    pager = page.locator(".llmdebug-pager")
    expect(pager).to_contain_text("0 to 63 of 150")
    expect(page.get_by_role("button", name="Previous ones")).to_be_disabled()
    heads.nth(63).click()
    heads.nth(63).press("ArrowRight")
    expect(pager).to_contain_text("64 to 127 of 150")
    expect(heads.first).to_be_focused()
    expect(heads.first).to_have_attribute("aria-checked", "true")
    page.get_by_role("button", name="Next ones").click()
    expect(pager).to_contain_text("128 to 149 of 150")
    expect(heads).to_have_count(22)
    expect(page.get_by_role("button", name="Next ones")).to_be_disabled()
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
          return Array.from({ length: el.width * el.height }, (_, i) => [...data.slice(4 * i, 4 * i + 3)].join());
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
    page.evaluate(
        """() => {
          const clipboard = {writeText: async text => { window.clip = text; }};
          Object.defineProperty(navigator, 'clipboard', {value: clipboard});
        }"""
    )
    page.get_by_role("button", name="Copy as code").click()
    expect(page.get_by_role("status")).to_contain_text("copied")
    assert page.evaluate("window.clip") == "run[100].tensor()"


# --- kernel ---


def test_python_moves_the_page(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    expect(row_at(page, 72)).to_be_visible()
    from_python(page, explorer, "position", 3)
    expect(step(page, 3)).to_have_attribute("aria-current", "step")
    expect(row_at(page, 216)).to_be_visible()
    from_python(page, explorer, "selected", 5)
    shown(page, 5)
    assert explorer.position == 0
    from_python(page, explorer, "path", "model.layers.2.mlp.up_proj")
    expect(page.get_by_role("treeitem", name="up_proj")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    from_python(page, explorer, "path", "")
    expect(page.locator(".llmdebug-total")).to_have_text("72 records")
    from_python(page, explorer, "selected", -1)
    expect(page.locator(".llmdebug-hint")).to_be_visible()


def test_an_explorer_starts_where_its_traits_say(mount: Mount) -> None:
    page = mount(Explorer(FakeView(), selected=230, path="model.layers.0"))
    shown(page, 230)
    page = page.context.new_page()
    mount_in(page, Explorer(FakeView(), path="model.layers.0"))
    expect(page.locator(".llmdebug-total")).to_have_text("22 records")


def test_a_token_chosen_while_the_kernel_is_slow_stays_chosen(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    expect(row_at(page, 72)).to_be_visible()
    hold(page)
    from_python(page, explorer, "selected", 5)  # in the warm-up
    step(page, 3).click()
    release(page)
    expect(row_at(page, 216)).to_be_visible()
    expect(page.locator(".llmdebug-place")).to_contain_text("#5 ·")
    expect(step(page, 3)).to_have_attribute("aria-current", "step")


def test_an_error_in_the_kernel_is_shown_and_the_next_action_clears_it(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    page.get_by_label("Filter records").fill("boom")
    expect(page.get_by_role("status")).to_have_text("ZeroDivisionError: division by zero")
    page.get_by_label("Filter records").press("End")
    expect(page.get_by_role("status")).to_have_text("")


def test_a_row_that_does_not_exist_is_an_error_not_a_crash(mount: Mount) -> None:
    explorer = Explorer(FakeView())
    page = mount(explorer)
    from_python(page, explorer, "selected", 4711)
    expect(page.get_by_role("status")).to_contain_text("no row 4711")


def test_a_slow_kernel_is_said_to_be_busy(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 74)).to_be_visible()
    hold(page)
    row_at(page, 74).click()
    expect(page.get_by_role("status")).to_have_text("kernel busy…")
    release(page)
    expect(page.get_by_role("status")).to_have_text("")
    shown(page, 74)


def test_requests_that_wait_behind_a_cell_are_sent_again_and_late_answers_change_nothing(
    mount: Mount,
) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 72)).to_be_visible()
    hold(page)
    row_at(page, 74).click()
    step(page, 3).click()
    page.evaluate("window.held = undefined")  # a way past the cell; what was sent still waits
    expect(row_at(page, 216)).to_be_visible()
    expect(page.locator(".llmdebug-place")).to_contain_text("#74 ·")
    row_at(page, 217).click()
    shown(page, 217)
    release(page)
    expect(page.get_by_role("status")).to_have_text("")
    shown(page, 217)


def test_requests_that_got_lost_are_sent_again(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 74)).to_be_visible()
    page.evaluate("window.deaf = true")
    row_at(page, 74).click()
    expect(page.get_by_role("status")).to_have_text("kernel busy…")
    page.evaluate("window.deaf = false")
    shown(page, 74)
    expect(page.get_by_role("status")).to_have_text("")


def test_what_a_slow_kernel_works_on_is_not_asked_for_again(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view))
    expect(row_at(page, 72)).to_be_visible()
    hold(page)
    sent = page.evaluate("window.sent")
    step(page, 3).click()
    page.wait_for_function(f"window.sent > {sent} + 1")  # it asked whether its request was lost
    before = len(view.calls)
    release(page)
    expect(row_at(page, 216)).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("")
    assert view.calls[before:] == [("rows", 0)]


def test_a_module_whose_children_could_not_be_read_can_be_opened_again(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view))
    chevron = page.get_by_role("treeitem", name="model").locator(".llmdebug-chevron")
    expect(chevron).to_be_visible()
    children = view.children
    view.children = lambda request: 1 / 0  # type: ignore[method-assign,assignment]
    chevron.click()
    expect(page.get_by_role("status")).to_contain_text("ZeroDivisionError")
    expect(page.get_by_role("treeitem", name="model")).to_have_attribute("aria-expanded", "false")
    view.children = children  # type: ignore[method-assign]
    chevron.click()
    expect(page.get_by_role("treeitem", name="embed_tokens")).to_be_visible()


def test_without_a_kernel_the_snapshot_stays_and_the_page_says_so(page: Page) -> None:
    page.clock.install()
    page.evaluate("window.deaf = true")
    explorer = Explorer(FakeView(report=True))
    page.add_init_script("window.deaf = true")
    page.goto("about:blank")
    mount_in(page, explorer)
    page.evaluate("window.deaf = true")
    page.clock.run_for(11_000)
    expect(page.get_by_role("status")).to_contain_text("the kernel is gone")
    expect(page.locator(".llmdebug-finding").first).to_be_visible()
    expect(page.locator(".llmdebug-layers")).to_be_hidden()
    expect(step(page, 2)).to_be_visible()


def test_hostile_names_are_text(mount: Mount) -> None:
    view = FakeView(report=True, extra=(HOSTILE,))
    finding = {
        **view.overview({"op": "overview"})["findings"][0],
        "path": HOSTILE,
        "op": HOSTILE,
        "evidence": HOSTILE,
    }
    hostile = {
        "title": HOSTILE,
        "lines": [HOSTILE],
        "summary": HOSTILE,
        "findings": [finding, finding],
    }
    view.overview = lambda request, plain=view.overview: {**plain(request), **hostile}  # type: ignore[method-assign]
    view._layer = lambda path: path  # type: ignore[method-assign]
    detail = {"script": HOSTILE, "why": "", "save": HOSTILE, "source": HOSTILE}
    view.finding = lambda request: detail  # type: ignore[method-assign,assignment,return-value]
    row = next(row["id"] for row in view.data if row["path"] == HOSTILE)
    view.flow = lambda row: [
        {"relation": "consumers", "links": [{"row": 1, "label": HOSTILE}], "total": 1}
    ]  # type: ignore[method-assign]
    explorer = Explorer(view, selected=row)
    page = mount(explorer)
    shown(page, row)
    expect(page.locator("h2")).to_have_text(HOSTILE)
    page.get_by_role("button", name="Details").first.click()
    expect(page.locator(".llmdebug-script")).to_have_text(HOSTILE)
    page.get_by_role("grid", name="Error over limit").press("End")
    page.locator(".llmdebug-layer-names span").last.hover()
    expect(page.locator(".llmdebug-place")).to_contain_text(HOSTILE)
    expect(page.get_by_role("treeitem", name="<img src=x")).to_be_visible()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_hostile_names_are_text_in_the_explorer_of_a_run(mount: Mount) -> None:
    view = FakeView(extra=(HOSTILE,))
    for step in view.steps:
        step["label"] = HOSTILE
    view.overview = lambda request, plain=view.overview: {
        **plain(request),
        "title": HOSTILE,
        "notes": [HOSTILE],
    }  # type: ignore[method-assign]
    wanted = next(row["id"] for row in view.data if row["path"] == HOSTILE)
    page = mount(Explorer(view, selected=wanted))
    shown(page, wanted)
    expect(page.locator("h2")).to_have_text(HOSTILE)
    expect(page.locator(".llmdebug-step").first).to_contain_text(HOSTILE)
    page.get_by_role("treeitem", name="<img src=x").click()
    expect(page.locator(".llmdebug-chip")).to_contain_text(HOSTILE.partition(".")[0])
    page.get_by_label("Filter records").fill(HOSTILE)
    expect(page.locator(".llmdebug-total")).to_have_text("0 records")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_keys_that_the_widget_uses_do_not_reach_the_notebook(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    page.evaluate(
        "() => { window.leaked = []; document.addEventListener('keydown', event => window.leaked.push(event.key)); }"
    )
    for key in ("n", "d", "x", "ArrowDown", "End"):
        page.get_by_role("grid", name="Records").press(key)
    expect(page.get_by_role("treeitem")).to_have_count(3)
    page.get_by_role("tree").press("Enter")
    page.get_by_role("grid", name="Records").press("Escape")
    page.get_by_role("grid", name="Records").press("Control+s")
    assert page.evaluate("window.leaked") == ["Escape", "Control", "s"]


# --- what is expected ---


def marked(page: Page) -> Locator:
    return page.locator(".llmdebug-marked")


def test_a_row_is_marked_by_key_with_a_comment_and_everything_follows(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    shown(page, explorer.selected)
    expect(step(page, 2).locator(".llmdebug-badge")).to_have_text("3")
    page.get_by_role("grid", name="Records").press("e")
    comment = page.locator(".llmdebug-place").get_by_label("why it is expected")
    expect(comment).to_be_focused()
    page.keyboard.type(f"fused kernel, N and p {HOSTILE}")
    comment.press("Enter")
    expect(page.locator(".llmdebug-title")).to_contain_text("diverged")
    expect(page.locator(SELECTED).locator(".llmdebug-verdict")).to_have_text("☑ expected")
    expect(page.locator(SELECTED)).to_contain_text(f"expected: fused kernel, N and p {HOSTILE}")
    expect(page.locator(".llmdebug-place")).to_contain_text(
        f"expected: fused kernel, N and p {HOSTILE}"
    )
    expect(step(page, 2).locator(".llmdebug-badge")).to_have_text("2")
    expect(page.get_by_role("treeitem", name="down_proj")).to_have_attribute(
        "title", re.compile("2 expected: fused kernel")
    )
    expect(page.locator(".llmdebug-status")).to_contain_text("marked as expected")
    expect(page.locator(".llmdebug-place [data-mark]")).to_be_focused()
    marked(page).locator("summary").click()
    expect(marked(page)).to_contain_text(f"{BROKEN} fused kernel, N and p {HOSTILE} 2 mismatches")
    expect(marked(page)).to_contain_text("kept in runs/compiled.expected.json")
    assert page.evaluate("window.hacked") is None
    page.get_by_role("grid", name="Records").press("e")  # once more: to what takes it back
    expect(page.locator(".llmdebug-place [data-mark]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(SELECTED).locator(".llmdebug-verdict")).to_have_text("✗ diverged")
    expect(marked(page)).to_have_count(0)
    expect(page.locator(".llmdebug-status")).to_contain_text("no longer expected")
    assert [call for call in view.calls if call[0].endswith("expect")] == [
        ("expect", explorer.selected),
        ("unexpect", 0),
    ]


def test_a_finding_is_marked_where_it_is_told_and_unmarked_there(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    finding = page.locator(".llmdebug-findings > ul > li").first
    button = finding.get_by_role("button", name="Mark as expected")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    finding.get_by_label("why it is expected").press("Escape")
    expect(finding.locator("form")).to_be_hidden()
    expect(button).to_be_focused()
    button.press("Enter")
    page.keyboard.type("fused")
    finding.get_by_role("button", name="Mark", exact=True).click()
    expect(marked(page)).to_contain_text("1 mark of what is expected")
    assert ("expect", -1) in view.calls


def test_a_mark_that_cannot_be_kept_says_why_and_changes_nothing(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    page.locator(".llmdebug-place").get_by_role("button", name="Mark as expected").click()
    page.keyboard.type("boom")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-failed")).to_contain_text("can't write expected.json: read-only")
    expect(page.locator(".llmdebug-place").get_by_label("why it is expected")).to_have_value("boom")
    expect(marked(page)).to_have_count(0)


def test_what_matches_is_not_marked(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    from_python(page, explorer, "selected", 1)
    shown(page, 1)
    page.get_by_role("grid", name="Records").press("e")
    expect(page.locator(".llmdebug-status")).to_contain_text("only a mismatch can be marked")
    expect(
        page.locator(".llmdebug-place").get_by_role("button", name="Mark as expected")
    ).to_have_count(0)


def test_an_open_explorer_follows_marks_made_in_python_and_stays_where_it_is(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    expect(
        page.get_by_role("treeitem", name="embed_tokens")
    ).to_be_visible()  # the tree opens behind the records
    page.get_by_role("treeitem", name="lm_head").click()
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    view.expect(
        {
            "op": "expect",
            "row": explorer.selected,
            "finding": -1,
            "scope": "tensor",
            "comment": "known",
        }
    )
    from_python(page, explorer, "snapshot", view.overview({"op": "overview"}))
    expect(marked(page)).to_contain_text("1 mark")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    expect(page.locator(".llmdebug-place")).to_contain_text("expected: known")
    assert explorer.path == "lm_head"


# --- the table of mismatches ---


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("columnheader", name=re.compile(f"^{name}"))


def ids_in_view(page: Page) -> list[int]:
    return [
        int(row)
        for row in page.locator(".llmdebug-record[data-row]").evaluate_all(
            "all => all.map(el => el.dataset.row)"
        )
    ]


def test_a_column_sorts_down_then_up_then_not_at_all_by_click_and_by_key(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    header = column(page, "error")
    expect(header).to_have_attribute("aria-sort", "none")
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "descending")
    bad = [row["id"] for row in view.data if row["step"] == 2 and row["verdict"] == "diverged"]
    expect(page.locator(".llmdebug-record[data-row]").first).to_have_attribute(
        "data-row", str(bad[0])
    )
    assert ids_in_view(page)[:3] == bad
    expect(header.get_by_role("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "ascending")
    expect(page.locator(".llmdebug-record[data-row]").first).not_to_have_attribute(
        "data-row", str(bad[0])
    )
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "none")
    column(page, "tensor").get_by_role("button").click()
    expect(column(page, "tensor")).to_have_attribute("aria-sort", "ascending")
    expect(header).to_have_attribute("aria-sort", "none")
    paths = [view.data[i]["path"] for i in ids_in_view(page)]
    assert paths == sorted(paths)


def test_all_tokens_are_one_sorted_table_and_n_walks_down_it(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    expect(column(page, "token")).to_have_count(0)
    page.get_by_label("all tokens").check()
    expect(page.locator(".llmdebug-total")).to_have_text(f"{len(view.data)} records")
    expect(column(page, "token")).to_have_count(1)
    page.get_by_label("mismatches only").check()
    expect(page.locator(".llmdebug-total")).to_have_text("6 records")
    column(page, "tensor").get_by_role("button").click()
    wanted = sorted(
        (row for row in view.data if row["verdict"] == "diverged"), key=lambda row: row["path"]
    )
    expect(page.locator(".llmdebug-record[data-row]").first).to_have_attribute(
        "data-row", str(wanted[0]["id"])
    )
    assert ids_in_view(page) == [row["id"] for row in wanted]
    page.locator(f".llmdebug-record[data-row='{wanted[0]['id']}']").click()
    shown(page, wanted[0]["id"])
    page.get_by_role("grid", name="Records").press("ArrowDown")
    shown(page, wanted[1]["id"])
    expect(step(page, wanted[1]["step"])).to_have_attribute("aria-current", "step")
    assert explorer.position == wanted[1]["step"]


def test_sorting_a_hundred_thousand_rows_asks_for_one_page_and_keeps_few_elements(
    mount: Mount,
) -> None:
    view = FakeView(report=True, records=100_000)
    page = mount(Explorer(view))
    page.get_by_label("all tokens").check()
    expect(page.locator(".llmdebug-total")).to_have_text("100,000 records")
    view.calls.clear()
    column(page, "#").get_by_role("button").click()
    column(page, "#").get_by_role("button").click()
    expect(page.locator(".llmdebug-record[data-row]").first).to_have_attribute("data-row", "99999")
    assert len([call for call in view.calls if call[0] == "rows"]) <= 4
    assert page.locator(".llmdebug-record").count() < 60


def test_a_run_is_in_execution_order_alone(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(column(page, "tensor")).not_to_have_attribute("aria-sort", re.compile(""))
    expect(page.get_by_label("all tokens")).to_have_count(0)


# --- the errors of a tensor ---


def test_the_differences_have_a_histogram_with_the_limit_in_it(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    figure = page.locator(".llmdebug-error-histogram")
    expect(figure.locator("rect")).to_have_count(64)
    expect(figure).to_contain_text(
        "64 of 64 elements differ · dashed: the limit, spread evenly (0.012)"
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
    plot = page.locator(".llmdebug-scatter-plot")
    expect(plot).to_have_attribute("data-kind", kind)
    expect(plot).to_have_attribute(
        "aria-label", re.compile("^Golden against mine, 64 elements from ")
    )
    drawn = """el => { const {width, height} = el; const data = el.getContext('2d').getImageData(0, 0, width, height).data;
      const words = new Set(new Uint32Array(data.buffer)); return words.size; }"""
    page.wait_for_function(
        f"(() => {{ const el = document.querySelector('.llmdebug-scatter-plot'); return ({drawn})(el) > 3; }})()"
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


def test_a_closed_view_leaves_nothing_behind(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 72)).to_be_visible()
    assert page.evaluate("window.listening()") == 6
    page.evaluate("window.unmount()")
    assert page.evaluate("window.listening()") == 0
    expect(page.locator(".llmdebug")).to_have_count(0)


TEXTS = ", ".join(
    f".llmdebug {name}"
    for name in (
        "h2",
        "h3",
        "button:not(:disabled)",
        "td",
        "th",
        ".llmdebug-badge",
        ".llmdebug-verdict",
        ".llmdebug-dim",
        ".llmdebug-path",
        ".llmdebug-slot",
        ".llmdebug-node-label",
        ".llmdebug-node-type",
    )
)
# as WCAG defines it
LEAST_CONTRAST = """selector => {
  const linear = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const paper = el => {
    const colour = getComputedStyle(el).backgroundColor;
    return /, 0\\)$/.test(colour) ? paper(el.parentElement) : colour;
  };
  const contrast = el => {
    const [a, b] = [light(getComputedStyle(el).color), light(paper(el))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  return Math.min(...[...document.querySelectorAll(selector)].filter(el => el.offsetParent).map(contrast));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    mount_in(page, Explorer(FakeView(report=True)))
    expect(page.locator(SELECTED)).to_be_visible()
    contrast = page.evaluate(LEAST_CONTRAST, TEXTS)
    assert contrast >= 4.5
