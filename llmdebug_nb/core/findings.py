"""The nouns of a comparison.

A **Pair** of records is measured into a **Difference**; a **Finding** is a call that is to blame,
with a **Source** in each program. **Coverage** says how much of golden was found in mine.
A deviation that the user knows and wants is an **Expectation**.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import escape, has_magic
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

from llmdebug_nb.core.errors import ProofError, StoreError
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.paths import matches
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.quick import quick
from llmdebug_nb.core.reasons import EXCUSED, Reason
from llmdebug_nb.core.records import Frame, Kernel, Record, Site
from llmdebug_nb.core.rules import Rule
from llmdebug_nb.core.urls import on_this_machine

if TYPE_CHECKING:
    import torch

RowVerdict = Literal["match", "within_noise", "expected", "diverged", "unmatched"]
# incomparable: too little of the two runs answers to each other for any other verdict
Verdict = Literal[RowVerdict, "nondeterministic", "incomparable"]
# equal: within noise. rewritten: computed otherwise, equal in effect. guilty: its inputs agree and
# its result does not. inherited: it follows from a guilty line.
LineState = Literal["equal", "rewritten", "guilty", "inherited"]

EXPECTED: Final = "expected"
MISMATCHES = ("diverged", "unmatched")  # verdicts that need attention

_ESCAPED = re.compile(r"\[[*?[]\]")  # what glob.escape makes of a wildcard


class Fit(Protocol):
    """Brings two tensors to one shape.

    ``says``: how, in words. ``key``: equal for fits that do the same. ``whole``: whether every
    element of both takes part; else ``places`` are the flat indices, int64[n], of those of golden
    (0) or mine (1) that do, None for all that both runs have. ``grain``: of a quantised weight,
    makes the distance of the values that each element can have. ``shared``: what takes no part are
    rows and tokens that the other run was not given.
    """

    @property
    def says(self) -> str: ...
    @property
    def key(self) -> Hashable: ...
    @property
    def whole(self) -> bool: ...
    @property
    def grain(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None: ...
    @property
    def shared(self) -> bool: ...
    @property
    def integers(self) -> int | None: ...
    def places(self, side: int, shape: Sequence[int]) -> torch.Tensor | None: ...
    def __call__(
        self, golden: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@quick
@dataclass(frozen=True, slots=True)
class Pair:
    """Two records and why they were matched, or one record and why it has no partner.

    ``why``: that in words. ``reason``: that as one of a closed set, None if nobody asked. ``fit``:
    brings tensors of different layouts to one shape; see `align/fit.py`. ``elsewhere``: the side
    whose tensor has no partner at its own place: the other side's tensor holds the same values at
    another place. With "both", neither has. ``alone``: why that side's tensor has none.
    ``other_batch``: the runs were given other rows or tokens, and no layout tells which these are.
    """

    golden: Record | None
    mine: Record | None
    why: str
    fit: Fit | None = None
    elsewhere: Literal["", "golden", "mine", "both"] = ""
    alone: Reason | None = None
    other_batch: bool = False
    reason: Reason | None = None

    @property
    def either(self) -> Record:
        record = self.golden or self.mine
        assert record is not None
        return record

    @property
    def at_its_place(self) -> bool:
        """False if the tensors stand at two places: one program has the value somewhere else."""
        return not self.elsewhere

    @property
    def content(self) -> object:
        """What both tensors hold, the same wherever they are seen; None if it is unknown.

        Two pairs of constants are one only if they are the same outputs, or if code that was not
        seen gave both to calls.
        """
        return self._content(_origin)

    @property
    def handed_on(self) -> object:
        """The content of the pair in which these outputs are seen next."""
        return self._content(attrgetter("id"))

    def _content(self, origin: Callable[[Record], int | None]) -> object:
        golden, mine, site = self.golden, self.mine, self.either.site
        if golden is None or mine is None:
            return None
        prints = golden.summary.fingerprint, mine.summary.fingerprint
        if None in prints:
            return None
        tells = identifies_itself(golden.summary) or identifies_itself(mine.summary)
        origins = () if tells else (origin(golden), origin(mine))
        return site.generation, site.step, site.rank, *prints, *origins

    def own(self, side: int) -> Record | None:
        """Return a side's record if this is its own row, and not only where it is seen again.

        ``side``: 0 for golden, 1 for mine.
        """
        record, other = (self.mine, "golden") if side else (self.golden, "mine")
        return None if self.elsewhere == other else record


def _origin(record: Record) -> int | None:
    """Return the output that a tensor is; its own id if it is made there; None if it is unknown.

    A backward pass is given gradients of outputs, and makes those of inputs.
    """
    given = "output" if record.site.phase == "backward" else "input"
    return record.id if record.producer is None and record.site.role != given else record.producer


@dataclass(frozen=True, slots=True)
class Expectation:
    """A deviation that the user knows and wants; ``comment`` says why.

    ``path``: a glob over module and operator paths. Alone it covers the outputs of such a module
    and everything inside it, but not its inputs. With ``role`` and ``slot`` it covers one tensor of
    such a module. ``phase`` and ``step`` restrict both; None means any. A pattern (a path with
    wildcards, and no slot) covers only differences that are small against the tensor.
    """

    path: str
    comment: str = ""
    role: str | None = None
    slot: str | None = None
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        tensor = f" {self.role or '*'}[{self.slot or '*'}]" if self.role or self.slot else ""
        phase = f" {self.phase}" if self.phase else ""
        step = "" if self.step is None else f" step {self.step}"
        return printable(f"{self.path or '(root)'}{phase}{tensor}{step}")

    @classmethod
    def of_row(cls, row: Difference, comment: str = "") -> Expectation:
        """Return an expectation of a row's tensor in all steps."""
        s = row.site
        return cls(escape(s.path), comment, s.role, s.slot, s.phase)

    @classmethod
    def of_finding(cls, finding: Finding, comment: str = "") -> Expectation:
        """Return an expectation of the blamed call, or of its input if that already diverged."""
        mark, row = cls(escape(finding.path), comment), finding.difference
        if row is None:
            return mark
        is_input = row.verdict == "diverged" and not mark.covers(row.site)
        return cls.of_row(row, comment) if is_input or not finding.path else mark

    def covers(self, site: Site) -> bool:
        """Return whether the expectation covers a tensor."""
        if self.step not in (None, site.step) or self.phase not in (None, site.phase):
            return False
        at_it, inside = matches(self.path, site.path)
        if self.role is None and self.slot is None:
            return inside or (at_it and site.role != "input")
        return at_it and self.role in (None, site.role) and self.slot in (None, site.slot)

    @property
    def is_pattern(self) -> bool:
        """True if it names no tensor or module, but what they have in common."""
        return self.slot is None and has_magic(_ESCAPED.sub("", self.path))

    def means(self, other: Expectation) -> bool:
        """Return whether both cover the same tensors; comments may differ."""
        return replace(self, comment="") == replace(other, comment="")


