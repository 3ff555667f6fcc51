"""Prove a finding: golden's value goes into mine's live model, and the step runs on.

What then agrees was made by the finding. What still differs is another bug behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.app import inside
from llmdebug_nb.app.rerun import Step
from llmdebug_nb.app.sides import sides
from llmdebug_nb.capture.substitution import Place, Substitution
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.errors import LLMDebugError, ProofError
from llmdebug_nb.core.paths import any_layer
from llmdebug_nb.findings.finding import Finding, Proof
from llmdebug_nb.findings.graft_choice import Placed, alike, of_weights, placed
from llmdebug_nb.graph.flow import AGREES
from llmdebug_nb.replay.in_place import Put
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import largest_error, same
from llmdebug_nb.replay.runs import Runs, Side
from llmdebug_nb.show.words import count_text
from llmdebug_nb.store.expectation import Expectation

if TYPE_CHECKING:
    import torch

    from llmdebug_nb.app.report import Programs, Report
    from llmdebug_nb.store.run import Run

Rows = Sequence[Difference]
# compares the runs as the report was made: all steps, or one generation and step of golden
Comparing: TypeAlias = "Callable[[Again, tuple[int, int] | None, list[Expectation]], Report]"


@dataclass(frozen=True)
class Again:
    """Runs the live models of a comparison again.

    ``find(model)``: finds the modules of mine in a model. ``inputs``: the run of mine that has the
    inputs of the model; default: mine. ``limit``: of its results. ``proven``: the findings whose
    values are put in already; ``puts``, ``weights``: these values; ``sites``: the rows of these.
    ``refused``: why nothing of this comparison can be proven; "" if it can.
    """

    golden: Run
    mine: Run
    runs: Runs
    compared: Comparing
    find: Callable[[torch.nn.Module], Callable[[str], torch.nn.Module | None]]
    inputs: Side | None = None
    limit: float = 0.0
    proven: tuple[Finding, ...] = ()
    puts: dict[Place, list[Put]] = field(default_factory=dict)
    weights: dict[tuple[str, str], Put] = field(default_factory=dict)
    sites: frozenset[tuple[object, ...]] = frozenset()
    refused: str = ""

    def prove(
        self, finding: Finding, report: Report, model: torch.nn.Module | None = None
    ) -> Proof:
        """Prove a finding of a report. Raises ProofError."""
        if self.refused:
            raise ProofError(self.refused)
        again = self if model is None else replace(self, runs=self._with(model))
        try:
            return again._prove(finding, report)
        except CannotReplay as why:
            raise ProofError(
                f"{finding.path or 'the model'}: golden's value can't be put in: {why}"
            ) from None

    def look_inside(
        self, finding: Finding, report: Report, programs: Programs | None = None
    ) -> Report:
        """Compare the blamed module again, recorded with its operators. Raises ProofError."""
        golden, mine = inside.recorded(finding, self.runs, programs)
        of_golden, of_mine = sides(golden, mine)
        runs = replace(self.runs, golden=of_golden, mine=of_mine)
        again = Again(
            golden, mine, runs, self.compared, self.find,
            self.inputs or self.runs.mine, self._limit(report.differences),
        )  # fmt: skip
        return self.compared(again, None, report.expected)

    def _limit(self, rows: Rows) -> float:
        """Return the limit of the results of the model."""
        limits = (d.limit or 0.0 for d in _results(rows, self.golden))
        return self.limit or max(limits, default=0.0)

    def knows(self, finding: Finding) -> bool:
        """Tell whether a finding is expected, or one that is put right already."""
        row = finding.difference
        again = any((f.path, f.cause) == (finding.path, finding.cause) for f in self.proven)
        mended = row is None or row.verdict != "diverged" or _key(row) in self.sites
        return finding.expected is not None or (again and mended)

    def _with(self, model: torch.nn.Module) -> Runs:
        return replace(self.runs, module=self.find(model))

    def _prove(self, finding: Finding, report: Report) -> Proof:
        row, rows = finding.difference, report.differences
        if row is None:
            raise CannotReplay("no tensor shows it")
        site = row.pair.mine.site if row.pair.mine is not None else row.site
        inputs = self.inputs or self.runs.mine
        step = replace(Step.of(site, inputs, self.runs.module), options_of=self.mine)
        if not self.proven:
            _check(step, self.runs, self._limit(rows))
        proof, after, mended = self._run(step, finding, report, (finding, report), False)
        # one piece of code may run several times in a step, and in every layer
        while proof.next is not None and _same_code(proof.next, finding):
            every_layer = proof.next.path != finding.path
            try:
                more = after._run(step, proof.next, mended, (finding, report), every_layer)
            except CannotReplay:
                break
            if more[0].rows_left >= proof.rows_left:
                break
            proof, after, mended = more
        return proof

    def _run(
        self,
        step: Step,
        finding: Finding,
        report: Report,
        first: tuple[Finding, Report],
        every_layer: bool,
    ) -> tuple[Proof, Again, Report]:
        """Run a step with golden's value of a finding of a report put in, too, and compare.

        ``first``: the finding that is proven, and its report. ``every_layer``: put golden's values
        in at the same place of the other layers as well. Raises CannotReplay.
        """
        after = self._with_value(finding, report.differences, every_layer)
        substitution = Substitution(after.puts)
        run = step.recorded(substitution, after.weights)
        missing = [place for place in after.puts if place not in substitution.done]
        if missing:
            raise CannotReplay(f"mine did not call {missing[0].path or 'the model'} there")
        side = _side(run, self.runs.mine, after.weights)
        after = replace(after, mine=run, runs=replace(self.runs, mine=side), inputs=step.side)
        generation_step = (step.key.generation, step.key.step)
        mended = after.compared(after, generation_step, report.expected)
        return _proof(first[0], after, first[1].differences, mended, every_layer), after, mended

    def _with_value(self, finding: Finding, rows: Rows, every_layer: bool) -> Again:
        """Return this with golden's value of a finding put in, too. Raises CannotReplay."""
        row = finding.difference
        proven = (*self.proven, finding)
        if finding.cause == causes.WEIGHT or (row is not None and row.site.role == "weight"):
            found = of_weights(finding, rows, self.runs, every_layer)
            if not found:
                raise CannotReplay("golden's model has no weight of these names that differs")
            return replace(self, proven=proven, weights=self.weights | found)
        puts = {place: [*several] for place, several in self.puts.items()}
        there = placed(finding, rows, self.runs)
        there = alike(there, rows, self.runs) if every_layer else there
        results = _results(rows, self.golden)
        if any(each.row is result for each in there for result in results):
            raise CannotReplay("it is the result itself, and nothing follows from it")
        for each in there:
            puts.setdefault(_place(each), []).append(each.put)
        sites = self.sites | {_key(each.row) for each in there}
        sites |= {_key(row)} if row is not None else set()
        return replace(self, proven=proven, puts=puts, sites=sites)


