"""The table of a check of operators: by type, the worst first, with buttons for its worst call."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from IPython.display import display
from ipywidgets import HTML, Button, GridBox, Layout, Output, VBox

from llmdebug_nb.app.opcheck.check import OpCheck
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.opchecks import CallCheck, TypeCount
from llmdebug_nb.notebook.explore import explore_record
from llmdebug_nb.show import opcheck as shown

_COLUMNS = len(shown.HEAD) + 2  # two buttons


def check_table(check: OpCheck) -> VBox:
    """Return the table. The buttons show the worst call of a type below it."""
    below = Output()
    types = check.result.types()[: shown.TYPES]
    head = [HTML(f"<b>{escape(name)}</b>") for name in (*shown.HEAD, "", "")]
    cells = [cell for each in types for cell in _row(check, each, below)]
    grid = GridBox(
        [*head, *cells], layout=Layout(grid_template_columns=f"repeat({_COLUMNS}, max-content)")
    )
    grid.layout.grid_gap = "0 1em"
    around = [
        HTML(f"<pre>{escape(text)}</pre>") for text in shown.around(check.result, check.paths)
    ]
    return VBox([around[0], grid, around[1], below])


def _row(check: OpCheck, each: TypeCount, below: Output) -> list[HTML | Button]:
    cells: list[HTML | Button] = [HTML(escape(cell)) for cell in shown.cells(each)]
    worst = each.worst
    if worst is None:
        return [*cells, HTML(""), HTML("")]
    return [
        *cells,
        _button("open in explorer", below, lambda: display(_explorer(check, worst))),
        _button("repro", below, lambda: print(check.repro(worst))),
    ]


def _explorer(check: OpCheck, call: CallCheck) -> object:
    return explore_record(check.run, call.record)


def _button(label: str, below: Output, act: Callable[[], object]) -> Button:
    """Return a button whose action shows something in place of what was shown before."""
    button = Button(description=label, layout=Layout(width="max-content"))

    def on_click(_: Button) -> None:
        below.clear_output()
        with below:
            try:
                act()
            except LLMDebugError as error:
                print(error)

    button.on_click(on_click)
    return button
