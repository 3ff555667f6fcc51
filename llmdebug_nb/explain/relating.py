"""Say what a finding's wrong tensor is of golden's: choose the two tensors, and what they may be.

They are those of the blamed calls, a weight that differs, or else the row that shows the error.
`relation.py` compares them, and also with golden's tensors around it (`neighbours.py`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import module_of, parent_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain import causes, evidence, neighbours
from llmdebug_nb.explain.evidence import Relation
from llmdebug_nb.explain.flow import Flow
from llmdebug_nb.explain.frontier import Region
from llmdebug_nb.explain.judge import Blamed
from llmdebug_nb.explain.relation import relation, weight_relation
from llmdebug_nb.explain.runs import CannotReplay, Runs, Side

# Elements. Two tensors of this size are compared in 0.1 s, and as many again of others with them.
_MOST = 2**22
_MOST_READ = 2**26  # of a tensor that is read from disk: 0.1 s
# causes that say themselves what to do
_SETTLED = (causes.SCALAR, causes.OVERFLOW, causes.NONDETERMINISTIC, causes.OTHER_TOKEN)
_INTEGER = re.compile(r"\d{1,6}")


class Told(NamedTuple):
    """The relation and the advice of a finding, as clauses; "" where nothing can be told."""

    relation: str = ""
    advice: str = ""


class _Two(NamedTuple):
    """Two tensors to compare. ``row``: that pairs them, if one does. ``where``: if not blamed."""

    golden: Record
    mine: Record
    row: Difference | None
    where: str = ""


def told(blamed: Blamed, flows: tuple[Flow, Flow], runs: Runs) -> Told:
    """Return what mine's value is of golden's, for a finding. Raises nothing."""
    return _Relating(blamed, flows, runs).told()


class _Relating:
    def __init__(self, blamed: Blamed, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self._blamed, self._flows, self._runs = blamed, flows, runs

    def told(self) -> Told:
        taken = self._taken()
        for two in self._twos():
            try:
                found = self._relation(two)
            except (CannotReplay, ValueError):  # no values, or others than the records say
                continue
            if found is not None:
                says = f"at {two.where}, {found.says}" if two.where else found.says
                settled = taken or two.where or self._blamed.cause in _SETTLED
                return Told("; ".join(filter(None, (taken, says))), "" if settled else found.advice)
        return Told(taken)

    def _taken(self) -> str:
        """Return a clause if mine's call takes another of golden's tensors."""
        region, flow = self._blamed.region, self._flows[0]
        if region is None or region.taken is None:
            return ""
        golden, mine = region.taken
        partners = (d.pair.golden for d in self._flows[1].rows[mine.id])
        partner = next((record for record in partners if record is not None), None)
        if partner is None or (golden is not None and partner.id == golden.id):
            return ""
        says = f"mine takes golden's {neighbours.name(flow, partner)}"
        return (
            says
            if golden is None
            else f"{says} where golden takes the {neighbours.name(flow, golden)}"
        )

    def _twos(self) -> Iterator[_Two]:
        """Yield the pairs of tensors that may tell, the nearest to the error first."""
        blamed, region = self._blamed, self._blamed.region
        if blamed.cause == causes.WEIGHT:
            for row in (*blamed.call.weights, blamed.row):
                if row.site.role == "weight" and row.verdict == "diverged":
                    yield from _of_row(row)
            return
        ends = list(_ends(region)) if region is not None else []
        yield from (_Two(*end, self._row(*end)) for end in ends)
        rows = [blamed.row]
        rows += [region.row] if region is not None and region.row is not blamed.row else []
        for two in (two for row in rows for two in _of_row(row)):
            s = two.mine.site
            where = f"{s.role} {s.slot} of {s.path or 'the model'}"
            if all(two.mine.id != mine.id for _, mine in ends):
                yield two if two.row is blamed.row and not ends else two._replace(where=where)

    def _row(self, golden: Record, mine: Record) -> Difference | None:
        """Return the row that pairs two tensors."""
        rows = self._flows[1].rows[mine.id]
        return next((d for d in rows if d.pair.golden and d.pair.golden.id == golden.id), None)

    # -- one pair ---------------------------------------------------------------------------------

    def _relation(self, two: _Two) -> Relation | None:
        limit = self._limit(two)
        golden, mine = self._fitted(two, two.golden)
        same = golden.shape == mine.shape
        if not same and max(golden.numel(), mine.numel()) > _MOST:
            return None  # corners of two shapes have nothing to do with each other
        corner = _corner(mine.shape)
        if same:
            golden, mine = _cut(golden, corner), _cut(mine, corner)
            if self._runs.error(golden, mine) <= limit:
                return None  # what is within the limit is no cause
        others = list(self._others(two, corner))
        groups = self._groups(mine.shape)
        if two.golden.site.role == "weight":
            return weight_relation(golden, mine, limit=limit, others=others, groups=groups)
        return relation(golden, mine, limit=limit, others=others, groups=groups)

    def _fitted(self, two: _Two, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor of golden and mine's, brought to one layout."""
        golden, mine = self._load(self._runs.golden, record), self._load(self._runs.mine, two.mine)
        fit = two.row.pair.fit if two.row is not None else None
        return (golden, mine) if fit is None else fit(golden, mine)

    def _others(self, two: _Two, corner: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield golden's tensors around, in mine's layout, as many as there is time for."""
        flow, left = self._flows[0], _MOST
        if two.golden.site.role == "weight":
            near = neighbours.weights(flow, two.golden, self._runs)
        else:
            near = neighbours.around(flow, two.golden, self._blamed.region)
        for name, record in near:
            if record.summary.numel != two.golden.summary.numel:
                continue
            try:
                value = self._fitted(two, record)[0]
            except (CannotReplay, ValueError):
                continue
            left -= math.prod(corner)
            if left < 0:
                return
            if value.dim() == len(corner):
                yield name, _cut(value, corner)

    def _limit(self, two: _Two) -> float:
        rows = [two.row, self._blamed.row]
        rows += [] if self._blamed.region is None else [self._blamed.region.row]
        limits = (row.limit for row in rows if row is not None)
        return next((limit for limit in limits if limit), 4 * evidence.FINEST)

    def _load(self, side: Side, record: Record) -> torch.Tensor:
        if record.summary.numel > _MOST_READ:
            raise CannotReplay("the tensor is too large to be compared again")
        return side.load(record)

    def _groups(self, shape: Sequence[int]) -> list[int]:
        """Return numbers of heads: whole attributes of the modules around that divide an axis."""
        call, found = self._blamed.call, set[int]()
        for side, key in ((self._runs.golden, call.golden), (self._runs.mine, call.mine)):
            if key is not None:
                found |= _counts(side, module_of(key.path))
        return sorted(count for count in found if any(size % count == 0 for size in shape))


def _of_row(row: Difference) -> Iterator[_Two]:
    if row.pair.golden is not None and row.pair.mine is not None:
        yield _Two(row.pair.golden, row.pair.mine, row)


def _ends(region: Region) -> Iterator[tuple[Record, Record]]:
    """Yield what the last operators of a region give.

    If one side has none, what the call takes before which they would stand is in their place.
    """
    before = region.before
    golden, mine = (
        calls[-1].outputs[:1] if calls and calls[-1].is_operator else []
        for calls in (region.golden, region.mine)
    )
    if before is not None and bool(golden) != bool(mine):
        golden, mine = golden or before.inputs, mine or before.inputs
    yield from itertools.product(golden, mine)


def _counts(side: Side, path: str) -> set[int]:
    """Return the whole numbers above 1 that a module and the one around it keep."""
    found = set()
    for module in dict.fromkeys((path, parent_of(path))):
        for kind, text in side.attributes.get(module, {}).values():
            if kind == "int" and text is not None and _INTEGER.fullmatch(text) and int(text) > 1:
                found.add(int(text))
    return found


def _corner(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of at most `_MOST` elements: the longest axis is halved until it is one."""
    sizes = list(shape)
    while math.prod(sizes) > _MOST:
        sizes[sizes.index(max(sizes))] //= 2
    return tuple(sizes)


def _cut(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x[tuple(slice(size) for size in shape)]
