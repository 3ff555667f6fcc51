"""The explorers by keyboard alone, and as assistive technology sees them."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser import Mount, violations
from browser import mount as mount_in
from explorer_page import SELECTED, more, token
from fake_view import FakeView
from llmdebug_nb.notebook.widgets import Explorer


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("report", [False, True], ids=["run", "report"])
def test_an_explorer_has_no_accessibility_violation(page: Page, scheme: Any, report: bool) -> None:
    page.emulate_media(color_scheme=scheme)
    view = FakeView(report=report)
    wanted = next(
        row["id"] for row in view.data if row["op"] == "Softmax" and row["role"] == "output"
    )
    mount_in(page, Explorer(view, selected=wanted))
    expect(page.locator(".llmdebug-canvas[aria-busy=false]").first).to_be_visible()
    if report:
        page.get_by_role("button", name="Records and model tree").click()
        more(page)
        page.get_by_role("button", name="More: mark as expected").click()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    else:
        expect(page.locator(".llmdebug-histogram rect").first).to_be_visible()
    assert violations(page, ".llmdebug") == []


def focused(page: Page) -> str:
    """Return role (or tag) and name of the element that has the focus; "" if none has it."""
    return str(
        page.evaluate(
            "() => { const at = document.activeElement; if (at === document.body) return '';"
            " return `${at.getAttribute('role') ?? at.tagName} ${at.ariaLabel ?? "
            "at.textContent}`; }"
        )
    )


def tab_to(page: Page, wanted: str) -> None:
    """Press Tab until the focus is there."""
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        if wanted in seen[-1]:
            return
    raise AssertionError(f"Tab never came to {wanted!r}; it came to {seen}")


def test_a_run_is_walked_from_token_to_value_by_keyboard_alone(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(page.locator(".llmdebug-total")).to_have_text("72 records")
    tab_to(page, "prefill")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".llmdebug-step[aria-current]")).to_contain_text("1 decode")
    tab_to(page, "tree Model tree")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-total")).to_have_text("2 records")
    tab_to(page, "grid Records")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".llmdebug-place")).to_contain_text("lm_head output[0]")
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_be_visible()
    tab_to(page, "img Heat map")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-value")).to_contain_text("] = ")


def test_a_report_is_walked_from_finding_to_difference_by_keyboard_alone(mount: Mount) -> None:
    page = mount(Explorer(FakeView(report=True)), drawer=False)
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_have_count(3)
    tab_to(page, "Repro")
    page.keyboard.press("Enter")
    expect(page.locator(".llmdebug-script")).to_be_visible()
    tab_to(page, "grid Where the error goes")
    page.keyboard.press("End")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(token(page)).to_have_text("2 decode")
    tab_to(page, "Records and model tree")
    page.keyboard.press("Enter")
    tab_to(page, "grid Records")
    page.keyboard.press("Shift+N")
    page.keyboard.press("Shift+P")
    expect(page.locator(".llmdebug-record[aria-selected=true]")).to_contain_text("model.norm")
    expect(page.locator(".llmdebug-place")).to_contain_text("model.norm")  # it is drawn anew
    page.keyboard.press("t")
    tab_to(page, "side by side")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="difference")).to_have_attribute("aria-selected", "true")


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
  const seen = [...document.querySelectorAll(selector)].filter(el => el.offsetParent);
  return Math.min(...seen.map(contrast));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    mount_in(page, Explorer(FakeView(report=True)))
    page.get_by_role("button", name="Records and model tree").click()
    expect(page.locator(SELECTED)).to_be_visible()
    contrast = page.evaluate(LEAST_CONTRAST, TEXTS)
    assert contrast >= 4.5
