"""Say what a finding's wrong tensor is of golden's: choose the two tensors, and what they may be.

They are those of the blamed calls, a weight that differs, or else the row that shows the error.
`relation.py` compares them, and also with golden's tensors around it (`neighbours.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from llmdebug_nb.causes import causes
from llmdebug_nb.causes.judge import Blamed
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.masks import may_hide
from llmdebug_nb.core.paths import module_of, operator_of
from llmdebug_nb.core.records import Record, Site
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.relation import neighbours, shapes
from llmdebug_nb.relation.evidence import MASKED, PART, Relation
from llmdebug_nb.relation.relation import relation, weight_relation
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs, Side


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
                if found is not None and found.kind == MASKED:
                    later = self._masked_later(two.mine)  # golden's may be of behind its mask
                    found = (
                        found if later is None else self._relation(_Two(two.golden, later, None))
                    )
            except (
                CannotReplay,
                CorruptDumpError,
                ValueError,
            ):  # no values, or others than the records say
                continue
            if found is not None:
                says = f"further on, at {two.where}, {found.says}" if two.where else found.says
                settled = taken or causes.about(self._blamed.cause).advises
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
        if partner is None or golden is None or partner.id == golden.id:
            return ""
        if partner.summary.numel != golden.summary.numel:  # neither stands for the other
            return ""
        theirs, ours = (neighbours.name(flow, record) for record in (golden, partner))
        return f"mine takes golden's {ours} where golden takes {theirs}" if theirs != ours else ""

    def _twos(self) -> Iterator[_Two]:
        """Yield the pairs of tensors that may tell, the nearest to the error first."""
        blamed, region = self._blamed, self._blamed.region
        if blamed.cause in (causes.UPDATED, causes.GRADIENT):
            return  # what an update does to values says nothing of them, nor what is not there
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
            where = _words(two.mine.site)
            if all(two.mine.id != mine.id for _, mine in ends):
                yield two if two.row is blamed.row and not ends else two._replace(where=where)

    def _row(self, golden: Record, mine: Record) -> Difference | None:
        """Return the row that pairs two tensors."""
        rows = self._flows[1].rows[mine.id]
        return next((d for d in rows if d.pair.golden and d.pair.golden.id == golden.id), None)

    def _masked_later(self, mine: Record) -> Record | None:
        """Return the same scores of mine behind its mask; None if they are, or if it has none."""
        if may_hide(mine.summary):
            return None
        module = module_of(mine.site.path)
        later = (
            record
            for record in self._flows[1].records.values()
            if record.id > mine.id
            and record.site.key[:4] == mine.site.key[:4]
            and module_of(record.site.path) == module
            and record.summary.shape == mine.summary.shape
            and may_hide(record.summary)
        )
        return next(later, None)

    # -- one pair ---------------------------------------------------------------------------------

    def _relation(self, two: _Two) -> Relation | None:
        """Compare two tensors, first as if one were a view of the other."""
        golden, mine = self._fitted(two, two.golden)
        if golden.shape != mine.shape and golden.numel() == mine.numel():
            limit = self._limit(two)
            viewed = golden.reshape(mine.shape)
            if self._runs.error(viewed, mine) <= limit:
                return None
            found = self._compared(two, viewed, mine)
            if found is not None:
                return found
        if (
            golden.shape != mine.shape
            and max(golden.numel(), mine.numel()) > constants.RELATED_ELEMENTS
        ):
            return None  # corners of two shapes have nothing to do with each other
        return self._compared(two, golden, mine)

    def _compared(self, two: _Two, golden: torch.Tensor, mine: torch.Tensor) -> Relation | None:
        limit, corner = self._limit(two), _corner(mine.shape)
        shape = tuple(mine.shape)
        if golden.shape == mine.shape:
            golden, mine = _cut(golden, corner), _cut(mine, corner)
            if self._runs.error(golden, mine) <= limit:
                return None  # what is within the limit is no cause
        others, heads = list(self._others(two, shape, corner)), self._heads(two, shape)
        if two.golden.site.role == "weight":
            return weight_relation(golden, mine, limit=limit, others=others, groups=heads)
        # the inputs of an engine do not tell how many tokens there are, those of the other run do
        keys = (two.mine.site.key, two.golden.site.key)
        words = (
            shapes.axis_words(flow, key, shape, heads)
            for flow, key in zip(reversed(self._flows), keys, strict=True)
        )
        axes = next(filter(None, words), ())
        found = relation(golden, mine, limit=limit, others=others, groups=heads, axes=axes)
        changed = self._changed(golden, mine) if found is not None and found.kind == PART else None
        return changed or found

    def _changed(self, golden: torch.Tensor, mine: torch.Tensor) -> Relation | None:
        """Tell how many channels each program changes of a tensor that both take, if not as many.

        A rotation may leave a part of each head as it is.
        """
        region = self._blamed.region
        entries = [] if region is None else [d.pair.golden for d in region.entries]
        for record in dict.fromkeys(r for r in entries if r is not None):
            if golden.dim() != 4 or record.summary.numel != golden.numel():
                continue
            batch, heads, tokens, size = golden.shape
            taken = self._load(self._runs.golden, record)
            for before in (
                taken.reshape(batch, tokens, heads, size).transpose(1, 2),
                taken.reshape(golden.shape),
            ):
                kept = [(before == x).flatten(0, 2).all(0) for x in (golden, mine)]
                theirs, ours = (size - int(each.sum()) for each in kept)
                if bool(kept[0].any()) and theirs < ours:
                    says = f"golden changes {theirs} of the {size} channels of a head, mine {ours}"
                    advice = "look at how many channels are turned: a partial factor or a size"
                    return Relation(PART, says, advice, 0.0)
        return None

    def _fitted(self, two: _Two, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor of golden and mine's, brought to one layout."""
        golden, mine = self._load(self._runs.golden, record), self._load(self._runs.mine, two.mine)
        fit = two.row.pair.fit if two.row is not None else None
        return (golden, mine) if fit is None else fit(golden, mine)

    def _others(
        self, two: _Two, shape: tuple[int, ...], corner: tuple[int, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield golden's tensors around, in mine's layout, as many as there is time for."""
        flow, left = self._flows[0], constants.RELATED_ELEMENTS
        if two.golden.site.role == "weight":
            near = neighbours.weights(flow, two.golden, self._runs)
        else:
            near = neighbours.around(flow, two.golden, self._blamed.region)
        for name, record in near:
            if record.summary.numel != two.golden.summary.numel:
                continue
            try:
                value = self._fitted(two, record)[0]
            except (CannotReplay, CorruptDumpError, ValueError):
                continue
            left -= math.prod(corner)
            if left < 0:
                return
            if _long(value.shape) == _long(shape):
                yield name, _cut(value.reshape(shape), corner)

    def _limit(self, two: _Two) -> float:
        rows = [two.row, self._blamed.row]
        rows += [] if self._blamed.region is None else [self._blamed.region.row]
        limits = (row.limit for row in rows if row is not None)
        return next((limit for limit in limits if limit), constants.EXACT)

    def _load(self, side: Side, record: Record) -> torch.Tensor:
        if record.summary.numel > constants.READ_ELEMENTS:
            raise CannotReplay("the tensor is too large to be compared again")
        return side.load(record)

    def _heads(self, two: _Two, shape: Sequence[int]) -> list[int]:
        """Return numbers of heads that may divide an axis."""
        sides = zip(
            (self._runs.golden, self._runs.mine),
            self._flows,
            (two.golden.site.key, two.mine.site.key),
            strict=True,
        )
        return sorted(set[int]().union(*(shapes.head_counts(*side, shape) for side in sides)))


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


def _words(site: Site) -> str:
    module = module_of(site.path) or "the model"
    operator = operator_of(site.path)
    return f"{site.role} {site.slot} of {f'{operator} in ' if operator else ''}{module}"


def _corner(shape: Sequence[int]) -> tuple[int, ...]:
    """Halve the longest axis of a shape until it has few enough elements."""
    sizes = list(shape)
    while math.prod(sizes) > constants.RELATED_ELEMENTS:
        sizes[sizes.index(max(sizes))] //= 2
    return tuple(sizes)


def _long(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _cut(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x[tuple(slice(size) for size in shape)]
