"""Requests of the explorer's page: all of them in one line, with what a test changes in them."""

from __future__ import annotations

from typing import Any

from llmdebug_nb.show.tables import EVERYTHING

_LISTED: dict[str, Any] = {**EVERYTHING, "every": False}


def rows_request(**changes: Any) -> Any:
    """Ask for the first rows of all steps."""
    return {"op": "rows", "step": -1, **_LISTED, "start": 0, "n": 1000, **changes}


def row_request(row: int, **changes: Any) -> Any:
    return {"op": "row", "row": row, **_LISTED, **changes}


def locate_request(row: int, delta: int, **changes: Any) -> Any:
    """Ask for the row behind another one, or before it; -1 is in front of the first and last."""
    return {"op": "locate", "row": row, "delta": delta, **_LISTED, **changes}


def view_request(row: int, **changes: Any) -> Any:
    """Ask for the heat map of golden's whole tensor, of three dimensions."""
    window = {"y0": 0, "x0": 0, "y1": 0, "x1": 0, "size": 512}
    plane = {"which": "golden", "axes": [1, 2], "fixed": [0, 0, 0]}
    return {"op": "view", "row": row, **plane, **window, **changes}
