"""The explorer's list of records: paging, filters, sorting, and walking by key."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from browser import Mount, from_python
from explorer_page import SELECTED, row_at, shown, token
from fake_view import FakeView
from llmdebug_nb.notebook.widgets import Explorer


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
    assert len([call for call in view.asked if call[0] == "rows"]) <= 5


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
    expect(page.get_by_role("status")).to_contain_text("no more records")


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
    expect(page.get_by_role("status")).to_contain_text("no more mismatches")
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
        "data-none", re.compile("^can't read the filter 'abs><img': > needs a number")
    )
    box.fill("abs>1")
    expect(box).to_have_attribute("aria-invalid", "false")
    box.fill("abs>")
    expect(box).to_have_attribute("aria-invalid", "true")
    page.get_by_role("radio", name="port.py:30").click()
    expect(box).to_have_value("")
    expect(box).to_have_attribute("aria-invalid", "false")
    expect(page.locator(SELECTED)).to_be_visible()


def test_a_jump_drops_the_filters_that_hide_its_target(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    page.get_by_role("treeitem", name="lm_head").click()
    page.get_by_label("Filter records").fill("lm_head")
    page.get_by_role("radio", name="port.py:30").click()
    shown(page, explorer.snapshot["findings"][0]["row"])
    assert explorer.path == ""
    expect(page.get_by_label("Filter records")).to_have_value("")


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
    expect(token(page)).to_have_text(view.steps[wanted[1]["step"]]["label"])
    assert explorer.position == wanted[1]["step"]


def test_sorting_a_hundred_thousand_rows_asks_for_one_page_and_keeps_few_elements(
    mount: Mount,
) -> None:
    view = FakeView(report=True, records=100_000)
    page = mount(Explorer(view))
    page.get_by_label("all tokens").check()
    expect(page.locator(".llmdebug-total")).to_have_text("100,000 records")
    view.asked.clear()
    column(page, "#").get_by_role("button").click()
    column(page, "#").get_by_role("button").click()
    expect(page.locator(".llmdebug-record[data-row]").first).to_have_attribute("data-row", "99999")
    assert len([call for call in view.asked if call[0] == "rows"]) <= 4
    assert page.locator(".llmdebug-record").count() < 60


def test_a_run_is_in_execution_order_alone(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(column(page, "tensor")).not_to_have_attribute("aria-sort", re.compile(""))
    expect(page.get_by_label("all tokens")).to_have_count(0)
