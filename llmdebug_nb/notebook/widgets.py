"""The explorer as a notebook widget."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show import export, html
from llmdebug_nb.show.bundle import bundle
from llmdebug_nb.show.state import first_stop, opening
from llmdebug_nb.show.wire import Overview, OverviewRequest, State


class View(Protocol):
    """What an `Explorer` shows: these, and one method per further op of `wire.ANSWERS`."""

    watchers: list[Callable[[], None]]

    def overview(self, request: OverviewRequest) -> Overview: ...

    def text(self) -> str: ...


class Explorer(anywidget.AnyWidget):
    """Steps through the tensors of a run or a comparison.

    ``position``: the step shown, an index of ``snapshot["steps"]``. ``selected``: id of the row
    shown, -1 for none. ``path``: the module that the list is narrowed to, "" for the whole model.
    Setting one moves the page, and using the page sets it.
    """

    snapshot = traitlets.Dict(
        help="the Overview: the first paint, and what is left when the kernel is gone"
    ).tag(sync=True)
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

    def export(self, path: str | os.PathLike[str], show: str | Sequence[str] = ()) -> Path:
        """Write what is shown to a file: ``.html`` or ``.png``, ``.svg``, ``.pdf``; see `llmdebug_nb.export`, also for errors."""
        shown = {name: getattr(self, name) for name in ("position", "selected", "path")}
        state: State = {**opening(self.snapshot), **shown}  # type: ignore[typeddict-item]
        return export.export(
            self._view, state, Path(path), [show] if isinstance(show, str) else show
        )

    def __repr__(self) -> str:
        """Return the view as text: for terminals, and for notebooks that are not trusted."""
        return self._view.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add the view as HTML: for what shows saved notebooks and knows no widgets."""
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return {**data, "text/html": html.fragment(self._view)}, metadata
