"""The explorer as a notebook widget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from llmdebug_nb.errors import LLMDebugError
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show.wire import Overview, OverviewRequest

BUNDLE = Path(__file__).parent.parent / "static" / "widget.js"


class View(Protocol):
    """What an `Explorer` shows: these, and one method per further op of `wire.ANSWERS`."""

    watchers: list[Callable[[], None]]

    def overview(self, request: OverviewRequest) -> Overview: ...

    def text(self) -> str: ...


class FrontEndMissingError(LLMDebugError):
    """The bundle that the page runs was not built."""


class Explorer(anywidget.AnyWidget):
    """Steps through the tensors of a run or a comparison.

    ``position``: the step shown, an index of ``snapshot["steps"]``. ``selected``: id of the row
    shown, -1 for none. ``path``: the module that the list is narrowed to, "" for the whole model.
    Setting one moves the page, and using the page sets it.
    """

    snapshot = traitlets.Dict(help="the Overview: the first paint, and what is left when the kernel is gone").tag(
        sync=True
    )
    position = traitlets.Int(0).tag(sync=True)
    selected = traitlets.Int(-1, min=-1).tag(sync=True)
    path = traitlets.Unicode("").tag(sync=True)

    def __init__(self, view: View, **traits: Any) -> None:
        self._esm = bundle()
        self._view = view
        self._bridge = Bridge(view)
        overview = view.overview({"op": "overview"})
        start = {"position": first_stop(overview), "selected": overview["first_bad"]}
        super().__init__(**{**start, **traits, "snapshot": overview})
        self.on_msg(self._on_message)
        view.watchers.append(self._refresh)

    def _refresh(self) -> None:
        """Show what is judged now: something was marked as expected, here or elsewhere."""
        self.snapshot = self._view.overview({"op": "overview"})

    @traitlets.validate("position")
    def _check_position(self, proposal: Any) -> int:
        last = max(0, len(self.snapshot["steps"]) - 1)
        if not 0 <= proposal["value"] <= last:
            raise traitlets.TraitError(f"position must be 0 to {last}, not {proposal['value']}")
        return int(proposal["value"])

    def _on_message(self, _widget: object, content: object, _buffers: object) -> None:
        answer, buffers = self._bridge.answer(content)
        self.send(answer, buffers)

    def __repr__(self) -> str:
        """Return the view as text: for terminals, and for notebooks that are not trusted."""
        return self._view.text()


def bundle(path: Path = BUNDLE) -> str:
    """Return the front end's code."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FrontEndMissingError(
            f"the front end was not built ({path.name} is missing); install llmdebug-nb from a wheel, "
            "or in a checkout run `npm ci && npm run build` in labextension/"
        ) from None


def first_stop(overview: Overview) -> int:
    """Return the step to open at: the first with a mismatch, else the first that is no warm-up."""
    steps = overview["steps"]
    for wanted in ([step for step in steps if step["bad"]], [step for step in steps if step["kind"] != "warmup"]):
        if wanted:
            return steps.index(wanted[0])
    return 0
