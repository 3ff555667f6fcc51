"""Switch each rule of the judgement off, one at a time, and print what changes in the answers.

    python benchmarks/rules.py [--jobs 2] [--sample N] [--most N] [--only PATTERN] [--rule NAME]
        [--slow SECONDS] [--write]

A rule is switched off from outside: its function gives what it gives where the rule has nothing to
say, see `SWITCHES`. The cases are those of ``answers.py``: engines, zoo, and ports in fp32 with
functions, without those that are held out. Programs are left out, as they record anew for each
comparison.

First each case is compared once, with all rules on; this tells in which cases a rule fired: its
function gave something else. Then each rule is switched off in at most ``--most`` cases in which it
fired. What is compared in less than ``--slow`` seconds comes alone. Which cases these are depends
on their names alone. What comes before a rule is computed once a case: pairs, measurements, rows.

A rule changes a case for the better or the worse if its grade does; else in its ``place`` (path,
line, step or number of findings, verdict), its ``cause`` (or relation) alone, or its ``rows`` alone
(counts of verdicts, coverage). "control" switches nothing off, and must change nothing.

Results are appended to ``out/rules/rules.jsonl`` as they come; what was stopped goes on, unless the
package's judgement changed. After a change to a switch, remove that file.
``--write`` writes ``rules.json``, a rule a line.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import answers  # sets the number of threads, and this checkout's package
import torch
from answering import Answer
from ports.sets import SETS

import llmdebug_nb.app.compare as comparing
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants

JOURNAL = answers.ROOT / "out" / "rules" / "rules.jsonl"
RESULTS = Path(__file__).with_name("rules.json")
OF_PORTS = ("known", "newest", "latest")
KINDS = (
    "engines/",
    "zoo/",
    *(f"ports/{name}/functions/fp32/*" for each in OF_PORTS for name in SETS[each]),
)
GRADES = ("wrong", "alarm", "late", "module", "exact", "right")  # from the worst
EXAMPLES = 4  # changes of a rule that are kept


# -- switches --------------------------------------------------------------------------------------


class Neutral(NamedTuple):
    """What a rule gives where it has nothing to say.

    ``call``: in place of a function, which is its first argument. ``fires``: whether a result of
    the function, before its arguments, is another one.
    """

    call: Callable[..., Any]
    fires: Callable[..., bool]


def gives(value: Any) -> Neutral:
    """Give a value; None, False, an empty collection for most rules."""

    def fires(result: Any, *_: Any) -> bool:
        if value is None or isinstance(value, bool):
            return result is not None if value is None else bool(result) != value
        return bool(result != value)

    return Neutral(lambda function, *_, **__: copy.copy(value), fires)


def keeps(at: int) -> Neutral:
    """Give an argument back."""

    def fires(result: Any, *given: Any) -> bool:
        return result is not given[at] and result != given[at]

    return Neutral(lambda function, *given, **_: given[at], fires)


def instead(call: Callable[..., Any], fires: Callable[..., bool] | None = None) -> Neutral:
    """Call something else, which may call the function. It fires at each call, if left out."""
    return Neutral(call, fires or (lambda *_: True))


class Switch(NamedTuple):
    """A rule that can be switched off.

    ``number``: in the list of the review. ``target``: ``module:attribute``, below the package.
    ``neutral``: what replaces it: of `judge.RULES`, the name of the member that is left out; of a
    constant, a value. ``says``: the rule in words, if the name doesn't say it. ``rule``: a constant
    is in question where a row has this rule.
    """

    number: str
    target: str
    neutral: Any = gives(None)
    says: str = ""
    rule: Rule | None = None

    @property
    def file(self) -> str:
        return f"{self.target.partition(':')[0].replace('.', '/')}.py"

    @property
    def name(self) -> str:
        if isinstance(self.neutral, str):
            return f"{self.file}: {self.neutral}"
        return f"{self.file}: {self.target.partition(':')[2]}{f' ({self.says})' * bool(self.says)}"

    @property
    def stage(self) -> int:
        """How many stages come before it, see `Kept`."""
        module = self.target.partition(":")[0]
        if module.startswith(("align", "core")):
            return 0
        if module.removeprefix("comparison.") in ("jobs", "engine", "uninitialised_memory"):
            return 1
        return 2 if module.startswith("comparison") else 3

    @property
    def place(self) -> tuple[Any, str]:
        """The module or class, and the name in it."""
        module, _, path = self.target.partition(":")
        owner: Any = import_module(f"llmdebug_nb.{module}")
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        return owner, name

    def put(self, stack: ExitStack, counts: Counter[str] | None = None) -> None:
        """Switch it off; if ``counts``, count there how often it fires instead."""
        owner, name = self.place
        old = vars(owner)[name]
        if isinstance(self.neutral, Neutral):
            new = around(old, self._counted if counts is not None else self._off, counts)
        elif isinstance(self.neutral, str):
            new = tuple(self._member(each, counts) for each in old)
            new = tuple(filter(None, new))
        elif counts is not None:
            return
        else:
            new = self.neutral
        setattr(owner, name, new)
        stack.callback(setattr, owner, name, old)

    def _off(self, function: Any, counts: Any) -> Any:
        @functools.wraps(function)
        def neutral(*given: Any, **named: Any) -> Any:
            return self.neutral.call(function, *given, **named)

        return neutral

    def _counted(self, function: Any, counts: Counter[str]) -> Any:
        @functools.wraps(function)
        def counting(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            told = found = list(found) if isinstance(found, Iterator) else found
            counts[self.name] += self.neutral.fires(told, *given)
            return iter(found) if isinstance(found, list) and is_generator(function) else found

        return counting

    def _member(self, function: Any, counts: Counter[str] | None) -> Any:
        if function.__name__ != self.neutral:
            return function
        fires = Switch(self.number, self.target, gives(None))

        @functools.wraps(function)
        def counting(*given: Any) -> Any:
            found = function(*given)
            assert counts is not None
            counts[self.name] += fires.neutral.fires(found)
            return found

        return None if counts is None else counting


def is_generator(function: Any) -> bool:
    return bool(getattr(function, "__wrapped__", function).__code__.co_flags & 0x20)


def around(old: Any, wrap: Callable[[Any, Any], Any], counts: Any) -> Any:
    """Return a function, or a property, with another function around it."""
    if isinstance(old, property):
        return property(wrap(old.fget, counts))
    if isinstance(old, functools.cached_property):
        new = functools.cached_property(wrap(old.func, counts))
        new.__set_name__(None, old.attrname)  # type: ignore[arg-type]
        return new
    return wrap(old, counts)


def without(rule: Rule) -> Neutral:
    """Leave out the readings of a pair that a rule stands for."""

    def call(function: Any, *given: Any) -> Any:
        return iter([each for each in function(*given) if each[1] is not rule])

    return Neutral(call, lambda found, *_: any(each[1] is rule for each in found))


def of_weights(function: Any, self: Any, row: Any) -> bool:
    """Take no weight for another thing than golden's."""
    golden = row.pair.golden
    is_weight = golden is not None and golden.site.role == "weight"
    return False if is_weight else function(self, row)


