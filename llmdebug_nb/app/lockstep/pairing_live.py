"""Two programs that run side by side: each pair is measured as soon as both sides have it.

Here calls are paired by the module trees and their numbers alone. What is measured is kept for the
comparison, which pairs all tensors as it does those of dumps; values that nobody waits for are
forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from llmdebug_nb.align.modules import ModuleTree
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.align.tree import Partners, partners
from llmdebug_nb.app.lockstep.events import Puts
from llmdebug_nb.app.lockstep.side import CallAt, Ended, Side
from llmdebug_nb.app.lockstep_outcome import Graft
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.engine import Measurer
from llmdebug_nb.comparison.jobs import Outcome
from llmdebug_nb.comparison.judging import Golden, Judging
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import any_layer, is_operator, module_of
from llmdebug_nb.core.records import Record


@dataclass(frozen=True)
class Wanted:
    """What is done at a divergence: ``stop`` both programs, or ``graft`` golden's value."""

    stop: bool = False
    graft: bool = False

    @property
    def judges(self) -> bool:
        return self.stop or self.graft


@dataclass
class Rules:
    """How pairs are measured and judged, as the comparison does it."""

    names: Names
    limits: Limits | None
    custom: Custom
    known: dict[Hashable, Outcome] = field(default_factory=dict)


