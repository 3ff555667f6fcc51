"""The nouns of a comparison: a measured pair with its verdict, and how much of golden was found."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from glob import escape
from typing import Final, Literal

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import EXCUSED
from llmdebug_nb.comparison import differing_rows
from llmdebug_nb.comparison.differing_rows import Batch, DifferingRows
from llmdebug_nb.comparison.rows import RowErrors
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.quick import quick
from llmdebug_nb.core.records import Site
from llmdebug_nb.store.expectation import Expectation

RowVerdict = Literal["match", "within_noise", "expected", "diverged", "unmatched"]
# incomparable: too little of the two runs answers to each other for any other verdict
Verdict = Literal[RowVerdict, "nondeterministic", "incomparable"]
EXPECTED: Final = "expected"
MISMATCHES = ("diverged", "unmatched")  # verdicts that need attention


class Comparison:
    """The comparison that rows belong to: it knows its report while somebody holds the report.

    ``batch``: that of golden's step at a site, None if it is unknown.
    """

    def __init__(self, batch: Callable[[Site], Batch | None] = lambda site: None) -> None:
        self.batch = batch
        self._report: weakref.ref[object] | None = None

    @property
    def report(self) -> object | None:
        return None if self._report is None else self._report()

    @report.setter
    def report(self, report: object) -> None:
        self._report = weakref.ref(report)


@quick
@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """A measured pair. ``metrics``: values by the names of `comparison/metrics.py`.

    ``error``: the figure that was judged; ``limit``: the largest allowed one. ``rule``: what
    decided. ``remark``: how it was measured, or why not; None if there is nothing to say of it.
    ``expected``: the expectation that covers it; None for an expected row that only follows from
    another one. ``follows``: it is within its limit, but only because that of an earlier tensor
    which diverged is passed on. ``rows``: see `Measured`.
    """

    index: int
    pair: Pair
    verdict: RowVerdict
    error: float | None = None
    limit: float | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    remark: str | None = None
    expected: Expectation | None = None
    comparison: Comparison | None = field(default=None, compare=False)
    follows: bool = False
    rule: Rule = Rule.NOISE
    rows: RowErrors | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        figures = "" if self.error is None else f", error {self.error:.2g} (limit {self.limit:.2g})"
        why = f", {self.reason}" if self.reason else ""
        return printable(f"<{self.verdict}: {self.site}{figures}{why}>")

    @property
    def reason(self) -> str | None:
        """How it was measured or what decided, in words; None if the figures say it all."""
        return self.remark or self.rule.text or None

    @property
    def site(self) -> Site:
        return self.pair.either.site

    @property
    def op(self) -> str:
        return self.pair.either.op

    @property
    def content(self) -> object:
        """What its two tensors hold, the same wherever they are seen; unique if it is unknown."""
        return self.pair.content or self.index

    @property
    def contents(self) -> set[object]:
        """What its two tensors hold, here and where they are seen next."""
        return {self.content, self.pair.handed_on or self.index}

    @property
    def marked_sites(self) -> list[Site]:
        """The sites by which an expectation covers it: golden's and mine's."""
        sites = [record.site for record in (self.pair.golden, self.pair.mine) if record is not None]
        if len(sites) == 1:  # that a call is there at all counts as its output, not as its input
            sites.append(replace(sites[0], role="output"))
        return sites

    def mark(self, comment: str = "") -> Expectation:
        """Return an expectation of its tensor in all steps."""
        s = self.site
        return Expectation(escape(s.path), comment, s.role, s.slot, s.phase)

    @property
    def differs(self) -> bool:
        """True if noise does not explain its error; it may be as small as that of its inputs."""
        return self.verdict == "diverged" or self.follows

    @property
    def differing(self) -> DifferingRows | None:
        """Which tokens, or other rows, differ if it diverged; None if it has but one row."""
        if self.verdict != "diverged" or self.pair.golden is None or self.pair.mine is None:
            return None
        batch = None if self.comparison is None else self.comparison.batch(self.site)
        return differing_rows.of(self.pair, self.rule, self.limit, self.metrics, self.rows, batch)

    @property
    def is_mismatch(self) -> bool:
        """True if the row needs attention: it diverged, or lacks a partner that should exist."""
        excused = self.pair.reason in EXCUSED or self.rule is Rule.REJOINED
        return self.verdict in MISMATCHES and not excused


@dataclass(frozen=True, slots=True)
class Reach:
    """How much of what one run computed was compared.

    ``calls``: forward calls of outermost modules that were recorded, and that ran. ``tokens``:
    places of its recorded token ids, without padding, that have a partner in the other run, and
    all of them. (0, 0): not known.
    """

    calls: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of golden was found in mine.

    ``observables``: golden's tensors that leave the model: outputs, logits, loss and gradients
    (its *results*). ``values``: golden's distinct tensors that could be compared; of these
    ``values_matched`` are equal within noise in some layout, and ``rejoined`` are written
    otherwise in mine, equal in effect. ``golden``, ``mine``: what of each run was not compared.
    """

    observables: int = 0
    observables_matched: int = 0
    values: int = 0
    values_matched: int = 0
    rejoined: int = 0
    golden: Reach = Reach()
    mine: Reach = Reach()

    @property
    def share(self) -> float:
        """The share of golden's values that mine has, from 0 to 1; 1 if there is none."""
        return (self.values_matched + self.rejoined) / self.values if self.values else 1.0

    @property
    def caution(self) -> str:
        """What a good verdict must not hide, in a few words; "" if there is nothing."""
        if self.observables and not self.observables_matched:
            return f"but 0 of golden's {self._results} agree"
        least = [f"{_percent(self.values_matched / self.values)} of golden's values"] * (
            2 * self.values_matched < self.values  # more is unknown than known
        )
        some = [*least, *self._tokens, *self._calls]
        return f"but on only {' and '.join(some)}" if some else ""

    def __str__(self) -> str:
        parts = f" ({self.rejoined:,} written otherwise, equal in effect)" if self.rejoined else ""
        number = f"{self.values:,} value{'' if self.values == 1 else 's'}"
        values = f"{_percent(self.share)} of golden's {number}{parts}"
        results = f" and {self.observables_matched:,} of {self._results} agree."
        if not self.observables:
            results = " agree; no result of the model was compared."
        tokens = [f"{' and '.join(self._tokens)} were compared."] if self._tokens else []
        more = "; tokens= records more."
        calls = [f"Recorded: {' and '.join(self._calls)}{more}"] if self._calls else []
        return " ".join([f"{values}{results}", *tokens, *calls])

    @property
    def _results(self) -> str:
        return f"{self.observables:,} result{'' if self.observables == 1 else 's'}"

    @property
    def _tokens(self) -> list[str]:
        return _parts(self.golden.tokens, self.mine.tokens, "token")

    @property
    def _calls(self) -> list[str]:
        return _parts(self.golden.calls, self.mine.calls, "call")


def _parts(golden: tuple[int, int], mine: tuple[int, int], noun: str) -> list[str]:
    """Return ``36 of golden's 40 tokens`` for each side of which only a part is there."""
    sides = {"golden": golden, "mine": mine}
    if golden == mine:
        sides = {"both": golden}
    parts = []
    for name, (some, every) in sides.items():
        if some < every:
            whose = (
                f"the {every:,} {noun}s of both"
                if name == "both"
                else f"{name}'s {every:,} {noun}s"
            )
            parts.append(f"{some:,} of {whose}")
    return parts


def _percent(share: float) -> str:
    """Return a share, rounded down: 100 % is all."""
    return f"{math.floor(100 * share)} %"
