"""A comparison in three sentences: what differs first, whether it is made or received there, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core.findings import EXPECTED, Difference, Finding
from llmdebug_nb.explain import causes

_MADE = {
    causes.INTRODUCED: "The error is made in {where}",
    causes.INHERITED: "The error is not made in {where}, which only magnifies what it is given",
    causes.WRONG_INPUT: "The error is received from outside, in what {where} was given",
    causes.WRONG_MASK: "The error is received by {where}, through its mask",
    causes.WRONG_POSITION: "The error is received by {where}, through its positions",
    causes.WRONG_CACHE: "The error is received by {where}, through its cache",
    causes.WEIGHT: "The error is made in {where}, by another weight and not by its code",
    causes.SCALAR: "The error is made in {where}, by what it is told and not by what it computes",
    causes.OTHER_OPS: "The error is made at {where}, where the two programs do not do the same",
    causes.NONDETERMINISTIC: "Nothing is wrong in {where}, but it gives something else each time",
    causes.OVERFLOW: "The error is made in {where}, where values overflow",
    causes.OTHER_TOKEN: "The error is received from the step before, which chose another token",
    causes.CARRIED_OVER: "The error is either made in {where} or carried over by its state from an earlier step",
    causes.UNKNOWN_INPUT: "The error is made in {where} or received by it, which can't be told without its inputs",
    causes.BEFORE: "The error is received from code that was not recorded, in {where}",
}
_NEXT = {
    causes.INHERITED: "Look at what it is given: record golden in a higher precision too, or pass limits if this much is fine",
    causes.WRONG_INPUT: "Record both runs on the same input",
    causes.WRONG_MASK: "Look at the code that builds the mask",
    causes.WRONG_POSITION: "Look at the code that counts positions, with its offset and its padding",
    causes.WRONG_CACHE: "Look at what was written to the cache in the step before",
    causes.WEIGHT: "Look at how the weight is loaded, split, tied or converted",
    causes.SCALAR: "Give it golden's value and compare again",
    causes.OTHER_OPS: "Look at the code there on both sides",
    causes.NONDETERMINISTIC: "Call ld.seed_all in both programs, or switch dropout off, and compare again",
    causes.OVERFLOW: "Scale its inputs, or compute it in a wider dtype",
    causes.OTHER_TOKEN: "Feed both runs the same tokens, or decode greedily",
    causes.CARRIED_OVER: "Look at the first step that differs",
    causes.UNKNOWN_INPUT: "Record inputs as well as outputs",
    causes.BEFORE: "Record inputs and outputs of all modules",
}
_SCRIPT = "run the script that findings[0].save_repro('repro.py') writes"


def sentences(
    labels: tuple[str, str],
    verdict: str,
    differences: Sequence[Difference],
    findings: Sequence[Finding],
) -> str:
    """Return the three sentences; ``labels``: of golden and mine."""
    first = next((d for d in differences if d.verdict == "diverged"), None)
    findings = [finding for finding in findings if finding.expected is None]
    if first is None and not findings:
        return _fine(labels, verdict, differences)
    seen = f"{labels[0]} and {labels[1]} agree within noise in every tensor that can be judged, but are not set to the same."
    if first is not None:
        where = f"{first.site.path or 'the model'} ({first.op})"
        seen = f"{labels[0]} and {labels[1]} first differ in step {first.site.step}, at the {first.site.phase} {first.site.role} "
        seen += f"{first.site.slot} of {where}{_by(first)}."
    expected = [d for d in differences if d.verdict == EXPECTED]
    seen += f" {len(expected):,} further tensors differ as expected." if expected else ""
    if not findings:
        return f"{seen} What is to blame was not looked for. Compare again with explain=True."
    finding = findings[0]
    made = _MADE.get(finding.cause, "To blame is {where}").format(
        where=f"{finding.path or 'the model'} ({finding.op})"
    )
    script = _SCRIPT if finding.repro else ""
    advice = _NEXT.get(finding.cause, "Look at the code there")
    more = f" (and {len(findings) - 1} more in findings)" if len(findings) > 1 else ""
    at = f" at {finding.source}" if finding.source else ""
    evidence = finding.evidence.replace(f": {advice[0].lower()}{advice[1:]}", "")  # said last
    return f"{seen} {made}{at}: {evidence}{more}. {advice}{f', or {script}' if script else ''}."


def _by(first: Difference) -> str:
    if first.error is None or not first.metrics:
        return f" ({first.reason})" if first.reason else ""
    return f", by {first.error:.2g} (relative L2) where {first.limit or 0.0:.2g} is allowed"


def _fine(labels: tuple[str, str], verdict: str, differences: Sequence[Difference]) -> str:
    compared = [d for d in differences if d.verdict != "unmatched"]
    alone = sum(d.is_mismatch for d in differences if not d.metrics)
    worst = max(compared, key=lambda d: d.error or 0.0, default=None)
    same = f"{labels[0]} and {labels[1]} are bit for bit the same in all {len(compared):,} tensors that both have."
    if verdict != "match" and worst is not None:
        same = f"Nothing diverges: {labels[0]} and {labels[1]} agree within noise in all {len(compared):,} tensors that both have, "
        same += f"the furthest apart being {worst.site.path or 'the model'} with {worst.error or 0.0:.2g}."
    if verdict == EXPECTED:
        return f"{_as_expected(labels, differences)} {_next(alone)}"
    nobody = "So nothing is made wrong anywhere, and nothing is received."
    return f"{same} {nobody} {_next(alone)}"


def _as_expected(labels: tuple[str, str], differences: Sequence[Difference]) -> str:
    expected = [d for d in differences if d.verdict == EXPECTED]
    marked = [d.expected for d in expected if d.expected]
    text = f"{labels[0]} and {labels[1]} differ in {len(expected):,} tensors, and in all of them as expected: "
    text += (
        f"{len(marked):,} marked so, and {len(expected) - len(marked):,} that follow from those."
    )
    said = list(dict.fromkeys(mark.comment or str(mark) for mark in marked))
    if not expected:
        text = f"{labels[0]} and {labels[1]} are not set to the same, which is expected."
    return text + (f" What was said of them: {'; '.join(said[:3])}." if said else "")


def _next(alone: int) -> str:
    if alone:
        return f"{alone:,} rows have no partner: record the same modules and steps in both."
    return "Try other inputs, or more steps."
