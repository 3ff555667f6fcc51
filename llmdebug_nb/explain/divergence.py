"""Where an error was made, as against where it was received.

A module call whose inputs agree and whose output does not has made an error, or one of the modules
inside it has. So of all such calls the innermost are to blame; everything after them inherits. That holds
for the forward and for the backward pass, each by itself: a backward pass computes with what the forward
pass left, so once that differs, only the forward pass is searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from llmdebug_nb.records import Difference, Finding, within

# causes: a closed set
INTRODUCED = "introduced"
WRONG_INPUT = "wrong input"
OTHER_TOKEN = "other token"  # the step's input is a token that the step before chose differently
CARRIED_OVER = "introduced or carried over"  # inputs agree, but an earlier step had diverged: state such as a cache
UNKNOWN_INPUT = "introduced or inherited"  # the inputs were not recorded
BEFORE = "introduced before"  # seen at an input, and nothing that was recorded made it


def first_divergence(differences: Iterable[Difference]) -> Difference | None:
    """Return the first diverged row in execution order."""
    return next((d for d in differences if d.verdict == "diverged"), None)


@dataclass
class _Call:
    """The rows of one module call."""

    inputs: list[Difference] = field(default_factory=list)
    weights: list[Difference] = field(default_factory=list)
    outputs: list[Difference] = field(default_factory=list)

    @property
    def bad_output(self) -> Difference | None:
        return first_divergence(self.outputs)

    @property
    def made_it(self) -> bool:
        """Its output diverged and nothing that it was given did, or was there on one side only."""
        return self.bad_output is not None and all(d.verdict in ("match", "within_noise") for d in self.inputs)


_CallKey = tuple[int, int, int, str, int]  # rank, generation, step, path, call; all of one phase


def findings(differences: Sequence[Difference]) -> list[Finding]:
    """Return what is to blame, the earliest first; one Finding a module, whatever the number of steps it shows in."""
    start = first_divergence(differences)
    if start is None:
        return []
    calls: dict[_CallKey, _Call] = {}
    for d in differences:
        s = d.site
        if s.phase == start.site.phase:
            call = calls.setdefault((s.rank, s.generation, s.step, s.path, s.call), _Call())
            {"input": call.inputs, "weight": call.weights}.get(s.role, call.outputs).append(d)
    makers = {key: call for key, call in calls.items() if call.made_it}
    if not makers:  # then those that were called with other arguments
        makers = {key: call for key, call in calls.items() if call.bad_output and not first_divergence(call.inputs)}
    innermost = {key: call for key, call in makers.items() if not _explained_within(key, makers)}
    found: dict[str, Finding] = {}
    steps: dict[str, set[tuple[int, int]]] = {}
    for key, call in sorted(innermost.items(), key=lambda item: _place(item[1])):
        path = key[3]
        steps.setdefault(path, set()).add(key[1:3])
        if path not in found:
            found[path] = _blame(call, start)
    blamed = [_with_steps(finding, len(steps[path])) for path, finding in found.items()]
    if not any(call.inputs for call in innermost.values()):
        blamed = blamed[:1]  # without inputs, all that follows the first is as likely inherited
    return [*_wrong_input(start, differences), *blamed] or [_unseen(start, differences)]


def _wrong_input(start: Difference, differences: Sequence[Difference]) -> list[Finding]:
    """Say that the runs were not given the same to begin with, where that is so."""
    s = start.site
    if s.role != "input" or not _is_root(start, differences):
        return []
    if s.step == 0:
        text = f"the model was given another {s.slot} to start with: record both runs on the same input"
        return [Finding(s.path, start.op, s.step, WRONG_INPUT, text, start)]
    text = (
        f"{s.slot} differs, though all of step {s.step - 1} agreed: another token was chosen (sampling, or a near tie)"
    )
    return [Finding(s.path, start.op, s.step, OTHER_TOKEN, text, start)]


def _is_root(start: Difference, differences: Sequence[Difference]) -> bool:
    """Tell whether the row is of an outermost module: no other path of this step holds it."""
    s = start.site
    return not any(
        d.site.path != s.path and within(s.path, d.site.path)
        for d in differences
        if (d.site.generation, d.site.step) == (s.generation, s.step)
    )


def _unseen(start: Difference, differences: Sequence[Difference]) -> Finding:
    """Blame what was not recorded, and say what would show it."""
    s = start.site
    parent = s.path.rpartition(".")[0]
    text = f"first seen at {s.role} {s.slot} of {s.path or 'the model'}; what made it was not recorded: record inputs and outputs"
    op = next((d.op for d in differences if d.site.path == parent), "")
    return Finding(parent, op, s.step, BEFORE, text, start)


def _place(call: _Call) -> int:
    bad = call.bad_output
    return bad.index if bad else 0


def _explained_within(key: _CallKey, makers: dict[_CallKey, _Call]) -> bool:
    """Tell whether a module inside this one, in the same step, made an error itself."""
    return any(other[:3] == key[:3] and other[3] != key[3] and within(other[3], key[3]) for other in makers)


def _blame(call: _Call, start: Difference) -> Finding:
    bad = call.bad_output
    assert bad is not None
    s = bad.site
    if not call.inputs:
        cause, before = UNKNOWN_INPUT, "its inputs were not recorded"
    else:
        worst = max((d.error or 0.0 for d in call.inputs), default=0.0)
        before = "its tensor inputs are identical" if worst == 0.0 else f"its inputs agree (error {worst:.2g})"
        earlier = (start.site.generation, start.site.step) < (s.generation, s.step)
        cause = CARRIED_OVER if earlier else INTRODUCED
    alone = [f"{d.site.slot} ({(d.reason or '').partition(':')[0]})" for d in call.inputs if d.verdict == "unmatched"]
    if alone:
        before = f"it was called with other arguments: {', '.join(alone[:3])}"
    other = [d.site.slot for d in call.weights if d.verdict == "diverged"]
    if other:
        before = f"its parameter {', '.join(other[:3])} differs; {before}"
    what = {("backward", "grad"): "the gradient of parameter", ("backward", "output"): "the gradient of input"}
    after = f"{what.get((s.phase, s.role), 'output')} {s.slot} differs"
    after += (
        f": {bad.reason}"
        if bad.error is None or not bad.metrics
        else f" by {bad.error:.2g} (relative L2), {_times(bad)}"
    )
    pair = bad.pair
    if pair.golden and pair.mine and pair.golden.op != pair.mine.op:
        before = f"it is a {pair.golden.op} in golden and a {pair.mine.op} in mine; {before}"
    return Finding(s.path, bad.op, s.step, cause, f"{before}; {after}", bad)


def _times(bad: Difference) -> str:
    if not bad.limit or bad.error is None or bad.error == float("inf"):
        return "where none is allowed" if not bad.limit else f"limit {bad.limit:.2g}"
    return f"{float(f'{bad.error / bad.limit:.2g}'):,.0f} times the limit"


def _with_steps(finding: Finding, steps: int) -> Finding:
    return finding if steps < 2 else replace(finding, evidence=f"{finding.evidence}; the same in {steps} steps")
