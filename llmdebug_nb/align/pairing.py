"""Which record of one run answers to which of the other, and why.

Modules are paired first (`tree.py`, after the user's map), then their calls, then the calls of the operators in them,
as sequences (`sequence.py`), with the calls of inner modules as fixed points; never by a running counter. Then the
tensors of each two calls, and at last what is left, by value. Whatever still has no partner stays visible, with a reason.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from llmdebug_nb.align import exported, tree
from llmdebug_nb.align.calls import (
    Call,
    Numbers,
    Pass,
    modules,
    operators,
    passes,
    share_inputs,
    slots,
    telling,
)
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.reshape import Fitter
from llmdebug_nb.align.sequence import Leeway
from llmdebug_nb.align.tokens import Load
from llmdebug_nb.align.tree import FUSED, SAME_PATH, Tree, above
from llmdebug_nb.core.findings import FOLDED, INNER, INSIDE, READ, WRITTEN, Pair
from llmdebug_nb.core.records import IN_KERNEL, Node, Record

SAME_SITE = SAME_PATH
SEQUENCE = "sequence of operators"
SAME_NODE = "same node of the traced program"
SAME_VALUES = "same values"
# why a record stays alone: a closed set, together with `records.EXCUSED`
NO_PATH = "the module is not in the other run"
NO_OPERATOR = "the operator was not called there in the other run"
NO_LEVEL = "the other run recorded no operators"
NO_MODULES = "the other run recorded no modules, only operators"
NO_RANK = "the other run did not record this rank"
NO_STEP = "the other run did not record this step"
NO_PHASE = "the other run did not record this phase"
NO_CALL = "the module was called fewer times in the other run"
NO_SLOT = "the other run has no such argument or output"
LEFT_OUT = "the map leaves it out"

_SAME, _REPLACED = "the same operator", "another way to the same"
_IN_PLACE = re.compile(r"^(Aten\.\w*[A-Za-z0-9])_(\.|$)")
_Key = tuple[object, ...]
Traced = Mapping[tuple[int, int, str, str, int], str]


def pair(
    golden: Iterable[Record], mine: Iterable[Record], names: Names | None = None,
    nodes: tuple[Sequence[Node], Sequence[Node]] = ((), ()), load: tuple[Load, Load] | None = None,
    traced: tuple[Traced, Traced] = ({}, {}),
) -> list[Pair]:  # fmt: skip
    """Pair the records of two runs, in golden's execution order. A record only in ``mine`` stands after the pair that ran before it there.

    Each record is in one pair, but those that answer to several: a fused tensor, or one of a rank that others share.
    ``nodes``: the model trees, where known. ``load``: read payloads of either side, to confirm how tensors lie. ``traced``: of compiled code,
    which node of the traced program a call is, by generation, step, phase, path and call.

    Raises:
        OptionError: a rule of ``names`` that is for no module of the runs.
    """
    sides = list(golden), list(mine)
    work = _Pairing(sides, names or Names(), nodes, Fitter(sides, load), traced)
    work.run()
    return work.in_order()


class _Pairing:
    """Pairs as they are found; each record once, unless it has several partners."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], names: Names,
        nodes: tuple[Sequence[Node], Sequence[Node]], fitter: Fitter, traced: tuple[Traced, Traced],
    ) -> None:  # fmt: skip
        self._traced = traced
        self._sides, self._names, self._fitter = sides, names, fitter
        trees = [
            Tree(tree_nodes, records) for tree_nodes, records in zip(nodes, sides, strict=True)
        ]
        paths = [
            [*t.modules, *{r.site.path for r in records if "/" in r.site.path}]
            for t, records in zip(trees, sides, strict=True)
        ]
        graphs = [exported.is_graph(records) for records in sides]
        self._crossed = graphs[0] != graphs[1]  # one is an exported graph, and the other is not
        self._exported = any(graphs)
        given = names.resolve(*paths) if names.rules else {}
        self._given = given
        self._leeway = Leeway.of(
            *([record.summary.dtype for record in records] for records in sides)
        )
        self._partners = tree.partners(
            trees[0], trees[1], {p: who for p, who in given.items() if "/" not in p}, names.kind
        )
        self._of: dict[int, list[Pair]] = defaultdict(list)  # id of a record of golden -> its pairs
        self._mine: set[int] = set()

    def run(self) -> None:
        golden, mine = (passes(records) for records in self._sides)
        ranks = _ranks(golden, mine)
        for key, calls in golden.items():
            rank, *rest = key
            for other in ranks.get(rank, ()):
                theirs = mine.get((other, *rest))  # type: ignore[arg-type]
                if theirs is not None:
                    self._pass(calls, theirs)

    def _pass(self, golden: list[Call], mine: list[Call]) -> None:
        """Pair the calls of one pass over the model."""
        by_module = [
            _grouped((c.module, c) for c in calls if not c.operator) for calls in (golden, mine)
        ]
        paired: Numbers = {}, {}
        s = golden[0].records[0].site
        loose = self._fitter.relaid(s.generation, s.step)
        for path, calls in by_module[0].items():
            partners, why = self._partners.get(path, ((), ""))
            for partner in partners:
                for left, right in modules(calls, by_module[1].get(partner, [])):
                    self._calls(left, right, why)
                    if len(partners) == 1 and not why.startswith(FUSED):
                        paired[0][id(left)] = paired[1][id(right)] = len(paired[0]) + 1
                        loose |= bool(
                            left.output and right.output and left.output.shape != right.output.shape
                        )
        self._operators(golden, mine, paired, replace(self._leeway, loose=loose))
        self._by_value(golden, mine)
        if self._crossed:
            alone = self._left(golden, self._of), self._left(mine, self._mine)
            nameless = 2 * sum(not c.operator for c in alone[0]) > sum(
                not c.operator for c in golden
            )
            for one, other, why, alike in exported.by_result(*alone, self._leeway, nameless):
                if alike:
                    self._calls(one, other, why)
                elif one.made is not None and other.made is not None:
                    self._add(one.made, other.made, why)
        if self._exported:
            self._handed_on(golden, mine)

    def _left(self, calls: list[Call], done: Collection[int]) -> list[Call]:
        """Return the calls of which the first result has no partner, and which the map says nothing of."""
        return [
            c
            for c in calls
            if c.made is not None and c.made.id not in done and c.path not in self._given
        ]

    def _handed_on(self, golden: list[Call], mine: list[Call]) -> None:
        """Pair what is the same tensor as one that is paired: what a module takes that another one gave, or gives as it was given."""
        pairs = [
            pair
            for call in golden
            for record in call.records
            for pair in self._of.get(record.id, ())
        ]
        there = [
            (pair.golden, pair.mine)
            for pair in pairs
            if pair.golden is not None and pair.mine is not None
        ]
        for left, right, why in [*exported.handed_on(golden, self._of, there)]:
            self._add(left, right, why)
        for right, left, why in [*exported.handed_on(mine, self._mine, [(m, g) for g, m in there])]:
            self._add(left, right, why)

    def _operators(
        self, golden: list[Call], mine: list[Call], paired: Numbers, leeway: Leeway
    ) -> None:
        """Align the operators within each module, the calls of inner modules between them."""
        kinds = self._kind, lambda call: self._kind_of(call.op)
        golden, mine = self._by_node(golden, mine)
        sides = [_by_holder(calls) for calls in (golden, mine)]
        for path, calls in sides[0].items():
            partners, why = self._partners.get(path, ((), ""))
            theirs = (
                sides[1].get(partners[0])
                if len(partners) == 1 and not why.startswith(FUSED)
                else None
            )
            if theirs is None:
                continue
            shared = {paired[0].get(id(c)) for c in calls} & {
                paired[1].get(id(c)) for c in theirs
            } - {None}
            known: Any = tuple({id(c): n[id(c)] for c in side if n.get(id(c)) in shared}
                               for side, n in zip((calls, theirs), paired, strict=True))  # fmt: skip
            for left, right, how in operators(
                calls, theirs, kinds, known, leeway, functools.partial(self._alike, leeway)
            ):
                replaced = how == _REPLACED
                self._calls(left, right, self._why(left, right, why, replaced), replaced)

    def _by_node(self, golden: list[Call], mine: list[Call]) -> tuple[list[Call], list[Call]]:
        """Pair the operators that are one node of the traced program; return all other calls."""
        if not all(self._traced):
            return golden, mine
        sides = [
            {
                node: call
                for call in calls
                if call.operator and (node := traced.get(_node_key(call))) is not None
            }
            for calls, traced in zip((golden, mine), self._traced, strict=True)
        ]
        found = {
            node: (call, sides[1][node]) for node, call in sides[0].items() if node in sides[1]
        }
        for left, right in found.values():
            if not self._misfits(left, right):
                self._calls(left, right, SAME_NODE)
        done = {id(call) for pair in found.values() for call in pair}
        return [c for c in golden if id(c) not in done], [c for c in mine if id(c) not in done]

    def _alike(self, leeway: Leeway, golden: Call, mine: Call) -> str:
        """Return how two calls of operators answer to each other, or "" if they do not."""
        same = self._kind(golden) == self._kind_of(mine.op)
        lie_alike = leeway.loose or golden.shape == mine.shape
        if not (same and lie_alike) and self._same_output(golden, mine):
            return _REPLACED
        given_alike = lie_alike or share_inputs(golden, mine, leeway.sure)
        return _SAME if same and given_alike and not self._misfits(golden, mine) else ""

    def _kind(self, call: Call) -> str:
        """Return what an operator of golden is in mine, where the map says so; else what it is."""
        targets, _ = self._given.get(call.path, ((), ""))
        return self._kind_of(targets[0].partition("/")[2] if targets else call.op)

    def _kind_of(self, op: str) -> str:
        """Return what an operator is; in compiled code nothing is done in place, so where that takes part, ``add_`` is ``add``."""
        kind = self._names.kind(op)
        return _IN_PLACE.sub(r"\1\2", kind) if any(self._traced) else kind

    def _why(self, golden: Call, mine: Call, why: str, replaced: bool) -> str:
        if golden.path in self._given:
            return self._given[golden.path][1]
        if replaced:
            other = "given something else" if golden.op == mine.op else f"replaced by {mine.op}"
            return f"{SEQUENCE}: {golden.op} is {other}, with the same result"
        sites = [(c.path, c.records[0].site.call) for c in (golden, mine)]
        return (
            SAME_SITE
            if sites[0] == sites[1]
            else f"{SEQUENCE}; {why}"
            if why != SAME_SITE
            else SEQUENCE
        )

    def _same_output(self, golden: Call, mine: Call) -> bool:
        outputs = golden.made, mine.made
        return (
            outputs[0] is not None
            and outputs[1] is not None
            and self._fitter.agree(outputs[0], outputs[1])
        )

    def _misfits(self, golden: Call, mine: Call) -> bool:
        """Tell whether two calls of one operator give tensors of different shapes, and nothing says how one is found in the other."""
        outputs = golden.made, mine.made
        if (
            outputs[0] is None
            or outputs[1] is None
            or outputs[0].summary.shape == outputs[1].summary.shape
        ):
            return False
        return self._fitter.fit(outputs[0], outputs[1]) is None

    def _calls(self, golden: Call, mine: Call, why: str, replaced: bool = False) -> None:
        for left, right, remark in slots(golden, mine, self._names, replaced, self._leeway.sure):
            self._add(left, right, f"{why}; {remark}" if remark else why)

    def _add(self, golden: Record, mine: Record, why: str) -> None:
        a, b = golden.summary, mine.summary
        alike = a.fingerprint is not None and a.fingerprint == b.fingerprint and a.shape == b.shape
        fit = None if alike else self._fitter.fit(golden, mine, why.startswith(FUSED))
        self._of[golden.id].append(Pair(golden, mine, why, fit))
        self._mine.add(mine.id)

    def _by_value(self, golden: list[Call], mine: list[Call]) -> None:
        """Pair what is left of a pass and has the same bytes, where it is the only one of these on its side."""
        for key in (
            lambda r: (r.site.role, r.op, r.summary.fingerprint),
            lambda r: (r.site.role, r.summary.fingerprint),
        ):
            sides = []
            for calls, done in ((golden, self._of), (mine, self._mine)):
                left = (
                    r for call in calls for r in call.records if r.id not in done and telling(r)
                )
                sides.append(_grouped((key(r), r) for r in left if r.site.path not in self._given))
            for print_, records in sides[0].items():
                others = sides[1].get(print_, [])
                if len(records) == len(others) == 1:
                    self._add(records[0], others[0], SAME_VALUES)

    # -- the table ----------------------------------------------------------------------------

    def in_order(self) -> list[Pair]:
        """Return all pairs, and the records without a partner where they ran."""
        pairs = [pair for several in self._of.values() for pair in several]
        if (
            len(pairs)
            == len(self._sides[0])
            == len(self._sides[1])
            == len(self._mine)
            == len(self._of)
        ):
            return [self._of[record.id][0] for record in self._sides[0]]
        last: dict[int, int] = {}  # id of a record of mine -> golden's of the pair it is in
        for pair in pairs:
            if pair.golden and pair.mine:
                last.setdefault(pair.mine.id, pair.golden.id)
        there = [(path, other) for path, (others, _) in self._partners.items() for other in others]
        left_out = {path for path, (others, _) in self._given.items() if not others}
        golden = _Reasons(
            self._sides, 0, [p.golden for p in pairs if p.golden], _grouped(there), left_out
        )
        mine = _Reasons(
            self._sides,
            1,
            [p.mine for p in pairs if p.mine],
            _grouped((m, g) for g, m in there),
            set(),
        )
        after: dict[int | None, list[Pair]] = defaultdict(list)
        place: int | None = None
        for record in self._sides[1]:
            if record.id in last:
                place = last[record.id]
            else:
                after[place].append(Pair(None, record, mine.why(record)))
        table = after.pop(None, [])
        for record in self._sides[0]:
            table += self._of.get(record.id) or [Pair(record, None, golden.why(record))]
            table += after.pop(record.id, ())
        return table


