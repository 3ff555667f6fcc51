"""Find the cause of a region's error.

Much is visible without computing: a weight, another operator, a scalar argument or an attribute
that differs. Else the call is replayed (`verify.py`). If it only magnifies the error of its inputs,
the blame passes to the calls before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmdebug_nb.causes import (
    causes,
    evidence_text,
    gradients,
    overflow,
    repairs,
    scalars,
    verify,
    weight_order,
)
from llmdebug_nb.causes.never_called import never_called
from llmdebug_nb.causes.root_arguments import RootArguments
from llmdebug_nb.causes.rotary_pairs import Turning
from llmdebug_nb.causes.tensor_kinds import (
    OwnRounding,
    around,
    changes_nothing,
    innermost,
    input_name,
    kind_of,
    module_on,
    near,
    origin,
)
from llmdebug_nb.causes.weights import Weights
from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import any_layer, common_ancestor, module_of, within
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall, as_one, same_operator
from llmdebug_nb.graph.flow import AGREES
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search.frontier import Frontier
from llmdebug_nb.search.narrowing import Narrowing


@dataclass
class Blamed:
    """A finding before it is put into words: ``call`` is blamed for ``row``.

    ``region``: where the two programs part. ``places``: the modules of golden and mine, if the
    code of a module is blamed and not a call. ``named``: the path that the finding has, if it is
    not that of the call. ``steps``: in how many steps. ``rule``: the name of what decided.
    ``advice``: what to do, if neither the cause nor the tensors tell it best.
    """

    call: ComparedCall
    cause: str
    evidence: str
    row: Difference
    region: Region | None = None
    places: tuple[str, str] | None = None
    named: str | None = None
    steps: int = 1
    rule: str = ""
    advice: str = ""


@dataclass(frozen=True)
class _Case:
    """A region to be judged. ``own``: the call of its row. ``golden``, ``mine``: what computes."""

    region: Region
    own: ComparedCall
    golden: list[ComparedCall]
    mine: list[ComparedCall]

    @property
    def row(self) -> Difference:
        return self.region.row

    @property
    def is_one_sided(self) -> bool:
        return bool(self.golden) != bool(self.mine)

    @property
    def both(self) -> tuple[list[ComparedCall], list[ComparedCall]]:
        """The calls of both; what only one program's records hold counts for the other, too."""
        return self.golden or self.mine, self.mine or self.golden


