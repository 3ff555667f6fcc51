"""The messages between the explorer in the page and the kernel. `labextension/src/widget/wire.ts` is generated from this.

A request is ``{"op": NAME, "re": n, ...}``, its answer ``{"re": n, ...}`` with binary buffers, or
``{"re": n, "error": "one line"}``. Floats that JSON lacks travel as the strings ``nan``, ``inf``, ``-inf``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Num = float | str | None
Which = Literal["golden", "mine", "difference"]  # a run's own tensors are "golden"
Tab = Literal["golden", "mine", "difference", "all"]  # "all": side by side
Relation = Literal["inputs", "outputs", "consumers", "siblings"]
Verdict = Literal["match", "within_noise", "expected", "diverged", "unmatched", "nondeterministic"]
Sort = Literal["", "step", "seq", "path", "op", "dtype", "shape", "error", "limit", "verdict"]
Scope = Literal["tensor", "step", "module"]


class Step(TypedDict):
    """One stop of the token stepper. ``label`` is ready to show: ``0 prefill``. ``text``: the tokens that the step was given, "" if not known."""

    index: int
    generation: int
    step: int
    kind: str
    label: str
    text: str
    rows: int
    bad: int


class TreeNode(TypedDict):
    """A module. ``rows``/``bad``/``unmatched``/``expected``: recorded (diverged, unpaired, expected) rows at it and below, all steps.

    ``verdict``: the worst of them, on what could be compared; None in a run. ``note``: its other names, and what was said of what is expected.
    """

    id: int
    label: str
    path: str
    type: str
    children: int
    rows: int
    bad: int
    unmatched: int
    expected: int
    verdict: Verdict | None
    note: str


class Children(TypedDict):
    total: int
    nodes: list[TreeNode]


class Row(TypedDict):
    """A record of a run, or a pair of a report. ``step`` indexes the stepper.

    ``expected``: what was said of it where it is expected, "" where it isn't. ``mark``: the place of what says so in the overview's list; -1: nothing
    does by itself.
    """

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
    expected: str
    mark: int


class Page(TypedDict):
    """``problem``: why the text of the filter can't be read, "" if it can."""

    total: int
    start: int
    rows: list[Row]
    problem: str


class Located(TypedDict):
    """``row`` is None where there is no next one.

    ``index`` is its place in the list that the request describes, that of its step or of all; -1 if it is not in it.
    """

    row: Row | None
    index: int


class FindingView(TypedDict):
    """What is to blame. ``step`` indexes the stepper; ``row`` is -1 for none. ``expected``, ``mark``: as in `Row`."""

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    row: int
    expected: str
    mark: int


class Mark(TypedDict):
    """What was marked as expected. ``text``: which tensors, in words; ``rows``: how many of the mismatches."""

    text: str
    comment: str
    rows: int


class Overview(TypedDict):
    """``lines``: what came out. ``summary``: that in sentences, of a report. ``notes``: how far to trust it, and what made the runs.

    ``marks``: what is expected; ``kept``: the file that they are kept in, "" for none.
    """

    kind: Literal["run", "report"]
    title: str
    golden: str
    mine: str
    verdict: Verdict | None
    lines: list[str]
    summary: str
    notes: list[str]
    steps: list[Step]
    findings: list[FindingView]
    marks: list[Mark]
    kept: str
    first_bad: int
    rows: int


class FindingDetail(TypedDict):
    """``script``: what calls it again, "" for none, then ``why`` says why not. ``save``: the line of Python that writes it.

    ``source``: where in the program it was called, "" if that was not recorded. ``kernel``, ``code``: of compiled code, the kernel that computes
    it, and its code; "" for none.
    """

    script: str
    why: str
    save: str
    source: str
    kernel: str
    code: str


class Layer(TypedDict):
    """A row of the map of layers. ``node``: its place in the tree; -1 is what lies around the layers."""

    path: str
    type: str
    node: int


class LayerMap(TypedDict):
    """The worst row of each layer (in execution order) at each step (all of the stepper), layer by layer in four buffers.

    Error and limit (little-endian float32, NaN: no figure), id of the row (int32, -1: nothing was recorded), and verdict
    (uint8: 0 nothing recorded, 1 unmatched, 2 match, 3 within noise, 4 expected, 5 diverged).
    """

    layers: list[Layer]
    steps: int


class Element(TypedDict):
    index: list[int]
    golden: Num
    mine: Num
    difference: Num


class Worst(TypedDict):
    """The elements that differ most, the worst first; NaN on one side only is worst. ``differing``: how many there are."""

    elements: list[Element]
    differing: int


class Axis(TypedDict):
    name: str
    size: int


class KernelView(TypedDict):
    """A kernel of compiled code. ``nodes``: of the graph, that it computes. ``code``: "" for one of PyTorch's."""

    name: str
    nodes: list[str]
    code: str


class Side(TypedDict):
    """One side of a row. ``kept`` says that values can be asked for; ``why`` says why not, ``part`` of what ("": all of it).

    ``call_id``: the execution id of its call, "" where there is none. ``axes``: of what was kept. ``code``: what gives this tensor in a cell. ``kernel``: of compiled code, the one that writes or reads it.
    """

    which: Which
    call_id: str
    kept: bool
    why: str
    part: str
    dtype: str
    shape: list[int]
    axes: list[Axis]
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
    kernel: KernelView | None


class Metric(TypedDict):
    name: str
    value: Num


class Link(TypedDict):
    row: int
    label: str


