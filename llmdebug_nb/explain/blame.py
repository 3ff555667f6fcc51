"""What is to blame: the calls that made an error, as against those that received it, each with cause and evidence.

A call whose inputs agree and whose output does not has made an error, or one inside it has; so of all such calls the innermost are
suspects, and everything after them inherits. That holds for the forward and for the backward pass, each by itself: a backward pass
computes with what the forward pass left, so once that differs, only the forward pass is searched. Inside a suspect module the first row
that differs says more: what it was made of leads to an operator that one side lacks, a mask, or a weight. Last, a suspect
is called again (`verify.py`); one that only magnifies what it was given hands the blame on to those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmdebug_nb.core.findings import EXPECTED, Difference, Finding
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Kernel
from llmdebug_nb.explain import causes, nodes, overflow, repro, scalars, verify
from llmdebug_nb.explain.calls import AGREES, Call, Calls, first_divergence, same_operator
from llmdebug_nb.explain.edges import Edge, by_producer, is_root, kind_of, look_inside
from llmdebug_nb.explain.runs import Runs
from llmdebug_nb.explain.weights import Weights

_TESTED = 8  # suspects that are called again
_BEFORE = 24  # calls before a suspect that are, where it only magnifies
_LAST = (causes.INHERITED, causes.CARRIED_OVER, causes.NONDETERMINISTIC)


def findings(differences: Sequence[Difference], runs: Runs) -> list[Finding]:
    """Return what is to blame, the worst first; one Finding a path, whatever the number of steps it shows in."""
    crossed = nodes.is_crossed(differences)
    if crossed:
        differences = nodes.compared(differences)
    start = first_divergence(differences)
    search = _Search(differences, start, runs, crossed) if start is not None else None
    return search.findings() if search is not None else _settings(differences, runs)


def _settings(differences: Sequence[Difference], runs: Runs) -> list[Finding]:
    """Blame numbers that the two programs are set to differently, though noise hides what that does."""
    changed = next((d for d in differences if _hides(d)), None)
    return [] if changed is None else _Search(differences, changed, runs).settings()


@dataclass
class _Blamed:
    """A finding on its way: ``call`` is blamed for ``row``."""

    call: Call
    cause: str
    evidence: str
    row: Difference
    steps: int = 1


class _Search:
    """The search for what is to blame in one comparison."""

    def __init__(
        self,
        differences: Sequence[Difference],
        start: Difference,
        runs: Runs,
        crossed: bool = False,
    ) -> None:
        self.differences, self.start, self.runs = differences, start, runs
        self.calls = Calls(differences, start.site.phase)
        self.weights = Weights(differences, runs)
        self.nodes = nodes.Search(runs)
        self.tested = 0
        # what fusion left no trace of may have come in: such a call is only to blame if nobody else is
        self.follows = (causes.INHERITED, causes.UNKNOWN_INPUT) if crossed else (causes.INHERITED,)
        # somebody is known to have made an error: what follows from it is to blame on nobody else
        self.made = any(d.verdict == EXPECTED and d.index < start.index for d in differences)
        self.excused = self.made

    def findings(self) -> list[Finding]:
        suspects = self._suspects()
        found: dict[str, _Blamed] = {}
        steps: dict[str, set[tuple[int, int]]] = {}
        for suspect in suspects:
            steps.setdefault(suspect.path, set()).add((suspect.key.generation, suspect.key.step))
        for path, seen_in in steps.items():
            blamed = self._judge(next(s for s in suspects if s.path == path))
            blamed.steps = len(seen_in)
            found.setdefault(blamed.call.path, blamed)
            self.made = self.made or blamed.cause not in _LAST
        first = self._at_start(suspects)
        if first is not None:
            later = found.get(first.call.path)
            found[first.call.path] = (
                replace(first, steps=later.steps + 1) if later is not None else first
            )
            self.made = True
        blames = [b for b in found.values() if b.cause not in self.follows or not self.made]
        ranked = sorted(blames, key=lambda b: (b.cause in _LAST, b.row.index))
        if not any(s.inputs or s.is_fused for s in suspects):
            ranked = ranked[:1]  # without inputs, all that follows the first is as likely inherited
        found_out = [*self._wrong_start(), *(self._finding(b) for b in ranked)]
        # suspects that only magnify what is expected are none
        return found_out if found_out or (self.excused and suspects) else [self._unseen()]

    def settings(self) -> list[Finding]:
        """Return calls that were told other numbers, one a path, where what they gave is not the same bit for bit."""
        found: dict[str, _Blamed] = {}
        for call in self.calls.all:
            row = next((d for d in call.outputs if _hides(d)), None)
            if row is None or call.path in found:
                continue
            unjudged = row.verdict != "within_noise"
            other = [] if call.is_rewritten else scalars.constants(scalars.of_call(call, self.runs))
            if not call.is_operator and (call.is_rewritten or call.path not in self.calls.operated):
                other += scalars.constants(scalars.of_module(call, self.runs))
            if unjudged and not call.is_operator:
                other += [
                    each
                    for each in scalars.flags(scalars.of_module(call, self.runs))
                    if each not in other
                ]
            if other:
                found[call.path] = _Blamed(
                    call, causes.SCALAR, f"{scalars.words(other)}; {_after(row)}", row
                )
        return [self._finding(b) for b in found.values()]

    def _suspects(self) -> list[Call]:
        """Return the innermost calls that made an error, in execution order."""
        calls = self.calls.all
        makers = [c for c in calls if c.made_it or overflow.starts(c)]
        if not makers:  # then those that were called with other arguments
            makers = [call for call in calls if call.bad_output and not call.bad_input]
        paths: dict[tuple[int, int, int], set[str]] = {}
        for call in makers:
            paths.setdefault(call.key[:3], set()).add(call.path)
        inner = [
            c
            for c in makers
            if not any(p != c.path and within(p, c.path) for p in paths[c.key[:3]])
        ]
        return sorted(inner, key=lambda call: call.place)

    # -- one suspect --------------------------------------------------------------------------------

    def _judge(self, suspect: Call) -> _Blamed:
        """Say what a suspect is to blame for, or who else is."""
        row = suspect.bad_output or suspect.outputs[0]
        if overflow.starts(suspect):
            return _Blamed(suspect, causes.OVERFLOW, overflow.words(suspect), row)
        told = self._told(suspect)
        if told is not None:
            return replace(told, evidence=f"{told.evidence}; {_given(suspect)}; {_after(row)}")
        edge = look_inside(suspect, self.calls) if not suspect.is_operator else None
        if edge is not None:
            return self._at_edge(suspect, edge, row)
        return self._called_again(suspect, row)

    def _at_start(self, suspects: list[Call]) -> _Blamed | None:
        """Say what the first row that differs leads to, where no suspect explains it: what it spoils may be within noise."""
        call, s = self.calls.of(self.start), self.start.site
        if call is None or any(
            call is suspect or self.calls.is_inside(call, suspect) for suspect in suspects
        ):
            return None
        if s.role == "weight":
            return self._told(call)
        holder = self.calls.holder(call)
        edge = look_inside(holder, self.calls) if holder is not None else None
        return (
            self._at_edge(holder, edge, self.start)
            if holder is not None and edge is not None
            else None
        )

    def _told(self, call: Call) -> _Blamed | None:
        """Blame what is not computed: another weight, another scalar argument or attribute, another operator."""
        row = call.bad_output or next(call.rows())
        other = self.weights.differing(call)
        if other:
            owner = self._owner(call)
            evidence = f"its parameter {', '.join(other[:3])} differs"
            return _Blamed(owner, causes.WEIGHT, evidence, owner.bad_output or row)
        golden, mine = call.ops
        if call.is_operator and golden and mine and not same_operator(golden, mine):
            owner = self._owner(call)
            told = scalars.of_module(owner, self.runs) if owner.is_rewritten else []
            if told:
                return _Blamed(owner, causes.SCALAR, scalars.words(told), owner.bad_output or row)
            return _Blamed(
                call, causes.OTHER_OPS, f"it is {golden} in golden and {mine} in mine", row
            )
        if call.is_rewritten:
            return None  # what another class is told and set to says nothing
        given = scalars.of_call(call, self.runs)
        if given:
            more = scalars.of_module(call, self.runs)
            evidence = scalars.words([*given, *more])
            return _Blamed(call, causes.SCALAR, evidence, row)
        settings = [] if call.is_operator else scalars.of_module(call, self.runs)
        if settings and call.path not in self.calls.operated:
            return _Blamed(call, causes.SCALAR, scalars.words(settings), row)
        return None

    def _owner(self, call: Call) -> Call:
        """Return the module call that an operator runs in, where modules were recorded."""
        if not call.is_operator:
            return call
        return next(
            (
                c
                for c in self.calls.all
                if c.path == call.module and c.key[:4] == call.key[:4] and c.bad_output
            ),
            call,
        )

    def _at_edge(self, suspect: Call, edge: Edge, row: Difference) -> _Blamed:
        """Blame what the first row that differs inside a module leads to."""
        told = (
            self._told(edge.call)
            if edge.cause in (causes.INTRODUCED, causes.WRONG_MASK) and not edge.call.one_sided
            else None
        )
        if told is not None:
            return replace(told, evidence=f"{told.evidence}; {_after(told.row)}")
        settings = scalars.words(scalars.of_module(suspect, self.runs))
        evidence = f"{settings}; {edge.words}" if settings else edge.words
        cause = edge.cause
        if cause == causes.INTRODUCED and settings:
            cause = causes.SCALAR
        if cause == causes.INTRODUCED and self._earlier(suspect):
            cause = causes.CARRIED_OVER
        here = f"in {suspect.path or 'the model'}, whose inputs agree: "
        return _Blamed(edge.call, cause, f"{here}{evidence}; {_after(edge.row)}", edge.row)

    def _called_again(self, suspect: Call, row: Difference) -> _Blamed:
        """Blame a suspect by the records alone, or by calling it again."""
        cause, before = self._by_records(suspect)
        classes = suspect.ops
        if suspect.is_rewritten:
            before = f"it is a {classes[0]} in golden and a {classes[1]} in mine; {before}"
        evidence = f"{before}; {_after(row)}"
        if self.tested >= _TESTED or row.verdict != "diverged":
            return _Blamed(suspect, cause, evidence, row)
        self.tested += 1
        tested = verify.test(suspect, self.calls, self.runs)
        if tested.kind == verify.RANDOM:
            return _Blamed(
                suspect,
                causes.NONDETERMINISTIC,
                f"{tested.words}, with nothing else in which the runs differ",
                row,
            )
        if tested.kind == verify.PASSES_ON:
            source = None if self.made else self._before(suspect)
            return source or _Blamed(suspect, causes.INHERITED, f"{tested.words}; {evidence}", row)
        if tested.kind == verify.MAKES:
            cause = causes.INTRODUCED
        if tested.kind == verify.MAKES or tested.score:
            evidence = f"{evidence}; {tested.words}"
        return _Blamed(suspect, cause, evidence, row)

    def _by_records(self, call: Call) -> tuple[str, str]:
        """Return the cause, and what is to be said of the inputs, from the records alone."""
        if call.is_fused and not call.inputs:
            return causes.INTRODUCED, "its kernel reads nothing but what the graph was given"
        if not call.inputs:
            return causes.UNKNOWN_INPUT, "its inputs were not recorded"
        return causes.CARRIED_OVER if self._earlier(call) else causes.INTRODUCED, _given(call)

    def _earlier(self, call: Call) -> bool:
        """Tell whether an earlier step had diverged, so that state may have carried that over."""
        s = self.start.site
        return (s.generation, s.step) < (call.key.generation, call.key.step)

    def _before(self, suspect: Call) -> _Blamed | None:
        """Blame the call before a suspect, along the edges, that made the error that it magnifies."""
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
                    edge = by_producer(row, self.calls) if call.one_sided else None
                    if edge is not None:
                        words = f"{edge.words}; {suspect.path} magnifies the difference"
                        return _Blamed(edge.call, edge.cause, words, edge.row)
                    told = self._told(call)
                    if told is not None:
                        return replace(
                            told, evidence=f"{told.evidence}; {suspect.path} magnifies its error"
                        )
                    tested = verify.test(call, self.calls, self.runs)
                    if tested.score > max(verify.CLEAN, best[0] if best else 0.0):
                        best = tested.score, call, tested.words
        if best is None:
            return None
        _, call, words = best
        row = max(call.outputs, key=lambda d: d.error or 0.0)
        return _Blamed(
            call, causes.INTRODUCED, f"{words}; {suspect.path} magnifies that beyond the limit", row
        )

    # -- where no call is to blame --------------------------------------------------------------------

    def _wrong_start(self) -> list[Finding]:
        """Say that the runs were not given the same to begin with, where that is so."""
        start, s = self.start, self.start.site
        if s.role != "input" or not is_root(start, self.differences):
            return []
        kind = kind_of(start)
        if s.step == 0 or kind is not None:
            what = f"the model was given another {s.slot}"
            text = (
                f"{what} to start with: record both runs on the same input"
                if s.step == 0
                else f"{what}; {_after(start)}"
            )
            return [Finding(s.path, start.op, s.step, kind or causes.WRONG_INPUT, text, start)]
        text = f"{s.slot} differs, though all of step {s.step - 1} agreed: another token was chosen (sampling, or a near tie)"
        return [Finding(s.path, start.op, s.step, causes.OTHER_TOKEN, text, start)]

    def _unseen(self) -> Finding:
        """Blame what was not recorded, and say what would show it."""
        start, s = self.start, self.start.site
        call = self.calls.of(start)
        kind = kind_of(start) if s.role == "input" else None
        told = self._told(call) if call is not None and call.is_operator else None
        if told is not None:
            return self._finding(told)
        module, _, operator = s.path.partition("/")
        parent = module if operator else module.rpartition(".")[0]
        text = f"first seen at {s.role} {s.slot} of {s.path or 'the model'}; what made it was not recorded: record inputs and outputs"
        if kind is not None:
            return Finding(s.path, start.op, s.step, kind, f"{text}; {_after(start)}", start)
        op = next((d.op for d in self.differences if d.site.path == parent), "")
        return Finding(parent, op, s.step, causes.BEFORE, text, start)

    # -- in words -------------------------------------------------------------------------------------

    def _finding(self, b: _Blamed) -> Finding:
        evidence = b.evidence if b.steps < 2 else f"{b.evidence}; the same in {b.steps} steps"
        key = b.call.mine or b.call.key
        side = self.runs.mine if b.call.mine is not None else self.runs.golden
        source = side.source(key) if b.call.is_operator else None
        weights = self.weights.differing(b.call) if b.cause == causes.WEIGHT else []
        rows = [d for c in self.calls.inside(b.call) for d in c.rows() if d.verdict == "diverged"]
        node = self.nodes.find(b.call, b.cause, weights, rows)
        cause = b.cause
        if node is not None:
            evidence, cause = f"{evidence}; {nodes.words(node)}", node.cause or cause
            source = source or side.source(node.node.key)
        script = repro.script(b.call, self.runs, b.cause, evidence, shows=self.start)
        kernel = self._kernel(b.call)
        if kernel is not None:
            evidence = (
                f"{evidence}; computed by kernel {kernel.name} (nodes {', '.join(kernel.nodes)})"
            )
        return Finding(
            b.call.path, b.call.op, b.call.key.step, cause, evidence, b.row, source, script, kernel
        )

    def _kernel(self, call: Call) -> Kernel | None:
        """Return the kernel of compiled code that computes a call: in mine, or in golden where mine's is none."""
        for key, side in ((call.mine, self.runs.mine), (call.golden, self.runs.golden)):
            kernel = side.kernel(key) if key is not None and call.is_operator else None
            if kernel is not None:
                return kernel
        return None


