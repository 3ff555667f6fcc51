"""The report of a comparison: verdict, differences and findings."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from llmdebug_nb.app.differences import Differences
from llmdebug_nb.app.lockstep_outcome import Lockstep
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison import (
    clipping,
    epsilons,
    other_tokens,
    padding,
    quantisation_steps,
    unseen_weights,
)
from llmdebug_nb.comparison.coverage import coverage, why_incomparable
from llmdebug_nb.comparison.differences import EXPECTED, Coverage, Difference, Reach, Verdict
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.unseen_weights import Unseen, Weight
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError, OptionError, ProofError, nearest
from llmdebug_nb.core.printable import printable
from llmdebug_nb.findings import listing
from llmdebug_nb.findings.finding import Finding, Proof
from llmdebug_nb.findings.headline import Headline
from llmdebug_nb.findings.summary import headline, sentences, unanswered
from llmdebug_nb.findings.verdicts import Judgement, Search
from llmdebug_nb.graph.compared_calls import first_divergence
from llmdebug_nb.show.report_view import ReportView
from llmdebug_nb.show.tokens import Tokenizer
from llmdebug_nb.show.words import count_text, error_text, labels, verdicts_text
from llmdebug_nb.source.listings import Listing
from llmdebug_nb.store import expected as marks
from llmdebug_nb.store.expectation import Expectation, covering
from llmdebug_nb.store.tabular import Tabular

if TYPE_CHECKING:
    import pandas
    import torch

    from llmdebug_nb.comparison.judging import Judging
    from llmdebug_nb.store.run import Run

Programs: TypeAlias = "tuple[Callable[[], object], Callable[[], object]]"
_MARKS = 8  # in one line


class LiveModels(Protocol):
    """Runs the models of a comparison again; see `app.proof.Again`."""

    def prove(self, finding: Finding, report: Report, model: torch.nn.Module | None) -> Proof: ...
    def look_inside(
        self, finding: Finding, report: Report, programs: Programs | None
    ) -> Report: ...


class Report(Tabular):
    """The result of comparing two runs.

    ``verdict``: match (bit-identical) | within_noise | expected (all differences were marked as
    expected) | diverged | nondeterministic (only calls whose results change from run to run) |
    incomparable (too little of the runs answers to each other; ``incomparable`` says why, then
    nothing is blamed). ``coverage``: how much of golden was found in mine.
    ``differences``: all rows, with or without a partner. ``first_divergence``: the first diverged
    row, or None. ``findings``: the causes, the worst first and expected ones last.
    ``limits``: the origin of the limits, in words. ``problems``: errors of the comparison itself.
    ``expected``: the expectations, see `expect`. ``lockstep``: what it took, of programs that ran
    side by side. ``reach``: how much of what ran golden and mine have; None: they tell.
    """

    lockstep: Lockstep | None = None
    reach: tuple[Reach, Reach] | None = None

    def __init__(
        self,
        sides: tuple[Run, Run],
        judging: Judging,
        search: Search,
        problems: Sequence[str] = (),
        again: LiveModels | None = None,
        expected: list[Expectation] | None = None,
    ) -> None:
        self.golden, self.mine = sides
        self.limits, self.problems = judging.says(), list(problems)
        self._judging, self._judgement = judging, Judgement(judging, search)
        self._views: weakref.WeakSet[ReportView] = weakref.WeakSet()
        self._again = again
        try:
            self.expected = marks.read(*sides) if expected is None else expected
        except CorruptDumpError as error:
            self.expected = []
            self.problems.append(str(error))
        self._judge()
        judging.comparison.report = self

    def _judge(self) -> None:
        """Judge all rows and search for the causes, with the current expectations."""
        verdicts = self._judgement.verdicts([] if self.incomparable else self.expected)
        self.findings = [] if self.incomparable else verdicts.findings
        self._failures = verdicts.problems
        self.differences = Differences(self.view, verdicts.rows)
        self.__dict__.pop("coverage", None)
        self.first_divergence = first_divergence(self.differences)
        self._counts = Counter(d.verdict for d in self.differences)

    @functools.cached_property
    def coverage(self) -> Coverage:
        reach = self.reach or (Reach(self.golden.calls()), Reach(self.mine.calls()))
        return coverage(self.differences, reach)

    @functools.cached_property
    def incomparable(self) -> str:
        """Why too little of the runs answers to each other; "" if enough does."""
        weights = (
            [(row.type, row.value or "") for row in run.index.scalars(role="weight")]
            for run in (self.golden, self.mine)
        )
        return why_incomparable(self._judging.plain, *weights) or (
            self._unseen_weights.says if self._unseen_weights.decides else ""
        )

    @functools.cached_property
    def _unseen_weights(self) -> Unseen:
        """What is not known of quantised weights from which on the runs differ."""
        weights = (
            [
                Weight(row.path, row.slot, row.type, row.value or "")
                for role in ("weight", "weight_type")
                for row in run.index.scalars(role=role)
            ]
            for run in (self.golden, self.mine)
        )
        return unseen_weights.found(self._judging.plain, *weights)

    @property
    def verdict(self) -> Verdict:
        if self.incomparable:
            return "incomparable"
        unexpected = [finding for finding in self.findings if finding.expected is None]
        by_chance = causes.NONDETERMINISTIC, causes.NEAR_TIE
        if unexpected and all(finding.cause in by_chance for finding in unexpected):
            return "nondeterministic"
        if unexpected or self._counts["diverged"]:  # a finding counts even if noise hides its rows
            return "diverged"
        if self._counts[EXPECTED] or self.findings:
            return EXPECTED
        return "within_noise" if self._counts["within_noise"] else "match"

    @property
    def caution(self) -> str:
        """What a good verdict must not hide: it is on little of golden. "" otherwise."""
        return self.coverage.caution if self.verdict in ("match", "within_noise") else ""

    # -- expectations -------------------------------------------------------------------------

    @property
    def kept_in(self) -> str:
        """The file of the expectations; "" if mine has no folder and only this report has them."""
        return str(marks.file_of(self.mine) or "")

    def expect(
        self,
        what: str | Difference | Finding,
        comment: str = "",
        *,
        role: str | None = None,
        slot: str | None = None,
        phase: str | None = None,
        step: int | None = None,
    ) -> Expectation:
        """Mark a deviation as expected, with a comment, and judge everything again.

        ``what``: a row of `differences`, one of `findings`, or a glob over module paths. A glob
        covers all outputs of these modules; ``role`` (input | output | weight | grad), ``slot``,
        ``phase`` (forward | backward) and ``step`` select some of their tensors.

        The mark is kept beside the run of mine. It counts in every later comparison of runs with
        these two names. Errors that follow from an expected one count as expected too, as far as
        it explains their size, or a replay shows that they follow. A pattern covers small errors
        of floats only.

        Raises:
            OptionError: no tensor of the comparison fits, or a field makes no sense.
            StoreError: the mark can't be kept; then it has no effect either.
        """
        if isinstance(what, (Difference, Finding)):
            mark = what.mark(str(comment))
        elif isinstance(what, str):
            mark = Expectation(what, str(comment), role, slot, phase, step)
        else:
            raise OptionError(
                f"expect {what!r:.60}: expected a glob over module paths, a row or a finding"
            )
        self._check(mark)
        self._keep([*(one for one in self._kept() if not one.means(mark)), mark])
        return mark

    def unexpect(self, what: str | Difference | Finding | Expectation) -> list[Expectation]:
        """Remove the marks with this glob, or those that cover this row or finding.

        Judge everything again, and return the removed marks.

        Raises:
            OptionError: there is no such mark.
            StoreError: the change can't be kept.
        """
        known_marks = self._kept()
        if isinstance(what, (str, Expectation)):
            removed = [one for one in known_marks if what in (one, one.path)]
        else:
            removed = [one for one in known_marks if one == what.expected]
        if not removed:
            known = ", ".join(map(str, known_marks[:6])) or "none"
            raise OptionError(f"{what!s:.200} is not marked as expected; marks: {known}")
        self._keep([one for one in known_marks if one not in removed])
        return removed

    def _check(self, mark: Expectation) -> None:
        """Raise OptionError unless a mark makes sense and covers something."""
        marks.checked(mark)
        if not any(covering([mark], d.marked_sites) for d in self.differences):
            near = nearest(mark.path, sorted({d.site.path for d in self.differences}))
            raise OptionError(f"expect {mark}: the comparison has no such tensor{near}")

    def _kept(self) -> list[Expectation]:
        """Return the expectations, including those of other reports on these runs."""
        if marks.file_of(self.mine) is None:
            return self.expected
        return marks.read(self.golden, self.mine)

    def _keep(self, expected: list[Expectation]) -> None:
        marks.write(self.golden, self.mine, expected)
        self.expected = expected
        self._judge()
        self._refresh()

    def _refresh(self) -> None:
        for view in list(self._views):
            view.refresh()

    def listing(self, finding: Finding) -> Listing:
        """Return golden's function beside mine's, line by line, around the lines to blame."""
        try:
            return listing.listing(finding, self.golden, self.mine, self.differences)
        except CorruptDumpError as error:
            return Listing(note=str(error))

    # -- the live models ----------------------------------------------------------------------

    def prove(self, finding: Finding, model: torch.nn.Module | None = None) -> Proof:
        """Return `Finding.prove`, and keep it with the finding. Raises ProofError."""
        if self._again is None:
            raise ProofError("this report was not made by compare: it knows no live model")
        proof = self._again.prove(finding, self, model)
        proven = replace(finding, proof=proof)
        self.findings = [proven if one is finding else one for one in self.findings]
        self._refresh()
        return proof

    def look_inside(
        self, finding: Finding | None = None, program: Programs | None = None
    ) -> Report:
        """Record the blamed module again, in both programs with its operators, and compare.

        ``finding``: default the first one. ``program``: a callable for each program, golden's
        first, that runs the step; default: the live models run on their recorded inputs. The
        findings of the new report name the line.

        Raises:
            ProofError: a model is gone, or can't be run again; the message says what to record.
        """
        if self._again is None or not self.findings:
            raise ProofError("this report blames no module of a live model")
        return self._again.look_inside(finding or self.findings[0], self, program)

    # -- in words -----------------------------------------------------------------------------

    def summary(self) -> str:
        """Return what differs first, where the error is made, what to do next, and the coverage."""
        names = labels(self.golden, self.mine)
        if self.incomparable:
            advice = unseen_weights.ADVICE if self._unseen_weights.decides else ""
            return printable(unanswered(names, self.incomparable, advice))
        text = sentences(names, self.verdict, list(self.differences), self.findings)
        parts = [text, str(self.coverage), *self._quantised()]
        return printable(" ".join(filter(None, parts)))

    def _quantised(self) -> list[str]:
        """Return a sentence each on quantised weights and activations, if there are any."""
        says = [each.says(self.differences) for each in (quantisation_steps, clipping)]
        if self._unseen_weights.says:
            says.append(f"{self._unseen_weights.says}. {unseen_weights.ADVICE}.")
        return list(filter(None, says))

    def _logits_error(self) -> float:
        """Return the largest error of logits; 0 if there are none."""
        rows = (d for d in self.differences if d.verdict == "within_noise")
        return max((d.error or 0.0 for d in rows if "top1_flips" in d.metrics), default=0.0)

    @functools.cached_property
    def _other_tokens(self) -> str:
        return other_tokens.says(self._judging.plain, self.golden.load, self.mine.load)

    def headlines(self) -> list[Headline]:
        """Return each finding in the words of the first screen."""
        return list(map(headline, self.findings))

    def view(self, tokenizer: Tokenizer | None = None) -> ReportView:
        """Return the view that explorers, text and HTML show; it follows new expectations.

        With a tokenizer, its steps show their input text.
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
        """Return the counts, coverage, first divergence and expectations, a line each."""
        hidden = self.verdict == "diverged" and not self._counts["diverged"]
        lines = [verdicts_text(self.differences, hidden), f"Coverage: {self.coverage}"]
        if self.incomparable:
            if self._unseen_weights.decides:
                return [f"{self.incomparable}. {unseen_weights.ADVICE}.", *lines]
            return [f"Too little answers to each other: {self.incomparable}", *lines]
        lines += self._quantised()
        first = self.first_divergence
        if first is not None:
            lines.append(f"First to diverge: {first.site}, {error_text(first)}")
        if self.verdict == "within_noise":
            noisy = (d for d in self.differences if d.verdict == "within_noise")
            worst = max(noisy, key=lambda d: d.error or 0.0)
            limit = f"limit {worst.limit or 0.0:.2g}"
            lines.append(f"Largest error: {worst.site}, {error_text(worst)} ({limit})")
        return lines + self._expected_lines()

    def _expected_lines(self) -> list[str]:
        """Return a line with the expectations and the number of rows that each covers."""
        rows = Counter(d.expected for d in self.differences if d.verdict == EXPECTED)
        findings = Counter(one.expected for one in self.findings if one.expected)
        parts = [
            f"{mark}{f' ({mark.comment})' if mark.comment else ''}: {count_text(rows[mark], 'row')}"
            for mark in self.expected
            if rows[mark] or findings[mark]
        ]
        if not parts:
            return []
        line = "; ".join(parts[:_MARKS])
        if len(parts) > _MARKS:
            line += f"; and {len(parts) - _MARKS} more marks"
        if rows[None]:
            follow = "follows" if rows[None] == 1 else "follow"
            line += f"; {count_text(rows[None], 'row')} more {follow} from that"
        return [f"Expected: {line}"]

    def _notes_on_marks(self) -> list[str]:
        used = {d.expected for d in self.differences} | {f.expected for f in self.findings}
        bad = (d for d in self.differences if d.verdict == "diverged")
        large = Counter(
            mark for d in bad if (mark := covering(self.expected, d.marked_sites)) is not None
        )
        notes = [
            f"marked as expected, but does not differ now: {mark}"
            for mark in self.expected
            if mark not in used and not large[mark]
        ]
        notes += [
            f"{mark} is a pattern, which covers only small differences of floats: "
            f"{count_text(rows, 'row')} differ by {constants.PERTURBED:g} or more, or are "
            "integers; mark a tensor, module or finding by itself if you expect that"
            for mark, rows in large.items()
        ]
        return notes

    def notes(self) -> list[str]:
        """Return the notes that limit the verdict, such as rows that could not be compared."""
        fine = [d for d in self.differences if d.verdict == "unmatched" and not d.is_mismatch]
        inside = sum(d.rule is not Rule.REJOINED for d in fine)
        alone = self._counts["unmatched"] - len(fine)
        notes = []
        if inside:
            have = "has" if inside == 1 else "have"
            notes.append(
                f"{count_text(inside, 'row')} of compiled or exported code {have} no partner by "
                "nature: inside a kernel or a node, read by one, or folded"
            )
        if alone:
            notes.append(
                f"{alone:,} of {len(self.differences):,} rows could not be compared; "
                "the verdict is on the others"
            )
        for run in (self.golden, self.mine):
            if not run.source.complete:
                ended_by = run.info()["ended_by"] or "its recording ended early"
                notes.append(f"{run.label} is incomplete: {ended_by}")
            within = (d for d in self.differences if d.verdict == "within_noise")
            limit = max((d.limit or 0.0 for d in within), default=0.0)
            stated = epsilons.Stated.of(run)
            says = epsilons.says(run.label, stated, self.verdict, limit, self._logits_error())
            notes += [says] if says else []
        notes += [self._other_tokens] if self._other_tokens else []
        notes += padding.notes(self.differences)
        notes += self._notes_on_marks()
        notes += [*self.problems, *self._failures]
        if self.verdict != "match" and self.limits:
            notes.append(self.limits)
        return notes

    def __str__(self) -> str:
        return self.view().text()

    def __repr__(self) -> str:
        golden, mine = labels(self.golden, self.mine)
        findings = count_text(len(self.findings), "finding")
        verdict = ", ".join(filter(None, (self.verdict, self.caution)))
        return printable(f"<Report: {golden} against {mine}, {verdict}, {findings}>")