class Flow(TypedDict):
    """Neighbours of a record in the dataflow, the first of ``total``.

    ``inputs``/``outputs``: of the same call. ``consumers`` take this tensor, ``siblings`` take the one that it is, too.
    """

    relation: Relation
    links: list[Link]
    total: int


class Detail(TypedDict):
    row: Row
    sides: list[Side]
    metrics: list[Metric]
    producer: int
    producer_label: str
    flow: list[Flow]


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


class Heads(TypedDict):
    """The same 2-d slice at ``count`` indices of an axis from ``first`` on, of ``total``, as ``count * h * w`` little-endian float32
    in the one buffer; cells as in `View`.
    """

    h: int
    w: int
    first: int
    count: int
    total: int
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


class ErrorHistogram(TypedDict):
    """How many elements differ by how much: counts of log10 of the absolute difference, in equal bins from ``lo`` to ``hi``.

    ``same``: elements that do not differ; ``broken``: those that are not finite on one side or both, and not the same. ``limit``: what the tensor's limit would be
    for each element, were the error spread evenly; None where it is none of the whole.
    """

    lo: Num
    hi: Num
    counts: list[int]
    same: int
    broken: int
    total: int
    limit: Num


class Scatter(TypedDict):
    """Golden against mine, both axes from ``lo`` to ``hi``. ``size`` 0: two buffers of ``count`` little-endian float32, golden's and mine's values.

    Else one buffer of ``size * size`` little-endian uint32: how many elements lie in each cell, golden along a row, mine's lowest row first.
    ``broken``: elements that are not finite on both sides.
    """

    lo: Num
    hi: Num
    size: int
    count: int
    broken: int


class Point(TypedDict):
    """``step`` indexes the stepper; ``value`` is None where there is no figure."""

    step: int
    row: int
    value: Num


class Line(TypedDict):
    """A figure of one site over all steps. Of many steps a point stands for several, and is the largest of them."""

    figure: str
    points: list[Point]


class Series(TypedDict):
    lines: list[Line]


class State(TypedDict):
    """What an explorer shows. ``position``: index of the stepper; ``selected``: a row, -1 for none; ``path``, ``mismatch``, ``text``:
    what the list is narrowed to. ``which``, ``axes``, ``fixed``: what of the tensor; no ``axes`` means its last two.
    """

    position: int
    selected: int
    path: str
    mismatch: bool
    text: str
    which: Tab
    axes: list[int]
    fixed: list[int]


class Exported(TypedDict):
    path: str


class Kept(TypedDict):
    """An answer that was given when a page was saved. ``key``: what was asked, see `saved_page.py`; ``buffers``: as base64."""

    key: str
    answer: dict[str, object]
    buffers: list[str]


class SavedPage(TypedDict):
    """What a saved page answers from. ``parents``: of ``nodes``; ``homes``: the node of each of ``rows``, -1 for none."""

    state: State
    snapshot: Overview
    nodes: list[TreeNode]
    parents: list[int]
    rows: list[Row]
    homes: list[int]
    answers: list[Kept]


class OverviewRequest(TypedDict):
    op: Literal["overview"]


class ChildrenRequest(TypedDict):
    """``parent`` -1 asks for the roots."""

    op: Literal["children"]
    parent: int
    start: int
    n: int


class Listed(TypedDict):
    """What a list is narrowed to, and its order.

    ``node`` -1 means all; ``mismatch`` keeps diverged and unmatched rows only; ``text``: see `filters.py`; ``every``: of all steps at once.
    ``sort``: a column, "" for execution order, which a run always has.
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
    """The next (``delta`` 1) or previous (-1) row, in execution order over all steps; of a sorted list, in that of the row's step.

    ``row`` -1 starts before the first row, or behind the last one.
    """

    op: Literal["locate"]
    row: int
    delta: int


class RowRequest(Listed):
    """Like `locate`, for the row itself: where is it?"""

    op: Literal["row"]
    row: int


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


class HeadsRequest(TypedDict):
    """``axis``: that of the heads, ``first``: the first one; ``axes``, ``fixed``, ``size`` as in `ViewRequest`."""

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
    """``points``: so many at most as points; ``size``: cells per side beyond that."""

    op: Literal["scatter"]
    row: int
    points: int
    size: int


class SeriesRequest(TypedDict):
    """``n``: points of a line at most."""

    op: Literal["series"]
    row: int
    n: int


class FindingRequest(TypedDict):
    """``finding`` is its place in the overview's list."""

    op: Literal["finding"]
    finding: int


class LayersRequest(TypedDict):
    op: Literal["layers"]


class WorstRequest(TypedDict):
    op: Literal["worst"]
    row: int
    n: int


class ExpectRequest(TypedDict):
    """Mark a row (``finding`` -1) or a finding (``row`` -1) as expected. ``scope``: of a row, that tensor in all steps or in its own, or all that its module makes."""

    op: Literal["expect"]
    row: int
    finding: int
    scope: Scope
    comment: str


class UnexpectRequest(TypedDict):
    """``mark``: its place in the overview's list; ``text``: as it is there."""

    op: Literal["unexpect"]
    mark: int
    text: str


class ExportRequest(State):
    """Write what is shown to a file beside the notebook: a page, or a figure."""

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
    "worst": (WorstRequest, Worst),
    "errors": (ErrorsRequest, ErrorHistogram),
    "scatter": (ScatterRequest, Scatter),
    "expect": (ExpectRequest, Overview),
    "unexpect": (UnexpectRequest, Overview),
    "export": (ExportRequest, Exported),
}
