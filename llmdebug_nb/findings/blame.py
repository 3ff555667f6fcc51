"""Find the calls that made an error, apart from those that inherited it.

`frontier.py` finds the regions where the two programs part for good, `judge.py` their causes. Here
they become findings, the worst first.

The forward and the backward pass are searched separately. The backward pass uses tensors of the
forward pass, so it is searched only if the forward passes agree.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmdebug_nb.causes import causes, evidence_text, gradients, onnx_nodes, scalars, verify
from llmdebug_nb.causes.judge import Blamed, Judge
from llmdebug_nb.causes.tensor_kinds import OtherTokens, input_name, is_root, kind_of
from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.paths import is_operator, module_of, within
from llmdebug_nb.core.records import CallKey, Kernel
from llmdebug_nb.findings import relation_inputs, repro, sources
from llmdebug_nb.findings.expected import PassedOn
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall
from llmdebug_nb.graph.equal_in_effect import equal_in_effect
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search import near_tie, reordered_values, swap_numbers, value_sets
from llmdebug_nb.search.frontier import Frontier


@dataclass(frozen=True)
class Explanation:
    """Why two runs differ. All others are indices of rows.

    ``rows``: of each finding, the differences that it makes. ``rejoins``: those that reach nothing.
    ``passed_on``: those that a replay shows to follow from what is expected. ``behind_ties``: those
    that follow from a choice that rounding decides. ``ties``: of the rows of such choices, how many
    tokens their step has. ``rounding``: those of ``rows`` that a replay shows to be the rounding of
    two right operators. ``problems``: errors of the search itself, in words.
    """

    findings: list[Finding]
    rows: list[frozenset[int]] = field(default_factory=list)
    rejoins: frozenset[int] = frozenset()
    passed_on: frozenset[int] = frozenset()
    problems: tuple[str, ...] = ()
    behind_ties: frozenset[int] = frozenset()
    ties: Mapping[int, int] = field(default_factory=dict)
    rounding: frozenset[int] = frozenset()


def explained(
    differences: Sequence[Difference], runs: Runs, causes_too: bool = True
) -> Explanation:
    """Return the findings, the worst first, and the rows that are only written otherwise.

    A path has one finding, even if many steps show its error. ``causes_too``: search for the
    causes; else there are no findings. Behind a choice that rounding decides the search goes on.
    """
    found = _searched(differences, runs, causes_too)
    ties: dict[int, int] = {}
    last: list[tuple[Finding, frozenset[int]]] = []
    while new := found.ties.keys() - ties.keys():
        ties |= found.ties
        every = zip(found.findings, found.rows, strict=True)
        last += [(f, rows) for f, rows in every if not new.isdisjoint(rows)]
        found = _searched(_but(differences, ties), runs, causes_too, ties)
    findings = [*found.findings, *(f for f, _ in last)]
    rows = [*found.rows, *(rows for _, rows in last)]
    rounding = _rounding(differences, rows, runs) if findings else frozenset()
    return replace(found, findings=findings, rows=rows, rounding=rounding)


def _rounding(
    differences: Sequence[Difference], rows: Sequence[frozenset[int]], runs: Runs
) -> frozenset[int]:
    """Return which rows that findings make are only rounding: no call is blamed unasked."""
    made = frozenset().union(*rows)
    asked = [d for d in differences if d.index in made and d.verdict == "diverged"]
    some = asked[: constants.REGION_CALLS]
    of_modules = any(not is_operator(d.site.path) for d in some)
    calls = Calls(differences, "forward") if of_modules else None
    return frozenset(d.index for d in some if verify.is_rounding(d, runs, calls))


def _but(differences: Sequence[Difference], ties: Collection[int]) -> list[Difference]:
    """Return the rows, those of near ties as expected."""
    contents = {content for d in differences if d.index in ties for content in d.contents}

    def other(d: Difference) -> Difference:
        if not d.differs or d.content not in contents:
            return d
        return replace(d, verdict=EXPECTED, follows=False, rule=Rule.AFTER_TIE, remark=None)

    return list(map(other, differences))


def _searched(
    differences: Sequence[Difference],
    runs: Runs,
    causes_too: bool,
    ties: Mapping[int, int] | None = None,
) -> Explanation:
    """Return what `explained` does, up to the first near tie. ``ties``: those that are known."""
    crossed = onnx_nodes.is_crossed(differences)
    if crossed:
        differences = onnx_nodes.comparable(differences)
    rejoins: set[int] = set()
    passed_on: set[int] = set()
    found: _Found = []
    seen: dict[int, int] = {}
    failures = _Failures()
    for phase in _phases(differences):
        if failures.texts:
            break  # nothing tells whether the pass before agrees
        with failures.told(
            f"of what differs in the {phase} pass", "differences without effect count"
        ):
            passes_on = PassedOn(differences, phase, runs, ties or {})
            frontier = Frontier(
                differences, phase, runs.same_code, passes_on,
                lambda row: reordered_values.holds_the_same(row, runs),
                lambda golden, mine, flows: swap_numbers.own(golden, mine, flows, runs),
            )  # fmt: skip
            guilty = frontier.guilty
            rejoins |= {d.index for d in frontier.rejoins}
            passed_on |= frontier.passed_on
            if guilty:
                if causes_too:
                    search = _Search(differences, guilty[0].row, frontier, runs, crossed, failures)
                    found, seen = search.findings(), search.ties
                break
    else:
        with failures.told("of settings that differ"):
            found = _settings(differences, runs) if causes_too else []
    if causes_too:
        with failures.told("of gradients that one run alone has"):
            found = _with_missing_gradients(differences, runs, found)
    if not failures.texts:
        with failures.told("of what one run alone has", "it counts as unmatched"):
            rejoins |= _equal_in_effect(differences, rejoins)
    findings, rows = [f for f, _ in found], [each for _, each in found]
    problems = tuple(failures.texts)
    followers = (frozenset(), frozenset(passed_on)) if ties else (frozenset(passed_on), frozenset())
    return Explanation(
        findings, rows, frozenset(rejoins), followers[0], problems, followers[1], seen
    )


def _phases(differences: Sequence[Difference]) -> list[str]:
    """Return the phases with differences, in their order.

    Ranks run at once: the backward pass of one is behind the forward pass of another.
    """
    sites = [d.site for d in differences if d.verdict == "diverged"]
    if len({site.rank for site in sites}) > 1:
        sites.sort(key=lambda site: (site.generation, site.step, site.phase == "backward"))
    return list(dict.fromkeys(site.phase for site in sites))


class _Failures:
    """Errors of the search: each ends the search in its scope alone.

    ``texts``: what the report says of them. Unexpected ones are warnings too, with the traceback,
    so that whoever tests this package sees them; a damaged dump is not unexpected.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextlib.contextmanager
    def told(self, scope: str, effect: str = "the verdict is not touched by it") -> Iterator[None]:
        """Note what is raised while the cause of a scope is searched."""
        try:
            yield
        except LLMDebugError as error:
            self.texts.append(f"the cause {scope} could not be searched: {error}; {effect}")
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            what = f"{type(error).__name__}: {first}"
            text = f"the cause {scope} could not be searched because of an error of ours ({what})"
            self.texts.append(f"{text}; {effect}")
            warnings.warn(f"{text}\n{traceback.format_exc()}", RuntimeWarning, stacklevel=1)


