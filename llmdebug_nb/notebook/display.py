"""How our objects look as the value of a cell.

In a terminal they are text, in a saved notebook HTML, and in a live notebook an explorer.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from llmdebug_nb.app.differences import Differences
from llmdebug_nb.app.opcheck.check import OpCheck
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.stepping import Stop
from llmdebug_nb.app.tables import TableFiles
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.notebook.check_table import check_table
from llmdebug_nb.notebook.explore import explore, explore_stop
from llmdebug_nb.show import html, text
from llmdebug_nb.show.bundle import FrontEndMissingError
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.timeline import Timeline
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from ipywidgets import VBox

    from llmdebug_nb.notebook.widgets import Explorer

Noun = Run | Report | Finding | Difference | Stop | OpCheck
Table = Differences | TableFiles | Timeline
Bundle = tuple[dict[str, object], dict[str, object]]  # data and metadata, each by MIME type


def bundle(noun: Noun) -> Bundle:
    """Return text, HTML and, where a notebook can draw it, the explorer."""
    if isinstance(noun, Finding):
        static = {"text/plain": text.finding_text(noun), "text/html": html.finding_fragment(noun)}
        return _with_explorer(lambda: _explorer_at(noun.difference), static)
    if isinstance(noun, Difference):
        plain, page = text.difference_text(noun), html.difference_fragment(noun)
        return _with_explorer(lambda: _explorer_at(noun), {"text/plain": plain, "text/html": page})
    if isinstance(noun, Stop):
        static = {"text/plain": repr(noun), "text/html": f"<pre>{escape(repr(noun))}</pre>"}
        return _with_explorer(lambda: explore_stop(noun), static)
    if isinstance(noun, OpCheck):
        static = {"text/plain": str(noun), "text/html": noun._repr_html_()}
        return _with_explorer(lambda: check_table(noun), static)
    view = noun.view() if isinstance(noun, Report) else RunView(noun)
    static = {"text/plain": view.text(), "text/html": html.fragment(view)}
    return _with_explorer(lambda: explore(noun), static)


def table_html(table: Table) -> str:
    """Return a table of differences, the tables of a run, or a timeline with its tables."""
    if isinstance(table, TableFiles):
        return "".join(
            f"<h4>{escape(name)}</h4>{html.table_fragment(frame)}"
            for name, frame in table.frames().items()
        )
    if isinstance(table, Timeline):
        return html.timeline_fragment(table)
    return html.table_fragment(table.to_pandas())


def _explorer_at(row: Difference | None) -> Explorer | None:
    """Return the explorer at a row; None if its report is gone."""
    from llmdebug_nb.notebook.widgets import Explorer

    report = row.comparison.report if row is not None and row.comparison is not None else None
    if row is None or not isinstance(report, Report):
        return None
    view = report.view()
    return Explorer(view, position=view.step_index_of(row.site), selected=row.index)


def _with_explorer(
    make_explorer: Callable[[], Explorer | VBox | None], static: dict[str, str]
) -> Bundle:
    if not _has_kernel():
        return {**static}, {}
    try:
        explorer = make_explorer()
    except FrontEndMissingError as error:
        return {**static, "text/plain": f"{static['text/plain']}\n{error}"}, {}
    if explorer is None:
        return {**static}, {}
    made = explorer._repr_mimebundle_()  # the widgets of ipywidgets give no metadata
    data, metadata = made if isinstance(made, tuple) else (made, {})
    return {**data, **static}, metadata


def _has_kernel() -> bool:
    """Return whether a front end is there that can draw more than text."""
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
