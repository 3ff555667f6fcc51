"""The result of a comparison: where measuring, blame and showing meet."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from llmdebug_nb.core.errors import CorruptDumpError, OptionError, StoreError, nearest
from llmdebug_nb.core.findings import EXPECTED, Difference, Expectation, Finding, covering
from llmdebug_nb.core.tabular import Tabular
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import first_divergence
from llmdebug_nb.explain.summary import sentences
from llmdebug_nb.show import html
from llmdebug_nb.show.report_view import ReportView
from llmdebug_nb.show.tokens import Tokenizer
from llmdebug_nb.show.words import count_text, expected_text, labels
from llmdebug_nb.store import expected as marks

if TYPE_CHECKING:
    import pandas

    from llmdebug_nb.comparison.tolerance import Judging
    from llmdebug_nb.store.run import Run

_MARKS = 8  # of a line
_NOT_BLAMED = "nothing is to blame for it but what is expected"
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
        return f"{len(self)} differences: " + ", ".join(
            f"{count:,} {name}" for name, count in counts.most_common()
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row a difference: site, both sides' dtype, shape and statistics, metrics, verdict and reason."""
        import pandas

        frame = pandas.DataFrame(
            [_flat(d) for d in self._rows], columns=None if self._rows else list(_SITE)
        )
        return frame.rename_axis("index")

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_pandas` as csv. Raises StoreError."""
        return write_text(path, self.to_pandas().to_csv())

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page. Raises StoreError."""
        return write_text(path, html.page(self._report.view()))


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
        | {
            "verdict": d.verdict,
            "error": d.error,
            "limit": d.limit,
            "why": d.pair.why,
            "reason": d.reason,
        }
        | {"expected": expected_text(d) or None, "fit": d.pair.fit.says if d.pair.fit else None}
    )


class Report(Tabular):
    """What comparing two runs gave.

    ``verdict``: match (bit-identical) | within_noise | expected (nothing differs but what was marked so) | diverged | nondeterministic (only
    what gives something else each time). ``differences``: every row, unmatched ones too.
    ``first_divergence``: the first diverged row, or None. ``findings``: what is to blame, the worst first; those that are expected come last.
    ``limits``: where the limits come from, in words. ``problems``: what of the comparison itself went wrong.
    ``expected``: what was marked as expected, see `expect`.
    """

    def __init__(
        self, golden: Run, mine: Run, judging: Judging, blame: Callable[[Sequence[Difference]], list[Finding]],
        limits: str = "", problems: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.golden, self.mine = golden, mine
        self.limits, self.problems = limits, list(problems)
        self._judging, self._blame = judging, blame
        self._views: weakref.WeakSet[ReportView] = weakref.WeakSet()
        try:
            self.expected = marks.read(golden, mine)
        except CorruptDumpError as error:
            self.expected = []
            self.problems.append(str(error))
        self._judge()
        judging.comparison.report = self

    def _judge(self) -> None:
        """Judge all rows, and look for what is to blame, with what is expected now."""
        rows = self._judging.differences(self.expected)
        self.findings = self._found(rows)
        if (
            self.expected
            and self._plain_findings
            and all(finding.expected for finding in self.findings)
        ):
            rows = [
                replace(d, verdict=EXPECTED, reason=_NOT_BLAMED) if d.verdict == "diverged" else d
                for d in rows
            ]
        self.differences = Differences(self, rows)
        self.first_divergence = first_divergence(self.differences)
        self._counts = Counter(d.verdict for d in self.differences)

    def _found(self, rows: list[Difference]) -> list[Finding]:
        """Return what is to blame, then what would be if it were not expected."""
        known = [
            replace(f, expected=mark)
            for f in self._plain_findings
            if (mark := covering(self.expected, f))
        ]
        if not self.expected:
            return self._plain_findings
        found = self._blame(rows)
        return [f for f in found if covering(self.expected, f) is None] + known

    @functools.cached_property
    def _plain_findings(self) -> list[Finding]:
        return self._blame(self._judging.plain)

    @property
    def verdict(self) -> str:
        unexpected = [finding for finding in self.findings if finding.expected is None]
        if unexpected and all(finding.cause == causes.NONDETERMINISTIC for finding in unexpected):
            return "nondeterministic"
        if unexpected or self._counts["diverged"]:  # also where noise hides what another eps does
            return "diverged"
        if self._counts[EXPECTED] or self.findings:
            return EXPECTED
        return "within_noise" if self._counts["within_noise"] else "match"

    # -- what is expected ---------------------------------------------------------------------

    @property
    def kept_in(self) -> str:
        """The file that `expected` is kept in; "" where mine is in no folder, and this report alone knows."""
        return str(marks.file_of(self.mine) or "")

    def expect(
        self, what: str | Difference | Finding, comment: str = "", *, role: str | None = None, slot: str | None = None,
        phase: str | None = None, step: int | None = None,
    ) -> Expectation:  # fmt: skip
        """Mark a deviation as expected, say why, and judge everything anew.

        ``what``: a glob over module paths, which means all that such modules make (``role``: input | output | weight | grad, ``slot``, ``phase``:
        forward | backward and ``step`` narrow that); or a row of `differences`; or one of `findings`. It is kept beside the run of mine, and counts from now on
        in every comparison of runs of these two names. What follows from it counts as expected too, as far as its size explains that.

        Raises:
            OptionError: no tensor of the comparison is like that, or a field makes no sense.
            StoreError: it can't be kept; then it is not expected either.
        """
        mark = self._mark(
            what, str(comment), {"role": role, "slot": slot, "phase": phase, "step": step}
        )
        self._keep([*(one for one in self._kept() if not one.means(mark)), mark])
        return mark

    def unexpect(self, what: str | Difference | Finding | Expectation) -> list[Expectation]:
        """Take marks back, judge everything anew, and return them: those with this glob, or those that cover this row or finding.

        Raises:
            OptionError: nothing of the kind is expected.
            StoreError: that can't be kept.
        """
        kept = self._kept()
        if isinstance(what, (str, Expectation)):
            gone = [one for one in kept if what in (one, one.path)]
        else:
            gone = [one for one in kept if one == what.expected]
        if not gone:
            there = ", ".join(map(str, kept[:6])) or "nothing"
            raise OptionError(f"{what!s:.200} is not marked as expected; what is: {there}")
        self._keep([one for one in kept if one not in gone])
        return gone

    def _mark(
        self, what: str | Difference | Finding, comment: str, narrowed: dict[str, Any]
    ) -> Expectation:
        if isinstance(what, Difference):
            mark = Expectation.of_row(what, comment)
        elif isinstance(what, Finding):
            mark = Expectation.of_finding(what, comment)
        elif isinstance(what, str):
            mark = Expectation(what, comment, **narrowed)
        else:
            raise OptionError(
                f"expect {what!r:.60}: expected a glob over module paths, a row or a finding"
            )
        marks.checked(mark)
        if not any(covering([mark], d) for d in self.differences):
            paths = {d.site.path for d in self.differences}
            raise OptionError(
                f"expect {mark}: the comparison has no such tensor{nearest(mark.path, sorted(paths))}"
            )
        return mark

    def _kept(self) -> list[Expectation]:
        """Return what is expected, with what other reports of these runs have marked meanwhile."""
        return (
            self.expected
            if marks.file_of(self.mine) is None
            else marks.read(self.golden, self.mine)
        )

    def _keep(self, expected: list[Expectation]) -> None:
        marks.write(self.golden, self.mine, expected)
        self.expected = expected
        self._judge()
        for view in list(self._views):
            view.refresh()

    # -- in words -----------------------------------------------------------------------------

    def summary(self) -> str:
        """Return three sentences: what differs first, whether it is made or received there, what to try next."""
        return sentences(
            labels(self.golden, self.mine), self.verdict, list(self.differences), self.findings
        )

    def view(self, tokenizer: Tokenizer | None = None) -> ReportView:
        """Return the view model that explorers, text and HTML show; it follows what is marked as expected.

        With a tokenizer, its steps have their text.
        """
        view = ReportView(self, tokenizer)
        self._views.add(view)
        return view

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table of differences; see `Differences.to_pandas`."""
        return self.differences.to_pandas()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page. Raises StoreError."""
        return self.differences.to_html(path)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of differences as csv. Raises StoreError."""
        return self.differences.to_csv(path)

    def lines(self) -> list[str]:
        counts = self._counts
        compared = sum(counts.values()) - counts["unmatched"]
        line = f"{count_text(compared, 'pair')}: {counts['match']:,} identical, {counts['within_noise']:,} within noise, "
        line += f"{counts['diverged']:,} diverged"
        if counts[EXPECTED]:
            line += f", {counts[EXPECTED]:,} as expected"
        if counts["unmatched"]:
            reasons = Counter(
                (d.reason or "").partition(": bytes")[0]
                for d in self.differences
                if d.verdict == "unmatched"
            )
            named = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(2))
            line += f"; {count_text(counts['unmatched'], 'row')} without a partner ({named})"
        lines = [line]
        first = self.first_divergence
        if first is not None:
            lines.append(f"First to diverge: {first.site}, {_error_text(first)}")
        if self.verdict == "within_noise":
            worst = max((d for d in self.differences if d.error), key=lambda d: d.error or 0.0)
            lines.append(
                f"Furthest apart: {worst.site}, {_error_text(worst)} (limit {worst.limit:.2g})"
            )
        return lines + self._expected_lines()

    def _expected_lines(self) -> list[str]:
        """Return what is expected, with how many rows each mark covers."""
        rows = Counter(d.expected for d in self.differences if d.verdict == EXPECTED)
        found = Counter(f.expected for f in self.findings if f.expected)
        seen = [mark for mark in self.expected if rows[mark] or found[mark]]
        if not seen:
            return []
        told = [
            f"{mark}{f' ({mark.comment})' if mark.comment else ''}: {count_text(rows[mark], 'row')}"
            for mark in seen
        ]
        more = (
            f"; {count_text(rows[None], 'row')} more follow{'s' if rows[None] == 1 else ''} from that"
            if rows[None]
            else ""
        )
        rest = f"; and {len(told) - _MARKS} more marks" if len(told) > _MARKS else ""
        return [f"Expected: {'; '.join(told[:_MARKS])}{rest}{more}"]

    def notes(self) -> list[str]:
        """Return what a reader should know of the verdict's limits."""
        notes = [
            f"{run.label} is incomplete: {run.info()['ended_by'] or 'its recording ended early'}"
            for run in (self.golden, self.mine)
            if not run.source.complete
        ]
        inside = sum(d.verdict == "unmatched" and not d.is_mismatch for d in self.differences)
        alone = self._counts["unmatched"] - inside
        if alone:
            notes.insert(
                0,
                f"{alone:,} of {len(self.differences):,} rows could not be compared; the verdict is on the others",
            )
        if inside:
            notes.insert(
                0,
                f"{count_text(inside, 'row')} of compiled or exported code {'has' if inside == 1 else 'have'} no partner by nature: inside a kernel or a node, read by one, or folded",
            )
        seen = {d.expected for d in self.differences} | {f.expected for f in self.findings}
        notes += [
            f"expected, but nothing like it differs now: {mark}"
            for mark in self.expected
            if mark not in seen
        ]
        notes += self.problems
        if self.verdict != "match" and self.limits:
            notes.append(self.limits)
        return notes

    def __str__(self) -> str:
        return self.view().text()

    def __repr__(self) -> str:
        golden, mine = labels(self.golden, self.mine)
        return f"<Report: {golden} against {mine}, {self.verdict}, {count_text(len(self.findings), 'finding')}>"
