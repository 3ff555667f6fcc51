"""The built code of the front end: the explorer for notebooks, and for pages of its own."""

from __future__ import annotations

from pathlib import Path

from llmdebug_nb.core.errors import LLMDebugError

_STATIC = Path(__file__).parent / "static"
WIDGET, PAGE = _STATIC / "widget.js", _STATIC / "page.js"


class FrontEndMissingError(LLMDebugError):
    """The front end was not built."""


def bundle(path: Path = WIDGET) -> str:
    """Return the front end's code. Raises FrontEndMissingError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FrontEndMissingError(
            f"the front end was not built ({path.name} is missing); install llmdebug-nb from a "
            "wheel, or in a checkout run `npm ci && npm run build` in labextension/"
        ) from None
