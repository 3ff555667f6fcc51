"""Tells IPython how to show runs, reports and rows that are the value of a cell, and progress.

The classes are named, not imported: IPython looks a class up when it meets the first object of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from tqdm import tqdm

    from llmdebug_nb.notebook.display import Bundle, Noun, Table

_WITH_EXPLORER = (
    ("llmdebug_nb.store.run", "Run"),
    ("llmdebug_nb.app.opcheck.check", "OpCheck"),
    ("llmdebug_nb.app.report", "Report"),
    ("llmdebug_nb.app.stepping", "Stop"),
    ("llmdebug_nb.comparison.differences", "Difference"),
    ("llmdebug_nb.findings.finding", "Finding"),
)
_WITH_HTML = (
    ("llmdebug_nb.app.report", "Differences"),
    ("llmdebug_nb.app.tables", "TableFiles"),
    ("llmdebug_nb.show.timeline", "Timeline"),
)


def register(shell: InteractiveShell) -> None:
    """Register the formatters in a shell. Calling it twice does no harm."""
    formatters = shell.display_formatter
    for module, name in _WITH_EXPLORER:
        formatters.mimebundle_formatter.for_type_by_name(module, name, _bundle)
    for module, name in _WITH_HTML:
        formatters.formatters["text/html"].for_type_by_name(module, name, _html)
    if getattr(shell, "kernel", None) is not None:
        from llmdebug_nb.core import bars

        bars.use(_cell_bar)


def register_in_running_shell() -> None:
    """Register the formatters if a notebook or IPython imports the package; import nothing."""
    ipython = sys.modules.get("IPython")
    running = getattr(ipython, "get_ipython", lambda: None)()
    if running is not None:
        register(running)


def _cell_bar(*args: object, **how: object) -> tqdm[object]:
    from llmdebug_nb.notebook.cell_bar import CellBar

    return CellBar(*args, **how)


def _bundle(noun: Noun) -> Bundle:
    from llmdebug_nb.notebook.display import bundle

    return bundle(noun)


def _html(table: Table) -> str:
    from llmdebug_nb.notebook.display import table_html

    return table_html(table)
