"""What calls only magnify is noise, if a replay proves it and its size is in question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.findings.blame import Explanation
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.verdicts import plain, settled

LIMIT = 0.01


class Judging:
    """Three calls in a row; ``errors``: theirs. What comes behind known noise may be twice it."""

    def __init__(self, *errors):
        self.errors = errors
        self.plain = [self._row(i, error, LIMIT) for i, error in enumerate(errors)]

    def _row(self, index, error, limit):
        record = Record(index, Site(f"call{index}"), index, "Op", Summary("float32", (4,)))
        verdict = "diverged" if error > limit else "within_noise"
        return Difference(index, Pair(record, record, ""), verdict, error, limit)

    def differences(self, expected, noise):
        rows, reach = [], LIMIT
        for row in self.plain:
            judged = self._row(row.index, row.error, reach)
            if row.index in noise:
                judged, reach = replace(judged, verdict=EXPECTED), max(reach, 2 * row.error)
            elif row.verdict == "diverged" and judged.verdict == "within_noise":
                judged = replace(judged, verdict=EXPECTED)
            rows.append(judged)
        return rows


def blaming(*kinds):
    """Return what blames the first row that differs; ``kinds``: the causes of the rows."""
    asked = []

    def blame(rows):
        asked.append(rows)
        for row, cause in zip(rows, kinds, strict=True):
            if row.verdict == "diverged":
                finding = Finding(row.site.path, "Op", 0, cause, "", row)
                return Explanation([finding], [frozenset((row.index,))])
        return Explanation([])

    blame.asked = asked
    return blame


def test_a_call_that_only_magnifies_is_within_noise_and_so_is_what_follows():
    found = plain(Judging(0.001, 0.02, 0.03), blaming("", causes.INHERITED, causes.INTRODUCED))
    rows = found.as_noise(found.settled)
    assert found.explanation.findings == []
    assert [row.verdict for row in rows] == ["within_noise"] * 3
    assert [row.reason is not None for row in rows] == [False, True, True]


def test_an_error_behind_magnified_noise_is_blamed():
    found = plain(Judging(0.001, 0.02, 0.5), blaming("", causes.INHERITED, causes.INTRODUCED))
    assert [each.path for each in found.explanation.findings] == ["call2"]
    rows = found.as_noise(found.settled)
    assert [row.verdict for row in rows] == ["within_noise", "within_noise", "diverged"]


@pytest.mark.parametrize("cause", [causes.INTRODUCED, causes.CARRIED_OVER, causes.SCALAR])
def test_another_cause_is_no_noise_however_small_the_error(cause):
    blame = blaming("", cause, cause)
    found = plain(Judging(0.0, 1.01 * LIMIT, 0.0), blame)
    assert [each.cause for each in found.explanation.findings] == [cause]
    assert found.as_noise(found.settled)[1].verdict == "diverged"
    assert len(blame.asked) == 1


def test_an_error_that_no_draw_of_rounding_makes_is_no_noise():
    most = constants.CALIBRATED * LIMIT
    for error, verdict in ((0.99 * most, "within_noise"), (1.01 * most, "diverged")):
        found = plain(Judging(0.0, error, 0.0), blaming("", causes.INHERITED, ""))
        assert found.as_noise(found.settled)[1].verdict == verdict


def test_a_row_that_the_user_expects_stays_expected():
    found = plain(Judging(0.001, 0.02, 0.03), blaming("", causes.INHERITED, causes.INTRODUCED))
    mark = object()
    rows = [replace(row, verdict=EXPECTED, expected=mark) for row in found.rows]
    assert [row.verdict for row in found.as_noise(rows)] == [EXPECTED] * 3


def test_without_differences_nothing_is_searched_again():
    blame = blaming("", "", "")
    found = plain(Judging(0.0, 0.001, 0.0), blame)
    assert found.rows is found.as_noise(settled(found.rows, found.explanation))
    assert len(blame.asked) == 1