def _equal_in_effect(differences: Sequence[Difference], rejoins: set[int]) -> set[int]:
    """Return the indices of rows of one program alone of which only what agrees is made."""
    found: set[int] = set()
    alone = (d for d in differences if d.verdict == "unmatched")
    for phase in dict.fromkeys(d.site.phase for d in alone):
        rows = [d for d in differences if d.site.phase == phase]
        for side in (0, 1):
            found |= {d.index for d in equal_in_effect(Flow(rows, side), rejoins)}
    return found


_START = "wrong_start"
_Found = list[tuple[Finding, frozenset[int]]]  # with the indices of the rows that it makes


def _settings(differences: Sequence[Difference], runs: Runs) -> _Found:
    """Blame settings that differ although noise hides their effect."""
    changed = next((d for d in differences if _hides(d)), None)
    if changed is None:
        return []
    frontier = Frontier(differences, changed.site.phase, runs.same_code)
    return _Search(differences, changed, frontier, runs).settings()


def _with_missing_gradients(differences: Sequence[Difference], runs: Runs, found: _Found) -> _Found:
    """Return findings with one for the first step with gradients that one run lacks.

    Weights that are changed otherwise behind it follow from that.
    """
    _, first = min(gradients.missing(differences, runs).items(), default=(None, None))
    if first is None or any(
        finding.cause in (causes.GRADIENT, causes.UNTRAINED) for finding, _ in found
    ):
        return found
    row, s = first.first, first.first.site
    if any(finding.step < s.step for finding, _ in found):
        return found  # what is wrong before may be why
    op, words = row.op, first.words
    finding = Finding(s.path, op, s.step, causes.UNTRAINED, words, row, rule="without_gradient")
    others = [(one, rows) for one, rows in found if one.cause != causes.UPDATED]
    own = finding, frozenset(each.index for each in first.rows)
    told = [one.difference for one, _ in others if one.difference is not None]
    forward = any(d.differs and d.site.phase == "forward" and d.site.step == s.step for d in told)
    return [*others, own] if forward else [own, *others]


