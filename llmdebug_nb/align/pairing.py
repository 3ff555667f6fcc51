"""Pair the records of two runs, each pair with its reason.

Modules are paired first (the user's mapping, then `tree.py`), then their calls, then the operators
inside each module as sequences (`sequence.py`), with inner modules as fixed points; call numbers
play no part. Then the tensors of two calls are paired, and the remaining ones by value.
A record without a partner keeps a reason (`unpaired.py`).
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from llmdebug_nb.align import exported, folded, tree, unpaired
from llmdebug_nb.align.batch_layout import Load
from llmdebug_nb.align.calls import (
    Numbers,
    Operators,
    RecordedCall,
    by_parent,
    calls_by_pass,
    grouped,
    match_modules,
    match_tensors,
    pair_ranks,
    places_of,
    share_inputs,
)
from llmdebug_nb.align.matches import ValueMatch, ValueMatches, WeightMatches
from llmdebug_nb.align.modules import ModuleTree
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.padding import AtTokens
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import Reason, Why
from llmdebug_nb.align.results import ResultMatches, RoleMatches, place_results
from llmdebug_nb.align.sequence import MatchTolerance
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.paths import is_operator, operator_of
from llmdebug_nb.core.records import CallKey, Node, Record

_SAME, _REPLACED = "the same operator", "another operator with the same result"
_IN_PLACE = re.compile(r"^(Aten\.\w*[A-Za-z0-9])_(\.|$)")
Records = tuple[list[Record], list[Record]]
Elsewhere = Literal["", "golden", "mine", "both"]
Nodes = tuple[Sequence[Node], Sequence[Node]]
_NOBODY: tuple[tuple[str, ...], Why] = ((), Why(Reason.SAME_SITE))  # no module of mine
Traced = Mapping[CallKey, str]  # an operator's call, its rank set to 0 -> its traced node


def pair(
    golden: Iterable[Record],
    mine: Iterable[Record],
    names: Names | None = None,
    nodes: Nodes = ((), ()),
    load: tuple[Load, Load] | None = None,
    traced: tuple[Traced, Traced] = ({}, {}),
    rounding: float = 0.0,
) -> list[Pair]:
    """Pair the records of two runs, in golden's execution order.

    A record that only ``mine`` has comes after the pair that ran before it in mine. Each record is
    in one pair, unless it has several partners: a fused tensor, or one rank against several.

    ``nodes``: the module trees, if known. ``load``: read the values of each side, to confirm
    layouts. ``traced``: for compiled code, the nodes of the traced program. ``rounding``: the
    coarsest epsilon that a run states. Raises OptionError: a rule of ``names`` fits no module.
    """
    shown = AtTokens((list(golden), list(mine)), load)
    work = _Pairing(shown, names or Names(), nodes, traced, rounding)
    work.run()
    return folded.unfolded(shown.restored(work.in_order()), load)


class _Pairing:
    """Collects the pairs of two runs as they are found."""

    def __init__(
        self,
        shown: AtTokens,
        names: Names,
        nodes: Nodes,
        traced: tuple[Traced, Traced],
        rounding: float,
    ) -> None:
        sides, layouts = shown.sides, LayoutFinder(shown.sides, shown.load)
        self._sides, self._names, self._layouts, self._traced = sides, names, layouts, traced
        trees = [ModuleTree(own, records) for own, records in zip(nodes, sides, strict=True)]
        self._kinds: dict[str, str] = {}  # of operators, by their names
        graphs = [exported.is_graph(records) for records in sides]
        self._crossed = graphs[0] != graphs[1]  # an exported graph and a model
        self._any_graph = any(graphs)
        paths = [
            [*t.modules, *{r.site.path for r in records if is_operator(r.site.path)}]
            for t, records in zip(trees, sides, strict=True)
        ]
        self._given = names.resolve(*paths) if names.rules else {}  # by the user's mapping
        dtypes = ([record.summary.dtype for record in records] for records in sides)
        self._tolerance = MatchTolerance.of(*dtypes, stated=rounding)
        of_modules = {path: who for path, who in self._given.items() if not is_operator(path)}
        self._partners = tree.partners(trees[0], trees[1], of_modules, names.kind)
        self._summands = tree.summands(self._partners)
        self._pairs: dict[int, list[Pair]] = defaultdict(list)  # by the id of golden's record
        self._by_place = (
            (ResultMatches(), Why(Reason.RESULT)),
            (RoleMatches(layouts), Why(Reason.EARLIER)),
        )
        self._mine: set[int] = set()  # ids of mine's records that have a partner
        self._doubtful: list[tuple[Record, Record, Why]] = []  # they may belong elsewhere

    def run(self) -> None:
        golden, mine = (calls_by_pass(records) for records in self._sides)
        ranks = pair_ranks(golden, mine)
        for (rank, generation, step, phase), calls in golden.items():
            for other in ranks.get(rank, ()):
                theirs = mine.get((other, generation, step, phase))
                if theirs is not None:
                    self._pass(calls, theirs)

    def _pass(self, golden: list[RecordedCall], mine: list[RecordedCall]) -> None:
        """Pair the calls of one pass over the model."""
        s = golden[0].records[0].site
        self.__dict__.pop("_values", None)
        self._now = [r for c in golden for r in c.records], [r for c in mine for r in c.records]
        self._relaid = self._layouts.relaid(s.generation, s.step)
        paired, reshaped = self._modules(golden, mine)
        tolerance = replace(self._tolerance, any_shape=self._relaid | reshaped)
        self._operators(golden, mine, paired, tolerance)
        if self._crossed:
            self._by_result(golden, mine)
        if self._any_graph:
            self._copies(golden, mine)
        self._by_value(golden, mine)
        self._results()

    @functools.cached_property
    def _values(self) -> ValueMatches:
        """The tensors of the present pass that both runs have."""
        done = self._pairs, self._mine
        return ValueMatches(*self._now, self._layouts, self._tolerance, done)

    def _modules(
        self, golden: list[RecordedCall], mine: list[RecordedCall]
    ) -> tuple[Numbers, bool]:
        """Pair the calls of modules; return the pairs' numbers, and whether any shapes differ."""
        sides = [
            grouped((c.module, c) for c in calls if not c.operator) for calls in (golden, mine)
        ]
        paired: Numbers = {}, {}
        reshaped = False
        for path, calls in sides[0].items():
            partners, why = self._partners.get(path, _NOBODY)
            for partner in partners:
                for left, right in match_modules(calls, sides[1].get(partner, [])):
                    self._tensors(left, right, why)
                    if len(partners) == 1 and why.reason is not Reason.FUSED:
                        paired[0][id(left)] = paired[1][id(right)] = len(paired[0]) + 1
                        a, b = left.output, right.output
                        reshaped |= a is not None and b is not None and a.shape != b.shape
        return paired, reshaped

    def _by_result(self, golden: list[RecordedCall], mine: list[RecordedCall]) -> None:
        """Pair the results of an exported graph and a model that names did not pair."""
        left = self._unpaired(golden, self._pairs), self._unpaired(mine, self._mine)
        modules, open_ones = (sum(not c.operator for c in calls) for calls in (golden, left[0]))
        nameless = open_ones > constants.MAJORITY * modules
        for one, other, why, same_kind in exported.match_results(*left, self._tolerance, nameless):
            if same_kind:
                self._tensors(one, other, why)
            elif one.first_output is not None and other.first_output is not None:
                self._add(one.first_output, other.first_output, why)

    def _unpaired(
        self, calls: list[RecordedCall], paired_ids: Collection[int]
    ) -> list[RecordedCall]:
        """Return the calls whose first output has no partner and that the mapping leaves open."""
        return [
            call
            for call in calls
            if (output := call.first_output) is not None
            and output.id not in paired_ids
            and call.path not in self._given
        ]

    def _copies(self, golden: list[RecordedCall], mine: list[RecordedCall]) -> None:
        """Pair the records of modules that pass on a tensor which is paired elsewhere."""
        pairs = [
            (pair.golden, pair.mine)
            for call in golden
            for record in call.records
            for pair in self._pairs.get(record.id, ())
            if pair.golden is not None and pair.mine is not None
        ]
        for left, right, why in list(exported.match_copies(golden, self._pairs, pairs)):
            self._add(left, right, why)
        turned = [(m, g) for g, m in pairs]
        for right, left, why in list(exported.match_copies(mine, self._mine, turned)):
            self._add(left, right, why)

    def _operators(
        self,
        golden: list[RecordedCall],
        mine: list[RecordedCall],
        paired: Numbers,
        tolerance: MatchTolerance,
    ) -> None:
        """Pair the operators: those with the same result, then the rest inside each module.

        Calls of inner modules, and operators with the same result, are fixed points.
        """
        golden, mine = self._by_node(golden, mine)
        sides = [by_parent(calls) for calls in (golden, mine)]
        compare = functools.partial(self._compare, tolerance)
        kinds = self._kind, lambda call: self._kind_of(call.op)
        rest: list[tuple[list[RecordedCall], list[RecordedCall], Why]] = []
        for path, calls in sides[0].items():
            partners, why = self._partners.get(path, _NOBODY)
            if len(partners) != 1 or why.reason is Reason.FUSED or partners[0] not in sides[1]:
                continue
            theirs = sides[1][partners[0]]
            operators = Operators(calls, theirs, kinds, paired, tolerance)
            if operators.are_parallel:
                for left, right in operators.matches(compare):
                    self._tensors(left, right, self._why(left, right, why, False))
            else:
                rest.append((calls, theirs, why))
        self._settle()
        self._same_results(golden, mine, paired, compare)
        for calls, theirs, why in rest:
            operators = Operators(calls, theirs, kinds, paired, tolerance)
            for left, right in operators.matches(compare):
                self._tensors(left, right, self._why(left, right, why, False))
        self._settle()

    def _same_results(
        self,
        golden: list[RecordedCall],
        mine: list[RecordedCall],
        paired: Numbers,
        compare: Callable[[RecordedCall, RecordedCall], str],
    ) -> None:
        """Pair the operators of both runs that have the same result."""
        left = [c for c in self._unpaired(golden, self._pairs) if c.operator]
        right = {
            output.id: c
            for c in self._unpaired(mine, self._mine)
            if c.operator and (output := c.first_output) is not None
        }
        if not left or not right:
            return
        places = places_of(golden, self._kind), places_of(mine, lambda c: self._kind_of(c.op))
        for one in left:
            output = one.first_output
            assert output is not None
            others = [
                (match, right[match.mine.id])
                for match in self._values.of_golden(output)
                if match.mine.id in right
            ]
            if not others:
                continue
            home = self._partners.get(one.module, _NOBODY)[0]
            # all are about as close: a step that changes next to nothing has the values of the next
            _, other = min(
                others,
                key=lambda each: (
                    each[1].module not in home,
                    other_kind := self._kind(one) != self._kind_of(each[1].op),
                    not other_kind and places[0][id(one)] != places[1][id(each[1])],
                ),
            )
            replaced = compare(one, other) != _SAME
            why = self._why(one, other, Why(Reason.SAME_VALUES), replaced)
            self._tensors(one, other, why, replaced)
            paired[0][id(one)] = paired[1][id(other)] = len(paired[0]) + 1
            del right[other.first_output.id]  # type: ignore[union-attr]

    def _by_node(
        self, golden: list[RecordedCall], mine: list[RecordedCall]
    ) -> tuple[list[RecordedCall], list[RecordedCall]]:
        """Pair the operators that are one node of the traced program; return all other calls."""
        if not all(self._traced):
            return golden, mine
        theirs, ours = (
            {
                node: call
                for call in calls
                if call.operator
                and (node := traced.get(call.records[0].site.key._replace(rank=0))) is not None
            }
            for calls, traced in zip((golden, mine), self._traced, strict=True)
        )
        pairs = [(call, ours[node]) for node, call in theirs.items() if node in ours]
        for left, right in pairs:
            if not self._misfits(left, right):
                self._tensors(left, right, Why(Reason.SAME_NODE))
        done = {id(call) for both in pairs for call in both}
        return [c for c in golden if id(c) not in done], [c for c in mine if id(c) not in done]

    def _compare(self, tolerance: MatchTolerance, golden: RecordedCall, mine: RecordedCall) -> str:
        """Describe how two operator calls correspond; "" if they do not."""
        same_op = self._kind(golden) == self._kind_of(mine.op)
        same_shapes = tolerance.any_shape or golden.shape == mine.shape
        if not (same_op and same_shapes) and self._same_output(golden, mine):
            return _REPLACED
        same_inputs = same_shapes or share_inputs(golden, mine, tolerance.sure_digits)
        return _SAME if same_op and same_inputs and not self._misfits(golden, mine) else ""

    def _kind(self, call: RecordedCall) -> str:
        """Return mine's name of an operator of golden, if the mapping renames it."""
        if not self._given:
            return self._kind_of(call.op)
        targets, _ = self._given.get(call.path, _NOBODY)
        return self._kind_of(operator_of(targets[0]) if targets else call.op)

    def _kind_of(self, op: str) -> str:
        """Return the kind of an operator. Compiled code replaces ``add_`` by ``add``."""
        kind = self._kinds.get(op)
        if kind is None:
            kind = self._names.kind(op)
            kind = _IN_PLACE.sub(r"\1\2", kind) if any(self._traced) else kind
            self._kinds[op] = kind
        return kind

    def _why(self, golden: RecordedCall, mine: RecordedCall, why: Why, replaced: bool) -> Why:
        """Say why two operators are paired. ``why``: the reason for their modules."""
        if golden.path in self._given:
            return self._given[golden.path][1]
        if replaced:
            other = "has other inputs" if golden.op == mine.op else f"is replaced by {mine.op}"
            return Why(Reason.SEQUENCE, f": {golden.op} {other}, with the same result")
        if golden.path == mine.path and golden.records[0].site.call == mine.records[0].site.call:
            return Why(Reason.SAME_SITE)
        same = why.reason is Reason.SAME_SITE
        return Why(Reason.SEQUENCE).and_also("" if same else str(why))

    def _same_output(self, golden: RecordedCall, mine: RecordedCall) -> bool:
        a, b = golden.first_output, mine.first_output
        return a is not None and b is not None and self._layouts.agree(a, b)

    def _misfits(self, golden: RecordedCall, mine: RecordedCall) -> bool:
        """Tell whether no layout explains the shapes, or integers are nowhere near floats."""
        a, b = golden.first_output, mine.first_output
        if a is None or b is None:
            return False
        if is_floating(a.summary.dtype) != is_floating(b.summary.dtype):
            return self._is_other_number(a, b)
        if a.summary.numel != b.summary.numel:  # it may be called on some of the rows
            return self._is_guess(a, b)
        return a.summary.shape != b.summary.shape and self._layouts.fit(a, b) is None

    def _is_other_number(self, golden: Record, mine: Record) -> bool:
        """Tell whether one of two tensors holds integers, and they are nowhere near the floats."""
        if golden.site.role == "weight":
            return False
        kinds = {is_floating(record.summary.dtype) for record in (golden, mine)}
        return len(kinds) > 1 and self._layouts.unrelated(golden, mine)

    def _is_guess(self, golden: Record, mine: Record) -> bool:
        """Tell whether nothing says how one tensor lies in the other, nor that batches differ."""
        return not self._relaid and self._layouts.is_guess(golden, mine)

    def _tensors(
        self, golden: RecordedCall, mine: RecordedCall, why: Why, replaced: bool = False
    ) -> None:
        """Pair the tensors of two calls."""
        sure = self._tolerance.sure_digits
        other_code = (golden.path, golden.op) != (mine.path, mine.op)
        written_anew = other_code and golden.path not in self._given and not self._any_graph
        a, b = golden.output, mine.output
        part = golden.operator or golden.records[0].site.call != mine.records[0].site.call
        part &= a is not None and b is not None and a.numel != b.numel
        for left, right, remark in match_tensors(golden, mine, self._names, replaced, sure):
            summand = left.site.role == "output" and (golden.path, mine.path) in self._summands
            if summand or (part and self._is_guess(left, right)):
                continue
            if self._any_graph and self._is_other_number(left, right):
                continue  # a node of integers may stand for more than the module
            if written_anew:
                self._doubtful.append((left, right, why.and_also(remark)))
            else:
                self._add(left, right, why.and_also(remark))

    def _settle(self) -> None:
        """Pair the tensors of code that was written anew, but for those that belong elsewhere.

        That is searched for what has no partner, so it comes after all that need no search.
        """
        for golden, mine, why in self._doubtful:
            if not self._belongs_elsewhere(golden, mine):
                self._add(golden, mine, why)
        self._doubtful.clear()

    def _belongs_elsewhere(self, golden: Record, mine: Record) -> bool:
        """Tell whether another tensor of the other run holds one of two tensors.

        A tensor of which another one is a part may have more parts.
        """
        same = golden.summary.fingerprint == mine.summary.fingerprint
        if golden.site.role == "weight" or same:
            return False
        theirs, ours = self._values.holders(golden, 0), self._values.holders(mine, 1)
        if not theirs and not ours:
            return False
        return all(match.mine.id != mine.id for match in theirs) and all(
            match.golden.id != golden.id for match in ours
        )

    def _add(self, golden: Record, mine: Record, why: Why, elsewhere: Elsewhere = "") -> None:
        a, b = golden.summary, mine.summary
        equal = a.fingerprint is not None and a.fingerprint == b.fingerprint and a.shape == b.shape
        fit = None if equal else self._layouts.fit(golden, mine, why.reason is Reason.FUSED)
        relaid = self._relaid and golden.op == mine.op  # another operator may be wrong by itself
        fit = fit if fit is None or not relaid or self._layouts.holds(golden, mine, fit) else None
        unlike = relaid and fit is None
        pair = Pair(golden, mine, str(why), fit, elsewhere, other_batch=unlike, reason=why.reason)
        self._pairs[golden.id].append(pair)
        self._mine.add(mine.id)

    def _by_value(self, golden: list[RecordedCall], mine: list[RecordedCall]) -> None:
        """Pair the remaining records with any record of the other run that holds the same."""
        for calls, done in ((golden, self._pairs), (mine, self._mine)):
            for record in [r for c in calls for r in c.records if r.id not in done]:
                if record.site.path in self._given:
                    continue
                if record.site.role == "weight":
                    match = self._weights.only(record, calls is golden, (self._pairs, self._mine))
                else:
                    of = self._values.of_golden if calls is golden else self._values.of_mine
                    match = min(of(record), key=ValueMatch.likeness, default=None)
                if match is not None:
                    side: Elsewhere = "golden" if calls is golden else "mine"
                    if match.golden.id not in self._pairs and match.mine.id not in self._mine:
                        side = "" if record.site.role == "weight" else "both"
                    self._add(match.golden, match.mine, Why(Reason.SAME_VALUES), side)

    def _results(self) -> None:
        """Pair what the programs give elsewhere, and the integers that they take."""
        place_results(self._now, self._pairs)
        pairs = [pair for r in self._now[0] for pair in self._pairs.get(r.id, ())]
        for matches, why in self._by_place:
            for one, other in matches.match(self._now, pairs):
                if why.reason is Reason.RESULT or not self._is_guess(one, other):
                    self._add(one, other, why)

    @functools.cached_property
    def _weights(self) -> WeightMatches:
        return WeightMatches(self._sides)

    def in_order(self) -> list[Pair]:
        """Return all pairs, with the records without a partner where they ran."""
        pairs = [pair for several in self._pairs.values() for pair in several]
        sizes = {len(pairs), *map(len, (*self._sides, self._mine, self._pairs))}
        if len(sizes) == 1:
            return [self._pairs[record.id][0] for record in self._sides[0]]
        left_out = {path for path, (others, _) in self._given.items() if not others}
        partners = {path: others for path, (others, _) in self._partners.items()}
        reasons = unpaired.reasons(self._sides, pairs, partners, left_out)
        return unpaired.in_order(self._sides, self._pairs, *reasons)
