"""Shared by the tests of the explorer in a bare page: the places of its parts."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

SELECTED = ".llmdebug-record[aria-selected=true]"


def row_at(page: Page, row: int) -> Locator:
    return page.locator(f".llmdebug-record[data-row='{row}']")


def shown(page: Page, row: int) -> None:
    """The record is selected in the list and its tensor is in the panel."""
    expect(page.locator(SELECTED)).to_have_attribute("data-row", str(row))
    expect(page.locator(".llmdebug-place")).to_contain_text(f"#{row} ·")


def more(page: Page) -> None:
    """Unfold what the tensor of a comparison has besides its pictures."""
    page.locator(".llmdebug-more > summary").click()


def token(page: Page) -> Locator:
    """The selected token of a comparison."""
    return page.locator(".llmdebug-time-now")


def step(page: Page, index: int) -> Locator:
    return page.locator(f".llmdebug-step[data-index='{index}']")


def clipboard(page: Page) -> None:
    """Let what is copied be kept as ``window.clip``."""
    page.evaluate(
        """() => {
          const clipboard = {writeText: async text => { window.clip = text; }};
          Object.defineProperty(navigator, 'clipboard', {value: clipboard});
        }"""
    )