def _same_code(one: Finding, other: Finding) -> bool:
    """Tell whether two findings are of the same code: another call of it, or another layer."""
    return any_layer(one.path) == any_layer(other.path) and one.cause == other.cause


def _side(run: Run, before: Side, put: Iterable[tuple[str, str]]) -> Side:
    """Return a mended run of mine. A state that the model has changed since is no finding."""
    side, without = Side(run, run.kernel, before.execute), set(put)
    side.fingerprints = {
        path: {name: each for name, each in weights.items() if (path, name) not in without}
        for path, weights in before.fingerprints.items()
    }
    return side


def _place(each: Placed) -> Place:
    role = "input" if each.site.role == "input" else "output"
    return Place(each.site.path, each.site.call, role, each.site.slot)  # type: ignore[arg-type]


def _check(step: Step, runs: Runs, limit: float) -> None:
    """Check that the live model still gives what was recorded. Raises CannotReplay."""
    one, other = step.results(seed=0), step.results(seed=1)
    if any(not same(tensor, other[slot]) for slot, tensor in one.items() if slot in other):
        raise CannotReplay("two calls on the same inputs give two results")
    kept = {
        record.site.slot: step.side.load(record)
        for record in step.side.records(step.key, "output")
        if record.payload is not None and record.kept is None
    }
    if kept and largest_error(kept, one, runs) > limit:
        raise CannotReplay("the model no longer computes the recorded values")


def _results(rows: Rows, golden: Run) -> list[Difference]:
    """Return the rows of what the model gives."""
    roots = {node.path for node in golden.nodes if node.parent < 0}
    return [
        d
        for d in rows
        if (d.site.role, d.site.phase) == ("output", "forward") and d.site.path in roots
    ]


def _key(d: Difference) -> tuple[object, ...]:
    """Return what tells a row of one comparison in another: golden's record."""
    golden = d.pair.golden
    return (golden.id,) if golden is not None else ("mine", d.site)


def _proof(
    finding: Finding, after: Again, before: Rows, mended: Report, every_layer: bool
) -> Proof:
    """Return what became of the rows of a step."""
    now = {_key(d): d for d in mended.differences}
    row = finding.difference
    assert row is not None
    diverged = [
        d
        for d in before
        if d.verdict == "diverged" and d.site.key[:4] == row.site.key[:4]
        and _key(d) not in after.sites and _key(d) in now
    ]  # fmt: skip
    results = _results(mended.differences, after.golden)
    left = {_key(d) for d in diverged if not _agrees(now[_key(d)])}
    count = len(diverged) - len(left)
    agrees = all(map(_agrees, results)) if results else not left
    left |= {_key(d) for d in results if not _agrees(d)}
    behind = next((f for f in mended.findings if not after.knows(f)), None)
    place = finding.path or "the model"
    place += " in every layer" if every_layer else ""
    says = _words(place, agrees, count, len(left), behind)
    return Proof(agrees, count, len(left), says, behind, mended)


def _agrees(d: Difference) -> bool:
    return d.verdict in AGREES or d.rule is Rule.REJOINED


def _words(place: str, agrees: bool, count: int, left: int, behind: Finding | None) -> str:
    put = f"With golden's value put in at {place}"
    if agrees and not left:
        rows = "does the row" if count == 1 else f"do all {count:,} rows"
        mended = f", as {rows} that diverged after it" if count else ""
        text = f"{put}, the result of mine agrees with golden{mended}."
    elif not count:
        result = "the result agrees" if agrees else "nothing agrees that diverged before"
        text = f"{put}, {result}: {count_text(left, 'row')} still diverge."
    else:
        result = "agrees" if agrees else "still diverges"
        text = (
            f"{put}, {count:,} of the {count_text(count + left, 'row')} that diverged agree, and "
            f"{left:,} still diverge; the result {result}."
        )
    if behind is None:
        return text
    return f"{text} Next to blame: {behind.path or 'the model'} ({behind.cause})."


def proven(report: Report) -> None:
    """Prove the first finding of a report, if its step can be run again; else note why not."""
    finding = next((one for one in report.findings if one.expected is None), None)
    if finding is None:
        return
    try:
        report.prove(finding)
    except LLMDebugError as why:
        report.problems.append(f"not proven: {why}")