class Comparison:
    """The comparison that rows belong to: it knows its report while somebody holds the report."""

    def __init__(self) -> None:
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
    decided. ``reason``: that in words, or how it was measured; None if the figures say it all.
    ``expected``: the expectation that covers it; None for an expected row that only follows from
    another one. ``follows``: it is within its limit, but only because that of an earlier tensor
    which diverged is passed on.
    """

    index: int
    pair: Pair
    verdict: RowVerdict
    error: float | None = None
    limit: float | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    reason: str | None = None
    expected: Expectation | None = None
    comparison: Comparison | None = field(default=None, compare=False)
    follows: bool = False
    rule: Rule = Rule.NOISE

    def __repr__(self) -> str:
        figures = "" if self.error is None else f", error {self.error:.2g} (limit {self.limit:.2g})"
        why = f", {self.reason}" if self.reason else ""
        return printable(f"<{self.verdict}: {self.site}{figures}{why}>")

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
    def differs(self) -> bool:
        """True if noise does not explain its error; it may be as small as that of its inputs."""
        return self.verdict == "diverged" or self.follows

    @property
    def is_mismatch(self) -> bool:
        """True if the row needs attention: it diverged, or lacks a partner that should exist."""
        excused = self.pair.reason in EXCUSED or self.rule is Rule.REJOINED
        return self.verdict in MISMATCHES and not excused


@dataclass(frozen=True, slots=True)
class Source:
    """A call in one of the two programs, and the line that makes it.

    ``path``, ``op``: as in its run. ``file``, ``line``: the line that calls the operator, or where
    the module's forward begins; None if unknown. ``code``: the text of that line, "" if unknown.
    ``frames``: the call stack, innermost first, up to the module's forward. ``lacks``: the program
    does not make the call there; then the line is the last one before the place where it would
    stand, and ``op`` is "".
    """

    path: str
    op: str
    file: str | None = None
    line: int | None = None
    code: str = ""
    frames: tuple[Frame, ...] = ()
    lacks: bool = False

    def __str__(self) -> str:
        """Return ``file:line function``, or the path if the line is unknown."""
        if self.file is None:
            return printable(self.path) or "(root)"
        function = f" {self.frames[0].function}" if self.frames else ""
        return printable(f"{self.file}:{self.line}{function}")


@dataclass(frozen=True, slots=True)
class LinePair:
    """A line of golden and the line of mine that answers to it; None on one side: it has none.

    ``error``: the relative L2 error between their results; None if nothing could be measured.
    """

    golden: Source | None
    mine: Source | None
    error: float | None
    state: LineState


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of golden was found in mine.

    ``observables``: golden's tensors that leave the model: outputs, logits, loss and gradients
    (its *results*). ``values``: golden's distinct tensors that could be compared; of these
    ``values_matched`` are equal within noise in some layout, and ``rejoined`` are written
    otherwise in mine, equal in effect.
    """

    observables: int = 0
    observables_matched: int = 0
    values: int = 0
    values_matched: int = 0
    rejoined: int = 0

    @property
    def share(self) -> float:
        """The share of golden's values that mine has, from 0 to 1; 1 if there is none."""
        return (self.values_matched + self.rejoined) / self.values if self.values else 1.0

    @property
    def caution(self) -> str:
        """What a good verdict must not hide, in a few words; "" if there is nothing."""
        if self.observables and not self.observables_matched:
            return f"but 0 of golden's {self._results} agree"
        if 2 * self.values_matched < self.values:  # more is unknown than known
            return f"but on only {_percent(self.values_matched / self.values)} of golden's values"
        return ""

    def __str__(self) -> str:
        parts = f" ({self.rejoined:,} written otherwise, equal in effect)" if self.rejoined else ""
        number = f"{self.values:,} value{'' if self.values == 1 else 's'}"
        values = f"{_percent(self.share)} of golden's {number}{parts}"
        if not self.observables:
            return f"{values} agree; no result of the model was compared."
        return f"{values} and {self.observables_matched:,} of {self._results} agree."

    @property
    def _results(self) -> str:
        return f"{self.observables:,} result{'' if self.observables == 1 else 's'}"


