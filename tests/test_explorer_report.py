"""The explorer's findings and its marks for expected mismatches."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from browser import Mount, from_python
from explorer_page import SELECTED, shown, step
from fake_view import BROKEN, HOSTILE, SCRIPT, FakeView
from llmdebug_nb.notebook.widgets import Explorer


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
    expect(body.locator(".llmdebug-script")).to_have_text(SCRIPT)
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


def test_a_finding_shows_both_lines_side_by_side_and_its_lines_folded(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    page.get_by_role("button", name="Details").first.click()
    body = page.locator(".llmdebug-finding-body").first
    expect(body.locator(".llmdebug-relation")).to_have_text("mine's value is golden's times 0.5")
    golden, mine = (body.get_by_role("region", name=name) for name in ("golden", "mine"))
    expect(golden.locator("pre")).to_have_text("x = self.act(x)")
    expect(mine.locator("pre")).to_have_text("x = <b>self.act(x)</b> / 2")  # it is text
    expect(mine).to_contain_text("called at port.py:41 forward")
    boxes = golden.bounding_box(), mine.bounding_box()
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    lines = body.get_by_role("row")
    expect(lines).to_have_count(0)
    body.get_by_text("Line by line").click()
    expect(lines).to_have_count(3)
    expect(lines.last).to_contain_text("guilty")
    expect(lines.last).to_contain_text("0.5")


def test_a_finding_stays_shown_and_asks_again_if_its_script_could_not_be_read(
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
    comment = page.locator(".llmdebug-place").get_by_label("reason")
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
    expect(marked(page)).to_contain_text("saved in runs/compiled.expected.json")
    assert page.evaluate("window.hacked") is None
    page.get_by_role("grid", name="Records").press("e")  # once more: to what takes it back
    expect(page.locator(".llmdebug-place [data-mark]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(SELECTED).locator(".llmdebug-verdict")).to_have_text("✗ diverged")
    expect(marked(page)).to_have_count(0)
    expect(page.locator(".llmdebug-status")).to_contain_text("mark removed")
    assert [call for call in view.calls if call[0].endswith("expect")] == [
        ("expect", explorer.selected),
        ("unexpect", 0),
    ]


def test_a_finding_is_marked_and_unmarked_in_its_own_row(mount: Mount) -> None:
    view = FakeView(report=True)
    page = mount(Explorer(view))
    finding = page.locator(".llmdebug-findings > ul > li").first
    button = finding.get_by_role("button", name="Mark as expected")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    finding.get_by_label("reason").press("Escape")
    expect(finding.locator("form")).to_be_hidden()
    expect(button).to_be_focused()
    button.press("Enter")
    page.keyboard.type("fused")
    finding.get_by_role("button", name="Mark", exact=True).click()
    expect(marked(page)).to_contain_text("Marked as expected: 1")
    assert ("expect", -1) in view.calls


def test_a_mark_that_cannot_be_kept_says_why_and_changes_nothing(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)))
    page.locator(".llmdebug-place").get_by_role("button", name="Mark as expected").click()
    page.keyboard.type("boom")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-failed")).to_contain_text("can't write expected.json: read-only")
    expect(page.locator(".llmdebug-place").get_by_label("reason")).to_have_value("boom")
    expect(marked(page)).to_have_count(0)


def test_a_matching_tensor_can_not_be_marked(mount: Mount) -> None:
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
    expect(marked(page)).to_contain_text("Marked as expected: 1")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    expect(page.locator(".llmdebug-place")).to_contain_text("expected: known")
    assert explorer.path == "lm_head"
