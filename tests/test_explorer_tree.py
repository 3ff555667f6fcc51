"""The explorer's tree of modules."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, expect

from browser import Mount
from explorer_page import SELECTED
from fake_view import FakeView
from llmdebug_nb.notebook.widgets import Explorer


def test_the_tree_fetches_children_when_a_module_is_opened(mount: Mount) -> None:
    view = FakeView()
    page = mount(Explorer(view))
    expect(page.get_by_role("treeitem")).to_have_count(3)  # the lone root is open
    assert [call for call in view.asked if call[0] == "children"] == [
        ("children", -1),
        ("children", 0),
    ]
    page.get_by_role("treeitem", name="model").locator(".llmdebug-chevron").click()
    expect(page.get_by_role("treeitem", name="layers")).to_be_visible()
    assert [call for call in view.asked if call[0] == "children"][2:] == [("children", 1)]


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
    page.get_by_role("button", name="in model").click()
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
    tree.evaluate("el => { el.scrollTop = 0; el.scrollTop = 500 * 24; }")
    expect(page.locator(".llmdebug-node-label", has_text=re.compile("^510$"))).to_be_visible()
    assert page.get_by_role("treeitem").count() < 60


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
    node = view.tree.at["lm_head"]
    view.tree.bad[node] = view.tree.near[node] = 0
    view.tree.alone[node] = 1234
    page = mount(Explorer(view))
    head = page.get_by_role("treeitem", name=re.compile("^lm_head Linear unmatched"))
    expect(head.locator(".llmdebug-alone")).to_have_text("? 1,234")
    expect(head.locator(".llmdebug-badge")).to_have_count(0)
