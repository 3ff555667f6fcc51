"""The explorer and its kernel: traits, slow and lost answers, errors, and hostile names."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from browser import Mount, from_python, hold, release
from browser import mount as mount_in
from explorer_page import more, row_at, shown, step
from fake_view import HOSTILE, FakeView
from llmdebug_nb.notebook.widgets import Explorer


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
    expect(page.locator(".llmdebug-place")).to_contain_text("#221 ·")  # the same tensor there
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
    expect(page.locator(".llmdebug-place")).to_contain_text("#218 ·")
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
    before = len(view.asked)
    release(page)
    expect(row_at(page, 216)).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("")
    assert view.asked[before:] == [("rows", 0)]


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
    expect(page.get_by_role("status")).to_contain_text("the kernel has stopped")
    expect(page.locator("h2")).to_contain_text("Made in port.py:30")
    expect(page.get_by_text("Look at the scale.")).to_be_visible()


def test_hostile_names_are_text(mount: Mount) -> None:
    view = FakeView(report=True, extra=(HOSTILE,))
    finding = {
        **view.overview({"op": "overview"})["findings"][0],
        "path": HOSTILE,
        "op": HOSTILE,
        "evidence": HOSTILE,
        **dict.fromkeys(("head", "place", "where", "what", "why", "do", "file", "proof"), HOSTILE),
    }
    hostile = {
        "title": HOSTILE,
        "lines": [HOSTILE],
        "summary": HOSTILE,
        "findings": [finding, finding],
    }
    plain = view.overview
    view.overview = lambda request: {**plain(request), **hostile}  # type: ignore[method-assign]
    source = {
        "which": "mine",
        "place": HOSTILE,
        "call": HOSTILE,
        "code": HOSTILE,
        "frames": [HOSTILE],
    }
    pair = {"state": "guilty", "golden": HOSTILE, "mine": HOSTILE, "error": None}
    detail = {"script": HOSTILE, "why": "", "save": HOSTILE, "relation": HOSTILE, "advice": HOSTILE}
    line = {"golden_line": 1, "golden": HOSTILE, "mine_line": 1, "mine": HOSTILE}
    code = {
        f"{which}_{what}": HOSTILE for which in ("golden", "mine") for what in ("file", "function")
    }
    lines = [{**line, "state": "guilty", "error": None}]
    detail |= {"listing": {**code, "lines": lines, "at": 0, "note": HOSTILE}}  # type: ignore[dict-item]
    detail |= {"kernel": "", "code": "", "sources": [source, source], "pairs": [pair]}
    line = {"golden": HOSTILE, "mine": HOSTILE, "golden_line": 1, "mine_line": 1}
    files = ("golden_file", "golden_function", "mine_file", "mine_function", "note")
    detail["listing"] = {
        **dict.fromkeys(files, HOSTILE),
        "lines": [line | {"state": "guilty", "error": None}],
        "at": 0,
    }
    view.finding = lambda request: detail  # type: ignore[method-assign,assignment,return-value]
    row = next(row["id"] for row in view.data if row["path"] == HOSTILE)
    view.flow = lambda row: [
        {"relation": "consumers", "links": [{"row": 1, "label": HOSTILE}], "total": 1}
    ]  # type: ignore[method-assign]
    explorer = Explorer(view, selected=row)
    page = mount(explorer)
    shown(page, row)
    expect(page.locator("h2")).to_contain_text(HOSTILE)
    expect(page.locator(".llmdebug-lines code")).to_have_text([HOSTILE, HOSTILE])
    page.get_by_role("button", name="Repro").click()
    expect(page.locator(".llmdebug-script")).to_have_text(HOSTILE)
    page.get_by_role("grid", name="Where the error goes").press("End")
    page.get_by_role("grid", name="Where the error goes").press("Enter")
    page.locator(".llmdebug-time-heads span").last.hover()
    more(page)
    expect(page.locator(".llmdebug-place")).to_contain_text(HOSTILE)
    expect(page.get_by_role("treeitem", name="<img src=x")).to_be_visible()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_hostile_names_are_text_in_the_explorer_of_a_run(mount: Mount) -> None:
    view = FakeView(extra=(HOSTILE,))
    for one in view.steps:
        one["label"] = HOSTILE
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
        "() => { window.leaked = []; document.addEventListener('keydown', event => "
        "window.leaked.push(event.key)); }"
    )
    for key in ("n", "d", "x", "ArrowDown", "End"):
        page.get_by_role("grid", name="Records").press(key)
    expect(page.get_by_role("treeitem")).to_have_count(3)
    page.get_by_role("tree").press("Enter")
    page.get_by_role("grid", name="Records").press("Escape")
    page.get_by_role("grid", name="Records").press("Control+s")
    assert page.evaluate("window.leaked") == ["Escape", "Control", "s"]


def test_a_closed_view_leaves_nothing_behind(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(row_at(page, 72)).to_be_visible()
    assert page.evaluate("window.listening()") == 6
    page.evaluate("window.unmount()")
    assert page.evaluate("window.listening()") == 0
    expect(page.locator(".llmdebug")).to_have_count(0)
