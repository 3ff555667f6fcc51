"""A table for an output cell: whole at any width, whatever stands in it."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable

from llmdebug_nb.core.printable import printable

# characters: a shorter figure is never broken, though an explanation in its place may be; a column
# of text has room for as many
_SHORT = 16


def html_table(
    head: Iterable[str], rows: Iterable[Iterable[str]], figures: Collection[int] = ()
) -> str:
    """Return the table, "" if it has no rows. ``figures``: columns that hold numbers.

    Numbers stand to the right and are never broken; all else is broken wherever it has to be.
    """
    lines = "".join(_row("td", row, figures) for row in rows)
    return f"<table>{_row('th', head, figures)}{lines}</table>" if lines else ""


def _row(tag: str, cells: Iterable[str], figures: Collection[int]) -> str:
    return f"<tr>{''.join(_cell(tag, cell, at in figures) for at, cell in enumerate(cells))}</tr>"


def _cell(tag: str, cell: str, is_figure: bool) -> str:
    text = printable(cell)
    # notebooks align cells to the right, and cut off what doesn't fit
    style = f"text-align:{'right' if is_figure else 'left'}"
    if tag == "th" or (is_figure and len(text) <= _SHORT):
        style += ";white-space:nowrap"
    elif not is_figure:
        style += f";overflow-wrap:anywhere;min-width:{min(len(text), _SHORT)}ch"
    words = html.escape(text).replace("/", "/<wbr>").replace(".", ".<wbr>")
    return f'<{tag} style="{style}">{words}</{tag}>'
