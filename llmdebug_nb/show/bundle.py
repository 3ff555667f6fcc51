"""The front end's code, as it was built: the explorer for notebooks, and the same in a page of its own."""

from __future__ import annotations

from pathlib import Path

from llmdebug_nb.core.errors import LLMDebugError

_STATIC = Path(__file__).parent / "static"
WIDGET, PAGE = _STATIC / "widget.js", _STATIC / "page.js"


class FrontEndMissingError(LLMDebugError):
    """The code that a page runs was not built."""


def bundle(path: Path = WIDGET) -> str:
    """Return the front end's code. Raises FrontEndMissingError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FrontEndMissingError(
            f"the front end was not built ({path.name} is missing); install llmdebug-nb from a wheel, "
            "or in a checkout run `npm ci && npm run build` in labextension/"
        ) from None
