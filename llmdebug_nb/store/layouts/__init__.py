"""Dumps of other tools: each module reads the folders of one layout into `Contents`.

No file outside the folder is opened. No pickle is trusted (``weights_only=True``). Every length
field is checked against the size of the file before it is used.
"""

from __future__ import annotations

from pathlib import Path

from llmdebug_nb.store.layouts.contents import Contents as Contents
from llmdebug_nb.store.layouts.contents import Layout as Layout


def layouts() -> list[Layout]:
    """Return every known layout, the most specific first: plain files match nearly any folder."""
    from llmdebug_nb.store.layouts import atb, fx, ge, msit, msprobe, plain

    return [msprobe, msit, atb, fx, ge, plain]


def detect(path: Path) -> Layout | None:
    """Return the layout that ``path`` has, or None."""
    from llmdebug_nb.store.layouts.files import Folder

    names = list(Folder(path).scan()) if path.is_dir() else []
    return next((layout for layout in layouts() if layout.detect(path, names)), None)
