"""The differences of a report, as a sequence and as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import saving
from llmdebug_nb.core.printable import cell
from llmdebug_nb.core.records import Record
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.show import html
from llmdebug_nb.show.report_view import ReportView
from llmdebug_nb.show.row_columns import BY_NAME, JUDGED, MEASURED, differing
from llmdebug_nb.show.words import expected_text
from llmdebug_nb.store.tabular import Tabular

if TYPE_CHECKING:
    import pandas

_SITE = ("rank", "generation", "step", "path", "call", "phase", "role", "slot")
_SIDE: dict[str, Callable[[Record], object]] = {
    "dtype": lambda record: record.summary.dtype,
    "shape": lambda record: record.summary.shape,
    "max": BY_NAME["max"].of,
    **{column.name: column.of for column in MEASURED},
    "op": lambda record: record.op,
}


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a result file. Raises DumpWriteError if it can't be written."""
    where = on_this_machine(path)
    with saving(where):
        where.write_text(text, encoding="utf-8")
    return where


def write_csv(path: str | os.PathLike[str], table: pandas.DataFrame) -> Path:
    """Write a table as csv; a spreadsheet computes no text of it. Raises DumpWriteError.

    Its index is written if it has a name.
    """
    return write_text(path, table.map(cell).to_csv(index=table.index.name is not None))


class ResultTable(Tabular):
    """The result of a check: a text, and a table that can be written."""

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_pandas` as csv; a spreadsheet computes no text of it. Raises DumpWriteError."""
        return write_csv(path, self.to_pandas())

    def __repr__(self) -> str:
        return str(self)


class Differences(Sequence[Difference], ResultTable):
    """The differences of a report, in execution order."""

    def __init__(self, view: Callable[[], ReportView], rows: Sequence[Difference]) -> None:
        """``view()``: the view of the report, which the page shows."""
        self._view, self._rows = view, rows

    @overload
    def __getitem__(self, index: int) -> Difference: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Difference]: ...
    def __getitem__(self, index: int | slice) -> Difference | Sequence[Difference]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self._rows)

    def __repr__(self) -> str:
        counts = Counter(d.verdict for d in self._rows)
        named = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        return f"{len(self)} differences: {named}"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with one row per difference.

        Its columns: the site; ``golden`` and ``mine``, the tensor of each side; dtype, shape and
        statistics of both sides, metrics, verdict, the tokens that differ, the rule that decided
        it, reason.
        """
        import pandas

        frame = pandas.DataFrame(
            [_flat(d) for d in self._rows], columns=None if self._rows else list(_SITE)
        )
        return frame.rename_axis("index")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page. Raises StoreError."""
        return write_text(path, html.page(self._view()))


def _flat(d: Difference) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(d.site, name) for name in _SITE}
    for side, record in (("golden", d.pair.golden), ("mine", d.pair.mine)):
        row[side] = None if record is None else str(record.site)
    row["op"], row["seq"] = d.op, d.pair.either.seq
    for side, record in (("golden", d.pair.golden), ("my", d.pair.mine)):
        for name, of in _SIDE.items():
            row[f"{side}_{name}"] = None if record is None else of(record)
    row |= d.metrics
    row |= {column.name: column.of(d.pair.either, d) for column in JUDGED}
    row["differing"] = differing(d)
    row |= {"why": d.pair.why, "rule": d.rule.name.lower(), "reason": d.reason}
    row["expected"] = expected_text(d) or None
    return row | {"fit": d.pair.fit.says if d.pair.fit else None}