def unlimited(function: Any, self: Any, amplification: float, own: float) -> float:
    """Return the limit of noise without those of what diverged."""
    return float((max(amplification * self.noise, 0.0) ** 2 + own**2) ** 0.5)


def no_earlier_slot(function: Any, self: Any, what: str, of: Any) -> Any:
    return None if what == "slot" else function(self, what, of)


JUDGE, FRONTIER = "causes.judge", "search.frontier:Frontier"
NARROWING, REWRITTEN = "search.narrowing:Narrowing", "search.rewritten:Rewritten"
RESULTS_, LAYOUTS = "align.results", "align.tensor_layout"
TOLERANCE, KNOWN = "comparison.tolerance", "search.computed_elsewhere:Known"
NO, NOTHING, EMPTY = gives(False), gives(()), gives([])
CONTROL = Switch("", "core.constants:CHUNK", constants.CHUNK, "control")
SWITCHES = (
    # who is whose partner
    Switch("1", "align.padding:AtTokens._blanks"),
    Switch("3", "align.tree:_wrapper"),
    Switch("5", "align.tree:_leaves", instead(lambda *_, **__: [])),
    Switch("5", "align.tree:_inner", instead(lambda *_, **__: None)),
    Switch("6", "align.tree:_parts", NOTHING, "fused leaves"),
    Switch("6", "align.tree:_joint", EMPTY),
    Switch("7", "align.tree:_rest", instead(lambda *_, **__: None)),
    Switch("8", "align.tree:_leaves", Neutral(
        lambda leaves, *given: (leaves(*given), [])[1], lambda found, *_: bool(found)),
        "unlike ones at one place"),
    Switch("9", "align.tree:_are_alike", gives(True)),
    Switch("10", "align.pairing:_Pairing._by_node", instead(
        lambda _, self, golden, mine: (golden, mine), lambda _, self, *more: all(self._traced))),
    Switch("11", "align.calls:Operators.are_parallel", NO),
    Switch("12", "align.sequence:_moved", NO),
    Switch("13", "align.pairing:_Pairing._same_results", instead(lambda *_: None)),
    Switch("15", "core.constants:ALIGNMENT_ROUNDS", 1),
    Switch("16", "align.pairing:_Pairing._by_result", instead(lambda *_: None)),
    Switch("17", "align.pairing:_Pairing._copies", instead(lambda *_: None)),
    Switch("18", "align.pairing:_Pairing._by_value", instead(lambda *_: None)),
    Switch("19", "align.matches:WeightMatches.only"),
    Switch("20", "align.pairing:_Pairing._belongs_elsewhere", NO),
    Switch("21", "align.tree:summands", gives(set())),
    Switch("22", "align.pairing:_Pairing._is_guess", NO),
    Switch("23", LAYOUTS + ":LayoutFinder.unrelated", NO),
    Switch("24", "align.pairing:place_results", instead(lambda *_: None)),
    Switch("25", RESULTS_ + ":_Partners.of"),
    Switch("26", RESULTS_ + ":_Free.first", instead(
        no_earlier_slot, lambda found, self, what, of: what == "slot" and found is not None)),
    Switch("28", RESULTS_ + ":_Free.only"),
    Switch("28", RESULTS_ + ":_Free.last"),
    Switch("29", RESULTS_ + ":RoleMatches._as_earlier", NOTHING),
    Switch("30", RESULTS_ + ":RoleMatches._remember_sums", instead(
        lambda *_: None, lambda _, self, *more: bool(self._sums))),
    Switch("31", RESULTS_ + ":RoleMatches._counted", NOTHING),
    # how the elements lie
    Switch("32", LAYOUTS + ":_divided"),
    Switch("34", LAYOUTS + ":LayoutFinder._dequantised"),
    Switch("35", "align.rounded:Roundings.fit"),
    Switch("36", LAYOUTS + ":LayoutFinder._by_tokens"),
    Switch("37", "align.masks:may_be_longer", NO),
    Switch("38", "align.masks:are_masks", NO),
    Switch("42", "align.angles:fits", NOTHING),
    Switch("43", LAYOUTS + ":LayoutFinder._reordered", NOTHING),
    Switch("45", LAYOUTS + ":_assumed"),
    # how it is measured
    Switch("47", "comparison.uninitialised_memory:Unwritten.holds", NO),
    Switch("53", "comparison.engine:hide_as_much", NO),
    Switch("57", "comparison.jobs:_in_one_order"),
    # the verdict of a row
    Switch("60", "comparison.untouched:Untouched.reading"),
    Switch("62", "core.constants:CHANNEL_GRAINS", float("inf"), "channel off", Rule.CHANNEL_OFF),
    Switch("64", TOLERANCE + ":Judge._tie"),
    Switch("64", "comparison.used_outputs:Uses.ignores", NO),
    Switch("65", TOLERANCE + ":is_even", NO),
    Switch("66", "comparison.epsilons:Epsilons.is_odd", NO),
    Switch("68", "comparison.siblings:Member._learnt", gives(constants.AMPLIFICATION)),
    Switch("69", "comparison.siblings:Member.chance", gives(1.0)),
    Switch("70", "comparison.siblings:Member.smallness", gives(1.0)),
    Switch("71", "comparison.noise:NoisePropagation.cancelled", gives(1.0)),
    Switch("72", "comparison.weight_noise:WeightNoise.of", gives(0.0)),
    Switch("72", "comparison.weight_noise:WeightNoise.any_in", NO),
    Switch("73", "comparison.noise:Level.limit", instead(
        unlimited, lambda _, self, *more: self.cap > 0.0), "cap"),
    Switch("73", TOLERANCE + ":Judge._is_followed", NO),
    Switch("75", "core.constants:GLUE_FLOORS", 1.0, "hidden modules"),
    Switch("76", TOLERANCE + ":unseen", gives(0.0)),
    Switch("77", "comparison.unknown:Unknown.readings", without(Rule.NO_TOKEN), "no token"),
    Switch("78", "comparison.unknown:Unknown.readings", without(Rule.SORTED), "sorted"),
    Switch("79", "comparison.unknown:Unknown.readings", without(Rule.SAME_PLACES), "same places"),
    Switch("80", "comparison.unknown:Unknown._is_mixed", NO),
    Switch("81", "comparison.unknown:Unknown._is_of_whole", NO),
    Switch("82", TOLERANCE + ":_alone", keeps(0)),
    Switch("83", "comparison.noise:NoisePropagation.is_outermost", NO),
    Switch("", TOLERANCE + ":Judge._of_producer"),
    # which rows count
    Switch("85", "causes.onnx_nodes:is_crossed", NO),
    Switch("86", "search.frontier:reordered", gives(set())),
    Switch("87", FRONTIER + "._is_crossed", NO),
    Switch("88", FRONTIER + "._agrees", NO),
    Switch("90", FRONTIER + "._comes_to_agree", NO),
    Switch("91", FRONTIER + "._is_half_constant", NO),
    Switch("92", FRONTIER + ".is_dubious", instead(
        of_weights, lambda found, self, row: bool(
            found and row.pair.golden and row.pair.golden.site.role == "weight")), "of weights"),
    Switch("87-92", FRONTIER + "._refuted", EMPTY),
    Switch("94", FRONTIER + "._handed_on", gives(set())),
    Switch("97", FRONTIER + ".is_constant", NO),
    Switch("100", "search.frontier:_in_any_layer", instead(
        lambda _, record: record.id), "same two in another layer"),
    Switch("101", FRONTIER + "._is_made", NO),
    Switch("100-101", FRONTIER + "._harmless", EMPTY),
    Switch("102", "graph.flow:Flow.is_lost", NO),
    Switch("103", FRONTIER + "._is_passed_on", NO),
    Switch("104", "search.frontier:_passes_on", NO),
    Switch("", "graph.flow:Flow._copied"),
    Switch("", "graph.flow:Flow._whole"),
    # which calls of a region
    Switch("106", NARROWING + "._given"),
    Switch("107", NARROWING + "._hidden"),
    Switch("108", REWRITTEN + ".by_number"),
    Switch("109-111", NARROWING + "._backwards", keeps(1)),
    Switch("110", "search.swap_tensors:Exchange._gives_golden", NO),
    Switch("112", NARROWING + "._around", keeps(1)),
    Switch("113", KNOWN + ".exactly", NO),
    Switch("113", KNOWN + ".apart", NO),
    Switch("113", KNOWN + ".moves", NO),
    Switch("113", KNOWN + ".same", NO),
    Switch("113", "search.value_sets:Values.pad", NO),
    Switch("113", "search.value_sets:Values.cover", NO),
    Switch("114", REWRITTEN + "._not_rejoining", instead(
        lambda _, self, calls, known, *more: [c for c in calls if c not in known],
        lambda found, self, calls, known, *more: found != [c for c in calls if c not in known])),
    Switch("116", REWRITTEN + "._parting", instead(
        lambda _, self, golden, mine: (golden, mine),
        lambda found, self, golden, mine: found[0] != golden)),
    Switch("117", REWRITTEN + "._given_another_table"),
    Switch("118", REWRITTEN + "._other_weight"),
    Switch("119", REWRITTEN + "._given_another"),
    Switch("120", REWRITTEN + "._by_entries"),
    Switch("121", REWRITTEN + "._tables", EMPTY),
    Switch("122", REWRITTEN + "._first_lines", keeps(1)),
    Switch("123", NARROWING + "._chosen", keeps(1)),
    Switch("113-124", NARROWING + "._rewritten"),
    Switch("137", NARROWING + ".made_up", keeps(1)),
    # why
    Switch("125", "findings.blame:_Search._tied"),
    *(
        Switch(number, JUDGE + ":RULES", name)
        for number, name in (
            ("126", "_wrong_weight"),
            ("128", "_overflow"),
            ("176", "_argument_of_the_model"),
            ("177", "_never_called"),
            ("178", "_gives_no_gradient"),
            ("181", "_given_by_the_loss"),
            ("129", "_rotated_otherwise"),
            ("130", "_order_never_undone"),
            ("131", "_weights_in_other_order"),
            ("132", "_unlike_other_layers"),
            ("133", "_another_number"),
            ("134", "_given_from_outside"),
            ("136", "_unrecorded_code"),
            ("137", "_only_one_program_calls_it"),
            ("139", "_given_another_tensor"),
            ("140", "_written_otherwise"),
            ("141", "_other_arguments"),
            ("179", "_takes_more"),
            ("180", "_argument_alone"),
            ("147", "_other_setting"),
        )
    ),
    Switch("140", JUDGE + ":near", keeps(0)),
    Switch("140", JUDGE + ":changes_nothing", NO),
    Switch("138", "causes.evidence_text:of_missing", gives("")),
    Switch("142", "causes.weights:Weights._words", gives("")),
    Switch("143", "causes.updates:Updates.blamed", Neutral(
        lambda *_: ("", ""), lambda found, *_: bool(found[1]))),
    Switch("144-146", JUDGE + ":Judge._by_arguments"),
    Switch("146", "causes.scalars:of_call", EMPTY),
    Switch("147", "causes.scalars:of_module", EMPTY),
    Switch("147", JUDGE + ":Judge._owner", keeps(1)),
    Switch("148", JUDGE + ":Judge._earlier", NO),
    Switch("150", "causes.verify:by_chance"),
    Switch("151", "causes.verify:test", instead(
        lambda *_: import_module("llmdebug_nb.causes.verify").Tested("unknown", ""))),
    Switch("152", JUDGE + ":Judge._before"),
    Switch("154", "causes.tensor_kinds:OwnRounding.is_of", NO),
    Switch("", JUDGE + ":innermost", instead(
        lambda _, call, row, calls: (call, row), lambda found, call, *_: found[0] is not call)),
    Switch("", "graph.compared_calls:Calls.is_made_around", NO),
    # which finding first
    Switch("155", "causes.tensor_kinds:OtherTokens.reach", NO),
    Switch("156", "findings.blame:_known", instead(lambda _, blamed, found: id(blamed))),
    Switch("159", FRONTIER + ".is_vague", NO),
    Switch("160", FRONTIER + ".is_sure", gives(True)),
    Switch("162", "findings.blame:_Search._wrong_start", EMPTY),
    Switch("", "search.value_sets:is_reordered", NO, "order of regions"),
    # what the search says back to the rows
    Switch("165", "findings.verdicts:_asks_for_padding", NO),
    Switch("166", "findings.verdicts:_may_be_noise", NO),
    Switch("167", FRONTIER + ".rejoins", EMPTY),
    Switch("170", "findings.blame:equal_in_effect", NOTHING),
    Switch("172", "findings.blame:_settings", EMPTY),
)  # fmt: skip
BY_NAME = {each.name: each for each in (CONTROL, *SWITCHES)}


