"""Bringing runs of several ranks to one rank each, so that any number compares with any other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from llmdebug_nb.align.parts import PartFinder
from llmdebug_nb.core.kernels.joining import Recipe
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import by_token
from llmdebug_nb.store.joined import Whole, join
from llmdebug_nb.store.renumbered import renumbered
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.spread import Shape, Spread, Step, slot_of, spread
from llmdebug_nb.store.world import grid_of, ranks_of, world_size


def same_ranks(golden: Run, mine: Run) -> tuple[Run, Run, list[str]]:
    """Return both runs with one rank each, if they have different numbers of them; and remarks.

    A run of one rank that computes golden's batches in parts is put together, too.

    Raises:
        CompareError: a rank is missing, or the processes of a run are not of one program.
    """
    if by_token.is_engine(golden) or by_token.is_engine(mine):
        return golden, mine, []
    counts = [len(ranks_of(run)) for run in (golden, mine)]
    remarks = [*_alone(golden), *_alone(mine)]
    alike = not _in_parts(golden, mine) if counts == [1, 1] else _divide_alike(golden, mine)
    if counts[0] == counts[1] and alike:
        return golden, mine, remarks
    sides = zip((golden, mine), counts, strict=True)
    if any(count > 1 and world_size(run) is None for run, count in sides):
        return golden, mine, remarks  # another tool's dump: nothing tells how its ranks divide
    if counts[0] > 1:
        golden, found = _joined(golden, mine if counts[1] == 1 else None)
        remarks += found
    if counts[1] > 1 or counts[0] == 1:
        mine, found = _joined(mine, golden)
        remarks += found
    return golden, mine, remarks


def _alone(run: Run) -> list[str]:
    """Say that a run has one rank of several."""
    size, ranks = world_size(run), ranks_of(run)
    if size is None or size == len(ranks) or len(ranks) > 1:
        return []
    return [f"{run.label}: rank {ranks[0]} of {size} alone was recorded; the others may be wrong"]


def _divide_alike(golden: Run, mine: Run) -> bool:
    """Tell whether two runs of several ranks divide weights and inputs alike."""
    sides = [
        {
            (s.rank, s.path, s.slot): (record.summary.shape, record.placed and record.placed.parts)
            for columns in ({"role": "weight"}, {"role": "input", "path": "", "step": 0})
            for record in run.records(**columns)  # type: ignore[arg-type]
            for s in (record.site,)
        }
        for run in (golden, mine)
    ]
    return all(sides[1].get(key, there) == there for key, there in sides[0].items())


def _in_parts(golden: Run, mine: Run) -> bool:
    """Tell whether a run of one rank computes each batch of golden in several calls."""
    sizes = [_batches(run) for run in (golden, mine)]
    if not sizes[0]:
        return False
    times, rest = divmod(len(sizes[1]), len(sizes[0]))
    if rest or times < 2 or len(ranks_of(golden)) > 1:
        return False
    return all(
        whole[0] == sum(part[0] for part in parts) and {whole[1:]} == {part[1:] for part in parts}
        for at, whole in enumerate(sizes[0])
        for parts in (sizes[1][at * times : (at + 1) * times],)
    )


def _batches(run: Run) -> list[tuple[int, ...]]:
    """Return the shape of what the model is given first in each step; none if it generates."""
    calls = run.root_calls()
    if not calls or any(call.kind != "forward" for call in calls):
        return []
    found: dict[Step, tuple[int, ...]] = {}
    for record in run.records(role="input", phase="forward", path=""):
        if shape := record.summary.shape:
            found.setdefault((record.site.generation, record.site.step), tuple(shape))
    return list(found.values())


def _joined(run: Run, other: Run | None) -> tuple[Run, list[str]]:
    """Return the run of one rank. ``other``: tells how the parts lie, and where they belong."""
    grid = grid_of(run)
    records = list(run.records())
    theirs = [] if other is None else list(other.records())
    steps = _steps(records, theirs)
    golden: dict[tuple[object, ...], Record] = {}
    counts: Counter[tuple[Step, str, str, str, str]] = Counter()
    for record in theirs:
        slot = slot_of(record, (record.site.generation, record.site.step))
        golden[(*slot, record.site.call)] = record
        counts[slot] += 1
    first = min(steps.values(), default=(0, 0))
    of_weights = (slot[0] for slot in counts if slot[3] == "weight")
    shape = Shape(steps, counts, next(of_weights, first), grid, renumbered(run, other, grid))
    spreads = spread(records, shape)
    finder = PartFinder((other or run).load, run.load)
    recipes: dict[int, Recipe] = {}
    for last in (False, True):
        for at, each in enumerate(spreads):
            if at not in recipes:
                recipe = finder.recipe(each, golden.get(_key(each)), last)
                if recipe is not None:
                    recipes[at] = recipe
    wholes = [Whole(spreads[at], recipes[at]) for at in sorted(recipes)]
    remarks = [
        f"{run.label}: {len(grid)} ranks are put together"
        if len(grid) > 1
        else f"{run.label}: batches that it computes in parts are put together"
    ]
    lost = len(spreads) - len(wholes)
    if lost:
        remarks.append(
            f"{run.label}: {lost} tensors were left out: nothing tells how their parts go together"
        )
    remarks += [_averaged(run, *each) for each in finder.averaged.items() if each[1]]
    return join(run, shape, _in_order(wholes, golden)), remarks


def _averaged(run: Run, name: str, count: int) -> str:
    over = "the parts of a batch" if name == "time" else "ranks"
    return (
        f"{run.label}: {count} gradients of parameters agree as the mean over {over},"
        " not as the sum: what divides them later was not recorded, so see that the program does it"
    )


def _key(each: Spread) -> tuple[object, ...]:
    s = each.site
    return (s.generation, s.step), s.path, s.phase, s.role, s.slot, s.call


def _steps(records: Iterable[Record], theirs: Iterable[Record]) -> dict[Step, Step]:
    """Return the step of the other run that each step is, or is a part of."""
    own, other = (_forward_steps(each) for each in (records, theirs))
    times, rest = divmod(len(own), max(len(other), 1))
    if not other or rest:
        return {step: step for step in own}
    return {step: other[at // times] for at, step in enumerate(own)}


def _forward_steps(records: Iterable[Record]) -> list[Step]:
    found = {(r.site.generation, r.site.step) for r in records}
    return sorted(step for step in found if step[0] >= 0) or sorted(found)  # warm-ups apart


def _in_order(wholes: Sequence[Whole], golden: Mapping[tuple[object, ...], Record]) -> list[Whole]:
    """Return tensors in the order in which the other run has them.

    Ranks run at once, and stages of a pipeline one after the other. What the other run lacks stays
    behind what its own rank had before it.
    """
    last: dict[int, int] = defaultdict(lambda: -1)
    keys = []
    for at, whole in enumerate(wholes):
        rank = whole.spread.first.site.rank
        found = golden.get(_key(whole.spread))
        if found is not None:
            last[rank] = found.id
        keys.append((last[rank], at))
    return [wholes[at] for _, at in sorted(keys)]
