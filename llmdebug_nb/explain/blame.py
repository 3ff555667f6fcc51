"""Find the calls that made an error, apart from those that inherited it.

`frontier.py` finds the regions where the two programs part for good. Here each region gets its
cause. Much is visible without computing: a weight, another operator, a scalar argument or an
attribute that differs. Else the call is replayed (`verify.py`). If it only magnifies the error of
its inputs, the blame passes to the calls before it.

The forward and the backward pass are searched separately. The backward pass uses tensors of the
forward pass, so it is searched only if the forward passes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmdebug_nb.core.findings import EXPECTED, Difference, Finding
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import Kernel
from llmdebug_nb.explain import causes, nodes, overflow, repro, scalars, sources, verify
from llmdebug_nb.explain.calls import AGREES, Calls, ComparedCall, same_operator
from llmdebug_nb.explain.edges import (
    first_of_chain,
    innermost,
    input_name,
    is_root,
    kind_of,
    origin,
    slots,
)
from llmdebug_nb.explain.frontier import Frontier, Region
from llmdebug_nb.explain.narrowing import Narrowing
from llmdebug_nb.explain.runs import Runs
from llmdebug_nb.explain.weights import Weights

_TESTED = 8  # at most so many suspects are replayed
_BEFORE = 24  # at most so many calls before a suspect are replayed, if it only magnifies
_MOST_WEIGHTS = 3  # at most so many weights are named in the evidence
_LAST = (causes.INHERITED, causes.CARRIED_OVER, causes.NONDETERMINISTIC)


@dataclass(frozen=True)
class Explanation:
    """Why two runs differ. ``rejoins``: indices of the rows whose difference reaches nothing."""

    findings: list[Finding]
    rejoins: frozenset[int] = frozenset()


def explained(
    differences: Sequence[Difference], runs: Runs, causes_too: bool = True
) -> Explanation:
    """Return the findings, the worst first, and the rows that are only written otherwise.

    A path has one finding, even if many steps show its error. ``causes_too``: search for the
    causes; else there are no findings.
    """
    crossed = nodes.is_crossed(differences)
    if crossed:
        differences = nodes.comparable(differences)
    rejoins: set[int] = set()
    for phase in dict.fromkeys(d.site.phase for d in differences if d.verdict == "diverged"):
        frontier = Frontier(differences, phase, runs.same_code)
        rejoins |= {d.index for d in frontier.rejoins}
        if frontier.guilty:
            if not causes_too:
                return Explanation([], frozenset(rejoins))
            start = frontier.guilty[0].row
            found = _Search(differences, start, frontier, runs, crossed).findings()
            return Explanation(found, frozenset(rejoins))
    return Explanation(_settings(differences, runs) if causes_too else [], frozenset(rejoins))


def _settings(differences: Sequence[Difference], runs: Runs) -> list[Finding]:
    """Blame settings that differ although noise hides their effect."""
    changed = next((d for d in differences if _hides(d)), None)
    if changed is None:
        return []
    frontier = Frontier(differences, changed.site.phase, runs.same_code)
    return _Search(differences, changed, frontier, runs).settings()


@dataclass
class _Blamed:
    """A finding before it is put into words: ``call`` is blamed for ``row``."""

    call: ComparedCall
    cause: str
    evidence: str
    row: Difference
    steps: int = 1


class _Search:
    """The search for the causes of one comparison, from its first row that differs."""

    def __init__(
        self,
        differences: Sequence[Difference],
        start: Difference,
        frontier: Frontier,
        runs: Runs,
        crossed: bool = False,
    ) -> None:
        self.differences, self.start, self.runs = differences, start, runs
        self.calls = Calls(differences, start.site.phase)
        self.weights = Weights(differences, runs)
        self.frontier = frontier
        self.narrowing = Narrowing(self.frontier.flows, runs)
        self.nodes = nodes.NodeSearch(runs)
        self.tested = 0
        # Fusion may hide an input. A call with hidden inputs is blamed only if no other call is.
        self.follows = (causes.INHERITED, causes.UNKNOWN_INPUT) if crossed else (causes.INHERITED,)
        # True once a call is known to have made an error. Its consequences blame no other call.
        self.made = any(d.verdict == EXPECTED and d.index < start.index for d in differences)
        self.excused = self.made

    def findings(self) -> list[Finding]:
        found: dict[str, _Blamed] = {}
        steps: dict[str, set[tuple[int, int]]] = {}
        for region in self.frontier.guilty:
            blamed = self._judge(self.narrowing.narrowed(region))
            key = blamed.call.key
            found.setdefault(blamed.call.path, blamed)
            steps.setdefault(blamed.call.path, set()).add((key.generation, key.step))
            self.made = self.made or blamed.cause not in _LAST
        for path, seen_in in steps.items():
            found[path].steps = len(seen_in)
        blames = [b for b in found.values() if b.cause not in self.follows or not self.made]
        ranked = sorted(blames, key=lambda b: (b.cause in _LAST, b.row.index))
        findings = [*self._wrong_start(), *(self._finding(b) for b in ranked)]
        # a region that only magnifies an expected difference needs no finding
        return findings if findings or self.excused else [self._unseen()]

    def settings(self) -> list[Finding]:
        """Return a finding for each path with other settings, if its outputs differ at all."""
        found: dict[str, _Blamed] = {}
        for call in self.calls.all:
            row = next((d for d in call.outputs if _hides(d)), None)
            if row is None or call.path in found:
                continue
            other = self._other_settings(call, judged=row.verdict == "within_noise")
            if other:
                evidence = f"{scalars.words(other)}; {_difference(row)}"
                found[call.path] = _Blamed(call, causes.SCALAR, evidence, row)
        return [self._finding(b) for b in found.values()]

    def _other_settings(self, call: ComparedCall, judged: bool) -> list[scalars.Differing]:
        """Return the differing constants of a call, and the flags if no limit could judge it."""
        other = [] if call.is_rewritten else scalars.constants(scalars.of_call(call, self.runs))
        if call.is_operator:
            return other
        of_module = scalars.of_module(call, self.runs)
        if call.is_rewritten or call.path not in self.calls.operated:
            other += scalars.constants(of_module)
        if not judged:
            other += [each for each in scalars.flags(of_module) if each not in other]
        return other

    # -- one region -----------------------------------------------------------------------------

    def _judge(self, region: Region) -> _Blamed:
        """Return the cause of a region's error."""
        row = region.row
        own = self.calls.of(row)
        assert own is not None
        if row.site.role == "weight":
            return self._by_setting(own) or _Blamed(own, causes.WEIGHT, _difference(row), row)
        golden, mine = self.calls.both(region)
        around = next((c for c in (*mine, *golden) if self.calls.is_inside(own, c)), None)
        if row.site.role == "input" and (around or not (golden or mine)):
            return self._between(own, row, around)
        if bool(golden) != bool(mine):
            return self._one_sided(golden or mine, "golden" if golden else "mine", row)
        if golden and golden[-1] is not mine[-1]:
            return self._rewritten(golden, mine, row)
        call = mine[-1] if mine else own
        if overflow.starts(call):
            return _Blamed(call, causes.OVERFLOW, overflow.words(call), row)
        setting = self._by_setting(call)
        if setting is not None:
            evidence = f"{setting.evidence}; {_inputs(call)}; {_difference(row)}"
            return replace(setting, evidence=evidence)
        return self._run_again(call, row)

    def _between(self, call: ComparedCall, row: Difference, around: ComparedCall | None) -> _Blamed:
        """Blame the code before a call: it is given something else, made from what agrees."""
        kind, holder = kind_of(row), around or self.calls.holder(call)
        made = origin(row, self.calls)
        producers = self.calls.producers(row)
        other = None not in producers and producers[0] is not producers[1]
        if kind is not None:
            call, row = innermost(call, row, self.calls)
            words = f"{call.path} received another {input_name(row)}{made}"
            return self._placed(_Blamed(call, kind, words, row), holder)
        if call.is_operator or other or holder is None:
            words = f"the first tensor to differ is an input of {call.path}{made}"
            return self._placed(_Blamed(call, causes.INTRODUCED, words, row), holder)
        words = f"{call.path} is the first call with another input{made}"
        return self._placed(_Blamed(holder, causes.INTRODUCED, words, row), holder)

    def _one_sided(self, calls: list[ComparedCall], owner: str, row: Difference) -> _Blamed:
        """Blame a chain of calls that only one program makes."""
        call = first_of_chain(calls, self.calls)
        if call.is_operator:
            reaches = f"{row.site.role} {row.site.slot} of {row.op}"
            words = f"only {owner} calls {call.op}, and its result reaches {reaches}"
        else:
            words = f"only {owner} calls {call.path}"
        shown = next(iter(call.outputs or call.inputs), row)
        return self._placed(_Blamed(call, causes.OTHER_OPS, words, shown), self.calls.holder(call))

    def _rewritten(
        self, golden: list[ComparedCall], mine: list[ComparedCall], row: Difference
    ) -> _Blamed:
        """Blame a chain of calls that mine writes otherwise, and not equal in effect."""
        call = ComparedCall(golden[0].golden, mine[0].mine)
        call.inputs = [*mine[0].inputs]
        call.outputs = [d for c in (mine[0], golden[0]) for d in c.outputs]
        setting = self._by_setting(call)
        if setting is not None:
            return replace(setting, evidence=f"{setting.evidence}; {_difference(row)}")
        theirs, ours = (", ".join(c.op for c in calls) for calls in (golden, mine))
        words = f"golden calls {theirs} where mine calls {ours}"
        blamed = _Blamed(call, causes.OTHER_OPS, words, row)
        return self._placed(blamed, self.calls.holder(mine[0]))

    def _placed(self, b: _Blamed, holder: ComparedCall | None) -> _Blamed:
        """Add what the module around a blamed call contributes: its settings, its place."""
        if b.cause in (causes.INTRODUCED, causes.WRONG_MASK) and not b.call.one_sided:
            setting = self._by_setting(b.call)
            if setting is not None:
                evidence = f"{setting.evidence}; {_difference(setting.row)}"
                return replace(setting, evidence=evidence)
        if holder is None:
            return replace(b, evidence=f"{b.evidence}; {_difference(b.row)}")
        settings = scalars.words(scalars.of_module(holder, self.runs))
        evidence = f"{settings}; {b.evidence}" if settings else b.evidence
        cause = b.cause
        if cause == causes.INTRODUCED and settings:
            cause = causes.SCALAR
        if cause == causes.INTRODUCED and self._earlier(holder):
            cause = causes.CARRIED_OVER
        here = f"in {holder.path or 'the model'}"
        return replace(b, cause=cause, evidence=f"{here}: {evidence}; {_difference(b.row)}")

    def _by_setting(self, call: ComparedCall) -> _Blamed | None:
        """Blame a difference that is visible without computing.

        It is a weight, another operator, a scalar argument or an attribute.
        """
        row = call.bad_output or next(call.rows())
        other = self.weights.differing(call)
        if other:
            owner = self._owner(call)
            evidence = f"its parameter {', '.join(other[:_MOST_WEIGHTS])} differs"
            return _Blamed(owner, causes.WEIGHT, evidence, owner.bad_output or row)
        golden, mine = call.ops
        if call.is_operator and golden and mine and not same_operator(golden, mine):
            owner = self._owner(call)
            eps = scalars.of_module(owner, self.runs) if owner.is_rewritten else []
            if eps:
                return _Blamed(owner, causes.SCALAR, scalars.words(eps), owner.bad_output or row)
            evidence = f"it is {golden} in golden and {mine} in mine"
            return _Blamed(call, causes.OTHER_OPS, evidence, row)
        if call.is_rewritten:
            return None  # arguments and attributes of different classes can't be compared
        arguments = scalars.of_call(call, self.runs)
        if arguments:
            evidence = scalars.words([*arguments, *scalars.of_module(call, self.runs)])
            return _Blamed(call, causes.SCALAR, evidence, row)
        settings = [] if call.is_operator else scalars.of_module(call, self.runs)
        if settings and call.path not in self.calls.operated:
            return _Blamed(call, causes.SCALAR, scalars.words(settings), row)
        return None

    def _owner(self, call: ComparedCall) -> ComparedCall:
        """Return the module call around an operator, if modules were recorded."""
        if not call.is_operator:
            return call
        module, run_pass = call.module, call.key[:4]
        around = (c for c in self.calls.all if c.path == module and c.key[:4] == run_pass)
        return next((c for c in around if c.bad_output), call)

    def _run_again(self, suspect: ComparedCall, row: Difference) -> _Blamed:
        """Blame a suspect by its records, and by a replay."""
        cause, inputs = self._by_records(suspect)
        golden, mine = suspect.ops
        if suspect.is_rewritten:
            inputs = f"it is a {golden} in golden and a {mine} in mine; {inputs}"
        evidence = f"{inputs}; {_difference(row)}"
        if self.tested >= _TESTED or row.verdict != "diverged":
            return _Blamed(suspect, cause, evidence, row)
        self.tested += 1
        tested = verify.test(suspect, self.calls, self.runs)
        if tested.kind == verify.RANDOM:
            words = f"{tested.words}, and nothing else differs between the runs"
            return _Blamed(suspect, causes.NONDETERMINISTIC, words, row)
        if tested.kind == verify.PASSES_ON:
            source = None if self.made else self._before(suspect)
            return source or _Blamed(suspect, causes.INHERITED, f"{tested.words}; {evidence}", row)
        if tested.kind == verify.MAKES:
            cause = causes.INTRODUCED
        if tested.kind == verify.MAKES or tested.score:
            evidence = f"{evidence}; {tested.words}"
        return _Blamed(suspect, cause, evidence, row)

    def _by_records(self, call: ComparedCall) -> tuple[str, str]:
        """Return the cause, and a clause on the inputs, from the records alone."""
        if call.is_fused and not call.inputs:
            return causes.INTRODUCED, "its kernel reads only inputs of the graph"
        if not call.inputs:
            return causes.UNKNOWN_INPUT, "its inputs were not recorded"
        return causes.CARRIED_OVER if self._earlier(call) else causes.INTRODUCED, _inputs(call)

    def _earlier(self, call: ComparedCall) -> bool:
        """Tell whether an earlier step diverged: a cache may carry its error over."""
        s = self.start.site
        return (s.generation, s.step) < (call.key.generation, call.key.step)

    def _before(self, suspect: ComparedCall) -> _Blamed | None:
        """Find the call that made the error which the suspect only magnifies, and blame it."""
        queue, seen, best = [suspect], {id(suspect)}, None
        while queue and len(seen) <= _BEFORE:
            current = queue.pop(0)
            for row in (*current.inputs, *current.outputs):  # a module's output was made inside it
                for producer in self.calls.producers(row) if row.error else ():
                    call = self.calls.of(producer) if producer is not None else None
                    if call is None or id(call) in seen:
                        continue
                    seen.add(id(call))
                    queue.append(call)
                    if call.one_sided and call.is_operator:
                        owner = "golden" if call.mine is None else "mine"
                        alone = self._one_sided([call], owner, row)
                        words = f"{alone.evidence}; {suspect.path} only magnifies the difference"
                        return replace(alone, evidence=words)
                    setting = self._by_setting(call)
                    if setting is not None:
                        words = f"{setting.evidence}; {suspect.path} only magnifies that error"
                        return replace(setting, evidence=words)
                    tested = verify.test(call, self.calls, self.runs)
                    if tested.score > max(verify.CLEAN, best[0] if best else 0.0):
                        best = tested.score, call, tested.words
        if best is None:
            return None
        _, call, words = best
        row = max(call.outputs, key=lambda d: d.error or 0.0)
        words = f"{words}; {suspect.path} magnifies that error beyond its limit"
        return _Blamed(call, causes.INTRODUCED, words, row)

    # -- no call to blame -------------------------------------------------------------------------

    def _wrong_start(self) -> list[Finding]:
        """Return a finding if the two runs began with different inputs."""
        start, s = self.start, self.start.site
        if s.role != "input" or not is_root(start, self.differences):
            return []
        kind, name = kind_of(start), input_name(start)
        if s.step == 0 or kind is not None:
            if s.step == 0:
                text = f"the first {name} of the model differs: record both runs on the same input"
            else:
                text = f"the model received another {name}; {_difference(start)}"
            return [Finding(s.path, start.op, s.step, kind or causes.WRONG_INPUT, text, start)]
        text = f"{name} differs, though step {s.step - 1} agreed: another token was chosen "
        text += "(sampling, or a near tie)"
        return [Finding(s.path, start.op, s.step, causes.OTHER_TOKEN, text, start)]

    def _unseen(self) -> Finding:
        """Blame code that was not recorded, and advise a recording that shows more."""
        start, s = self.start, self.start.site
        call = self.calls.of(start)
        kind = kind_of(start) if s.role == "input" else None
        setting = self._by_setting(call) if call is not None and call.is_operator else None
        if setting is not None:
            return self._finding(setting)
        parent = module_of(s.path) if is_operator(s.path) else s.path.rpartition(".")[0]
        text = f"first seen at {s.role} {s.slot} of {s.path or 'the model'}; its producer was not "
        text += "recorded: record inputs and outputs"
        if kind is not None:
            return Finding(s.path, start.op, s.step, kind, f"{text}; {_difference(start)}", start)
        op = next((d.op for d in self.differences if d.site.path == parent), "")
        return Finding(parent, op, s.step, causes.BEFORE, text, start)

    # -- in words ---------------------------------------------------------------------------------

    def _finding(self, b: _Blamed) -> Finding:
        evidence = b.evidence if b.steps < 2 else f"{b.evidence}; the same in {b.steps} steps"
        call, cause = b.call, b.cause
        weights = self.weights.differing(call) if cause == causes.WEIGHT else []
        rows = [d for c in self.calls.inside(call) for d in c.rows() if d.verdict == "diverged"]
        node = self.nodes.find(call, cause, weights, rows)
        if node is not None:
            evidence, cause = f"{evidence}; {nodes.words(node)}", node.cause or cause
        script = repro.script(call, self.runs, b.cause, evidence, shows=self.start)
        kernel = self._kernel(call)
        if kernel is not None:
            computes = ", ".join(kernel.nodes)
            evidence = f"{evidence}; computed by kernel {kernel.name} (nodes {computes})"
        place = call.path, call.op, call.key.step
        golden, mine = sources.of_call(call, self.runs, node.node.key if node else None)
        return Finding(*place, cause, evidence, b.row, script, kernel, golden=golden, mine=mine)

    def _kernel(self, call: ComparedCall) -> Kernel | None:
        """Return the kernel of compiled code that computes a call: mine's, else golden's."""
        for key, side in ((call.mine, self.runs.mine), (call.golden, self.runs.golden)):
            kernel = side.kernel(key) if key is not None and call.is_operator else None
            if kernel is not None:
                return kernel
        return None