class _Search:
    """The search for the causes of one comparison, from its first row that differs."""

    def __init__(
        self,
        differences: Sequence[Difference],
        start: Difference,
        frontier: Frontier,
        runs: Runs,
        crossed: bool = False,
        failures: _Failures | None = None,
    ) -> None:
        self.differences, self.start, self.runs = differences, start, runs
        self._failures = failures or _Failures()
        self.frontier = frontier
        self.judge = Judge(differences, start, frontier, runs)
        self.nodes = onnx_nodes.NodeSearch(runs)
        self.ties: dict[int, int] = {}  # tokens of the step, by the row of the region
        # Fusion may hide an input. A call with hidden inputs is blamed only if no other call is.
        self.follows = (causes.INHERITED, causes.UNKNOWN_INPUT) if crossed else (causes.INHERITED,)

    def findings(self) -> _Found:
        found: dict[object, Blamed] = {}
        steps: dict[object, set[tuple[int, int]]] = {}
        rows: dict[object, set[int]] = {}
        sure: set[object] = set()  # places of regions that begin at tensors that are one thing
        first_in: dict[object, Region] = {}
        regions, chosen = self._regions(), OtherTokens(self.differences, self.start)
        began: tuple[int, int] | None = None  # the step of the first error
        for region in [r for r in regions if not chosen.reach(r.row.site)] or regions:
            blamed = self._blamed(region)
            if blamed is None:
                continue
            key = blamed.call.key
            place, step = _known(blamed, found), (key.generation, key.step)
            is_later = place not in found and began is not None and began < step
            if is_later and self.judge.weights.updates.may_explain(blamed.call, blamed.row):
                continue  # an optimizer carries the first error over
            if began is None and not causes.about(blamed.cause).is_last:
                began = step
            found.setdefault(place, blamed)
            steps.setdefault(place, set()).add(step)
            rows.setdefault(place, set()).add(region.row.index)
            first_in.setdefault(place, region)
            if any(map(self.frontier.is_sure, filter(None, (blamed.region, region)))):
                sure.add(place)
        for place, seen_in in steps.items():
            found[place].steps = len(seen_in)
        made = self.judge.made
        blames = [(p, b) for p, b in found.items() if b.cause not in self.follows or not made]
        own = [
            first_in[place]
            for place, b in blames
            if not causes.about(b.cause).is_last
            and (place in sure or not self.frontier.is_constant(first_in[place].row))
        ]
        vague = {p for p, _ in blames if self.frontier.is_vague(first_in[p], own)}
        ranked = sorted(
            blames,
            key=lambda each: (
                causes.about(each[1].cause).is_last,
                each[0] in vague,
                each[0] not in sure,
                *_place(each[1]),
            ),
        )
        first = frozenset((self.start.index,))
        findings = [(finding, first) for finding in self._wrong_start()]
        ranked = [each for each in ranked if not findings or rows[each[0]] != first]
        findings += [(self._told(b), frozenset(rows[place])) for place, b in ranked]
        return findings or [(self._unseen(), first)]

    def _blamed(self, region: Region) -> Blamed | None:
        """Return what is to blame for a region: the call at its end if the search for it fails."""
        row, found = region.row, list[Blamed]()
        with self._failures.told(f"of the error at {row.site.path or 'the model'}"):
            found.append(self._tied(region) or self.judge.blamed(region))
        own = self.judge.calls.of(row)
        if not found and own is not None:
            words = evidence_text.of_difference(row)
            found.append(Blamed(own, causes.UNKNOWN_INPUT, words, row, rule="search_failed"))
        return found[0] if found else None

    def _tied(self, region: Region) -> Blamed | None:
        """Return the choice in a region that rounding decides, if there is one."""
        tie = near_tie.told(region, self.runs, self.frontier.flows[0])
        own = self.judge.calls.of(region.row) if tie else None
        if tie is None or own is None:
            return None
        self.ties[region.row.index] = tie.tokens
        return Blamed(own, causes.NEAR_TIE, tie.words, region.row, rule="near_tie")

    def _regions(self) -> list[Region]:
        """Return the regions in execution order.

        Of the tensors that one call takes, those in which only the order differs come last: a
        call may take queries and keys whose channels are in another order, but in the same one.
        """
        first: dict[CallKey, int] = {}
        for region in self.frontier.guilty:
            first.setdefault(region.row.site.key, region.row.index)
        alone = len(first) == len(self.frontier.guilty)
        return sorted(
            self.frontier.guilty,
            key=lambda region: (
                first[region.row.site.key],
                not alone and value_sets.is_reordered(region.row, self.runs),
            ),
        )

    def settings(self) -> _Found:
        """Return a finding for each path with other settings, if its outputs differ at all."""
        found: dict[str, Blamed] = {}
        for call in self.judge.calls.all:
            row = next((d for d in call.outputs if _hides(d)), None)
            if row is None or call.path in found:
                continue
            other = self._other_settings(call, judged=row.verdict == "within_noise")
            if other:
                evidence = f"{scalars.words(other)}; {evidence_text.of_difference(row)}"
                found[call.path] = Blamed(call, causes.SCALAR, evidence, row, rule="hidden_setting")
        return [(self._finding(b), frozenset((b.row.index,))) for b in found.values()]

    def _other_settings(self, call: ComparedCall, judged: bool) -> list[scalars.Differing]:
        """Return the differing constants of a call, and the flags if no limit could judge it."""
        other = [] if call.is_rewritten else scalars.choices(scalars.of_call(call, self.runs))
        if call.is_operator:
            return other
        of_module = scalars.of_module(call, self.runs)
        if call.is_rewritten or call.path not in self.judge.calls.operated:
            other += scalars.choices(of_module)
        if not judged:
            other += [each for each in scalars.flags(of_module) if each not in other]
        return other

    # -- no call to blame -------------------------------------------------------------------------

    def _wrong_start(self) -> list[Finding]:
        """Return a finding if the two runs began with different inputs."""
        start, s = self.start, self.start.site
        if s.role != "input" or s.phase != "forward" or not is_root(start, self.differences):
            return []
        kind, name = kind_of(start), input_name(start)
        ids = evidence_text.of_token_ids(start, self.runs)
        told = f": {ids}" if ids else ""
        if s.step == 0 or kind is not None:
            if s.step == 0:
                text = f"the first {name} of the model differs{told}"
            else:
                text = f"the model received another {name}; {evidence_text.of_difference(start)}"
            return [self._started(kind or causes.WRONG_INPUT, text)]
        text = f"{name} differs, though step {s.step - 1} agreed: another token was chosen "
        text += f"(sampling, or a near tie){told}"
        return [self._started(causes.OTHER_TOKEN, text)]

    def _started(self, cause: str, text: str) -> Finding:
        s, call = self.start.site, self.judge.calls.of(self.start)
        if call is None:
            return Finding(s.path, self.start.op, s.step, cause, text, self.start, rule=_START)
        region = Region(self.start)
        return self._told(Blamed(call, cause, text, self.start, region, rule=_START))

    def _unseen(self) -> Finding:
        """Blame code that was not recorded, and advise a recording that shows more."""
        start, s = self.start, self.start.site
        call = self.judge.calls.of(start)
        kind = kind_of(start) if s.role == "input" else None
        setting = self.judge.by_setting(call) if call is not None and call.is_operator else None
        if setting is not None:
            return self._finding(setting)
        parent = module_of(s.path) if is_operator(s.path) else s.path.rpartition(".")[0]
        text = f"first seen at {s.role} {s.slot} of {s.path or 'the model'}; its producer was not "
        text += "recorded: record inputs and outputs"
        if kind is not None:
            text = f"{text}; {evidence_text.of_difference(start)}"
            return Finding(s.path, start.op, s.step, kind, text, start, rule="unrecorded_maker")
        op = next((d.op for d in self.differences if d.site.path == parent), "")
        return Finding(parent, op, s.step, causes.BEFORE, text, start, rule="unrecorded_maker")

    # -- in words ---------------------------------------------------------------------------------

    def _told(self, b: Blamed) -> Finding:
        """Return the finding in words, with fewer of them if the search for these fails."""
        found: list[Finding] = []
        with self._failures.told(f"at {b.call.path or 'the model'}"):
            found.append(self._finding(b))
        call = b.call
        plain = Finding(call.path, call.op, call.key.step, b.cause, b.evidence, b.row, rule=b.rule)
        return found[0] if found else plain

    def _finding(self, b: Blamed) -> Finding:
        evidence = b.evidence if b.steps < 2 else f"{b.evidence}; the same in {b.steps} steps"
        call, cause = b.call, b.cause
        weights = self.judge.weights.differing(call) if cause == causes.WEIGHT else []
        rows = [
            d for c in self.judge.calls.inside(call) for d in c.rows() if d.verdict == "diverged"
        ]
        node = self.nodes.find(call, cause, weights, rows)
        if node is not None:
            evidence, cause = f"{evidence}; {onnx_nodes.words(node)}", node.cause or cause
        script = repro.script(call, self.runs, b.cause, evidence, shows=self.start)
        kernel = self._kernel(call)
        if kernel is not None:
            computes = ", ".join(kernel.nodes)
            evidence = f"{evidence}; computed by kernel {kernel.name} (nodes {computes})"
        of = sources.Places(self.runs, self.frontier.flows, b, node.node.key if node else None)
        golden, mine = of.sources()
        told = relation_inputs.told(b, self.frontier.flows, self.runs)
        path = b.named or (call.path if b.places is None else b.places[0])
        op = call.op if b.places is None or golden is None else golden.op
        return Finding(
            path,
            op,
            call.key.step,
            cause,
            evidence,
            b.row,
            script,
            kernel,
            golden=golden,
            mine=mine,
            pairs=of.pairs(),
            relation=told.relation,
            advice=b.advice or told.advice,
            rule=b.rule,
        )

    def _kernel(self, call: ComparedCall) -> Kernel | None:
        """Return the kernel of compiled code that computes a call: mine's, else golden's."""
        for key, side in ((call.mine, self.runs.mine), (call.golden, self.runs.golden)):
            kernel = side.kernel(key) if key is not None and call.is_operator else None
            if kernel is not None:
                return kernel
        return None