def _node_key(call: Call) -> tuple[int, int, str, str, int]:
    s = call.records[0].site
    return s.generation, s.step, s.phase, s.path, s.call


_K = TypeVar("_K")
_V = TypeVar("_V")


def _grouped(items: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    found: dict[_K, list[_V]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found


def _by_holder(calls: list[Call]) -> dict[str, list[Call]]:
    """Return the calls right within each module: of its operators, and of the modules in it, from whatever depth."""
    called = {call.module for call in calls}
    holders: dict[str, str | None] = {}

    def holder(path: str) -> str | None:
        if path not in holders:
            holders[path] = next(
                (outer for outer in above(path) if outer != path and outer in called), None
            )
        return holders[path]

    found: dict[str, list[Call]] = {}
    for call in calls:
        path = call.module if call.operator else holder(call.module)
        if path is not None:
            found.setdefault(path, []).append(call)
    return found


def _ranks(golden: Iterable[Pass], mine: Iterable[Pass]) -> dict[int, list[int]]:
    """Return rank of golden -> ranks of mine: the same, or where one run has a single rank, all of the other's."""
    ours, theirs = (sorted({key[0] for key in keys}) for keys in (golden, mine))
    if len(ours) != len(theirs) and 1 in (len(ours), len(theirs)):
        return dict.fromkeys(ours, theirs)
    return {rank: [rank] for rank in ours}


class _Reasons:
    """Says why a record of one side has no partner on the other.

    ``partners``: module -> what answers to it there. ``left_out``: paths that the map says have no partner.
    """

    def __init__(
        self, sides: tuple[list[Record], list[Record]], side: int, paired: Iterable[Record], partners: dict[str, list[str]],
        left_out: set[str],
    ) -> None:  # fmt: skip
        sites = [record.site for record in sides[1 - side]]
        self._ranks = {s.rank for s in sites}
        self._steps = {(s.generation, s.step) for s in sites}
        self._phases = {s.phase for s in sites}
        self._levels = {"/" in s.path for s in sites}
        self._written, self._fused = (
            any(r.site.slot.startswith(IN_KERNEL) for r in sides[at]) for at in (side, 1 - side)
        )
        seen = {s.path.partition("/")[0] for s in sites}
        self._known = {module for module, others in partners.items() if not seen.isdisjoint(others)}
        self._calls = {_call(record) for record in paired}
        self._left_out = left_out
        graphs = [exported.is_graph(records) for records in (sides[side], sides[1 - side])]
        self._excuse = None if graphs[0] == graphs[1] else INNER if graphs[0] else FOLDED

    def why(self, record: Record) -> str:
        s = record.site
        module, operator, _ = s.path.partition("/")
        checks = (
            (s.path in self._left_out or module in self._left_out, LEFT_OUT),
            (len(self._ranks) > 1 and s.rank not in self._ranks, NO_RANK),
            (s.slot.startswith(IN_KERNEL), READ),
            (
                bool(operator)
                and self._fused
                and (s.generation, s.step) in self._steps
                and s.phase in self._phases,
                INSIDE,
            ),
            (
                bool(self._excuse)
                and (s.generation, s.step) in self._steps
                and s.phase in self._phases,
                self._excuse or "",
            ),
            (module not in self._known, NO_PATH),
            ((s.generation, s.step) not in self._steps, NO_STEP),
            (s.phase not in self._phases, NO_PHASE),
            (bool(operator) not in self._levels, NO_LEVEL if operator else NO_MODULES),
            (_call(record) in self._calls, NO_SLOT),
            (bool(operator) and self._written, WRITTEN),
            (bool(operator), NO_OPERATOR),
        )
        return next((reason for holds, reason in checks if holds), NO_CALL)


def _call(record: Record) -> _Key:
    s = record.site
    return s.rank, s.generation, s.step, s.phase, s.path, s.call
