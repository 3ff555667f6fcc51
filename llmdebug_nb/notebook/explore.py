"""Showing runs and reports: the explorer where a front end can draw it, text everywhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.text import notebook_text, report_text
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from llmdebug_nb.app.stepping import Stop
    from llmdebug_nb.notebook.widgets import Explorer


def explore(what: Run | Report | str | os.PathLike[str], tokenizer: Any = None) -> Explorer:
    """Return the explorer of a run (or its name or path) or of a report; display it by leaving it last in a cell.

    With a ``tokenizer`` (anything with ``decode(ids)``) each step shows the text that it was given, where token ids were recorded.

    Raises:
        OptionError: a tokenizer that can't decode. UnknownRunError and other StoreErrors: there is no such run.
    """
    from llmdebug_nb.notebook.widgets import Explorer

    return Explorer(
        what.view(tokenizer) if isinstance(what, Report) else RunView(open_run(what), tokenizer)
    )


def show_report(report: Report, shell: Any) -> None:
    """Print verdict, findings and the first mismatches, then show the explorer if a kernel's front end is there to draw it."""
    from IPython.display import display

    if getattr(shell, "kernel", None) is None:
        print(report_text(report.view()))
        return
    print(notebook_text(report.view()))
    display(explore(report))


def explore_stop(stop: Stop) -> Explorer:
    """Return the explorer of the tensors at a halt: at what diverged, else at what the call gave."""
    from llmdebug_nb.notebook.widgets import Explorer

    view = stop.view()
    bad = view.overview()["first_bad"]
    return Explorer(
        view,
        selected=view.find(stop.path, stop.step, "output") if bad < 0 and stop.outputs else bad,
    )
