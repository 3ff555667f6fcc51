"""The explorer as a notebook widget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show import export, html, saved_page
from llmdebug_nb.show.bundle import bundle
from llmdebug_nb.show.state import first_stop, opening
from llmdebug_nb.show.wire import State

if TYPE_CHECKING:
    from llmdebug_nb.show.views import View


class Explorer(anywidget.AnyWidget):
    """Steps through the tensors of a run or a comparison.

    ``position``: the current step, an index of ``snapshot["steps"]``. ``selected``: the id of the
    selected row, -1 for none. ``path``: the module whose rows are listed, "" for the whole model.
    Setting one updates the page, and the page sets them.
    """

    snapshot = traitlets.Dict(
        help="the Overview, which is left to show when the kernel is gone"
    ).tag(sync=True)
    position = traitlets.Int(0).tag(sync=True)
    selected = traitlets.Int(-1, min=-1).tag(sync=True)
    path = traitlets.Unicode("").tag(sync=True)

    def __init__(self, view: View, **traits: int | str) -> None:
        self._esm = bundle()
        self._view = view
        self._bridge = Bridge(view)
        overview = view.overview({"op": "overview"})
        start = {"position": first_stop(overview), "selected": overview["first_bad"]}
        super().__init__(**{**start, **traits, "snapshot": overview})
        self.on_msg(self._on_message)
        view.watchers.append(self._refresh)

    def _refresh(self) -> None:
        self.snapshot = self._view.overview({"op": "overview"})

    @traitlets.validate("position")
    def _check_position(self, proposal: dict[str, Any]) -> int:
        last = max(0, len(self.snapshot["steps"]) - 1)
        if not 0 <= proposal["value"] <= last:
            raise traitlets.TraitError(f"position must be 0 to {last}, not {proposal['value']}")
        return int(proposal["value"])

    def _on_message(self, _widget: object, content: object, _buffers: object) -> None:
        answer, buffers = self._bridge.answer(content)
        self.send(answer, buffers)

    def export(self, path: str | os.PathLike[str], show: str | Sequence[str] = ()) -> Path:
        """Write the current state to a ``.html``, ``.png``, ``.svg`` or ``.pdf`` file.

        For ``show`` and the errors see `llmdebug_nb.export`.
        """
        pictures = [show] if isinstance(show, str) else show
        return export.export(self._view, self._state, Path(path), pictures)

    @property
    def _state(self) -> State:
        return {
            **opening(self.snapshot),
            "which": "all" if self.snapshot["kind"] == "report" else "golden",
            "position": self.position,
            "selected": self.selected,
            "path": self.path,
        }

    def __repr__(self) -> str:
        """Return the view as text, for terminals and for notebooks that are not trusted."""
        return self._view.text()

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add the view as text, as HTML, and as a snapshot that our JupyterLab extension draws.

        They are for saved notebooks, which have no widgets. (A widget's own text is cut.)
        """
        data, metadata = super()._repr_mimebundle_(**kwargs)
        small = self._view.snapshot(self._state)
        kept = {} if small is None else {saved_page.SNAPSHOT_TYPE: small}
        return {**data, **kept, "text/plain": repr(self), "text/html": self._html()}, metadata

    def _html(self) -> str:
        return html.fragment(self._view)