class Meeting:
    """``met``: how many pairs were measured. ``grafts``: where golden's values were put in.

    ``unjudged``: how many calls could not be judged when they had ended, as a value was not held.

    ``stopped``: the call after which both programs were stopped; "" if they were not. ``acted``:
    the ids of mine's tensors after which that was done, with their paths, all layers as one.
    """

    def __init__(
        self,
        golden: Side,
        mine: Side,
        rules: Rules,
        wanted: Wanted,
        passed: frozenset[str] = frozenset(),
    ) -> None:
        """``passed``: paths, those of all layers as one, at which nothing is decided."""
        self._passed, self.acted = passed, dict[int, str]()
        self._golden, self._mine, self._rules, self._wanted = golden, mine, rules, wanted
        self.met, self.unjudged, self.stopped = 0, 0, ""
        self.grafts: list[Graft] = []
        self._ended: dict[CallAt, Ended] = {}  # golden's calls that mine has not made yet
        self._over = False
        self._rows: list[Measured] = []
        self._noise = 0.0  # the largest error that was judged to be noise
        self._partners: dict[str, str] = {}
        self._modules = Modules(())
        self._measurer = Measurer(golden.peek, mine.peek, rules.custom, rules.known)
        self._nodes: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Run both programs to their ends, or to the first divergence. Raises CaptureError."""
        self._golden.begin(waits=False, strictly=self._wanted.stop)
        self._mine.begin(waits=self._wanted.graft, strictly=self._wanted.stop)
        self._advance()  # its modules are known then
        while (ended := self._mine.ended()) is not None:
            self._meet(ended)
            if self.stopped:
                return
        while self._golden.ended() is not None:
            pass

    def _meet(self, mine: Ended) -> None:
        """Measure the tensors of a call that both programs have made."""
        golden, place = self._counterpart(mine), any_layer(mine.end.path)
        if place in self._passed:
            golden = None
        rows = [] if golden is None else self._measured(golden, mine)
        self._rows += rows
        self.met += len(rows)
        puts: Puts = {}
        if self._wanted.judges and golden is not None:
            wrong = self._diverged(rows)
            self.acted |= {d.pair.mine.id: place for d in wrong if d.pair.mine is not None}
            if wrong and self._wanted.stop:
                self.stopped = _said(mine, wrong)
                # it may be ahead, and what mine has not reached is no error of mine
                self._golden.last = max(record.id for record in golden.records)
            elif wrong and mine.end.waits:
                puts = self._graft(mine, wrong)
        if mine.end.waits:
            self._mine.go_on(puts, mine.at)

    # -- pairs ----------------------------------------------------------------------------------

    def _counterpart(self, mine: Ended) -> Ended | None:
        """Run golden on until it has made a call of mine; return it, or None."""
        self._match_modules()
        generation, step, path, number = mine.at
        module, slash, operator = path.partition("/")
        partner = self._partners.get(module_of(path) if is_operator(path) else module)
        if partner is None:
            return None
        at = generation, step, partner + slash + operator, number
        ahead = 0
        while at not in self._ended and not self._over and ahead <= self._golden.window.ahead:
            ahead += self._advance()
        if not path:  # the root has ended: what is left of this step has no partner
            self._ended = {key: each for key, each in self._ended.items() if key[:2] > at[:2]
                           or key == at}  # fmt: skip
        return self._ended.pop(at, None)

    def _advance(self) -> int:
        """Run golden on to the end of its next call; return the bytes of its tensors."""
        ended = self._golden.ended()
        if ended is None:
            self._over = True
            return 0
        self._ended[ended.at] = ended
        return sum(_length(record) for record in ended.records)

    def _match_modules(self) -> None:
        """Match the modules that both programs are known to have by now."""
        sides = [side.nodes for side in (self._golden, self._mine)]
        sizes = len(sides[0]), len(sides[1])
        if sizes == self._nodes:
            return
        self._nodes = sizes
        given: Partners = {}
        if self._rules.names.rules and all(sizes):
            paths = [[node.path for node in nodes] for nodes in sides]
            given = self._rules.names.resolve(*paths)
        pairs = partners(ModuleTree(sides[0], ()), ModuleTree(sides[1], ()), given)
        single = {there: here[0] for there, (here, _) in pairs.items() if len(here) == 1}
        uses = Counter(single.values())
        self._partners = {here: there for there, here in single.items() if uses[here] == 1}
        self._modules = Modules(sides[0])

    def _measured(self, golden: Ended, mine: Ended) -> list[Measured]:
        measured = self._measurer.measured(self._pairs(golden, mine), self._modules)
        known = [each for each in measured if each.metrics is not None]
        if self._wanted.judges and len(known) < len(measured):
            self.unjudged += 1
        return known

    def _pairs(self, golden: Ended, mine: Ended) -> Iterator[Pair]:
        own = {(r.site.role, r.site.slot): r for r in mine.records}
        theirs = {(r.site.role, r.site.slot): r for r in golden.records}
        lone = [
            next(iter(outputs)) if len(outputs) == 1 else None
            for outputs in ([k for k in side if k[0] == "output"] for side in (theirs, own))
        ]
        for key, record in theirs.items():
            other = own.get(lone[1] if key == lone[0] and lone[1] else key)
            if other is not None and record.summary.shape == other.summary.shape:
                yield Pair(record, other, Reason.SAME_SITE.text, reason=Reason.SAME_SITE)

    # -- divergences ----------------------------------------------------------------------------

    def _diverged(self, rows: list[Measured]) -> list[Difference]:
        """Return the outputs among the last rows that noise does not explain.

        All rows are judged, as the noise of each comes from those before it; but only when an
        error is larger than all that were judged to be noise.
        """
        outputs = [m for m in rows if m.pair.either.site.role == "output"]
        error = max((m.error for m in outputs), default=0.0)
        if not error > constants.LOCKSTEP_GROWTH * self._noise:
            return []
        self._rows.sort(key=lambda m: _golden(m).id)
        places = {id(m): i for i, m in enumerate(self._rows)}
        judged = Judging(
            [replace(m, index=i) for i, m in enumerate(self._rows)],
            golden=Golden(self._modules.size), limits=self._rules.limits,
        ).plain  # fmt: skip
        wrong = [judged[places[id(m)]] for m in outputs]
        wrong = [d for d in wrong if d.verdict == "diverged"]
        if not wrong:
            self._noise = error
        return wrong

    def _graft(self, mine: Ended, wrong: list[Difference]) -> Puts:
        """Return golden's values for the outputs of a call, and note the graft."""
        puts, own = {}, []
        for d in wrong:
            golden, record = d.pair.golden, d.pair.mine
            if golden is None or record is None or golden.kept or record.kept:
                continue
            puts[record.site.slot] = self._golden.peek(golden)
            own.append(record.id)
        if not puts:
            return {}
        generation, step, path, number = mine.at
        error = max(d.error or 0.0 for d in wrong)
        self.grafts.append(Graft(path, generation, step, number, error, tuple(own)))
        replaced = {*own}
        self._rows = [_mended(m) if _mine(m).id in replaced else m for m in self._rows]
        return puts


def _mended(m: Measured) -> Measured:
    """Return the pair of a tensor that has golden's value by now."""
    figures = metrics.identical(_golden(m).summary, False)
    return Measured(m.index, m.pair, figures, None, True, False, m.rounded)


def _golden(m: Measured) -> Record:
    assert m.pair.golden is not None
    return m.pair.golden


def _mine(m: Measured) -> Record:
    assert m.pair.mine is not None
    return m.pair.mine


def _length(record: Record) -> int:
    return int(str(record.payload).rpartition(",")[2])


def _said(mine: Ended, wrong: list[Difference]) -> str:
    error = max(d.error or 0.0 for d in wrong)
    _, step, path, number = mine.at
    again = f" call {number}" if number else ""
    return f"{path or 'the model'} step {step}{again} (error {error:.2g})"
