"""The result of a comparison: where measuring, blame and showing meet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakSet

from llmdebug_nb.errors import StoreError
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import first_divergence
from llmdebug_nb.explain.summary import sentences
from llmdebug_nb.records import Difference, Finding, Shown, Tabular
from llmdebug_nb.show import html
from llmdebug_nb.show.report_view import ReportView
from llmdebug_nb.show.words import count_text, labels

if TYPE_CHECKING:
    import pandas

    from llmdebug_nb.store.run import Run

_SITE = ("rank", "generation", "step", "path", "call", "phase", "role", "slot")
_SIDE = ("dtype", "shape", "max", "min", "mean", "l2norm")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a result file. Raises StoreError with a clear line where it can't be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"can't write {os.fspath(path)}: {error.strerror or error}") from None
    return Path(path)


class Differences(Sequence[Difference], Tabular):
    """The differences of a report, in execution order."""

    def __init__(self, report: Report, rows: Sequence[Difference]) -> None:
        self._report, self._rows = report, rows

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
        return f"{len(self)} differences: " + ", ".join(f"{count:,} {name}" for name, count in counts.most_common())

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row a difference: site, both sides' dtype, shape and statistics, metrics, verdict and reason."""
        import pandas

        frame = pandas.DataFrame([_flat(d) for d in self._rows], columns=None if self._rows else list(_SITE))
        return frame.rename_axis("index")

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_pandas` as csv. Raises StoreError."""
        return write_text(path, self.to_pandas().to_csv())

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page. Raises StoreError."""
        return write_text(path, html.page(self._report.view()))

    def _repr_html_(self) -> str:
        return str(self.to_pandas().head(60).to_html(escape=True))


def _error_text(d: Difference) -> str:
    if d.reason and not d.metrics:
        return d.reason
    return f"error {d.error:.2g} ({d.reason or 'relative L2'})"


def _flat(d: Difference) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(d.site, name) for name in _SITE}
    row["op"], row["seq"] = d.op, d.pair.either.seq
    for side, record in (("golden", d.pair.golden), ("my", d.pair.mine)):
        for name in _SIDE:
            row[f"{side}_{name}"] = None if record is None else getattr(record.summary, name)
        row[f"{side}_op"] = None if record is None else record.op
    return (
        row
        | d.metrics
        | {"verdict": d.verdict, "error": d.error, "limit": d.limit, "why": d.pair.why, "reason": d.reason}
        | {"fit": d.pair.fit.says if d.pair.fit else None}
    )


_reports: WeakSet[Report] = WeakSet()


def report_of(difference: Difference) -> Report | None:
    """Return the report that a difference is a row of, while there is one: the row itself knows no runs."""
    at = difference.index
    return next((r for r in _reports if at < len(r.differences) and r.differences[at] is difference), None)


class Report(Shown, Tabular):
    """What comparing two runs gave.

    ``verdict``: match (bit-identical) | within_noise | diverged | nondeterministic (only what gives something else each time). ``differences``: every row, unmatched ones too.
    ``first_divergence``: the first diverged row, or None. ``findings``: what is to blame, the worst first.
    ``limits``: where the limits come from, in words. ``problems``: what of the comparison itself went wrong.
    """

    def __init__(
        self, golden: Run, mine: Run, differences: Sequence[Difference], findings: Sequence[Finding],
        limits: str = "", problems: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.golden, self.mine = golden, mine
        self.limits, self.problems = limits, list(problems)
        self.differences = Differences(self, differences)
        self.findings = list(findings)
        self.first_divergence = first_divergence(differences)
        self._counts = Counter(d.verdict for d in differences)
        _reports.add(self)

    @property
    def verdict(self) -> str:
        if self.findings and all(finding.cause == causes.NONDETERMINISTIC for finding in self.findings):
            return "nondeterministic"
        if self.findings:  # also where noise hides what another eps does
            return "diverged"
        return next((name for name in ("diverged", "within_noise") if self._counts[name]), "match")

    def summary(self) -> str:
        """Return three sentences: what differs first, whether it is made or received there, what to try next."""
        return sentences(labels(self.golden, self.mine), self.verdict, list(self.differences), self.findings)

    def view(self, tokenizer: Any = None) -> ReportView:
        """Return the view model that explorers, text and HTML show; with a tokenizer, of steps with their text."""
        return ReportView(
            self.golden, self.mine, list(self.differences), self.findings, self.verdict, self._lines(), self._notes(),
            self.summary(), tokenizer,
        )  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table of differences; see `Differences.to_pandas`."""
        return self.differences.to_pandas()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page. Raises StoreError."""
        return self.differences.to_html(path)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of differences as csv. Raises StoreError."""
        return self.differences.to_csv(path)

    def _lines(self) -> list[str]:
        counts = self._counts
        compared = sum(counts.values()) - counts["unmatched"]
        line = (
            f"{count_text(compared, 'pair')}: {counts['match']:,} identical, {counts['within_noise']:,} within noise, "
        )
        line += f"{counts['diverged']:,} diverged"
        if counts["unmatched"]:
            reasons = Counter(
                (d.reason or "").partition(": bytes")[0] for d in self.differences if d.verdict == "unmatched"
            )
            named = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(2))
            line += f"; {count_text(counts['unmatched'], 'row')} without a partner ({named})"
        first = self.first_divergence
        if first is not None:
            return [line, f"First to diverge: {first.site}, {_error_text(first)}"]
        if self.verdict == "within_noise":
            worst = max((d for d in self.differences if d.error), key=lambda d: d.error or 0.0)
            return [line, f"Furthest apart: {worst.site}, {_error_text(worst)} (limit {worst.limit:.2g})"]
        return [line]

    def _notes(self) -> list[str]:
        """Return what a reader should know of the verdict's limits."""
        notes = [
            f"{run.label} is incomplete: {run.info()['ended_by'] or 'its recording ended early'}"
            for run in (self.golden, self.mine)
            if not run.source.complete
        ]
        alone = self._counts["unmatched"]
        if alone:
            notes.insert(
                0, f"{alone:,} of {len(self.differences):,} rows could not be compared; the verdict is on the others"
            )
        notes += self.problems
        if self.verdict != "match" and self.limits:
            notes.append(self.limits)
        return notes

    def __str__(self) -> str:
        return self.view().text()

    def __repr__(self) -> str:
        golden, mine = labels(self.golden, self.mine)
        return f"<Report: {golden} against {mine}, {self.verdict}, {count_text(len(self.findings), 'finding')}>"
