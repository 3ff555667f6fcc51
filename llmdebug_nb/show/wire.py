"""The messages between the explorer in the page and the kernel. `labextension/src/widget/wire.ts` is generated from this.

A request is ``{"op": NAME, "re": n, ...}``, its answer ``{"re": n, ...}`` with binary buffers, or
``{"re": n, "error": "one line"}``. Floats that JSON lacks travel as the strings ``nan``, ``inf``, ``-inf``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Num = float | str | None
Which = Literal["golden", "mine", "difference"]  # a run's own tensors are "golden"
Verdict = Literal["match", "within_noise", "diverged", "unmatched", "nondeterministic"]


class Step(TypedDict):
    """One stop of the token stepper. ``label`` is ready to show: ``0 prefill``."""

    index: int
    generation: int
    step: int
    kind: str
    label: str
    rows: int
    bad: int


class TreeNode(TypedDict):
    """A module. ``rows``/``bad``: recorded rows (diverged ones) at it and below, all steps."""

    id: int
    label: str
    path: str
    type: str
    children: int
    rows: int
    bad: int
    note: str


class Children(TypedDict):
    total: int
    nodes: list[TreeNode]


class Row(TypedDict):
    """A record of a run, or a pair of a report. ``step`` indexes the stepper."""

    id: int
    step: int
    seq: int
    path: str
    call: int
    role: str
    slot: str
    op: str
    dtype: str
    shape: list[int]
    min: Num
    max: Num
    mean: Num
    l2norm: Num
    nan: int
    inf: int
    kept: bool
    verdict: Verdict | None
    error: Num
    limit: Num
    reason: str


class Page(TypedDict):
    total: int
    start: int
    rows: list[Row]


class Located(TypedDict):
    """``row`` is None where there is no next one.

    ``index`` is its place in the list of its step that the request describes; -1 if it is not in it.
    """

    row: Row | None
    index: int


class FindingView(TypedDict):
    """What is to blame. ``step`` indexes the stepper; ``row`` is -1 for none."""

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    row: int


class Overview(TypedDict):
    """``lines``: what came out. ``notes``: how far to trust it, and what made the runs."""

    kind: Literal["run", "report"]
    title: str
    golden: str
    mine: str
    verdict: Verdict | None
    lines: list[str]
    notes: list[str]
    steps: list[Step]
    findings: list[FindingView]
    first_bad: int
    rows: int


class Axis(TypedDict):
    name: str
    size: int


class Side(TypedDict):
    """One side of a row. ``kept`` says that values can be asked for; ``why`` says why not, ``part`` of what ("": all of it)."""

    which: Which
    kept: bool
    why: str
    part: str
    dtype: str
    shape: list[int]
    device: str
    min: Num
    max: Num
    mean: Num
    l2norm: Num
    nan: int | None
    inf: int | None
    zero: int | None
    numel: int
    fingerprint: str
    code: str


class Metric(TypedDict):
    name: str
    value: Num


class Detail(TypedDict):
    row: Row
    sides: list[Side]
    axes: list[Axis]
    metrics: list[Metric]
    producer: int
    producer_label: str


class View(TypedDict):
    """A window of a 2-d slice as ``h * w`` little-endian float32 in the one buffer.

    ``y0 .. x1``: the window in elements, end exclusive; each cell covers ``fy * fx`` elements and
    shows the one of largest magnitude (a NaN wins), so that one outlier stays visible.
    """

    h: int
    w: int
    fy: int
    fx: int
    y0: int
    x0: int
    y1: int
    x1: int
    rows: int
    cols: int
    lo: Num
    hi: Num


class Histogram(TypedDict):
    """Counts of the finite elements of the whole tensor in equal bins from ``lo`` to ``hi``."""

    lo: Num
    hi: Num
    counts: list[int]
    nan: int
    inf: int
    total: int


class OverviewRequest(TypedDict):
    op: Literal["overview"]


class ChildrenRequest(TypedDict):
    """``parent`` -1 asks for the roots."""

    op: Literal["children"]
    parent: int
    start: int
    n: int


class RowsRequest(TypedDict):
    """``step`` and ``node`` -1 mean all; ``mismatch`` keeps diverged and unmatched rows only."""

    op: Literal["rows"]
    step: int
    node: int
    mismatch: bool
    text: str
    start: int
    n: int


class LocateRequest(TypedDict):
    """The next (``delta`` 1) or previous (-1) row in execution order, over all steps, under ``node``.

    ``row`` -1 starts before the first row, or behind the last one. ``text`` filters as in `RowsRequest`.
    """

    op: Literal["locate"]
    row: int
    delta: int
    node: int
    mismatch: bool
    text: str


class RowRequest(TypedDict):
    """Like `locate`, for the row itself: where is it? ``node``, ``mismatch``, ``text``: the list it is looked for in."""

    op: Literal["row"]
    row: int
    node: int
    mismatch: bool
    text: str


class PathRequest(TypedDict):
    """The ids of the tree nodes from a root down to the one at ``path`` (its nearest one above)."""

    op: Literal["path"]
    path: str


class PathAnswer(TypedDict):
    ids: list[int]


class DetailRequest(TypedDict):
    op: Literal["detail"]
    row: int


class ViewRequest(TypedDict):
    """``axes``: row and column axis (-1: none, for fewer than two); ``fixed``: index per axis, ignored for those two.

    ``y1``/``x1`` of 0 mean up to the end; ``size``: cells per side at most.
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


class HistogramRequest(TypedDict):
    op: Literal["histogram"]
    row: int
    which: Which
    bins: int


ANSWERS: dict[str, tuple[type, type]] = {
    "overview": (OverviewRequest, Overview),
    "children": (ChildrenRequest, Children),
    "rows": (RowsRequest, Page),
    "locate": (LocateRequest, Located),
    "row": (RowRequest, Located),
    "path": (PathRequest, PathAnswer),
    "detail": (DetailRequest, Detail),
    "view": (ViewRequest, View),
    "histogram": (HistogramRequest, Histogram),
}
