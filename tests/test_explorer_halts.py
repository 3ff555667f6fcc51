"""The explorer of a program that is stepped through, in a browser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from torch import nn

import llmdebug_nb as ld
from browser import Mount, from_python, violations
from browser import mount as mount_in
from llmdebug_nb.app.stepping import Stepper
from llmdebug_nb.notebook.step_panel import StepPanel
from models import llama, prompt


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    """A port that is halted where its one bug acts."""
    model = llama()
    with ld.dump(model, name="golden", mode="module+api"), torch.no_grad():
        model(prompt())
    port = copy.deepcopy(model)
    port.model.layers[1].mlp.act_fn = nn.GELU()

    def run() -> None:
        with torch.no_grad():
            port(prompt())

    made = ld.step(port, when="diverges", golden="golden")
    made.start(run)
    yield made
    made.abort()


def panel(stepper: Stepper) -> StepPanel:
    return StepPanel(stepper, lambda stop: None)


def test_a_halt_is_one_screen_with_its_line_and_golden_beside(
    mount: Mount, stepper: Stepper
) -> None:
    page = mount(panel(stepper), drawer=False)
    expect(page.locator("h2")).to_contain_text("Halted in modeling_llama.py:")
    here = page.get_by_role("row", name="the program is halted here")
    expect(here).to_contain_text("self.act_fn(self.gate_proj(x))")
    for side in ("golden", "mine", "difference", "side by side"):
        expect(page.get_by_role("tab", name=side)).to_be_visible()
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_have_count(3)
    box = page.locator(".llmdebug").bounding_box()
    assert box is not None
    assert box["height"] <= 602


def test_a_button_goes_on_and_keeps_the_focus_at_the_next_halt(
    mount: Mount, stepper: Stepper
) -> None:
    page = mount(panel(stepper), drawer=False)
    button = page.get_by_role("button", name="op", exact=True)
    for number in range(2, 5):
        before = page.locator("h2").text_content() or ""
        button.press("Enter")
        expect(page.locator("h2")).not_to_have_text(before)
        expect(button).to_be_focused()
        assert stepper.halts == number
    expect(page.get_by_text("next call")).to_be_visible()


def test_golden_is_put_in_and_the_screen_says_that_the_rest_agrees(
    mount: Mount, stepper: Stepper
) -> None:
    page = mount(panel(stepper), drawer=False)
    page.get_by_role("button", name="replace").click()
    expect(page.locator("h2")).to_contain_text("Ended; halted last in")
    expect(page.locator(".llmdebug-reasons")).to_contain_text("the rest agrees: ")
    for command in ("op", "layer", "token", "continue", "replace", "abort"):
        expect(page.get_by_role("button", name=command, exact=True)).to_be_disabled()


def test_the_panel_follows_a_command_from_elsewhere(mount: Mount, stepper: Stepper) -> None:
    shown = panel(stepper)
    page = mount(shown, drawer=False)
    expect(page.locator("h2")).to_contain_text("act_fn")
    stepper.go("op")
    for name in ("selected", "snapshot"):  # the order in which they come does not matter
        from_python(page, shown, name, getattr(shown, name))
    assert stepper.stop is not None
    expect(page.locator("h2")).to_contain_text(stepper.stop.op)
    expect(page.get_by_text("next call")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_halt_has_no_accessibility_violation(page: Page, scheme: Any, stepper: Stepper) -> None:
    page.emulate_media(color_scheme=scheme)
    mount_in(page, panel(stepper))
    expect(page.locator(".llmdebug-canvas[aria-busy=false]")).to_have_count(3)
    assert violations(page, ".llmdebug") == []
