"""The explorer in a bare page: the real bundle, the real widget, and no Jupyter between them."""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
expect.set_options(timeout=20_000)  # a machine may be slow; what is about time says so itself
SYNCED = ("snapshot", "position", "selected", "path")
# stands in for the widget manager: traits both ways, custom messages with buffers
MODEL = """async ({esm, state}) => {
  const url = URL.createObjectURL(new Blob([esm], {type: 'text/javascript'}));
  const {default: widget} = await import(url);
  const listeners = new Map();
  const fire = (name, ...args) => [...(listeners.get(name) ?? [])].forEach(f => f(...args));
  let dirty = {};
  const put = (name, value) => {
    if (state[name] === value) return false;
    state[name] = value;
    fire('change:' + name);
    return true;
  };
  const bytes = text => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
  const model = {
    get: name => state[name],
    set: (name, value) => { if (put(name, value)) dirty[name] = value; },
    save_changes: () => { const changes = dirty; dirty = {}; window.pySet(changes); },
    on: (name, f) => { listeners.set(name, [...(listeners.get(name) ?? []), f]); },
    off: (name, f) => { listeners.set(name, (listeners.get(name) ?? []).filter(g => g !== f)); },
    send: async message => {
      window.sent = (window.sent ?? 0) + 1;
      if (window.deaf) return;
      await window.held;
      const [content, buffers] = await window.pyMessage(message);
      fire('msg:custom', content, buffers.map(bytes));
    },
  };
  window.fromPython = put;
  window.listening = () => [...listeners.values()].flat().length;
  window.unmount = widget.render({model, el: document.querySelector('main')});
}"""


def launch_args(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that start this machine's Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = os.environ.get("LLMDEBUG_CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    if executable is None:
        raise RuntimeError(
            "these tests drive a browser: install chromium, or name one in LLMDEBUG_CHROMIUM"
        )
    return {**defaults, "executable_path": executable, "args": CHROMIUM_ARGS}


def mount(page: Page, explorer: Any, head: str = "") -> None:
    """Show ``explorer`` in ``page``; both share traits and messages as in a notebook."""
    replies: list[tuple[dict[str, Any], list[memoryview]]] = []
    explorer.send = lambda content, buffers=None: replies.append((content, buffers or []))

    def message(content: object) -> list[Any]:
        explorer._on_message(explorer, content, [])
        answer, buffers = replies.pop()
        return [answer, [base64.b64encode(bytes(buffer)).decode() for buffer in buffers]]

    def from_page(traits: dict[str, Any]) -> None:
        for name, value in traits.items():
            explorer.set_trait(name, value)

    page.expose_function("pyMessage", message)
    page.expose_function("pySet", from_page)
    page.set_content(f"<!doctype html><meta charset=utf-8>{head}<body><main></main></body>")
    page.evaluate(
        MODEL, {"esm": explorer._esm, "state": {name: getattr(explorer, name) for name in SYNCED}}
    )


def from_python(page: Page, explorer: Any, name: str, value: object) -> None:
    """Set a trait as a cell of the notebook would."""
    setattr(explorer, name, value)
    page.evaluate("([name, value]) => { window.fromPython(name, value); }", [name, value])


def hold(page: Page) -> None:
    """Let the page's requests wait from now on, as behind a running cell."""
    page.evaluate("() => { window.held = new Promise(done => { window.release = done; }); }")


def release(page: Page) -> None:
    """Let them go."""
    page.evaluate("() => { window.held = undefined; window.release(); }")


AXE = Path(__file__).parent.parent / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
# target-size (WCAG 2.2 AA) is the one rule of the level that is off by default
VIOLATIONS = """async scope => (
    await axe.run(scope, {rules: {'target-size': {enabled: true}}})).violations
    .map(one => one.id + ': ' + one.nodes.map(
      node => node.html.slice(0, 200) + ' ' + node.failureSummary).join(' | '))"""


def violations(page: Page, scope: str) -> list[str]:
    """Return the accessibility problems below ``scope``."""
    page.add_script_tag(path=AXE)
    found: list[str] = page.evaluate(VIOLATIONS, scope)
    return found


Mount = Callable[..., Page]


def click_value(scope: Page | Locator, pattern: str) -> None:
    """Click into the heat map until a value shows; a redraw may remove it again."""
    for attempt in range(5):
        scope.locator(".llmdebug-canvas[aria-busy=false]").click()
        try:
            expect(scope.locator(".llmdebug-value")).to_have_text(
                re.compile(pattern), timeout=4_000
            )
        except AssertionError:
            if attempt == 4:
                raise
        else:
            return
