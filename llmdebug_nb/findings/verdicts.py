"""The verdicts on all rows, from what was measured, what a search found out, and the user's marks.

Rows are judged by their figures first, see `comparison.judging`. A search for causes tells facts of
them: which are written otherwise and equal in effect, which follow from another one, and which are
rounding. How much a call amplifies is estimated from others of its kind, so the limit of an
ill-conditioned one may be too low. Where a replay proves that all blamed calls only pass their
inputs on, and the error is no larger than another draw of rounding may be, nothing is wrong. Nor is
it where both programs' operators prove to be right, and their exact results agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from llmdebug_nb.align.program_results import Results
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import EXPECTED, Difference, RowVerdict
from llmdebug_nb.comparison.judging import Judging
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.findings.blame import Explanation
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.store.expectation import Expectation, covering

Search = Callable[[Sequence[Difference]], Explanation]


@dataclass(frozen=True)
class Verdicts:
    """All rows with their verdicts, and the findings, the expected ones last.

    ``problems``: errors of the search itself, in words.
    """

    rows: list[Difference]
    findings: list[Finding]
    problems: tuple[str, ...] = ()


class Judgement:
    """Judges rows by their figures and by the facts that a search finds, for any marks."""

    def __init__(self, judging: Judging, search: Search) -> None:
        self._judging, self._search = judging, search

    def verdicts(self, marks: Sequence[Expectation]) -> Verdicts:
        """Return the verdicts. What is blamed on a marked call is expected.

        Then the search goes on behind it.
        """
        plain, explanation = self.plain, self.plain.explanation
        if not marks:
            rows = plain.as_noise(plain.settled)
            return Verdicts(rows, explanation.findings, explanation.problems)
        expected: dict[tuple[str, str], Finding] = {}
        excused = set(plain.noise)
        known = -1
        while known < len(excused):
            known = len(excused)
            for finding, mark, made in self._marked(explanation, marks):
                if mark is not None:
                    expected.setdefault((finding.path, finding.op), replace(finding, expected=mark))
                    excused |= made
            rows = self._judging.differences(marks, excused)
            explanation = self._search(rows)
        rows = plain.as_noise(settled(settled(rows, plain.explanation), explanation))
        found = [finding for finding, mark, _ in self._marked(explanation, marks) if mark is None]
        return Verdicts(rows, [*found, *expected.values()], explanation.problems)

    @functools.cached_property
    def plain(self) -> Plain:
        """What is found without any mark."""
        return plain(self._judging, self._search)

    def _marked(
        self, explanation: Explanation, marks: Sequence[Expectation]
    ) -> Iterator[tuple[Finding, Expectation | None, frozenset[int]]]:
        """Yield the findings with the mark that covers each, and the rows that it makes."""
        for finding, made in zip(explanation.findings, explanation.rows, strict=True):
            large = any(map(self._judging.is_large, made))
            yield finding, covering(marks, finding.marked_sites, large), made


@dataclass(frozen=True)
class Plain:
    """What is found without any mark.

    ``explanation``: of ``rows``, whose verdicts know what is magnified noise. ``noise``: the
    indices of the rows that calls magnify.
    """

    rows: list[Difference]
    explanation: Explanation
    noise: frozenset[int] = frozenset()

    @property
    def settled(self) -> list[Difference]:
        """All rows, with what the search found out."""
        return settled(self.rows, self.explanation)

    def as_noise(self, rows: list[Difference]) -> list[Difference]:
        """Return rows in which those are within noise that follow from what is magnified."""
        if not self.noise:
            return rows
        follows = {row.index for row in self.settled if row.verdict == EXPECTED}
        return [_within(row) if row.index in follows else row for row in rows]


def _within(row: Difference) -> Difference:
    if row.verdict != EXPECTED or row.expected is not None:
        return row
    return _ruled(row, "within_noise", Rule.MAGNIFIED)


def _ruled(row: Difference, verdict: RowVerdict, rule: Rule) -> Difference:
    return replace(row, verdict=verdict, rule=rule, remark=None)


def plain(judging: Judging, search: Search) -> Plain:
    """Judge all rows, and search for the causes, until nothing more proves to be noise."""
    now = Plain(judging.plain, search(judging.plain))
    if _asks_for_padding(now):
        judging.count_padding()
        now = Plain(judging.plain, search(judging.plain))
    while now.explanation.findings:
        by_index = {row.index: row for row in now.rows}
        made = [by_index[index] for each in now.explanation.rows for index in each]
        noise = now.noise | now.explanation.rounding
        if _may_be_noise(now.explanation, made):
            noise = noise.union(row.index for row in made)
        if noise == now.noise:
            break  # something else is to blame
        rows = judging.differences((), noise)
        now = Plain(rows, search(rows), noise)
    return now


def _asks_for_padding(now: Plain) -> bool:
    """Tell whether padding counts: what is blamed first is right at tokens, or follows from it.

    Or a result is made of all places.
    """
    if any(row.rule is Rule.MIXED for row in now.rows):
        results = Results(row.pair.golden for row in now.rows)
        if any(row.rule is Rule.MIXED and row.pair.golden in results for row in now.rows):
            return True
    if not now.explanation.findings or not any(row.rule is Rule.NO_TOKEN for row in now.rows):
        return False
    first = now.explanation.findings[0]
    return first.cause == causes.INHERITED or _is_right_at_tokens(first.difference)


def _is_right_at_tokens(row: Difference | None) -> bool:
    return row is not None and row.rule is Rule.NO_TOKEN and row.site.role == "output"


def _may_be_noise(explanation: Explanation, made: Sequence[Difference]) -> bool:
    """Tell whether all findings are calls that magnify, and by how much is in question."""
    inherited = all(each.cause == causes.INHERITED for each in explanation.findings)
    return inherited and all(
        (row.error or 0.0) <= constants.CALIBRATED * (row.limit or 0.0)
        and row.rule is not Rule.PRODUCT_OFF  # its factors are known: they magnify nothing
        for row in made
    )


def settled(rows: list[Difference], explanation: Explanation) -> list[Difference]:
    """Return the rows with what the search for causes found out about differences."""

    def known(d: Difference) -> Difference:
        if d.verdict != EXPECTED and d.index in explanation.rejoins:
            return _ruled(d, "unmatched", Rule.REJOINED)
        if d.verdict == "diverged" and d.index in explanation.passed_on:
            return _ruled(d, EXPECTED, Rule.REPLAYED)
        if d.verdict == "diverged" and d.index in explanation.behind_ties:
            return _ruled(d, "unmatched", Rule.AFTER_TIE)
        return d

    found = explanation.rejoins, explanation.passed_on, explanation.behind_ties
    return [known(d) for d in rows] if any(found) else rows