# -- comparing a case many times -------------------------------------------------------------------


class Kept:
    """What the first comparison of a case computed: what a later one needs not, it takes from here.

    The stages are pairing, measuring, judging, and the search.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    @contextmanager
    def used(self, stages: int = 0) -> Iterator[None]:
        """Take the results of so many stages from here; keep the others, if there are none."""
        with ExitStack() as stack:
            for stage, (owner, name) in enumerate(
                ((comparing, "pair"), (engine._Plan, "measured"), (engine, "judging"))
            ):
                old = vars(owner)[name]
                setattr(owner, name, self._taken(stage, old, stage < stages))
                stack.callback(setattr, owner, name, old)
            yield

    def _taken(self, stage: int, function: Any, is_known: bool) -> Any:
        @functools.wraps(function)
        def taken(*given: Any, **named: Any) -> Any:
            if not is_known:
                found = function(*given, **named)
                known = self._kept.setdefault(stage, found)
                if stage == 2 and known is found:
                    self._kept[stage] = copy.copy(found), found.plain
                return found
            if stage < 2:
                return self._kept[stage]
            judging, plain = self._kept[stage]
            judging = copy.copy(judging)
            judging.__dict__["plain"] = plain
            return judging

        return taken


def fired(counts: Mapping[str, int], answer: Answer) -> list[str]:
    """Return the names of the switches that a case is about."""
    rules = answer.get("rules", {})

    def may(each: Switch) -> bool:
        if isinstance(each.neutral, Neutral | str):
            return bool(counts.get(each.name))
        return each.rule is None or str(each.rule) in rules

    return [CONTROL.name, *(each.name for each in SWITCHES if may(each))]


def work(task: answers.Task, wanted: Mapping[str, list[str] | None], slow: float) -> int:
    """Compare the cases of a task. ``wanted``: by case the names of switches, None to trace all."""
    torch.set_num_threads(1)
    for name, ask in answers.KINDS[task.kind].asked(task):
        case = f"{task.name}/{name}"
        if case not in wanted:
            continue
        names, kept, counts = wanted[case], Kept(), Counter[str]()
        with ExitStack() as stack:
            for each in SWITCHES if names is None else ():
                each.put(stack, counts)
            stack.enter_context(kept.used())
            with _Recorded(ask) as start:
                base = answers.tried(ask)
        row = {"case": case, "stamp": answers.stamp(task.kind), "answer": base}
        if names is None:
            took = time.process_time() - start()
            _add(row | {"fired": fired(counts, base), "seconds": round(took, 2)})
            continue
        for each in map(BY_NAME.__getitem__, names):
            with ExitStack() as stack:
                each.put(stack)
                stack.enter_context(kept.used(each.stage))
                _add(row | {"answer": base, "switch": each.name, "other": answers.tried(ask)})
    return len(wanted)


class _Recorded:
    """Tells when a case began to compare: what is before that is recording."""

    def __init__(self, ask: object) -> None:
        self._start = time.process_time()

    def __enter__(self) -> Callable[[], float]:
        self._compare = comparing.Comparison.report

        @functools.wraps(self._compare)
        def report(*given: Any, **named: Any) -> Any:
            self._start = time.process_time()
            return self._compare(*given, **named)

        comparing.Comparison.report = report  # type: ignore[method-assign]
        return lambda: self._start

    def __exit__(self, *_: object) -> None:
        comparing.Comparison.report = self._compare  # type: ignore[method-assign]


def _add(row: dict[str, Any]) -> None:
    JOURNAL.parent.mkdir(parents=True, exist_ok=True)
    with JOURNAL.open("ab", buffering=0) as file:  # at once: several processes write
        file.write((json.dumps(row) + "\n").encode())


def read() -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], dict[str, Any]]]:
    """Return what was traced, by case, and what was switched off, by switch and case."""
    traced, tried = {}, {}
    lines = JOURNAL.read_text(encoding="utf-8").splitlines() if JOURNAL.exists() else []
    for row in map(json.loads, lines):
        if row["stamp"] != answers.stamp(row["case"].partition("/")[0]):
            continue
        if "switch" in row:
            tried[row["switch"], row["case"]] = row
        else:
            traced[row["case"]] = row
    return traced, tried


# -- which cases -----------------------------------------------------------------------------------


def shuffled(names: Iterable[str]) -> list[str]:
    """Return names in an order that depends on nothing but them."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def plan(
    traced: Mapping[str, Mapping[str, Any]], most: int, slow: float, only: list[str]
) -> dict[str, list[str]]:
    """Return the switches to be tried, by case."""
    cases: dict[str, list[str]] = defaultdict(list)
    for each in (CONTROL, *SWITCHES):
        if only and not any(text in each.name for text in only):
            continue
        about = [
            case
            for case in shuffled(traced)
            if each.name in traced[case]["fired"] and traced[case]["seconds"] <= slow
        ]
        for case in about[:most]:
            cases[case].append(each.name)
    return cases


