"""The answers that the kernel sends to the explorer in a page.

`row_columns` has the row of a list, `wire_findings` those on findings, `wire_layers` those on
layers, `wire_halts` those on halts, `wire_requests` the requests; `labextension/src/widget/wire.ts`
is generated from all. A request is ``{"op": NAME, "re": n, ...}``, its answer ``{"re": n, ...}``
with binary buffers, or ``{"re": n, "error": "one line"}``. JSON lacks some floats; they travel as
the strings ``nan``, ``inf``, ``-inf``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from llmdebug_nb.show import row_columns

# the cells of a row, and the row
Num = row_columns.Num
Verdict = row_columns.Verdict
Row = row_columns.Row
Which = Literal["golden", "mine", "difference"]  # a run's own tensors are "golden"
Tab = Literal["golden", "mine", "difference", "all"]  # "all": side by side
Relation = Literal["inputs", "outputs", "consumers", "siblings"]
Scope = Literal["tensor", "step", "module"]


class RequestRows(TypedDict):
    """The rows of one request in a step of an engine, and their positions in its tokens."""

    name: str
    row: int
    last_row: int
    position: int
    last_position: int


class Step(TypedDict):
    """One step of the token stepper. ``label`` is ready to show: ``0 prefill``.

    ``text``: the step's input tokens as text, "" if not known. ``requests``: of an engine, in the
    order of their rows.
    """

    index: int
    generation: int
    step: int
    kind: str
    label: str
    text: str
    requests: list[RequestRows]
    rows: int
    bad: int


class TreeNode(TypedDict):
    """A module. ``rows``: its records and those below it, over all steps.

    ``bad``, ``unmatched``, ``expected``: how many of them diverged, have no partner, are expected.
    ``verdict``: the worst of the rows that were compared; None in a run.
    ``note``: the module's other names, and the comments on its expected rows.
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


class Page(TypedDict):
    """A page of the list. ``problem``: why the filter can't be read, "" if it can."""

    total: int
    start: int
    rows: list[Row]
    problem: str


class Located(TypedDict):
    """A row and its place in the list. ``row`` is None if there is no next one.

    ``index``: the place in the requested list, of the row's step or of all; -1 if not listed.
    """

    row: Row | None
    index: int


class FindingView(TypedDict):
    """A finding. ``step`` indexes the stepper; ``row`` is -1 for none.

    ``head``, ``place``, ``where``, ``what``, ``which``, ``why``, ``do``: see `Headline` in
    `findings.headline`.
    ``file``, ``line``: to open, "" and 0 if unknown, or if torch's own. ``proof``: what a proof
    said, "" without one. ``expected``, ``mark``: as in `Row`.
    """

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    row: int
    head: str
    place: str
    where: str
    what: str
    which: str
    why: str
    do: str
    file: str
    line: int
    proof: str
    expected: str
    mark: int


class Mark(TypedDict):
    """An expectation. ``text``: its tensors in words; ``rows``: how many mismatches it covers."""

    text: str
    comment: str
    rows: int


class Overview(TypedDict):
    """The result. ``lines``: the figures. ``summary``: a report's result in sentences.

    ``caution``: what a good verdict must not hide, "" for nothing.
    ``notes``: the limits of the result, and the versions that recorded the runs.
    ``inside``: it is the comparison of a blamed module, recorded again with its operators.
    ``halt``: the number of the halt that it shows, from 1; 0: no program is stepped through.
    ``marks``: the expectations; ``kept``: the file they are kept in, "" for none.
    ``ranks``: those that the rows are of, if there are several.
    """

    kind: Literal["run", "report"]
    title: str
    golden: str
    mine: str
    verdict: Verdict | None
    caution: str
    lines: list[str]
    summary: str
    notes: list[str]
    steps: list[Step]
    findings: list[FindingView]
    marks: list[Mark]
    kept: str
    first_bad: int
    rows: int
    ranks: list[int]
    inside: bool
    halt: int


