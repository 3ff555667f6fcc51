"""The explorer's findings and its marks for expected mismatches."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from browser import Mount, from_python
from explorer_page import SELECTED, clipboard, more, shown
from fake_view import BROKEN, HOSTILE, SCRIPT, FakeView
from llmdebug_nb.core.errors import ProofError
from llmdebug_nb.notebook.widgets import Explorer


def test_the_first_screen_is_the_answer_and_fits_into_600_pixels(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)), drawer=False)
    expect(page.locator("h2")).to_have_text(
        f"✗ diverged Made in port.py:30 · {BROKEN} (FastLinear, was Linear)"
    )
    expect(page.locator(".llmdebug-reasons dd")).to_have_text(
        [
            "Mine's value is golden's times 0.5.",
            "Tokens 12-39 of 40 differ.",
            "replayed on its own inputs, the op gives another result.",
            "Look at the scale.",
        ]
    )
    expect(page.locator(".llmdebug-trio .llmdebug-canvas[aria-busy=false]")).to_have_count(3)
    for width in (600, 1240, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        box = page.locator(".llmdebug").bounding_box()
        assert box
        assert box["height"] <= 600
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.get_by_role("grid", name="Records")).to_be_hidden()


def test_a_report_shows_errors_and_metrics(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    expect(page.get_by_role("grid", name="Records").get_by_role("columnheader")).to_have_text(
        ["#", "tensor", "op", "type", "shape", "error", "limit", "which", "verdict"]
    )
    more(page)
    expect(page.locator(".llmdebug-metrics")).to_contain_text("cosine")
    expect(page.locator(".llmdebug-summary tr.llmdebug-differs th[scope=row]")).to_have_text(
        ["fingerprint"]
    )


# --- findings ---


def test_each_finding_is_a_chip_that_leads_to_its_tensor(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    chips = page.get_by_role("radiogroup", name="2 findings").get_by_role("radio")
    expect(chips).to_have_text(["✗ port.py:30", "✗ lm_head"])
    chips.nth(1).click()
    expect(page.locator("h2")).to_have_text("✗ diverged A weight differs in lm_head (Linear)")
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    expect(chips.nth(1)).to_be_focused()
    chips.nth(1).press("ArrowLeft")
    expect(page.locator("h2")).to_contain_text("Made in port.py:30")
    page.keyboard.press("f")
    expect(page.locator("h2")).to_contain_text("A weight differs in lm_head")
    page.keyboard.press("f")  # and round
    expect(page.locator("h2")).to_contain_text("Made in port.py:30")


def test_the_script_that_replays_a_finding_is_one_click_away(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    repro = page.get_by_role("button", name="Repro")
    repro.click()
    expect(repro).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".llmdebug-script")).to_have_text(SCRIPT)
    expect(page.locator(".llmdebug-answer")).to_contain_text(
        'report.findings[0].save_repro("repro.py")'
    )
    clipboard(page)
    page.get_by_role("button", name="Copy script").click()
    expect(page.get_by_role("status")).to_contain_text("copied")
    assert page.evaluate("window.clip") == SCRIPT
    page.get_by_role("radio", name="lm_head").click()
    expect(page.locator(".llmdebug-answer")).to_contain_text(
        "no repro script: its tensors were not recorded in both runs"
    )
    assert view.asked.count(("finding", 0)) == 1
    repro.click()
    expect(page.locator(".llmdebug-answer-drawer")).to_have_count(0)


def test_golden_and_mine_stand_line_by_line_with_the_guilty_line_in_view(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    lines = page.get_by_role("region", name="Code").get_by_role("row")
    expect(lines).to_have_count(4)
    guilty = page.locator("tr[data-guilty]")
    expect(guilty).to_have_count(1)
    expect(guilty.locator("code")).to_have_text(
        ["    x = self.act(x)", "    x = <b>self.act(x)</b> / 2"]  # it is text
    )
    expect(guilty).to_contain_text("0.5 ✗")
    expect(guilty).to_be_in_viewport()
    expect(lines.nth(1)).to_contain_text("=")
    expect(lines.last).to_contain_text("0.5 ⤵")
    page.get_by_role("grid", name="Records").press("c")
    expect(page.get_by_role("region", name="Code")).to_be_focused()
    page.keyboard.press("t")
    expect(page.get_by_role("region", name="Tensor", exact=True)).to_be_focused()


def test_a_finding_stays_shown_and_asks_again_if_its_details_could_not_be_read(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    finding = view.finding
    view.finding = lambda request: 1 / 0  # type: ignore[method-assign,assignment]
    page = mount(Explorer(view), drawer=False)
    expect(page.get_by_role("status")).to_contain_text("ZeroDivisionError")
    expect(page.locator("h2")).to_contain_text("Made in port.py:30")
    expect(page.get_by_role("region", name="Code")).to_be_hidden()
    view.finding = finding  # type: ignore[method-assign]
    page.keyboard.press("Tab")
    page.get_by_role("radio", name="lm_head").click()
    page.get_by_role("radio", name="port.py:30").click()
    expect(page.locator("tr[data-guilty]")).to_be_visible()


def test_a_proof_is_asked_for_by_button_and_its_result_stands_with_the_reasons(
    mount: Mount,
) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    page.get_by_role("button", name="Prove").click()
    expect(page.locator(".llmdebug-reasons")).to_contain_text("all 12 rows agree")
    assert ("prove", 0) in view.asked


def test_a_proof_that_is_not_possible_says_why(mount: Mount) -> None:
    view = FakeView(report=True)

    def refused(request: object) -> None:
        raise ProofError("the model is gone")

    view.prove = refused  # type: ignore[method-assign,assignment]
    page = mount(Explorer(view))
    page.get_by_role("button", name="Prove").click()
    expect(page.get_by_role("status")).to_contain_text("the model is gone")
    expect(page.get_by_role("button", name="Prove")).to_be_enabled()


def test_a_module_is_looked_into_and_there_is_a_way_back(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    page.get_by_role("button", name="Look inside").click()
    back = page.get_by_role("button", name="Back")
    expect(back).to_be_visible()
    expect(page.get_by_role("button", name="Look inside")).to_have_count(0)
    back.click()
    expect(page.get_by_role("button", name="Look inside")).to_be_visible()
    assert [call for call in view.asked if call[0] == "inside"] == [("inside", 0), ("inside", -1)]


def test_a_line_that_no_editor_can_open_is_copied_and_said(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    clipboard(page)
    page.get_by_role("button", name="Open line").click()
    expect(page.get_by_role("status")).to_contain_text("copied: port.py:30")
    assert page.evaluate("window.clip") == "port.py:30"


def test_the_keys_are_listed_by_a_question_mark_and_by_button(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    page.get_by_role("grid", name="Records").press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_contain_text("next finding")
    page.keyboard.press("Enter")
    expect(keys).to_be_hidden()
    page.get_by_role("button", name="Keys").click()
    expect(keys).to_be_visible()


def test_without_a_finding_the_answer_is_how_much_agrees(mount: Mount) -> None:
    view = FakeView(report=True, layers=0)
    plain = view.overview

    def overview(request: object = None) -> Any:
        fine = {"findings": [], "verdict": "match", "caution": "but on only 12 % of golden"}
        return {**plain(), **fine, "first_bad": -1}

    view.overview = overview  # type: ignore[method-assign]
    page = mount(Explorer(view), drawer=False)
    expect(page.locator("h2")).to_have_text("✓ match but on only 12 % of golden")
    expect(page.locator(".llmdebug-answer")).to_contain_text("It differs.")  # the summary
    expect(page.get_by_role("region", name="Code")).to_be_hidden()
    expect(page.get_by_text("Select a record to see its tensor.")).to_be_visible()


# --- what is expected ---


def marked(page: Page) -> Locator:
    return page.locator(".llmdebug-marked")


def test_a_row_is_marked_by_key_with_a_comment_and_everything_follows(mount: Mount) -> None:
    view = FakeView(report=True)
    explorer = Explorer(view)
    page = mount(explorer)
    shown(page, explorer.selected)
    page.get_by_role("grid", name="Records").press("e")
    comment = page.locator(".llmdebug-panel").get_by_label("reason")
    expect(comment).to_be_focused()
    page.keyboard.type(f"fused kernel, N and p {HOSTILE}")
    comment.press("Enter")
    expect(page.locator(SELECTED).locator(".llmdebug-verdict")).to_have_text("☑ expected")
    expect(page.locator(SELECTED)).to_contain_text(f"expected: fused kernel, N and p {HOSTILE}")
    expect(page.locator(".llmdebug-place")).to_contain_text(
        f"expected: fused kernel, N and p {HOSTILE}"
    )
    page.get_by_role("button", name="More: mark as expected").click()
    expect(page.get_by_role("treeitem", name="down_proj")).to_have_attribute(
        "title", re.compile("2 expected: fused kernel")
    )
    marked(page).locator("summary").click()
    expect(marked(page)).to_contain_text(f"{BROKEN} fused kernel, N and p {HOSTILE} 2 mismatches")
    expect(marked(page)).to_contain_text("saved in runs/compiled.expected.json")
    assert page.evaluate("window.hacked") is None
    page.get_by_role("grid", name="Records").press("e")  # once more: to what takes it back
    expect(page.locator(".llmdebug-panel [data-mark]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(SELECTED).locator(".llmdebug-verdict")).to_have_text("✗ diverged")
    expect(marked(page)).to_have_count(0)
    expect(page.locator(".llmdebug-status")).to_contain_text("mark removed")
    assert [call for call in view.asked if call[0].endswith("expect")] == [
        ("expect", explorer.selected),
        ("unexpect", 0),
    ]


def test_a_finding_is_marked_and_unmarked_in_the_answer(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    page.get_by_role("button", name="More: mark as expected").click()
    answer = page.locator(".llmdebug-answer")
    button = answer.get_by_role("button", name="Mark as expected", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    answer.get_by_label("reason").press("Escape")
    expect(answer.locator("form")).to_be_hidden()
    expect(button).to_be_focused()
    button.press("Enter")
    page.keyboard.type("fused")
    answer.get_by_role("button", name="Mark", exact=True).click()
    expect(marked(page)).to_contain_text("Marked as expected: 1")
    assert ("expect", -1) in view.asked


def test_a_mark_that_cannot_be_kept_says_why_and_changes_nothing(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    page.get_by_role("grid", name="Records").press("e")
    page.keyboard.type("boom")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-failed")).to_contain_text("can't write expected.json: read-only")
    expect(page.locator(".llmdebug-panel").get_by_label("reason")).to_have_value("boom")
    expect(marked(page)).to_have_count(0)


def test_a_matching_tensor_can_not_be_marked(mount: Mount) -> None:
    explorer = Explorer(FakeView(report=True))
    page = mount(explorer)
    from_python(page, explorer, "selected", 1)
    shown(page, 1)
    page.get_by_role("grid", name="Records").press("e")
    expect(page.locator(".llmdebug-status")).to_contain_text("only a mismatch can be marked")
    expect(
        page.locator(".llmdebug-panel").get_by_role("button", name="Mark as expected")
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
    page.get_by_role("button", name="More: mark as expected").click()
    expect(marked(page)).to_contain_text("Marked as expected: 1")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    expect(page.locator(".llmdebug-place")).to_contain_text("expected: known")
    assert explorer.path == "lm_head"
