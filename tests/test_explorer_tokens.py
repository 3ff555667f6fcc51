"""The explorer's token stepper, by click, by key and by playing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from browser import Mount, hold, release
from browser import mount as mount_in
from explorer_page import row_at, shown, step
from fake_view import HOSTILE, FakeView
from llmdebug_nb.notebook.widgets import Explorer


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


def test_a_warm_up_looks_different(mount: Mount) -> None:
    page = mount(Explorer(FakeView()))
    expect(step(page, 0)).to_have_class(re.compile("llmdebug-warmup"))
    expect(step(page, 1)).not_to_have_class(re.compile("llmdebug-warmup"))


@pytest.mark.parametrize("report", [False, True])
def test_another_token_shows_the_same_tensor_there(mount: Mount, report: bool) -> None:
    view = FakeView(report=report)
    at = [row["id"] for row in view.data if row["path"] == "lm_head" and row["role"] == "output"]
    explorer = Explorer(view, selected=at[1], position=1)
    page = mount(explorer)
    shown(page, at[1])
    page.get_by_role("grid", name="Records").press("]")
    shown(page, at[2])
    assert explorer.position == 2
    page.get_by_role("grid", name="Records").press("[")
    page.get_by_role("grid", name="Records").press("[")
    shown(page, at[0])
    page.get_by_role("grid", name="Records").press("[")  # there is no token before the first
    assert (explorer.position, explorer.selected) == (0, at[0])


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
def test_any_key_and_any_click_stop_the_play(page: Page, mount: Mount, action: str) -> None:
    page.clock.install()
    explorer = Explorer(FakeView(steps=50))
    mount(explorer)
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
    page.clock.run_for(2000)
    assert explorer.position == at


def test_play_waits_for_a_slow_kernel_and_ends_with_the_view(page: Page, mount: Mount) -> None:
    page.clock.install()
    explorer = Explorer(FakeView(steps=50))
    mount(explorer)
    expect(row_at(page, 72)).to_be_visible()
    hold(page)
    play(page).click()
    expect(step(page, 2)).to_have_attribute("aria-current", "step")
    page.clock.run_for(2000)
    assert explorer.position == 2
    release(page)
    expect(step(page, 3)).to_have_attribute("aria-current", "step")
    page.evaluate("window.unmount()")
    at = explorer.position
    page.clock.run_for(2000)
    assert explorer.position == at