class Element(TypedDict):
    index: list[int]
    golden: Num
    mine: Num
    difference: Num


class Worst(TypedDict):
    """The elements that differ most, the worst first; NaN on one side is worst.

    ``differing``: how many elements differ.
    """

    elements: list[Element]
    differing: int


class Axis(TypedDict):
    name: str
    size: int


class KernelView(TypedDict):
    """A kernel of compiled code. ``nodes``: the graph nodes that it computes.

    ``code``: its source, "" for a kernel of PyTorch.
    """

    name: str
    nodes: list[str]
    code: str


class Side(TypedDict):
    """One side of a row. ``kept``: its values were recorded; if not, ``why`` says why.

    ``part``: which part of the tensor was kept, "" for all. ``axes``: those of the kept values.
    ``call_id``: the execution id of its call, "" for none. ``code``: the Python expression of the
    tensor. ``kernel``: for compiled code the kernel that writes or reads it.
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

    ``inputs``, ``outputs``: of the same call. ``consumers``: inputs that are this tensor.
    ``siblings``: other inputs that are the same tensor as this input.
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
    """A window of a 2-d slice as ``h * w`` little-endian float32 in one buffer.

    ``y0 .. x1``: the window in elements, end exclusive. Each cell covers ``fy * fx`` elements and
    shows the one of largest magnitude (a NaN wins), which keeps an outlier visible.
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
    """The same 2-d slice at ``count`` of ``total`` indices of an axis, from ``first`` on.

    One buffer of ``count * h * w`` little-endian float32; cells as in `View`.
    """

    h: int
    w: int
    first: int
    count: int
    total: int
    lo: Num
    hi: Num


class Histogram(TypedDict):
    """Counts of the tensor's finite elements in equal bins from ``lo`` to ``hi``."""

    lo: Num
    hi: Num
    counts: list[int]
    nan: int
    inf: int
    total: int


class ErrorHistogram(TypedDict):
    """Counts of log10 of the absolute differences, in equal bins from ``lo`` to ``hi``.

    ``same``: elements that don't differ; ``broken``: different ones that are not finite on one side
    or both. ``limit``: the tensor's limit per element if its error were spread evenly; None if the
    tensor's limit is not one of the relative L2 error.
    """

    lo: Num
    hi: Num
    counts: list[int]
    same: int
    broken: int
    total: int
    limit: Num


class Scatter(TypedDict):
    """Golden against mine, both axes from ``lo`` to ``hi``.

    With ``size`` 0, two buffers of ``count`` little-endian float32: golden's and mine's values.
    Else one buffer of ``size * size`` little-endian uint32: the number of elements in each cell,
    golden along a row, mine's lowest row first. ``broken``: elements that are not finite on both
    sides.
    """

    lo: Num
    hi: Num
    size: int
    count: int
    broken: int


class Point(TypedDict):
    """A point of a curve. ``step`` indexes the stepper; ``value`` is None without a figure."""

    step: int
    row: int
    value: Num


class Line(TypedDict):
    """A figure of one tensor over all steps; of many steps, a point is the largest of several."""

    figure: str
    points: list[Point]


class Series(TypedDict):
    lines: list[Line]


class State(TypedDict):
    """The state of an explorer. ``position``: index of the stepper; ``selected``: a row or -1.

    ``path``, ``mismatch``, ``text``: the filter of the list. ``which``, ``axes``, ``fixed``: the
    side and the slice of the tensor; without ``axes`` its last two.
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
    """An answer in a saved page. ``key``: the request, see `saved_page.py`; ``buffers``: base64."""

    key: str
    answer: dict[str, object]
    buffers: list[str]


class SavedPage(TypedDict):
    """The data of a saved page. ``parents``: of ``nodes``; ``homes``: each row's node or -1."""

    state: State
    snapshot: Overview
    nodes: list[TreeNode]
    parents: list[int]
    rows: list[Row]
    homes: list[int]
    answers: list[Kept]
