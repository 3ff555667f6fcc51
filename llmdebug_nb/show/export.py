"""Writes the state of an explorer to a file: a page that needs no kernel, or a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmdebug_nb.core.errors import OptionError, saving
from llmdebug_nb.show import figure, saved_page, wire
from llmdebug_nb.show.view_data import ViewData

PAGES, FIGURES = (".html", ".htm"), (".png", ".svg", ".pdf")


def export(view: ViewData, state: wire.State, path: Path, show: Sequence[str] = ()) -> Path:
    """Write the state of a view to ``path``; the suffix decides between page and figure.

    ``show``: the pictures of a figure, keys of `figure.PICTURES`.

    Raises:
        OptionError: the suffix or a picture is unknown, or there is nothing to draw.
        StoreError: the file can't be written.
    """
    suffix = path.suffix.lower()
    if suffix not in PAGES + FIGURES:
        known = ", ".join((PAGES[0], *FIGURES))
        raise OptionError(f"export to {path.name!r}: expected a name that ends in {known}")
    if suffix in PAGES and show:
        raise OptionError("show chooses the pictures of a figure, but a page shows everything")
    with saving(path):
        if suffix in PAGES:
            path.write_text(saved_page.page(view, state), encoding="utf-8")
        else:
            figure.save(figure.state_figure(view, state, show), path)
    return path


def free_path(view: ViewData, state: wire.State, kind: str, folder: Path) -> Path:
    """Return the path of a new file in ``folder``, named after the state."""
    overview = view.overview()
    names = [overview["golden"], overview["mine"]]
    if not -1 <= state["position"] < max(1, len(overview["steps"])):
        raise OptionError(f"position {state['position']}: there are {len(overview['steps'])} steps")
    if overview["steps"]:
        names.append("step " + overview["steps"][state["position"]]["label"])
    if state["selected"] >= 0:
        names.append(view.detail({"op": "detail", "row": state["selected"]})["row"]["path"])
    parts = [re.sub(r"[^\w.-]+", "-", name).strip("-.") for name in names]
    stem = "_".join(filter(None, parts))[:120] or "llmdebug"
    path, number = folder / f"{stem}.{kind}", 2
    while path.exists():
        path, number = folder / f"{stem}.{number}.{kind}", number + 1
    return path
