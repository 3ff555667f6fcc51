"""How the nouns look as the value of a cell: text in a terminal, HTML in what is saved, the explorer where a kernel can answer it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.report import Report, report_of
from llmdebug_nb.app.stepping import Stop
from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.notebook.explore import explore, explore_stop
from llmdebug_nb.show import html, text
from llmdebug_nb.show.bundle import FrontEndMissingError
from llmdebug_nb.show.run_view import RunView

if TYPE_CHECKING:
    from llmdebug_nb.notebook.widgets import Explorer

Bundle = tuple[dict[str, Any], dict[str, Any]]  # data and metadata, each by MIME type


def bundle(what: Any) -> Bundle:
    """Return what a front end chooses from, for a Run, a Report, a Finding, a Difference or a Stop."""
    if isinstance(what, Finding):
        static = {"text/plain": text.finding_text(what), "text/html": html.finding_fragment(what)}
        return _with_explorer_of(what.difference, static)
    if isinstance(what, Difference):
        static = {
            "text/plain": text.difference_text(what),
            "text/html": html.difference_fragment(what),
        }
        return _with_explorer_of(what, static)
    if isinstance(what, Stop):
        static = {"text/plain": repr(what), "text/html": f"<pre>{escape(repr(what))}</pre>"}
        return _with_explorer(lambda: explore_stop(what), static)
    view = what.view() if isinstance(what, Report) else RunView(what)
    return _with_explorer(
        lambda: explore(what), {"text/plain": view.text(), "text/html": html.fragment(view)}
    )


def _with_explorer_of(row: Difference | None, static: dict[str, str]) -> Bundle:
    report = None if row is None or not _kernel() else report_of(row)
    if row is None or report is None:
        return static, {}
    return _with_explorer(lambda: _explorer_at(report, row), static)


def _explorer_at(report: Report, row: Difference) -> Explorer:
    from llmdebug_nb.notebook.widgets import Explorer

    view = report.view()
    return Explorer(view, position=view.stop(row.site), selected=row.index)


def _with_explorer(explorer: Callable[[], Explorer], static: dict[str, str]) -> Bundle:
    if not _kernel():
        return static, {}
    try:
        data, metadata = explorer()._repr_mimebundle_()
    except FrontEndMissingError as error:
        return {**static, "text/plain": f"{static['text/plain']}\n{error}"}, {}
    return {**data, **static}, metadata


def _kernel() -> bool:
    """Is there a front end that can draw more than text?"""
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
