"""Which parts of a model the difference of two programs' logits comes from.

The other program's recorded values are put into the live model part by part, in the order of its
calls. How much closer its logits then come to the other's is what a part contributed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from llmdebug_nb.app.by_token import same_steps
from llmdebug_nb.app.compare import compare
from llmdebug_nb.app.live_models import module_finder, modules_in
from llmdebug_nb.app.logits.sources import Key, Source, of_run
from llmdebug_nb.app.logits.texts import of_engine
from llmdebug_nb.app.rerun import FindModule, Step
from llmdebug_nb.app.sides import sides
from llmdebug_nb.capture.substitution import Place, Put, Substitution
from llmdebug_nb.comparison import token_rows
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.token_rows import Judge
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import CompareError, LLMDebugError, OptionError
from llmdebug_nb.core.layers import parts
from llmdebug_nb.core.paths import is_operator, within
from llmdebug_nb.core.printable import printable_lines
from llmdebug_nb.core.records import Site
from llmdebug_nb.replay.in_place import in_place
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.words import count_text
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.tabular import Tabular

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Part:
    """What one part contributed.

    ``modules``: its paths in the live model; several, where the other program has values of the
    last one alone. ``error``: the relative L2 error of the logits with the other's values put in up
    to here. ``share``: by how much that lowered the squared error, over the whole. Errors of parts
    that have nothing to do with each other add up in squares, so shares add up to 1. Less than 0:
    the part took back some of what came before it.
    """

    modules: tuple[str, ...]
    error: float
    share: float


class ByLayer(Tabular):
    """The parts of a model with their shares of the difference of logits, in the order of calls.

    ``error``: the relative L2 error of the live model's logits with nothing put in. ``inside``: the
    modules of the part with the largest share; their shares are of the same whole. ``positions``:
    how many rows of logits this rests on. ``left_out``: sequences that don't count, by reason.
    """

    def __init__(
        self, error: float, found: Sequence[Part], inside: Sequence[Part], positions: int,
        left_out: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.error, self.parts, self.inside = error, tuple(found), tuple(inside)
        self.positions, self.left_out = positions, dict(left_out)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each part, then for each module inside: level, module, share, error."""
        import pandas

        rows = [
            (level, "; ".join(part.modules), part.share, part.error)
            for level, several in (("part", self.parts), ("inside", self.inside))
            for part in several
        ]
        return pandas.DataFrame(rows, columns=["level", "module", "share", "error_after"])

    def __str__(self) -> str:
        lines = [
            f"logits differ by {self.error:.3g} (relative L2, {count_text(self.positions, 'row')});"
            " share of the squared error that each part introduces:"
        ]
        lines += _table(self.parts)
        if self.inside:
            lines += ["", "inside the largest one:", *_table(self.inside)]
        lines += [f"left out: {why}: {count}" for why, count in self.left_out.items()]
        return printable_lines(lines)

    __repr__ = __str__


def _table(found: Sequence[Part]) -> list[str]:
    cells = [
        [f"{part.share:7.1%}", f"{part.error:.3g}", " … ".join(_ends(part.modules))]
        for part in found
    ]
    return aligned(["share", "error after it", "modules"], cells)


def _ends(modules: Sequence[str]) -> list[str]:
    return [modules[0], modules[-1]] if len(modules) > 1 else list(modules)


def by_layer(golden: Run, mine: Run, model: torch.nn.Module, progress: bool = True) -> ByLayer:
    """Return what each part of a live model contributed to the difference of the logits.

    ``model``: that of golden or of mine; it is left unchanged. The other program's values are those
    that its run holds.

    Raises:
        OptionError: the model is of neither run.
        CompareError: no sequence can be run again, or the logits are the same.
    """
    other, live, cases, left_out = _roles(golden, mine, model)
    rows = _paired(compare(other, live, progress=progress).differences)
    swapping = _Swapping(cases, rows, other)
    whole = swapping.error([])
    if not whole:
        raise CompareError("the logits are the same: there is no difference to share out")
    divided = {live.nodes[at].path for at in parts(live.nodes)}
    outer = [path for path in swapping.paths if path in divided]
    if not outer:
        raise CompareError(f"{other.label} has no values of the parts of {live.label}'s model")
    found = swapping.parts([], outer, whole, progress)
    most = max(found, key=lambda part: part.share)
    before = [path for part in found[: found.index(most)] for path in part.modules]
    inside = swapping.parts(before, _leaves(most, swapping.paths), whole, progress)
    positions = sum(len(case.recorded.at) for case in cases)
    return ByLayer(whole, found, inside, positions, left_out)