def _hides(row: Difference) -> bool:
    """Tell whether noise or a near tie may hide the effect of a setting on this row."""
    return row.verdict == "within_noise" or (row.verdict == "unmatched" and bool(row.metrics))


def _inputs(call: ComparedCall) -> str:
    """Return a clause on how far the inputs agree."""
    other = [d for d in call.inputs if d.verdict not in AGREES]
    if other:
        return f"it was called with other arguments: {slots(other)}"
    worst = max((d.error or 0.0 for d in call.inputs), default=0.0)
    if any(d.verdict == EXPECTED for d in call.inputs):
        return f"its inputs differ no more than expected ({worst:.2g})"
    if worst == 0.0:
        return "its input tensors are identical"
    return f"its inputs agree (error {worst:.2g})"


def _difference(row: Difference) -> str:
    """Return a clause on how a row differs."""
    s = row.site
    if row.verdict == "unmatched":
        return row.reason or "only one run has it"
    what = {
        ("backward", "grad"): "the gradient of parameter",
        ("backward", "output"): "the gradient of input",
        ("forward", "input"): "input",
        ("forward", "weight"): "parameter",
    }
    text = f"{what.get((s.phase, s.role), 'output')} {s.slot} differs"
    if row.error is None or not row.metrics:
        return f"{text}: {row.reason}"
    return f"{text} by {row.error:.2g} (relative L2), {_times(row)}"


def _times(row: Difference) -> str:
    if not row.limit or row.error is None or row.error == float("inf"):
        return f"limit {row.limit or 0.0:.2g}"
    if row.error < row.limit:
        return f"within its limit of {row.limit:.2g}"
    return f"{float(f'{row.error / row.limit:.2g}'):,.0f} times the limit"