def _hides(row: Difference) -> bool:
    """Tell whether a row differs, but not beyond noise, or can't be judged as it follows a choice at a near tie."""
    return row.verdict == "within_noise" or (row.verdict == "unmatched" and bool(row.metrics))


def _given(call: Call) -> str:
    """Say how the inputs agree."""
    alone = [
        f"{d.site.slot} ({(d.reason or '').partition(':')[0]})"
        for d in call.inputs
        if d.verdict not in AGREES
    ]
    if alone:
        return f"it was called with other arguments: {', '.join(alone[:3])}"
    worst = max((d.error or 0.0 for d in call.inputs), default=0.0)
    if any(d.verdict == EXPECTED for d in call.inputs):
        return f"its inputs differ by no more than is expected ({worst:.2g})"
    return (
        "its tensor inputs are identical"
        if worst == 0.0
        else f"its inputs agree (error {worst:.2g})"
    )


def _after(row: Difference) -> str:
    """Say how a row differs."""
    s = row.site
    if row.verdict == "unmatched":
        return row.reason or "only one run has it"
    what = {
        ("backward", "grad"): "the gradient of parameter",
        ("backward", "output"): "the gradient of input",
        ("forward", "input"): "input",
        ("forward", "weight"): "parameter",
    }
    after = f"{what.get((s.phase, s.role), 'output')} {s.slot} differs"
    if row.error is None or not row.metrics:
        return f"{after}: {row.reason}"
    return f"{after} by {row.error:.2g} (relative L2), {_times(row)}"


def _times(row: Difference) -> str:
    if not row.limit or row.error is None or row.error == float("inf"):
        return "where none is allowed" if not row.limit else f"limit {row.limit:.2g}"
    if row.error < row.limit:
        return f"within its limit of {row.limit:.2g}"
    return f"{float(f'{row.error / row.limit:.2g}'):,.0f} times the limit"