def _leaves(part: Part, paths: Sequence[str]) -> list[str]:
    """Return the innermost modules of a part, in the order of calls."""
    below = [
        path for path in paths
        if any(path != module and within(path, module) for module in part.modules)
    ]  # fmt: skip
    return [path for path in below if not any(o != path and within(o, path) for o in below)]


def _roles(
    golden: Run, mine: Run, model: torch.nn.Module
) -> tuple[Run, Run, list[_Case], dict[str, int]]:
    """Return the other run, that of the live model, its sequences, and how many don't count.

    Both runs have one step for each sequence. Two models may have the same modules; then the live
    one is the one that computes what was recorded.
    """
    modules_in(model)
    why: CompareError | None = None
    for other, live in ((golden, mine), (mine, golden)):
        find = module_finder(live, model)
        if not live.nodes or any(find(node.path) is None for node in live.nodes):
            continue
        try:
            return _cases(other, live, find)
        except CompareError as error:
            why = why or error
    if why is not None:
        raise why
    raise OptionError(
        f"model: {type(model).__name__} has not the modules of {golden.label} or of {mine.label};"
        " expected the model that one of them was recorded of"
    )


class _Logits(NamedTuple):
    """Rows of one sequence. ``at``: which of the live model's; ``other``, ``live``: both recorded
    ones, ``[rows, vocabulary]``.
    """

    at: tuple[int, ...]
    other: torch.Tensor
    live: torch.Tensor


@dataclass(frozen=True)
class _Case:
    """A sequence that the live model can be given again. ``slot``: of the logits in its result."""

    key: Key
    step: Step
    recorded: _Logits
    slot: str

    def logits(self, substitution: Substitution | None = None) -> torch.Tensor:
        """Run the model; return the compared rows, ``[rows, vocabulary]``. Raises CannotReplay."""
        result = self.step.results(substitution=substitution)[self.slot]
        return result.reshape(-1, result.shape[-1])[list(self.recorded.at)]


_Rows = dict[Key, dict[str, list[Difference]]]  # by sequence and path in the live model


def _cases(other: Run, live: Run, find: FindModule) -> tuple[Run, Run, list[_Case], dict[str, int]]:
    """Return both runs by sequence, the sequences that can be run again, and how many can't.

    Raises CompareError: none can.
    """
    logits = _logits(other, live)
    other, live, *_ = same_steps(other, live, only_engines=True)
    side = sides(other, live)[1]
    cases: list[_Case] = []
    left_out: Counter[str] = Counter()
    for (generation, step), recorded in logits.items():
        try:
            call = Step.of(Site("", step, generation=generation), side, find)
            slot = _slot(call, recorded.other.shape[-1])
            case = _Case((generation, step), call, recorded, slot)
            _check(case)
            cases.append(case)
        except (CannotReplay, LLMDebugError) as why:
            left_out[str(why)] += 1
    if not cases:
        reasons = ", ".join(left_out) or "no logits of both programs follow the same tokens"
        raise CompareError(f"no sequence can be run again: {reasons}")
    return other, live, cases, dict(left_out)


def _logits(other: Run, live: Run) -> dict[Key, _Logits]:
    """Return the logits that both recorded after the same tokens, by sequence."""
    texts = of_engine(other, live)
    if texts is None:
        return _of_steps(of_run(other), of_run(live))
    found: dict[Key, _Logits] = {}
    for number, positions in enumerate(texts.positions):
        keys = [(number, at) for at in positions if (number, at) in texts.golden.steps]
        if not keys:
            continue
        both = (
            torch.cat([source.steps[key].load()[0] for key in keys])
            for source in (texts.golden, texts.mine)
        )
        at = tuple(positions.index(position) for _, position in keys)
        found[number, 0] = _Logits(at, *both)
    return found


