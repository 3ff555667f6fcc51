"""The table of a check of operators: by type, the worst first, with buttons for its worst call."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from IPython.display import display
from ipywidgets import HTML, Button, GridBox, Layout, Output, VBox

from llmdebug_nb.app.opcheck.check import OpCheck
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.notebook.explore import explore_record
from llmdebug_nb.replay.checks import CallCheck, TypeCount
from llmdebug_nb.show import opcheck as shown

# the name gives way where there is no room, figures and the two buttons never do
_COLUMNS = f"minmax(6em, max-content) repeat({len(shown.HEAD) + 1}, max-content)"
_CUT = "overflow: hidden; text-overflow: ellipsis; white-space: nowrap"
_WRAPPED = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"


def check_table(check: OpCheck) -> VBox:
    """Return the table. The buttons show the worst call of a type below it."""
    below = Output()
    types = check.result.types()[: shown.TYPES]
    head = [_cell(name, at, "b") for at, name in enumerate((*shown.HEAD, "", ""))]
    cells = [cell for each in types for cell in _row(check, each, below)]
    look = Layout(grid_template_columns=_COLUMNS, grid_gap="0 0.8em", align_items="center")
    grid = GridBox([*head, *cells], layout=look)
    around = [
        HTML(f'<pre style="{_WRAPPED}">{escape(text)}</pre>')
        for text in shown.around(check.result, check.paths)
    ]
    return VBox([around[0], grid, around[1], below])


def _cell(text: str, column: int, tag: str = "span") -> HTML:
    """Return a cell: names to the left, figures to the right; a name that is cut has a title."""
    side, words = "right" if column else "left", escape(text)
    style = f"text-align: {side}; {_CUT}"
    inner = f'<div style="{style}" title="{words}"><{tag}>{words}</{tag}></div>'
    return HTML(inner, layout=Layout(min_width="0", margin="0", overflow="hidden"))


def _row(check: OpCheck, each: TypeCount, below: Output) -> list[HTML | Button]:
    cells: list[HTML | Button] = [_cell(c, at) for at, c in enumerate(shown.cells(each))]
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
    button = Button(description=label, layout=Layout(width="max-content", margin="2px 0"))

    def on_click(_: Button) -> None:
        below.clear_output()
        with below:
            try:
                act()
            except LLMDebugError as error:
                print(error)

    button.on_click(on_click)
    return button
