"""The columns of a row: each is declared here, once.

`Row` is a row on the wire. The views fill it, the rows of a comparison are sorted and searched, and
the tables of text, HTML and pandas and the explorer's list are made by what is declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypedDict, get_type_hints

from llmdebug_nb.show.words import expected_text

if TYPE_CHECKING:
    from llmdebug_nb.comparison.differences import Difference
    from llmdebug_nb.core.records import Record

Num = float | str | None
Verdict = Literal[
    "match", "within_noise", "expected", "diverged", "unmatched", "nondeterministic", "incomparable"
]
# every: where the rows of all steps are listed. ranked: where there are several ranks.
When = Literal["always", "run", "report", "every", "ranked"]


def _none(record: Record) -> None:
    """A record has no such value, or a view knows it."""


class Column(NamedTuple):
    """``of_record``: its value. ``of_difference``: that of a comparison, if it is another one.

    ``title``: over the explorer's list, "" if it is not in it. ``width``: there, in pixels; 0: the
    remaining space. ``when``: it is shown. ``head``: over the tables of text and HTML, "" if it is
    not in them; None: its name if it has a title. ``searched``: by the words of a filter.
    ``name``, ``kind``: taken from `Row`, where the column is declared.
    """

    of_record: Callable[[Record], object] = _none
    title: str = ""
    width: int = 60
    when: When = "always"
    head: str | None = None
    searched: bool = False
    of_difference: Callable[[Difference], object] | None = None
    name: str = ""
    kind: object = None

    def of(self, record: Record, difference: Difference | None = None) -> object:
        """Return the value of a record, or of a difference and its record."""
        if difference is not None and self.of_difference is not None:
            return self.of_difference(difference)
        return self.of_record(record)

    @property
    def is_figure(self) -> bool:
        return self.kind is Num

    @property
    def is_number(self) -> bool:
        return self.is_figure or (self.kind is int and self.name != "step")  # which has a label


def _role(record: Record) -> str:
    site = record.site
    return site.role if site.phase == "forward" else f"{site.phase} {site.role}"


def differing(d: Difference) -> str:
    """Return which tokens, or other rows, of a tensor that diverged differ; "" for none."""
    found = d.differing
    return found.where if found else ""


def _numbers(d: Difference) -> str:
    found = d.differing
    return found.numbers if found else ""


def differing_share(d: Difference) -> float | None:
    """Return the part of them that differs, None if it is unknown."""
    found = d.differing
    return found.share if found else None


def _reason(d: Difference) -> str:
    return d.reason or (d.pair.fit.says if d.pair.fit else "")


class Row(TypedDict):
    """A record of a run, or a pair of a report. ``step`` indexes the stepper.

    ``differing``: which tokens, or other rows, of a tensor that diverged differ; "" for none;
    ``which``: their numbers.
    ``expected``: the comment on an expected row, "" for another. ``mark``: the index of its
    expectation in the overview's list; -1 if no expectation names the row.
    """

    id: int
    step: Annotated[int, Column(title="token", width=78, when="every")]
    rank: Annotated[int, Column(lambda r: r.site.rank, "rank", 40, "ranked", head="")]
    seq: Annotated[int, Column(lambda r: r.seq, "#", 46, head="")]
    path: Annotated[str, Column(lambda r: r.site.path, "tensor", 0)]
    call: Annotated[int, Column(lambda r: r.site.call)]
    role: Annotated[str, Column(_role)]
    slot: Annotated[str, Column(lambda r: r.site.slot, head="tensor")]
    op: Annotated[str, Column(lambda r: r.op, "op", 70, searched=True)]
    dtype: Annotated[str, Column(lambda r: r.summary.dtype, "type", 42, searched=True)]
    shape: Annotated[list[int], Column(lambda r: list(r.summary.shape), "shape", 84)]
    min: Annotated[Num, Column(lambda r: r.summary.min, "min", when="run")]
    max: Annotated[Num, Column(lambda r: r.summary.max, "max", when="run")]
    mean: Annotated[Num, Column(lambda r: r.summary.mean, "mean", when="run")]
    l2norm: Annotated[Num, Column(lambda r: r.summary.l2norm, "l2 norm", when="run")]
    nan: Annotated[int, Column(lambda r: r.summary.nan or 0)]
    inf: Annotated[int, Column(lambda r: r.summary.inf or 0)]
    kept: Annotated[bool, Column(lambda r: r.payload is not None)]
    verdict: Annotated[
        Verdict | None,
        Column(_none, "verdict", 124, "report", searched=True, of_difference=lambda d: d.verdict),
    ]
    error: Annotated[Num, Column(title="error", when="report", of_difference=lambda d: d.error)]
    limit: Annotated[Num, Column(title="limit", when="report", of_difference=lambda d: d.limit)]
    which: Annotated[
        str, Column(lambda r: "", "which", 60, "report", head="", of_difference=_numbers)
    ]
    differing: Annotated[str, Column(lambda r: "", of_difference=differing)]
    reason: Annotated[str, Column(lambda r: r.lost or "", of_difference=_reason)]
    expected: Annotated[str, Column(lambda r: "", of_difference=expected_text)]
    mark: int


def _declared() -> Iterator[Column]:
    for name, hint in get_type_hints(Row, include_extras=True).items():
        for column in getattr(hint, "__metadata__", ()):
            head = (name if column.title else "") if column.head is None else column.head
            yield column._replace(name=name, kind=hint.__origin__, head=head)


COLUMNS = tuple(_declared())  # as on the wire; a view knows `step`, `id` and `mark`
BY_NAME = {column.name: column for column in COLUMNS}
FIGURES = tuple(column.name for column in COLUMNS if column.is_figure)
MEASURED = tuple(column for column in COLUMNS if column.when == "run")
JUDGED = tuple(column for column in COLUMNS if column.when == "report" and column.head)
SEARCHED = tuple(column for column in COLUMNS if column.searched)
# shown in this order: the verdict is last, as the reason stands in its cell, too
_SHOWN = sorted(COLUMNS, key=lambda column: column.name == "verdict")
_LISTED = [column for column in _SHOWN if column.title]

if TYPE_CHECKING:
    ColumnName = str
    Sort = str
else:
    ColumnName = Literal[tuple(column.name for column in _LISTED)]
    # the rows of a run always are in execution order
    Sort = Literal[("", *(column.name for column in _LISTED if column.when != "run"))]


class ListColumn(TypedDict):
    """A column of the explorer's list.

    ``number``: it is aligned to the right. ``figure``: the first click sorts it from the largest.
    """

    name: ColumnName
    title: str
    width: int
    when: When
    number: bool
    figure: bool
    searched: bool


LIST_COLUMNS: list[ListColumn] = [
    {
        "name": column.name, "title": column.title, "width": column.width, "when": column.when,
        "number": column.is_number, "figure": column.is_figure, "searched": column.searched,
    }
    for column in _LISTED
]  # fmt: skip


def tabled(kind: Literal["run", "report"]) -> list[Column]:
    """Return the columns of a table of text or HTML."""
    other = "report" if kind == "run" else "run"
    return [column for column in _SHOWN if column.head and column.when != other]
