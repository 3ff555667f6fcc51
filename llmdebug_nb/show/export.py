"""Any state of an explorer as a file: a page that needs no kernel, or a figure. The suffix decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError, StoreError
from llmdebug_nb.show import figure, saved_page, wire

PAGES, FIGURES = (".html", ".htm"), (".png", ".svg", ".pdf")


def export(view: Any, state: wire.State, path: Path, show: Sequence[str] = ()) -> Path:
    """Write the state of a `RunView` or `ReportView` to ``path``; ``show``: the pictures of a figure, see `figure.PICTURES`.

    Raises:
        OptionError: another suffix, no such picture, or nothing that a figure could show.
        StoreError: the file can't be written.
    """
    suffix = path.suffix.lower()
    if suffix not in PAGES + FIGURES:
        raise OptionError(
            f"export to {path.name!r}: expected a name that ends in {', '.join((PAGES[0], *FIGURES))}"
        )
    if suffix in PAGES and show:
        raise OptionError("show chooses the pictures of a figure; a page shows everything")
    try:
        if suffix in PAGES:
            path.write_text(saved_page.page(view, state), encoding="utf-8")
        else:
            figure.save(figure.state_figure(view, state, show), path)
    except OSError as error:
        raise StoreError(f"can't write {path}: {error.strerror or error}") from None
    return path


def beside(view: Any, state: wire.State, kind: str, folder: Path) -> Path:
    """Return a path in ``folder`` that is not taken, named after what is shown."""
    overview: wire.Overview = view.overview()
    names = [overview["golden"], overview["mine"]]
    if overview["steps"]:
        names.append("step " + overview["steps"][state["position"]]["label"])
    if state["selected"] >= 0:
        names.append(view.detail({"op": "detail", "row": state["selected"]})["row"]["path"])
    stem = (
        "_".join(filter(None, (re.sub(r"[^\w.-]+", "-", name).strip("-.") for name in names)))[:120]
        or "llmdebug"
    )
    path, number = folder / f"{stem}.{kind}", 2
    while path.exists():
        path, number = folder / f"{stem}.{number}.{kind}", number + 1
    return path
