"""The requests of the explorer in a page; `wire` has the answers."""

from __future__ import annotations

from typing import Literal, TypedDict

from llmdebug_nb.show.row_columns import Sort
from llmdebug_nb.show.wire import (
    Children,
    Detail,
    ErrorHistogram,
    Exported,
    Heads,
    Histogram,
    Located,
    Overview,
    Page,
    Scatter,
    Scope,
    Series,
    State,
    View,
    Which,
    Worst,
)
from llmdebug_nb.show.wire_findings import FindingDetail
from llmdebug_nb.show.wire_halts import HaltView
from llmdebug_nb.show.wire_layers import Calls, LayerMap


class OverviewRequest(TypedDict):
    op: Literal["overview"]


class ChildrenRequest(TypedDict):
    """``parent`` -1 asks for the roots."""

    op: Literal["children"]
    parent: int
    start: int
    n: int


class Listed(TypedDict):
    """The filter and the order of a list.

    ``node`` -1 means all; ``mismatch``: only diverged and unmatched rows; ``text``: see
    `filters.py`; ``every``: all steps at once. ``sort``: a column, "" for execution order, in which
    the rows of a run always are.
    """

    node: int
    mismatch: bool
    text: str
    every: bool
    sort: Sort
    descending: bool


class RowsRequest(Listed):
    """``step`` -1 means all."""

    op: Literal["rows"]
    step: int
    start: int
    n: int


class LocateRequest(Listed):
    """The next (``delta`` 1) or previous (-1) row in execution order over all steps.

    In a sorted list it is the next one in that list, of the row's step. ``row`` -1 starts before
    the first row, or after the last one.
    """

    op: Literal["locate"]
    row: int
    delta: int


class RowRequest(Listed):
    """Where in the list a row is."""

    op: Literal["row"]
    row: int


class PathRequest(TypedDict):
    """The ids of the tree nodes from a root down to ``path`` or its nearest ancestor."""

    op: Literal["path"]
    path: str


class PathAnswer(TypedDict):
    ids: list[int]


class DetailRequest(TypedDict):
    op: Literal["detail"]
    row: int


class ViewRequest(TypedDict):
    """A window of a slice. ``axes``: row and column axis, -1 for none.

    ``fixed``: an index for each axis, ignored for those two. ``y1``, ``x1``: 0 means the end.
    ``size``: cells per side at most.
    """

    op: Literal["view"]
    row: int
    which: Which
    axes: list[int]
    fixed: list[int]
    y0: int
    x0: int
    y1: int
    x1: int
    size: int


class HeadsRequest(TypedDict):
    """The slice at each index of ``axis`` from ``first`` on.

    ``axes``, ``fixed``, ``size``: as in `ViewRequest`.
    """

    op: Literal["heads"]
    row: int
    which: Which
    axis: int
    first: int
    axes: list[int]
    fixed: list[int]
    size: int


class HistogramRequest(TypedDict):
    op: Literal["histogram"]
    row: int
    which: Which
    bins: int


class ErrorsRequest(TypedDict):
    op: Literal["errors"]
    row: int
    bins: int


class ScatterRequest(TypedDict):
    """Golden against mine: up to ``points`` points, else ``size`` cells per side."""

    op: Literal["scatter"]
    row: int
    points: int
    size: int


class SeriesRequest(TypedDict):
    """The curves of a row, with at most ``n`` points each."""

    op: Literal["series"]
    row: int
    n: int


class FindingRequest(TypedDict):
    """The details of a finding, by its index in the overview's list."""

    op: Literal["finding"]
    finding: int


class LayersRequest(TypedDict):
    op: Literal["layers"]


class CallsRequest(TypedDict):
    """The calls of a layer (an index of `LayerMap.layers`) in a step; ``n`` at most."""

    op: Literal["calls"]
    layer: int
    step: int
    n: int


class ProveRequest(TypedDict):
    """Put golden's value of a finding into mine's live model, run on, and compare."""

    op: Literal["prove"]
    finding: int


class InsideRequest(TypedDict):
    """Record a blamed module again with its operators; -1 goes back to the first comparison."""

    op: Literal["inside"]
    finding: int


class HaltRequest(TypedDict):
    """Where the program is halted."""

    op: Literal["halt"]


class StepRequest(TypedDict):
    """Let the halted program go on; the answer shows the next halt, or the end."""

    op: Literal["step"]
    command: str


class WorstRequest(TypedDict):
    op: Literal["worst"]
    row: int
    n: int


class ExpectRequest(TypedDict):
    """Mark a row (``finding`` -1) or a finding (``row`` -1) as expected.

    ``scope`` of a row: its tensor in all steps, in this step, or all outputs of its module.
    """

    op: Literal["expect"]
    row: int
    finding: int
    scope: Scope
    comment: str


class UnexpectRequest(TypedDict):
    """Remove an expectation: ``mark`` is its index in the overview's list, ``text`` its text."""

    op: Literal["unexpect"]
    mark: int
    text: str


class ExportRequest(State):
    """Write the state to a file beside the notebook: a page or a figure."""

    op: Literal["export"]
    kind: Literal["html", "svg", "png"]


ANSWERS: dict[str, tuple[type, type]] = {
    "overview": (OverviewRequest, Overview),
    "children": (ChildrenRequest, Children),
    "rows": (RowsRequest, Page),
    "locate": (LocateRequest, Located),
    "row": (RowRequest, Located),
    "path": (PathRequest, PathAnswer),
    "detail": (DetailRequest, Detail),
    "view": (ViewRequest, View),
    "heads": (HeadsRequest, Heads),
    "histogram": (HistogramRequest, Histogram),
    "series": (SeriesRequest, Series),
    "finding": (FindingRequest, FindingDetail),
    "layers": (LayersRequest, LayerMap),
    "calls": (CallsRequest, Calls),
    "prove": (ProveRequest, Overview),
    "inside": (InsideRequest, Overview),
    "halt": (HaltRequest, HaltView),
    "step": (StepRequest, Overview),
    "worst": (WorstRequest, Worst),
    "errors": (ErrorsRequest, ErrorHistogram),
    "scatter": (ScatterRequest, Scatter),
    "expect": (ExpectRequest, Overview),
    "unexpect": (UnexpectRequest, Overview),
    "export": (ExportRequest, Exported),
}
