"""A comparison in three sentences: the first difference, the place of its error, the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.places import in_torch
from llmdebug_nb.core.printable import bracketed, printable, sentence
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.headline import Headline

_SCRIPT = "run the script that findings[0].save_repro('repro.py') writes"


def sentences(
    labels: tuple[str, str],
    verdict: str,
    differences: Sequence[Difference],
    findings: Sequence[Finding],
) -> str:
    """Return the three sentences. ``labels``: of golden and mine."""
    first = next((d for d in differences if d.verdict == "diverged"), None)
    findings = [finding for finding in findings if finding.expected is None]
    if first is None and not findings:
        return _fine(labels, verdict, differences)
    ties = bool(findings) and all(f.cause == causes.NEAR_TIE for f in findings)
    seen = _seen(labels, first, ties)
    expected = sum(d.verdict == EXPECTED for d in differences)
    seen += f" {expected:,} further tensors differ as expected." if expected else ""
    if not findings:
        return f"{seen} The cause was not searched. Compare again with explain=True."
    return f"{seen} {_cause(findings)}"


def headline(finding: Finding) -> Headline:
    """Return a finding in the words of the first screen."""
    known = next((side for side in (finding.mine, finding.golden) if side and side.file), None)
    path = printable(finding.path) or "the model"
    file = (known and known.file) or ""
    if known is None or in_torch(file) or causes.about(finding.cause).of_weights:
        place = path
    else:
        place = printable(f"{PurePath(file).name}:{known.line}")
    do = sentence(finding.advice) or sentence(_advice(finding))
    relation = sentence(finding.relation)
    evidence = sentence(finding.evidence)
    what, why = (relation, evidence) if relation else (evidence, "")
    row, where = finding.difference, _where(finding, path)
    if row is not None and row.site.phase == "backward":
        where = f"{where} in the backward pass"
    head = "Missing behind" if known is not None and known.lacks else "Made in"
    return Headline(
        causes.about(finding.cause).head or head, place, where, printable(what),
        sentence(finding.which), printable(why), printable(do),
    )  # fmt: skip


def _where(finding: Finding, path: str) -> str:
    """Return ``path (class in mine, was class in golden)``; of an operator, module and name."""
    golden, mine = (
        None if side is None or side.lacks else side for side in (finding.golden, finding.mine)
    )
    side = mine or golden
    here = path if side is None else printable(side.path) or path
    was = ""
    if golden is not None and mine is not None:
        was = f", was {printable(golden.op)}" if golden.op != mine.op else ""
    elif side is not None:
        was = f", not so in {'golden' if golden is None else 'mine'}"
    op = printable(finding.op if side is None else side.op)
    if is_operator(here):
        return f"{module_of(here) or 'the model'} · {op}{was}"
    return here + bracketed(f"{op}{was}".removeprefix(", "))


def unanswered(labels: tuple[str, str], why: str, advice: str = "") -> str:
    """Return the sentences on two runs that do not answer to each other. ``why``: the reason."""
    usual = (
        "Record the same model, weights, steps and layers in both, or pair their modules with a map"
    )
    return f"{labels[0]} and {labels[1]} can't be compared: {why}. {advice or usual}."


def _seen(labels: tuple[str, str], first: Difference | None, ties: bool) -> str:
    """Return the sentence on the first difference. ``ties``: near ties make all that differs."""
    runs = f"{labels[0]} and {labels[1]}"
    if ties:
        return (
            f"{runs} agree within noise, but for a choice between near equals that rounding decides"
            " and for what follows from it."
        )
    if first is None:
        return f"{runs} agree within noise in every comparable tensor, but their settings differ."
    s = first.site
    tensor = f"{s.phase} {s.role} {s.slot} of {s.path or 'the model'}{bracketed(first.op)}"
    return f"{runs} first differ in step {s.step}, at the {tensor}{_by(first)}."


def _cause(findings: Sequence[Finding]) -> str:
    """Return the sentences on the first finding: where the error is made, and what to do next."""
    finding = findings[0]
    where = f"{finding.path or 'the model'}{bracketed(finding.op)}"
    made = causes.about(finding.cause).made.format(where=where)
    advice = sentence(finding.advice).rstrip(".") or _advice(finding)
    more = f" (and {len(findings) - 1} more in findings)" if len(findings) > 1 else ""
    at = f" at {finding.source}" if finding.source and finding.cause != causes.UPDATED else ""
    script = f", or {_SCRIPT}" if finding.repro else ""
    sentences = (
        f"{made}{at}: {finding.evidence}{more}.",
        sentence(finding.relation),
        f"{advice}{script}.",
    )
    return " ".join(filter(None, sentences))


def _advice(finding: Finding) -> str:
    """Return the advice that the cause suggests; code written otherwise has values of its own."""
    ops = {side.op for side in (finding.golden, finding.mine) if side is not None} - {""}
    rewritten = len(ops) > 1 or any(pair.state == "rewritten" for pair in finding.pairs)
    cause = causes.OTHER_OPS if rewritten and finding.cause == causes.SCALAR else finding.cause
    return causes.about(cause).advice


def _by(first: Difference) -> str:
    if first.error is None or not first.metrics:
        return f" ({first.reason})" if first.reason else ""
    return f", by {first.error:.2g} (relative L2) with a limit of {first.limit or 0.0:.2g}"


def _fine(labels: tuple[str, str], verdict: str, differences: Sequence[Difference]) -> str:
    """Return the sentences on a comparison in which nothing diverged."""
    alone = [d for d in differences if d.is_mismatch and not d.metrics]
    if verdict == EXPECTED:
        return f"{_as_expected(labels, differences)} {_next(alone)}"
    runs = f"{labels[0]} and {labels[1]}"
    compared = [d for d in differences if d.verdict != "unmatched"]
    worst = max(compared, key=lambda d: d.error or 0.0, default=None)
    all_tensors = f"all {len(compared):,} tensors that both have"
    if verdict == "match" or worst is None:
        same = f"{runs} are bit for bit the same in {all_tensors}."
    else:
        place = f"{worst.site.path or 'the model'} with {worst.error or 0.0:.2g}"
        same = f"Nothing diverges: {runs} agree within noise in {all_tensors}; "
        same += f"the largest error is that of {place}."
    return (
        f"{same} {_behind_ties(differences) or 'So there is no error to explain.'} {_next(alone)}"
    )


def _behind_ties(differences: Sequence[Difference]) -> str:
    """Return a sentence on what was not compared, as rounding decides a choice before it."""
    behind = [d for d in differences if d.rule in (Rule.AFTER_TIE, Rule.UNTOUCHED)]
    if not behind:
        return ""
    first = behind[0].site
    where = f"{first.path or 'the model'} in step {first.step}"
    left_out = sum(d.rule is Rule.AFTER_TIE for d in behind)
    told = [f"{left_out:,} tensors were not compared"] if left_out else []
    if some := len(behind) - left_out:
        told.append(f"{some:,} were compared only at the tokens that it does not touch")
    text = f"Rounding decides a choice before {where}, and the two runs chose otherwise. "
    return f"{text}Behind it, {', and '.join(told)}."


def _as_expected(labels: tuple[str, str], differences: Sequence[Difference]) -> str:
    runs = f"{labels[0]} and {labels[1]}"
    expected = [d for d in differences if d.verdict == EXPECTED]
    marks = [d.expected for d in expected if d.expected]
    text = f"The settings of {runs} differ, which is expected."
    if expected:
        follow = len(expected) - len(marks)
        text = f"{runs} differ in {len(expected):,} tensors, all of them as expected: "
        text += f"{len(marks):,} are marked as expected, and {follow:,} follow from those."
    comments = list(dict.fromkeys(mark.comment or str(mark) for mark in marks))
    return text + (f" Reasons: {'; '.join(comments[: constants.NAMES_SHOWN])}." if comments else "")


def _next(alone: Sequence[Difference]) -> str:
    """Return what may be done after a good verdict. ``alone``: the rows without a partner."""
    if not alone:
        return "Try other inputs, or more steps."
    (reason, count), *_ = Counter(d.reason or "" for d in alone).most_common()
    most = "most of them " if reason and count < len(alone) else ""
    rows = "1 row has" if len(alone) == 1 else f"{len(alone):,} rows have"
    return f"{rows} no partner{bracketed(most + reason)}."
