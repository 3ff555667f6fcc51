"""Shows runs and reports: as an explorer where a front end can draw it, else as text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.text import notebook_text, report_text
from llmdebug_nb.show.tokens import Tokenizer
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from llmdebug_nb.app.stepping import Stop
    from llmdebug_nb.notebook.widgets import Explorer


def explore(
    what: Run | Report | str | os.PathLike[str], tokenizer: Tokenizer | None = None
) -> Explorer:
    """Return the explorer of a report, or of a run (or its name or path).

    A notebook displays it if it is the last expression of a cell. With a ``tokenizer`` (any
    object with ``decode(ids)``) each step shows its input text if token ids were recorded.

    Raises:
        OptionError: the tokenizer can't decode the ids.
        StoreError: there is no such run (UnknownRunError), or it can't be read.
    """
    from llmdebug_nb.notebook.widgets import Explorer

    if isinstance(what, Report):
        return Explorer(what.view(tokenizer))
    return Explorer(RunView(open_run(what), tokenizer))


def show_report(report: Report, shell: InteractiveShell) -> None:
    """Print verdict, findings and first mismatches; in a notebook also show the explorer."""
    from IPython.display import display

    if getattr(shell, "kernel", None) is None:
        print(report_text(report.view()))
        return
    print(notebook_text(report.view()))
    display(explore(report))


def explore_record(run: Run, number: int) -> Explorer:
    """Return the explorer of a run at one of its records."""
    from llmdebug_nb.notebook.widgets import Explorer

    view = RunView(run)
    position = view.step_index_of(run.record(number).site)
    return Explorer(view, position=position, selected=number)


def explore_stop(stop: Stop) -> Explorer:
    """Return the explorer of a halt: at the first divergence, else at the output of the call."""
    from llmdebug_nb.notebook.widgets import Explorer

    view = stop.view()
    return Explorer(view, selected=stop.telling_row(view))