def _known(blamed: Blamed, found: Mapping[object, Blamed]) -> object:
    """Return the key under which findings are merged: their lines, or else module and cause.

    A later step may show the same wrong weight by values that lead to no line. Weights that were
    changed otherwise are one finding: one optimizer changes them all.
    """
    if blamed.cause == causes.UPDATED:
        return blamed.cause
    if blamed.places is not None:
        return blamed.places
    alike = ((p, b) for p, b in found.items() if b.cause == blamed.cause)
    same = (p for p, b in alike if b.call.path == blamed.call.path or _has_in_it(b, blamed))
    return next(same, blamed.call.path)


def _has_in_it(earlier: Blamed, later: Blamed) -> bool:
    """Tell whether the code that one step shows to be wrong calls what a later step shows."""
    if earlier.places is None or not earlier.places[0]:
        return False
    if not _place(earlier)[:2] < _place(later)[:2]:
        return False
    return within(later.call.path, earlier.places[0])


def _place(blamed: Blamed) -> tuple[int, int, int]:
    """Return where a finding stands: by the step that shows it, then by its own row.

    A region of a later step may reach back into code of an earlier one, whose results it keeps.
    """
    region = blamed.region
    site = (blamed.row if region is None else region.row).site
    return site.generation, site.step, blamed.row.index


def _hides(row: Difference) -> bool:
    """Tell whether noise or a near tie may hide the effect of a setting on this row."""
    return row.verdict == "within_noise" or (row.verdict == "unmatched" and bool(row.metrics))
