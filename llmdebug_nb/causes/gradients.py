"""Gradients that only one program has, and those that a model is given otherwise.

A gradient of a weight that one program lacks is no difference of numbers: no call makes it. The
backward pass of that program does not reach the weight, or it is not trained there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.records import Site
from llmdebug_nb.replay.runs import Runs

Step: TypeAlias = tuple[int, int, int]  # rank, generation, step
Name: TypeAlias = tuple[str, str]  # path of a module, name of its weight


class Missing(NamedTuple):
    """The gradients of a step that one program lacks, in the order of the other's backward pass."""

    rows: list[Difference]

    @property
    def first(self) -> Difference:
        return self.rows[0]

    @property
    def owner(self) -> str:
        """The program that has them."""
        return "golden" if self.first.pair.golden is not None else "mine"

    @property
    def words(self) -> str:
        names = [
            ".".join(filter(None, name)) for name in dict.fromkeys(_name(d.site) for d in self.rows)
        ]
        shown, more = names[: constants.NAMES_SHOWN], len(names) - constants.NAMES_SHOWN
        listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        has, lacks = ("golden", "mine") if self.owner == "golden" else ("mine", "golden")
        verb = "has a gradient" if len(names) == 1 else "have a gradient"
        return f"{listed} {verb} in {has} and none in {lacks}"


def missing(differences: Sequence[Difference], runs: Runs) -> dict[Step, Missing]:
    """Return what one program lacks, by step: the module ran in both, and both have the weight.

    A step in which a program has no gradient at all was not trained, or not recorded.
    """
    alone: defaultdict[Step, list[Difference]] = defaultdict(list)
    trained: defaultdict[tuple[Step, int], set[Name]] = defaultdict(set)  # by step and side
    partners: dict[tuple[Step, int, str], str] = {}  # by step, side and path
    for d in differences:
        sides, step = (d.pair.own(0), d.pair.own(1)), _step(d.site)
        if sides[0] is not None and sides[1] is not None and d.site.phase == "forward":
            golden, mine = (module_of(record.site.path) for record in sides if record is not None)
            partners[step, 0, golden], partners[step, 1, mine] = mine, golden
        if d.site.role != "grad":
            continue
        for side, record in enumerate(sides):
            if record is not None:
                trained[step, side].add(_name(record.site))
        if None in sides:
            alone[step].append(d)
    found = {}
    for step, some in alone.items():
        rows = _untrained(some, [trained[step, 0], trained[step, 1]], partners, runs)
        if rows:
            found[step] = Missing(rows)
    return found


def _untrained(
    alone: Iterable[Difference],
    trained: Sequence[Collection[Name]],
    partners: Mapping[tuple[Step, int, str], str],
    runs: Runs,
) -> list[Difference]:
    """Return the gradients of one program whose weights the other one has and does not train."""
    found = []
    for d in alone if all(trained) else ():
        side = 0 if d.pair.golden is not None else 1
        path, name = _name(d.site)
        other = partners.get((_step(d.site), side, path))
        has = (runs.mine, runs.golden)[side].fingerprints
        if other is not None and name in has.get(other, {}):
            found += [d] if (other, name) not in trained[1 - side] else []
    return [d for d in found if (d.pair.golden is None) == (found[0].pair.golden is None)]


def _step(site: Site) -> Step:
    return site.rank, site.generation, site.step


def _name(site: Site) -> Name:
    return site.path, unshared(site.slot)


def is_given(row: Difference, differences: Iterable[Difference]) -> bool:
    """Tell whether a gradient is the first of a backward pass: code outside of the model makes it.

    What holds the same is the same gradient. Before it, there may be operators of a loss that both
    programs write in their own ways.
    """
    s = row.site
    if s.phase != "backward" or s.role != "input":
        return False
    before = [
        d for d in differences
        if d.index < row.index and d.site.phase == "backward" and _step(d.site) == _step(s)
    ]  # fmt: skip
    alone = [d for d in before if d.verdict == "unmatched"]
    of_loss = [d for d in alone if is_operator(d.site.path)]
    sides = {d.pair.golden is None for d in of_loss if not module_of(d.site.path)}
    if of_loss and (len(sides) < 2 or any(module_of(d.site.path) for d in of_loss)):
        return False
    return all(d.content == row.content for d in before if d.verdict != "unmatched")