class Judge:
    """Judges the regions of one comparison. ``start``: the first row that differs."""

    def __init__(
        self, differences: Sequence[Difference], start: Difference, frontier: Frontier, runs: Runs
    ) -> None:
        self.start, self.runs = start, runs
        self._differences, self.calls = differences, Calls(differences, start.site.phase)
        self._missing = gradients.missing(differences, runs)
        self.weights = Weights(differences, runs)
        self._flows = frontier.flows
        self.narrowing = Narrowing(frontier.flows, frontier.origins, runs)
        self.turning = Turning(frontier.flows, runs)
        expected = (d for d in differences if d.verdict == EXPECTED)
        self._behind_tie = any(d.rule is Rule.AFTER_TIE for d in expected)
        self._tested, self._rounding = 0, OwnRounding(differences)
        self.roots = RootArguments(self.calls, frontier.flows, runs)
        self._whole: Region | None = None  # the region before it was narrowed
        self._settings_tried: dict[object, repairs.Tried] = {}
        self.made = False  # True once a call is known to have made an error

    def blamed(self, region: Region) -> Blamed:
        """Return what is to blame for a region."""
        expected, self._whole = region.expected, region
        region = replace(self.narrowing.narrowed(region), expected=expected)
        found = self.cause(region)
        self.made = self.made or not causes.about(found.cause).is_last
        evidence = f"{found.evidence}{evidence_text.of_expected(expected, self._behind_tie)}"
        return replace(found, region=found.region or region, evidence=evidence)

    def cause(self, region: Region) -> Blamed:
        """Return the cause of a region's error: what the first of `RULES` says that fits."""
        own, self._beside = self.calls.of(region.row), ""
        assert own is not None
        case = _Case(region, own, *self._acts(region))
        for rule in RULES:
            found = rule(self, case)
            if found is not None:
                evidence = f"{found.evidence}{self._beside}"
                name = found.rule or rule.__name__.strip("_")
                return replace(found, evidence=evidence, rule=name)
        return self._run_again(case)

    # -- the rules, see RULES ---------------------------------------------------------------------

    def _wrong_weight(self, case: _Case) -> Blamed | None:
        """The row is a weight's."""
        row = case.row
        if row.site.role != "weight":
            return None
        if row.metrics.get("channels_off"):  # certain, whatever noise hides of its effect
            evidence = f"its parameter {row.site.slot} differs: {row.reason}"
            return Blamed(case.own, causes.WEIGHT, evidence, row)
        return self.by_setting(case.own) or Blamed(
            case.own, causes.WEIGHT, evidence_text.of_difference(row), row
        )

    def _overflow(self, case: _Case) -> Blamed | None:
        """Infinities begin at a call."""
        if any(d.error == math.inf for d in case.region.expected):
            return None
        call = overflow.first(self.calls, case.row)
        if call is None:
            return None
        return Blamed(call, causes.OVERFLOW, overflow.words(call), call.outputs[0])

    def _argument_of_the_model(self, case: _Case) -> Blamed | None:
        """The model is given a tensor in one program alone."""
        found = self.roots.blamed(case.row)
        if found is None or (found.own and self.calls.has_operators[1]):
            self._beside = "" if found is None else f"; {found.words}"
            return None  # mine's own line, which makes something in its place, tells more
        first = self._last(case)
        evidence = f"{found.words}; first seen at {first.path or 'the model'}: "
        evidence += evidence_text.of_difference(case.row)
        cause, region = kind_of(found.row) or causes.WRONG_INPUT, Region(found.row)
        name = input_name(found.row)
        advice = f"Call the model {'without' if found.row.pair.golden is None else 'with'} {name}"
        return Blamed(found.call, cause, evidence, found.row, region, advice=f"{advice}, as golden")

    def _never_called(self, case: _Case) -> Blamed | None:
        """Golden calls a module that mine has, and does not call."""
        if case.row.site.phase != "forward":
            return None
        found = never_called(self._whole or case.region, self.calls, self._flows, self.runs)
        if found is None:
            return None
        call = self.calls.at(0, found.call.key)
        alone = ComparedCall(call.golden, None, call.inputs, call.weights, call.outputs)
        evidence = f"{found.words}; {evidence_text.of_difference(case.row)}"
        region = replace(case.region, golden=[found.call], mine=[], before=None, taken=None)
        advice = "Call it where golden does"
        return Blamed(alone, causes.OTHER_OPS, evidence, call.outputs[0], region, advice=advice)

    def _rotated_otherwise(self, case: _Case) -> Blamed | None:
        """Mine's rotation takes other channels of a head together than its weights are made for."""
        row = self.turning.wrong(case.region)
        if row is None:
            return None
        words = "mine turns other channels of a head together than golden, and the rows of"
        words = f"{words} {module_on(row, 1)} are not in that order"
        return self._misplaced(case.region, row, words)

    def _order_never_undone(self, case: _Case) -> Blamed | None:
        """A weight's rows lie in another order, and nothing of mine puts them back."""
        row = weight_order.never_undone(self._flows, case.region.entries)
        if row is None:
            return None
        words = f"{module_on(row, 1)} has golden's rows in another order"
        words = f"{words}, and mine takes none of golden's parts"
        return self._misplaced(case.region, row, words)

    def _weights_in_other_order(self, case: _Case) -> Blamed | None:
        """Weights that take one input lie in another order, as gate and up."""
        golden, mine = case.region.takes
        rows = None
        if golden is not None and mine is not None:
            rows = weight_order.in_other_order(self._flows, golden, mine)
        if rows is None:
            return None
        theirs, ours = (" and ".join(dict.fromkeys(module_on(d, n) for d in rows)) for n in (0, 1))
        words = f"the weights of {theirs} lie in another order in mine: {ours}"
        return self._misplaced(case.region, rows[0], words)

    def _unlike_other_layers(self, case: _Case) -> Blamed | None:
        """A weight that makes what a region takes lies otherwise than in most layers."""
        region = case.region
        taken = [d.pair.golden for d in region.entries if d.pair.golden is not None]
        inner = [c for call in region.golden for c in call.inner]  # code around them may take any
        taken += [r for c in inner for r in c.outputs if r.id < region.row.pair.either.id]
        row = weight_order.unlike_other_layers(self._flows[0], taken)
        if row is None:
            return None
        words = (
            f"the weight of {module_on(row, 0)} lies in {module_on(row, 1)} otherwise than it does"
        )
        return self._misplaced(region, row, f"{words} in most layers")

    def _another_number(self, case: _Case) -> Blamed | None:
        """With golden's number, mine's call gives what golden computes."""
        if case.region.numbers is None:
            return None
        theirs, ours = (calls[0] for calls in self.calls.both(case.region))
        evidence = evidence_text.of_numbers(case.region)
        evidence = f"{evidence}; {evidence_text.of_difference(case.row)}"
        return Blamed(as_one(theirs, ours), causes.SCALAR, evidence, case.row)

    def _gives_no_gradient(self, case: _Case) -> Blamed | None:
        """A module of one program is given the right gradient, and gives none of what it takes."""
        own = case.row.site
        if own.phase != "backward":
            return None
        for call in self.calls.all:
            if call.one_sided or call.is_operator or call.key[:3] != own.key[:3]:
                continue
            lost = [d for d in call.outputs if None in (d.pair.golden, d.pair.mine)]
            lost = [d for d in lost if d.site.role == "output" and d.index < case.row.index]
            if lost and call.inputs and all(d.verdict in AGREES for d in call.inputs):
                missing = self._missing.get((own.rank, own.generation, own.step))
                words = evidence_text.of_difference(case.row) if missing is None else missing.words
                return Blamed(call, causes.GRADIENT, words, lost[0])
        return None

    def _given_by_the_loss(self, case: _Case) -> Blamed | None:
        """The gradient that the model is given differs."""
        if not gradients.is_given(case.row, self._differences):
            return None
        own = case.own
        around = [c for c in self.calls.all if not c.is_operator and c.key[:4] == own.key[:4]]
        around = [c for c in around if not c.path or within(own.path, c.path)]
        root = min(around, key=lambda c: len(c.path), default=own)
        words = f"it is given another gradient; {evidence_text.of_difference(case.row)}"
        return Blamed(root, causes.WRONG_GRADIENT, words, case.row)

    def _given_from_outside(self, case: _Case) -> Blamed | None:
        """No call of the region computes: the tensor comes from its caller, or from code around."""
        given = case.row.site.role == "input" or case.region.before is not None
        if (given and not case.golden and not case.mine) or self._is_from_caller(case.region):
            return self._between(case)
        return None

    def _unrecorded_code(self, case: _Case) -> Blamed | None:
        """One program calls operators where the other one's code was not recorded."""
        if not case.is_one_sided:
            return None
        at = int(not case.golden)
        other = (case.region.golden, case.region.mine)[1 - at]
        unseen = any(call.inner for call in other) and not self.calls.has_operators[1 - at]
        return self._between(case) if unseen else None

    def _only_one_program_calls_it(self, case: _Case) -> Blamed | None:
        """Only one program makes the calls; else what the other one does there, it passes on."""
        calls = case.golden or case.mine
        if not case.is_one_sided or not calls[-1].one_sided:
            return None
        at = int(not case.golden)
        first = self._first_alone(calls, case.region, at)
        found = self._one_sided(first, ("golden", "mine")[at], case.row, case.region.before)
        told = evidence_text.of_missing(case.region, self._flows[0])
        return replace(found, evidence=told or found.evidence)

    def _given_another_tensor(self, case: _Case) -> Blamed | None:
        """Mine's call takes another tensor of golden's than golden's call does."""
        golden, mine = case.both
        if golden and mine and case.region.is_given_another(self._flows[1]):
            return self._given(golden, mine, case.row)
        return None

    def _written_otherwise(self, case: _Case) -> Blamed | None:
        """The last calls of the two programs are not one call."""
        golden, mine = case.both
        if not golden or (golden[-1] is mine[-1] and (golden[-1].same_kind or len(mine) == 1)):
            return None
        if any(call.is_operator for call in (*golden, *mine)):
            return self._rewritten(golden, mine, case.row)
        return self._between(case)

    def _other_arguments(self, case: _Case) -> Blamed | None:
        """The code around gives the call other arguments."""
        call, region = self._last(case), case.region
        outside = [any(c.inner for c in side) for side in (region.golden, region.mine)]
        if case.row.site.role == "output" and outside[0] != outside[1] and call.same_kind:
            return self._between(case)
        return None

    def _argument_alone(self, case: _Case) -> Blamed | None:
        """Mine's call gives golden's result without an argument that golden's does not take."""
        call = self._last(case)
        if call.golden is None or call.mine is None or not call.is_operator:
            return None
        theirs, ours = self._flows[0].calls[call.golden], self._flows[1].calls[call.mine]
        slots = {r.site.slot for r in theirs.inputs}
        alone = [r for r in ours.inputs if r.site.slot not in slots]
        if len(alone) != 1 or not self.narrowing.exchange.gives_golden_alone(theirs, ours):
            return None
        maker = self._flows[1].maker(alone[0])
        if maker is None:
            return None
        found, slot = self.calls.at(1, maker.key), alone[0].site.slot.removeprefix("kwargs.")
        words = (
            f"{call.path} takes {slot} in mine alone, and gives golden's result as golden calls it"
        )
        one = ComparedCall(None, maker.key, found.inputs, outputs=found.outputs)
        region = replace(case.region, golden=[], mine=[maker], before=theirs, taken=None)
        evidence = f"{words}; {evidence_text.of_difference(case.row)}"
        row = next((d for d in call.inputs if d.pair.own(1) is alone[0]), found.outputs[0])
        cause = kind_of(row) or causes.INTRODUCED
        return Blamed(one, cause, evidence, found.outputs[0], region)

    def _takes_more(self, case: _Case) -> Blamed | None:
        """Mine's call does what golden's does, and takes more than golden's takes."""
        call, row = self._last(case), case.row
        both = (d for d in call.inputs if d.pair.own(0) and d.pair.own(1) and d.pair.at_its_place)
        more = [d for d in both if evidence_text.takes_more(d)]
        if not more or not call.is_operator or call.golden is None or call.mine is None:
            return None
        theirs, ours = self._flows[0].calls[call.golden], self._flows[1].calls[call.mine]
        exchange, differs = self.narrowing.exchange, evidence_text.of_difference(row)
        if not exchange.does_the_same(theirs, ours):
            return None
        pairs = [(d.pair.golden, d.pair.mine) for d in more]
        taken = [(g, m) for g, m in pairs if g is not None and m is not None]
        maker = self._flows[1].maker(taken[0][1])
        if maker is not None and exchange.repeated_otherwise(theirs, ours, taken):
            words = f"{call.path} takes what {maker.key.path} repeats, and gives golden's result if"
            words += " that is repeated in the other way (each index, or all of them in turn)"
            found = self.calls.at(1, maker.key)
            alone = ComparedCall(None, maker.key, found.inputs, outputs=found.outputs)
            region = replace(case.region, golden=[], mine=[maker], before=theirs, taken=None)
            evidence = f"{words}; {differs}"
            return Blamed(alone, causes.INTRODUCED, evidence, found.outputs[0], region)
        if not all(d.pair.fit is not None and d.pair.fit.shared for d in more):
            return None
        words = f"{call.path} takes more in mine: {evidence_text.of_more(more)}. It does what "
        words += "golden's call does, so nothing hides from it what it takes beyond"
        return Blamed(call, causes.WRONG_MASK, f"{words}; {differs}", row)

    def _other_setting(self, case: _Case) -> Blamed | None:
        """A weight, an operator, an argument or an attribute differs."""
        call = self._last(case)
        setting = self.by_setting(call)
        if setting is None:
            return None
        evidence = f"{setting.evidence}; {evidence_text.of_inputs(call)}"
        return replace(setting, evidence=f"{evidence}; {evidence_text.of_difference(case.row)}")

    # ---------------------------------------------------------------------------------------------

    def _last(self, case: _Case) -> ComparedCall:
        """Return the call that gives a region's row."""
        _, mine = case.both
        if not mine or self.calls.is_made_around(mine[-1], case.own):
            return case.own
        return mine[-1]

    def _misplaced(self, region: Region, row: Difference, words: str) -> Blamed | None:
        """Blame a weight whose values lie in other places."""
        call = self.calls.of(row)
        evidence = f"{words}; {evidence_text.of_difference(region.row)}"
        return None if call is None else Blamed(call, causes.WEIGHT, evidence, row)

    def _is_from_caller(self, region: Region) -> bool:
        """Tell whether mine is called with the tensor, which golden may make itself."""
        record = region.row.pair.mine
        if record is None or record.site.role != "input" or region.mine:
            return False
        base = self._flows[1].base(record)
        return base.site.role == "input" and self._flows[1].call(base).around is None

    def _acts(self, region: Region) -> tuple[list[ComparedCall], list[ComparedCall]]:
        """Return the calls of a region that compute: operators, and modules with nothing inside."""
        kept = [[c.key for c in side if not c.inner] for side in (region.golden, region.mine)]
        golden, mine = self.calls.both(region)
        return (
            [c for c in golden if c.golden in kept[0] and not changes_nothing(c)],
            [c for c in mine if c.mine in kept[1] and not changes_nothing(c)],
        )

    def _between(self, case: _Case) -> Blamed:
        """Blame the code before a call: it is given something else, made from what agrees."""
        call, row, region = case.own, case.row, case.region
        kind, holder = kind_of(row), self.calls.holder(call)
        made = origin(row, self.calls)
        if kind is not None and row.site.role == "input":
            call, row = innermost(call, row, self.calls)
            words = f"{call.path} received another {input_name(row)}{made}"
            return self._placed(Blamed(call, kind, words, row), holder)
        places = self._places(region)
        calls = [c for side in (*region.golden, *region.mine) for c in (side.inner or [side])]
        unseen = any(not c.outputs and c.start < row.pair.either.id for c in calls)
        if unseen and row.site.role == "input":
            words = f"first seen at input {row.site.slot} of {call.path}; its producer was not "
            words += "recorded: record inputs and outputs"
            found = self._placed(Blamed(call, causes.BEFORE, words, row), holder)
            return replace(found, places=places)
        if call.is_operator and places[1] == call.module:
            words = f"the first tensor to differ is an input of {call.path}{made}"
            return self._placed(Blamed(call, causes.INTRODUCED, words, row), holder)
        words = f"{call.path or 'the model'} is the first call with another input{made}"
        if row.site.role != "input" and region.before is None:
            words = f"{call.path or 'the model'} is the first call with another output"
        blamed = Blamed(call if holder is None else holder, causes.INTRODUCED, words, row)
        return replace(self._placed(blamed, holder), places=places)

    def _places(self, region: Region) -> tuple[str, str]:
        """Return the innermost modules of golden and mine whose code makes a region's error.

        Only code after the last tensor that agrees counts: the rest made what agrees too.
        """
        found = []
        for at, flow in enumerate(self._flows):
            entries = ((d.pair.golden, d.pair.mine)[at] for d in region.entries)
            last = max((flow.known_by(entry) for entry in entries if entry is not None), default=-1)
            record = region.takes[at]
            makers = [] if record is None else flow.makers(record, last)
            paths = [module_of(call.key.path) for call in makers]
            found.append(common_ancestor(paths) if paths else around(record))
        return found[0], found[1]

    def _first_alone(self, calls: list[ComparedCall], region: Region, at: int) -> ComparedCall:
        """Return the first call of a chain that only one program makes, as a module if it is one.

        ``at``: 0 if that is golden, 1 if mine. Masks and the like are made on the way of what is
        computed with them.
        """
        keys = {(call.golden, call.mine)[at] for call in calls if call.one_sided}
        chain = [call for call in (region.golden, region.mine)[at] if call.key in keys]
        first = next((call for call in chain if not call.gives_indices), chain[0])
        return self.calls.at(at, self.narrowing.made_up(first, chain, at).key)

    def _one_sided(
        self, call: ComparedCall, owner: str, row: Difference, before: FlowCall | None = None
    ) -> Blamed:
        """Blame the first call of a chain that only one program makes, ``before`` another one."""
        words = f"only {owner} calls {call.op if call.is_operator else call.path}"
        words += f" before {before.key.path}" if before is not None else ""
        if call.is_operator:
            words += f", and its result reaches {row.site.role} {row.site.slot} of {row.op}"
            words += evidence_text.of_siblings(call.key, self._flows[owner == "mine"], owner)
        own = (call.golden, None) if owner == "golden" else (None, call.mine)
        alone = ComparedCall(own[0], own[1], call.inputs, call.weights, call.outputs)
        blamed = self._placed(Blamed(alone, causes.OTHER_OPS, words, row), self.calls.holder(call))
        return replace(blamed, row=next(iter(call.outputs or call.inputs), row))

    def _rewritten(
        self, golden: list[ComparedCall], mine: list[ComparedCall], row: Difference
    ) -> Blamed:
        """Blame a chain of calls that mine writes otherwise, and not equal in effect."""
        chains = golden, mine
        golden, mine = (near(side, at, row) for at, side in enumerate(chains))
        call = as_one(golden[0], mine[0])
        setting = self.by_setting(call) if len(golden) == len(mine) == 1 else None
        if setting is not None:
            evidence = f"{setting.evidence}; {evidence_text.of_difference(row)}"
            return replace(setting, evidence=evidence)
        theirs, ours = map(evidence_text.of_operators, (golden, mine), (0, 1))
        words = f"golden calls {theirs} where mine calls {ours}"
        if theirs == ours:
            words = evidence_text.of_other_tensors(*chains)
        blamed = self._placed(
            Blamed(call, causes.OTHER_OPS, words, row), self.calls.holder(mine[0])
        )
        if len(mine) == 1 < len(golden) and mine[0].mine is not None:  # the one call stands for all
            return replace(blamed, named=mine[0].mine.path)
        return blamed

    def _given(
        self, golden: list[ComparedCall], mine: list[ComparedCall], row: Difference
    ) -> Blamed:
        """Blame the code that gives a call another tensor than golden's takes."""
        call = mine[0] if mine[0] in golden else as_one(golden[0], mine[0])
        words = f"{call.path} is given another tensor"
        return self._placed(Blamed(call, causes.INTRODUCED, words, row), None)

    def _placed(self, b: Blamed, holder: ComparedCall | None) -> Blamed:
        """Add what the module around a blamed call contributes: its settings, its place."""
        if b.cause in (causes.INTRODUCED, causes.WRONG_MASK) and not b.call.one_sided:
            setting = self.by_setting(b.call, b.row)
            if setting is not None:
                evidence = f"{setting.evidence}; {evidence_text.of_difference(setting.row)}"
                return replace(setting, evidence=evidence)
        if holder is None:
            return replace(b, evidence=f"{b.evidence}; {evidence_text.of_difference(b.row)}")
        settings = self._settings_told(holder, of_module=True)
        if more := [d for d in holder.inputs if evidence_text.takes_more(d)]:
            b = replace(
                b, evidence=f"{b.evidence}; it takes more in mine: {evidence_text.of_more(more)}"
            )
        evidence = f"{settings}; {b.evidence}" if settings else b.evidence
        cause = b.cause
        if cause == causes.INTRODUCED and settings:
            cause = causes.SCALAR
        if cause == causes.INTRODUCED and self._earlier(holder):
            cause = causes.CARRIED_OVER
        drawn = verify.by_chance(holder, self.runs) if cause == causes.INTRODUCED else None
        if drawn is not None and holder.path not in self.calls.operated:
            cause, evidence = causes.NONDETERMINISTIC, f"{drawn.words}; {evidence}"
        differs = evidence_text.of_difference(b.row)
        module = b.call.module if b.call.one_sided and b.call.is_operator else holder.path
        evidence = f"in {module or 'the model'}: {evidence}; {differs}"
        return replace(b, cause=cause, evidence=evidence)

    def by_setting(self, call: ComparedCall, given: Difference | None = None) -> Blamed | None:
        """Blame a setting: a weight, another operator, a scalar argument or an attribute.

        ``given``: what the call takes that differs, which may be a weight.
        """
        row = call.bad_output or next(call.rows())
        cause, evidence = self.weights.blamed(call, given or row)
        if cause == causes.WEIGHT and self._does_no_harm(call, self.weights.differing, True):
            evidence = ""
        setting = None if evidence and cause == causes.WEIGHT else self._by_arguments(call, row)
        if setting is not None or not evidence:
            return setting
        owner = self._owner(call)
        return Blamed(owner, cause, evidence, owner.bad_output or row)

    def _by_arguments(self, call: ComparedCall, row: Difference) -> Blamed | None:
        golden, mine = call.ops
        if call.is_operator and golden and mine and not same_operator(golden, mine):
            owner = self._owner(call)
            eps = self._settings_told(owner) if owner.is_rewritten else ""
            if eps:
                return Blamed(owner, causes.SCALAR, eps, owner.bad_output or row)
            evidence = f"it is {golden} in golden and {mine} in mine"
            return Blamed(call, causes.OTHER_OPS, evidence, row)
        words = self._settings_told(call)
        return Blamed(call, causes.SCALAR, words, row) if words else None

    def _settings_told(self, call: ComparedCall, of_module: bool = False) -> str:
        """Return a clause on the settings of a call that make its error; "" if none do.

        With golden's settings, mine's call must give golden's result. Where that can't be computed,
        a call elsewhere with the same settings must not agree. ``of_module``: its attributes count
        though the code in it was recorded, too.
        """
        find = self._attributes if of_module else self._settings
        differing = find(call)
        if not differing:
            return ""
        key = call.path, tuple(each[:3] for each in differing)
        if key not in self._settings_tried:
            self._settings_tried[key] = repairs.settings(call, differing, self.runs)
        tried = self._settings_tried[key]
        if tried.mends:
            several = "s" * (len(tried.needed) > 1)
            words = scalars.words(tried.needed)
            return f"{words}, and with golden's value{several} it gives golden's result"
        if tried.mends is False or self._does_no_harm(call, find):
            return ""
        return f"{scalars.words(differing)} (not tested: {tried.why})"

    def _settings(self, call: ComparedCall) -> list[scalars.Differing]:
        """Return the settings of a call that differ; those of the code in it tell themselves."""
        given = [] if call.is_rewritten else scalars.of_call(call, self.runs)
        if call.is_operator or (call.path in self.calls.operated and not call.is_rewritten):
            return given
        return [*given, *self._attributes(call)]

    def _attributes(self, call: ComparedCall) -> list[scalars.Differing]:
        return scalars.of_module(call, self.runs)

    def _does_no_harm(
        self,
        call: ComparedCall,
        differing: Callable[[ComparedCall], Sequence[object]],
        other_layers: bool = False,
    ) -> bool:
        """Tell whether the same call agrees in another layer or step, though it differs alike.

        ``other_layers``: in these alone. Another step may not use what is wrong, as one row of an
        embedding.
        """
        own = differing(call)
        names = [each[:3] if isinstance(each, scalars.Differing) else each for each in own]
        place = any_layer(call.path), call.key.call
        for other in self.calls.all:
            if other is call or (any_layer(other.path), other.key.call) != place:
                continue
            if other_layers and other.path == call.path:
                continue
            if other.outputs and all(d.verdict in AGREES and not d.follows for d in other.outputs):
                theirs = differing(other)
                if names == [e[:3] if isinstance(e, scalars.Differing) else e for e in theirs]:
                    return True
        return False

    def _owner(self, call: ComparedCall) -> ComparedCall:
        """Return the module call around an operator, if modules were recorded."""
        if not call.is_operator:
            return call
        module, run_pass = call.module, call.key[:4]
        around = (c for c in self.calls.all if c.path == module and c.key[:4] == run_pass)
        return next((c for c in around if c.bad_output), call)

    def _run_again(self, case: _Case) -> Blamed:
        """Blame a suspect by its records, and by a replay."""
        suspect, row = self._last(case), case.row
        changed = self.weights.updates.unknown(suspect, row)
        cause, inputs = self._by_records(suspect, changed)
        golden, mine = suspect.ops
        if suspect.is_rewritten:
            inputs = f"it is a {golden} in golden and a {mine} in mine; {inputs}"
        evidence = f"{inputs}; {evidence_text.of_difference(row)}"
        late = self._tested >= constants.SUSPECTS_REPLAYED
        test = verify.by_chance if late else verify.test
        tested = test(suspect, self.runs) if row.verdict == "diverged" else None
        holder = self._gives_another(suspect)
        if holder is not None and (tested is None or tested.kind == verify.UNKNOWN):
            words = f"{suspect.path} is given another tensor (not tested); {evidence}"
            return Blamed(holder, causes.INTRODUCED, words, row, rule="given_another")
        if tested is None:
            return Blamed(suspect, cause, evidence, row, rule="by_records")
        self._tested += 1
        if tested.kind == verify.RANDOM:
            return Blamed(suspect, causes.NONDETERMINISTIC, tested.words, row, rule="random")
        if tested.kind == verify.PASSES_ON:
            source = None if self.made else self._before(suspect)
            if source is not None:
                return replace(source, rule="made_before")
            if holder is not None:
                words = f"{suspect.path} is given another tensor; {tested.words}"
                return Blamed(holder, causes.INTRODUCED, words, row, rule="given_another")
            evidence = f"{tested.words}; {evidence}"
            return Blamed(suspect, causes.INHERITED, evidence, row, rule="passes_on")
        if tested.kind == verify.MAKES and (suspect.is_operator or not changed):
            cause = causes.INTRODUCED
        if tested.kind == verify.MAKES or tested.score:
            evidence = f"{evidence}; {tested.words}"
        return Blamed(suspect, cause, evidence, row, rule="replayed")

    def _gives_another(self, suspect: ComparedCall) -> ComparedCall | None:
        """Return the module that gives a module inside of it a tensor that golden's lacks."""
        alone = [None in (d.pair.golden, d.pair.mine) for d in suspect.inputs]
        is_given = not suspect.is_operator and bool(alone) and all(alone)
        return self.calls.holder(suspect) if is_given else None

    def _by_records(self, call: ComparedCall, changed: str) -> tuple[str, str]:
        """Return the cause, and a clause on the inputs, from the records alone."""
        if call.is_fused and not call.inputs:
            return causes.INTRODUCED, "its kernel reads only inputs of the graph"
        if not call.inputs:
            return causes.UNKNOWN_INPUT, "its inputs were not recorded"
        cause = causes.CARRIED_OVER if changed or self._earlier(call) else causes.INTRODUCED
        return cause, "; ".join(filter(None, (changed, evidence_text.of_inputs(call))))

    def _earlier(self, call: ComparedCall) -> bool:
        """Tell whether an earlier step diverged: what nobody recorded may carry its error over."""
        s, is_seen = self.start.site, call.is_operator or call.path in self.calls.operated
        return not is_seen and (s.generation, s.step) < (call.key.generation, call.key.step)

    def _before(self, suspect: ComparedCall) -> Blamed | None:
        """Find the call that made the error which the suspect only magnifies, and blame it."""
        queue, seen, best = [suspect], {id(suspect)}, None
        while queue and len(seen) <= constants.CALLS_BEFORE:
            current = queue.pop(0)
            for row in (*current.inputs, *current.outputs):  # a module's output was made inside it
                for producer in self.calls.producers(row) if row.error else ():
                    call = self.calls.of(producer) if producer is not None else None
                    if call is None or id(call) in seen:
                        continue
                    seen.add(id(call))
                    queue.append(call)
                    if call.one_sided and call.is_operator and not self._rounding.is_of(call):
                        owner = "golden" if call.mine is None else "mine"
                        alone = self._one_sided(call, owner, row)
                        words = f"{alone.evidence}; {suspect.path} only magnifies the difference"
                        return replace(alone, evidence=words)
                    setting = self.by_setting(call)
                    if setting is not None:
                        words = f"{setting.evidence}; {suspect.path} only magnifies that error"
                        return replace(setting, evidence=words)
                    tested = verify.test(call, self.runs)
                    if tested.score > max(constants.OPERATOR_EPSILONS, best[0] if best else 0.0):
                        best = tested.score, call, tested.words
        if best is None:
            return None
        _, call, words = best
        row = max(call.outputs, key=lambda d: d.error or 0.0)
        words = f"{words}; {suspect.path} magnifies that error beyond its limit"
        return Blamed(call, causes.INTRODUCED, words, row)


# tried in this order: the first that fits is the cause; else the call is replayed
RULES: tuple[Callable[[Judge, _Case], Blamed | None], ...] = (
    Judge._wrong_weight,
    Judge._overflow,
    Judge._argument_of_the_model,
    Judge._never_called,
    Judge._rotated_otherwise,
    Judge._order_never_undone,
    Judge._weights_in_other_order,
    Judge._unlike_other_layers,
    Judge._another_number,
    Judge._gives_no_gradient,
    Judge._given_by_the_loss,
    Judge._given_from_outside,
    Judge._unrecorded_code,
    Judge._only_one_program_calls_it,
    Judge._given_another_tensor,
    Judge._written_otherwise,
    Judge._other_arguments,
    Judge._argument_alone,
    Judge._takes_more,
    Judge._other_setting,
)