def run(
    tasks: list[answers.Task], wanted: Mapping[str, list[str] | None], jobs: int, slow: float
) -> None:
    left = [
        task._replace(cases=cases)
        for task in tasks
        if (cases := tuple(case for case in task.cases if f"{task.name}/{case}" in wanted))
    ]
    start, done = time.perf_counter(), 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        about = ({name: wanted[name] for name in task.full()} for task in left)
        for each in as_completed(
            [pool.submit(work, task, some, slow) for task, some in zip(left, about, strict=True)]
        ):
            done += each.result()
            took = (time.perf_counter() - start) / 60
            print(f"{done} of {len(wanted)} cases, {took:.1f} min", file=sys.stderr, flush=True)


# -- the table -------------------------------------------------------------------------------------


def effect(case: str, old: Answer, new: Answer) -> tuple[str, list[str]]:
    """Return what switching a rule off did to a case, and the changes in words."""
    found = answers.changes(case, old, new)
    words = [str(each) for each in found]
    kinds = {each.kind for each in found} - {"moved", "figures"}
    if not kinds:
        return "same", words
    grades = [answer.get("grade", "") for answer in (old, new)]
    if grades[0] != grades[1] and set(grades) <= set(GRADES):
        worse = GRADES.index(grades[1]) < GRADES.index(grades[0])
        return "worse" if worse else "better", words
    if kinds <= {"rows", "coverage"}:
        return "rows", words
    return "cause" if kinds <= {"cause", "relation", "rows", "coverage"} else "place", words


