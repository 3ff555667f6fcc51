"""Writing the explorer's state to a file, as a page or a figure; and the report page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llmdebug_nb.app.compare import RunLike, compare
from llmdebug_nb.app.differences import write_text
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.show import export as exporting
from llmdebug_nb.show import html
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.state import state_of
from llmdebug_nb.show.tokens import Tokenizer


def export(
    what: Report | RunLike,
    path: str | os.PathLike[str],
    *,
    at: str | int | Difference | Finding | None = None,
    step: int | None = None,
    role: str = "output",
    side: str | None = None,
    slice: str | None = None,
    show: str | Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the explorer of a run (or its name or path) or of a report to a file; return its path.

    The suffix decides the format. ``.html``: the explorer itself, in one file that needs neither
    kernel nor network. ``.png``, ``.svg``, ``.pdf``: its pictures, drawn by matplotlib.

    Args:
        what: the run or report.
        path: the file.
        at: the tensor to show: the path of a module (with ``role`` and ``step``), a difference or
            finding of the report, or the number of a row. Default: the first mismatch of a report.
        step: generated token, as in `Run.tensor`.
        role: ``input`` or ``output`` of that module.
        side: ``golden``, ``mine``, ``difference`` or ``all``.
        slice: part of the tensor: ``0, 3, :, :``.
        show: only these pictures, any of layers, growth, heatmap, histogram and curves.
        tokenizer: as in `explore`.

    Raises:
        OptionError: an invalid argument, or nothing to draw.
        TensorLookupError: no such tensor.
        StoreError: the file can't be written, or the run can't be opened.
    """
    view = what.view(tokenizer) if isinstance(what, Report) else RunView(open_run(what), tokenizer)
    pictures = [show] if isinstance(show, str) else list(show)
    return exporting.export(
        view, state_of(view, at, step, role, side, slice), on_this_machine(path), pictures
    )


def write_report(golden: RunLike, mine: RunLike | None, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page: of one run (``mine`` None), or of two compared.

    Raises what `compare` raises.
    """
    if mine is not None:
        return compare(golden, mine).to_html(path)
    return write_text(path, html.page(RunView(open_run(golden))))