def _percent(share: float) -> str:
    """Return a share, rounded down: 100 % is all."""
    return f"{math.floor(100 * share)} %"


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of a step of mine in which golden's value stood in for that of a finding.

    ``agrees``: the model's results now agree with golden. ``rows_mended``: of the rows that
    diverged in that step and follow from the finding or not, those that agree now; ``rows_left``:
    those that still do not. ``says``: a sentence on that. ``next``: what is blamed now, the bug
    behind this one; None if nothing is. ``report``: golden against the mended step, a
    `app.report.Report`.
    """

    agrees: bool
    rows_mended: int
    rows_left: int
    says: str
    next: Finding | None = None
    report: object | None = field(default=None, repr=False, compare=False)


class Proving(Protocol):
    """A report that can prove its findings; see `app.report.Report`."""

    def prove(self, finding: Finding, model: torch.nn.Module | None = None) -> Proof: ...


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """A call that is to blame. ``op``: golden's class of the module, or the operator.

    ``cause``: one of `causes/causes.py`. ``evidence``: the reasons, with figures. ``difference``:
    the row that shows it. ``repro``: a Python script that replays the call from the two dumps.
    ``kernel``: for compiled code the kernel that computes the call in mine, or in golden if mine is
    not fused. ``expected``: the expectation that covers it, or None. ``golden``, ``mine``: the call
    in each program; where one lacks it, the place where it would stand, None if that is unknown.
    ``pairs``: the lines of both programs around it, as they answer to each other. ``relation``: a
    clause on what mine's value is, of golden's.
    ``advice``: a clause on what to do; "" stands for the advice that the cause suggests.
    ``proof``: the result of `prove`, in the findings of a report; None if it was not proven.
    ``rule``: the name of the rule that decided the cause, see `causes/judge.py`.
    """

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    difference: Difference | None = None
    repro: str | None = None
    kernel: Kernel | None = None
    expected: Expectation | None = None
    golden: Source | None = None
    mine: Source | None = None
    pairs: tuple[LinePair, ...] = ()
    relation: str = ""
    advice: str = ""
    proof: Proof | None = None
    rule: str = ""

    def prove(self, model: torch.nn.Module | None = None) -> Proof:
        """Put golden's value in place of mine's in the live model, run the step on, and compare.

        ``model``: the model of mine; default: the recorded one, if this process recorded it and
        it still exists. It is left unchanged.

        Raises:
            ProofError: the step can't be run again; the message says why.
        """
        row = self.difference
        report = row.comparison.report if row is not None and row.comparison is not None else None
        if report is None:
            raise ProofError("the report of this finding is gone: keep it, or compare again")
        return cast("Proving", report).prove(self, model)

    @property
    def source(self) -> str | None:
        """The line to look at: mine's, else golden's; ``file:line function``, None if unknown."""
        sides = (self.mine, self.golden)
        return next((str(side) for side in sides if side is not None and side.file), None)

    def script(self) -> str:
        """Return ``repro``. Raises StoreError if the call can't be replayed."""
        if self.repro is None:
            raise StoreError(
                f"{self.path or 'the root'} can't be replayed: "
                "its tensors were not recorded in both runs, or its weights had changed"
            )
        return self.repro

    def save_repro(self, path: str | os.PathLike[str]) -> Path:
        """Write ``repro`` to a file and return its path.

        Raises:
            StoreError: the call can't be replayed, or the file can't be written.
        """
        script, where = self.script(), on_this_machine(path)
        try:
            where.write_text(script, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"can't write {where}: {error.strerror or error}") from None
        return where

    def __repr__(self) -> str:
        place = f"{self.path or '(root)'} ({self.op}), step {self.step}"
        return printable(f"<{self.cause}: {place}; {self.evidence}>")


def covering(
    expected: Iterable[Expectation], what: Difference | Finding, large: bool = False
) -> Expectation | None:
    """Return the first expectation that covers a row, in golden or in mine, or a blamed call.

    ``large``: its difference is not small against the tensor, so that no pattern covers it.
    """
    if isinstance(what, Finding):
        site = what.difference.site if what.difference else Site(what.path, what.step)
        of_calls = [side.path for side in (what.golden, what.mine) if side is not None]
        sites = [replace(site, path=at, role="output", slot="0") for at in (what.path, *of_calls)]
        sites.append(site)
    else:
        sites = [record.site for record in (what.pair.golden, what.pair.mine) if record is not None]
        if len(sites) == 1:  # that a call is there at all counts as its output, not as its input
            sites.append(replace(sites[0], role="output"))
    marks = (m for m in expected if any(map(m.covers, sites)) and not (large and m.is_pattern))
    return next(marks, None)