def _of_steps(other: Source, live: Source) -> dict[Key, _Logits]:
    found: dict[Key, _Logits] = {}
    for key in other.steps.keys() & live.steps.keys():
        one, own = other.steps[key], live.steps[key]
        same = one.ids is None or own.ids is None or torch.equal(one.ids, own.ids)
        if one.problem or own.problem or not same or one.shape[0] != own.shape[0]:
            continue
        count, rows = min(one.shape[1], own.shape[1]), own.shape[1]
        at = tuple(
            sequence * rows + row
            for sequence in range(own.shape[0])
            for row in range(rows - count, rows)
        )
        both = (step.load()[:, -count:].flatten(0, 1) for step in (one, own))
        found[key] = _Logits(at, *both)
    return dict(sorted(found.items()))


def _slot(step: Step, width: int) -> str:
    """Return which of a model's results are its logits. Raises CannotReplay."""
    for slot, tensor in step.results().items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == width:
            return slot
    raise CannotReplay(f"the model gives no tensor with {width:,} channels")


def _check(case: _Case) -> None:
    """Check that the live model still computes what was recorded. Raises CannotReplay."""
    judge = Judge("rounding")
    for now, then in zip(case.logits(), case.recorded.live, strict=True):
        if not judge(token_rows.figures(then, now, None, 1), then, now)[0]:
            raise CannotReplay(
                "the model no longer computes the recorded logits: it has changed, or needs tokens"
                " that the engine took from its cache"
            )


def _paired(rows: Sequence[Difference]) -> _Rows:
    """Return the outputs of modules of which the other run has values, in the order of calls.

    What is written otherwise in the two, and equal in effect, is no value of the other one.
    """
    found: _Rows = defaultdict(lambda: defaultdict(list))
    both = [d for d in rows if d.pair.golden is not None and d.pair.mine is not None]
    for d in sorted(both, key=lambda d: d.pair.mine.id if d.pair.mine is not None else 0):
        record = d.pair.mine
        assert record is not None
        site = record.site
        is_output = (site.role, site.phase) == ("output", "forward")
        if is_output and d.rule is not Rule.REJOINED and not is_operator(site.path):
            found[site.generation, site.step][site.path].append(d)
    return found


class _Swapping:
    """Puts values of the other run into the live model. ``paths``: where, in the order of calls."""

    def __init__(self, cases: Sequence[_Case], rows: _Rows, other: Run) -> None:
        self._cases, self._rows, self._other = cases, rows, other
        in_all = [rows[case.key] for case in cases]
        self.paths = [path for path in in_all[0] if all(path in each for each in in_all)]

    def error(self, paths: Sequence[str]) -> float:
        """Return the relative L2 error of the logits with the values of some modules put in.

        Raises CannotReplay.
        """
        apart = whole = 0.0
        for case in self._cases:
            substitution = Substitution(self._puts(case.key, paths))
            own, other = case.logits(substitution).double(), case.recorded.other.double()
            if substitution.problem is not None:
                raise CannotReplay(str(substitution.problem))
            finite = own.isfinite() & other.isfinite()
            apart += float((own - other)[finite].square().sum())
            whole += float(other[finite].square().sum())
        return math.sqrt(apart / whole) if whole else 0.0

    def _puts(self, key: Key, paths: Sequence[str]) -> dict[Place, list[Put]]:
        puts: dict[Place, list[Put]] = {}
        for path in paths:
            for d in self._rows[key][path]:
                assert d.pair.golden is not None
                assert d.pair.mine is not None
                site, value = d.pair.mine.site, self._other.load(d.pair.golden)
                place = Place(path, site.call, "output", site.slot)
                puts[place] = [in_place(value, d.pair.fit)]
        return puts

    def parts(
        self, before: Sequence[str], paths: Sequence[str], whole: float, progress: bool
    ) -> list[Part]:
        """Return the parts at some modules. ``before``: what is put in all the time."""
        found: list[Part] = []
        error, put, waiting = self.error(before), list(before), []
        bar = progress_bar(paths, desc="swapping", unit="module", shown=progress)
        for path in bar:
            waiting.append(path)
            try:
                after = self.error([*put, path])
            except CannotReplay:  # the layout of its values can't be turned round
                continue
            found.append(Part(tuple(waiting), after, (error**2 - after**2) / whole**2))
            error, waiting = after, []
            put.append(path)
        return found