EFFECTS = ("worse", "better", "place", "cause", "rows", "same")


def results(
    traced: Mapping[str, Mapping[str, Any]], tried: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return of each rule in how many cases it fired, and what it changed."""
    found = {}
    for each in (CONTROL, *SWITCHES):
        rows = {case: row for (name, case), row in tried.items() if name == each.name}
        effects = {
            case: effect(case, row["answer"], row["other"]) for case, row in sorted(rows.items())
        }
        counts = Counter(kind for kind, _ in effects.values())
        by_weight = sorted(effects.values(), key=lambda each: EFFECTS.index(each[0]))
        told = [
            next((each for each in words if ": rows" not in each), words[0])
            for _, words in by_weight
            if words
        ]
        found[each.name] = {
            "number": each.number,
            "fired": sum(each.name in row["fired"] for row in traced.values()),
            "tried": len(rows),
            **{kind: counts[kind] for kind in EFFECTS if counts[kind]},
            "changes": told[:EXAMPLES],
        }
    return found


def table(found: Mapping[str, Mapping[str, Any]], cases: int) -> str:
    """Return a line for each rule, those that decide most first, as Markdown."""
    head = ["rule", "number", "fired", "tried", *EFFECTS]
    lines = [head, ["---"] * len(head)]
    for name, row in sorted(
        found.items(), key=lambda each: [-each[1].get(kind, 0) for kind in EFFECTS[:-1]]
    ):
        says = [str(row.get(kind, "")) for kind in ("number", "fired", "tried", *EFFECTS)]
        lines.append([name, *says])
    return "\n".join([*(f"|{'|'.join(line)}|" for line in lines), f"{cases} cases were traced"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes; 0 tells what is known")
    parser.add_argument("--sample", type=int, default=8, help="only each so many-th case")
    parser.add_argument("--most", type=int, default=4, help="so many cases a rule")
    parser.add_argument("--only", action="append", default=[], help="text in a case, or a glob")
    parser.add_argument("--rule", action="append", default=[], help="text in the name of a rule")
    parser.add_argument("--slow", type=float, default=4.0, help="seconds a comparison")
    parser.add_argument("--write", action="store_true", help="write rules.json")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    folder = Path(os.devnull)
    kinds = [kind for name, kind in answers.KINDS.items() if name != "programs"]
    tasks = [task for kind in kinds for task in kind.tasks(folder)]
    names = answers.chosen((case for task in tasks for case in task.full()), KINDS, 1)
    wanted = answers.chosen(shuffled(names), given.only, 1) if given.only else shuffled(names)
    wanted = wanted[:: given.sample]
    if given.jobs:
        known, _ = read()
        run(tasks, {case: None for case in wanted if case not in known}, given.jobs, given.slow)
        known, done = read()
        some = {case: row for case, row in known.items() if case in wanted}
        left = {
            case: [name for name in switches if (name, case) not in done]
            for case, switches in plan(some, given.most, given.slow, given.rule).items()
        }
        run(tasks, {case: switches for case, switches in left.items() if switches}, given.jobs, 0)
    known, done = read()
    found = results(known, done)
    print(table(found, len(known)))
    if given.write:
        sample = f"each {given.sample}th case, at most {given.most} a rule, none over"
        sample = f"{sample} {given.slow:g} s"
        about = answers.environment() | {"sample": sample, "cases": len(known)}
        answers.freeze(RESULTS, found, about)


if __name__ == "__main__":
    main()
