"""A finding: a call that is to blame, with its line in each program, and what proves it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import ProofError, StoreError, saving
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import Kernel, Site
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.source.lines import LinePair, Source
from llmdebug_nb.store.expectation import Expectation

if TYPE_CHECKING:
    import torch


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
    def marked_sites(self) -> list[Site]:
        """The sites by which an expectation covers it: those of the blamed calls, and its row."""
        site = self.difference.site if self.difference else Site(self.path, self.step)
        of_calls = [side.path for side in (self.golden, self.mine) if side is not None]
        sites = [replace(site, path=at, role="output", slot="0") for at in (self.path, *of_calls)]
        return [*sites, site]

    def mark(self, comment: str = "") -> Expectation:
        """Return an expectation of the blamed call, or of its input if that already diverged."""
        mark, row = Expectation(escape(self.path), comment), self.difference
        if row is None:
            return mark
        is_input = row.verdict == "diverged" and not mark.covers(row.site)
        return row.mark(comment) if is_input or not self.path else mark

    @property
    def source(self) -> str | None:
        """The line to look at: mine's, else golden's; ``file:line function``, None if unknown."""
        sides = (self.mine, self.golden)
        return next((str(side) for side in sides if side is not None and side.file), None)

    @property
    def which(self) -> str:
        """A clause on which tokens, or other rows, of its row differ; "" if it has not several."""
        rows = self.difference.differing if self.difference else None
        return rows.says if rows else ""

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
        with saving(where):
            where.write_text(script, encoding="utf-8")
        return where

    def __repr__(self) -> str:
        place = f"{self.path or '(root)'} ({self.op}), step {self.step}"
        return printable(f"<{self.cause}: {place}; {self.evidence}>")
