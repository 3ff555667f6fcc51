"""What became of each line of mine's function: equal, written otherwise, guilty, or behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.paths import is_operator, within
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.source.lines import LineState
from llmdebug_nb.source.listed_code import Code, Program

State: TypeAlias = LineState | Literal[""]
_WORST: tuple[State, ...] = ("guilty", "inherited", "equal", "rewritten")
_AGREES = ("match", "within_noise", EXPECTED)


@dataclass
class Line:
    """What was recorded on a line of mine. ``partners``: golden's tensors for its results.

    ``errors``: whether a result differs, and its error.
    """

    states: set[State] = field(default_factory=set)
    errors: list[tuple[bool, float]] = field(default_factory=list)
    partners: list[Record] = field(default_factory=list)

    @property
    def state(self) -> State:
        """The worst state of its calls; "" if nothing is known of them."""
        return next((state for state in _WORST if state in self.states), "")

    def add(self, state: State, results: Iterable[Difference]) -> None:
        """Add a call with the rows of its results."""
        self.states.add(state)
        for row in results:
            if row.pair.golden is not None:
                self.partners.append(row.pair.golden)
                if row.error is not None:
                    self.errors.append((row.verdict == "diverged", row.error))

    @property
    def error(self) -> float | None:
        """The largest error of its results; of a wrong line, of those that differ."""
        wrong = self.state in ("guilty", "inherited")
        errors = (error for differs, error in self.errors if differs or not wrong)
        return max(errors, default=None)


@dataclass
class _Call:
    """A call of mine, with the rows of its results and its inputs."""

    path: str
    number: int
    results: list[Difference] = field(default_factory=list)
    inputs: list[Difference] = field(default_factory=list)

    @property
    def state(self) -> State:
        """What its results say; "" if they have no partners."""
        if any(row.verdict == "diverged" for row in self.results):
            return "inherited"
        if any(row.verdict in _AGREES for row in self.results):
            return "equal"
        return "rewritten" if any(row.rule is Rule.REJOINED for row in self.results) else ""

    @property
    def start(self) -> int:
        return min(row.pair.mine.id for row in self.results + self.inputs if row.pair.mine)


_Placed: TypeAlias = tuple[int | None, _Call]  # with the line on which it stands


def lines_of(
    code: Code,
    program: Program,
    key: CallKey,
    differences: Sequence[Difference],
    guilty: Collection[int],
    seen: int,
) -> dict[int, Line]:
    """Return what was recorded on each line of mine's function, by line.

    ``key``: a call of the pass. ``guilty``: the lines to blame. ``seen``: the id of the record that
    shows it.
    """
    lines: dict[int, Line] = defaultdict(Line)
    wrong: set[int] = set()  # ids of results that differ, or are made of those
    calls = _calls(code, key, differences)
    placed = [(program.line_of_call(code, call.path, call.number), call) for call in calls]
    for line, call in _one_run(placed, guilty, seen):
        state = call.state
        made_of = {row.pair.mine.producer for row in call.inputs if row.pair.mine is not None}
        if not state and is_operator(call.path) and made_of - {None}:
            state = "inherited" if made_of & wrong else "rewritten"
        if state == "inherited" or (line in guilty and state != "equal"):
            wrong |= {row.pair.mine.id for row in call.results if row.pair.mine is not None}
        if line is not None:
            lines[line].add(state, call.results)
    for number in guilty:
        lines[number].states.add("guilty")
    return dict(lines)


def _one_run(placed: list[_Placed], guilty: Collection[int], seen: int) -> list[_Placed]:
    """Return the calls of that run of a function in which a line to blame ran.

    A function may run for each layer, called from the same line. Each run begins with its first
    line.
    """
    lines = [line for line, _ in placed if line is not None]
    runs: list[list[_Placed]] = [[]]
    before = lines[0] if lines else None
    for line, call in placed:
        if line is not None:
            if line == lines[0] != before:
                runs.append([])
            before = line
        runs[-1].append((line, call))
    found = (
        run
        for run in reversed(runs)
        if any(line in guilty and call.start <= seen for line, call in run)
    )
    return next(found, placed)


def _calls(code: Code, key: CallKey, differences: Sequence[Difference]) -> list[_Call]:
    """Return the calls of the pass that may stand in a function, as they began."""
    calls: dict[tuple[str, int], _Call] = {}
    for row in differences:
        record = row.pair.mine
        if record is None or record.site.role == "weight" or record.site.key[:4] != key[:4]:
            continue
        site = record.site
        if within(site.path, code.owner) and site.path != code.owner:
            call = calls.setdefault((site.path, site.call), _Call(site.path, site.call))
            (call.inputs if site.role == "input" else call.results).append(row)
    return sorted(calls.values(), key=lambda call: call.start)
