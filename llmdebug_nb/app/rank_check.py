"""Holding the ranks of one run against each other: replicas, and what collectives gave."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from llmdebug_nb.app.rank_weights import out_of_step
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.comparison.collectives import Reductions, fault
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.core.placement import ACCUMULATED, REPLICATE, SHARED, unshared
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.collectives import collectives
from llmdebug_nb.store.rank_checks import REPLICAS, RankCheck, RankFault
from llmdebug_nb.store.reduced import reduced_gradients
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.world import grid_of, groups_of

_Key: TypeAlias = tuple[object, ...]
_WEIGHTS: _Key = ("weight",)


def check_ranks(run: Run | str | os.PathLike[str]) -> RankCheck:
    """Hold the ranks of a run against each other, without a second run.

    Replicas have to be equal: weights and gradients that ranks share, and DTensors that are said to
    be replicated. Collectives have to give what their ranks put in, and so do reduced gradients.

    Raises:
        StoreError: the run can't be opened. CompareError: it has one rank, or some are missing.
    """
    run = open_run(run)
    ranks = grid_of(run)
    if len(ranks) < 2:
        raise CompareError(f"{run.label} has one rank: there is no other to hold it against")
    replicas = _Replicas(run)
    faults = list(replicas.faults())
    faults += out_of_step(run, ranks, replicas.reduced)
    unchecked: Counter[str] = Counter()
    if replicas.unread:
        unchecked["replicas whose values were not read, as sparse ones"] = replicas.unread
    count = 0
    for call in collectives(run, unchecked):
        try:
            found = fault(call)
        except ValueError as error:
            unchecked[str(error)] += 1
            continue
        count += 1
        if found is not None:
            faults.append(found)
    reductions = Reductions()
    for ways in reduced_gradients(run, groups_of(run), unchecked):
        reductions.add(ways)
    wrong, unknown = reductions.faults()
    if unknown:
        unchecked["gradients that are neither a mean nor a sum of what ranks added"] = unknown
    faults += wrong
    count += reductions.count - unknown
    return RankCheck(run.label, len(ranks), faults, replicas.count, count, dict(unchecked))


class _Replicas:
    """The tensors that several ranks should have alike.

    ``count``: how many there are. ``unread``: of how many nothing is known.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.count = self.unread = 0
        self._said: dict[_Key, list[Record]] = defaultdict(list)  # replicas by their placement
        self._plain: dict[_Key, list[Record]] = defaultdict(list)  # weights and reduced gradients
        self._latest: dict[_Key, list[Record]] = {}  # the gradients in which a parameter's stands
        for record in run.records():
            s = record.site
            key = s.generation, s.step, s.path, s.call, s.phase, s.role, s.slot
            if record.placed is not None:
                if REPLICATE in record.placed.parts:
                    self._said[(*key, *_line(record))].append(record)
            elif s.role == "weight":
                self._plain[(*key, record.summary.shape)].append(record)
            elif s.role == "grad" and s.slot.endswith(SHARED):
                self._add_gradient(record, self._plain[(*key, record.summary.shape)])

    def _add_gradient(self, record: Record, replicas: list[Record]) -> None:
        """Add a gradient to its replicas; of what passes add up, the sum alone counts."""
        s = record.site
        parameter = s.rank, s.path, unshared(s.slot)
        before = self._latest.get(parameter)
        if before is not None and s.slot.endswith(ACCUMULATED):
            before[:] = [each for each in before if each.site.rank != s.rank]
        replicas.append(record)
        self._latest[parameter] = replicas

    def faults(self) -> Iterator[RankFault]:
        """Yield the replicas that are out of step."""
        for records in self._said.values():
            if len(records) > 1:
                yield from self._of(records, sure=True)
        groups: dict[_Key, list[list[Record]]] = defaultdict(list)
        for records in self._plain.values():
            if len(records) > 1:
                groups[_pass_of(records[0])].append(records)
        parts: set[_Key] = set()  # parameters of which each rank has its own part
        for kind, several in sorted(groups.items(), key=lambda each: each[0] != _WEIGHTS):
            whole = [each for each in several if _parameter_of(each[0]) not in parts]
            equal = sum(_are_equal(records) for records in whole)
            shared = equal > constants.MAJORITY * len(whole)  # of data parallel ranks, say
            if kind == _WEIGHTS and not shared:
                parts = {_parameter_of(each[0]) for each in whole if not _are_equal(each)}
            for records in whole:
                yield from self._of(records, sure=shared)

    @property
    def reduced(self) -> set[tuple[str, str]]:
        """The parameters, by path and name, that have one gradient on all ranks in some pass."""
        several = (each for each in self._plain.values() if len(each) > 1)
        return {
            (each[0].site.path, unshared(each[0].site.slot))
            for each in several
            if each[0].site.role == "grad" and _are_equal(each) and not _is_constant(each[0])
        }

    def _of(self, records: Sequence[Record], sure: bool) -> Iterator[RankFault]:
        """Yield the fault of replicas. Unless they are ``sure`` ones, parts may only look alike."""
        if _are_equal(records):
            self.count += 1
            return
        if any(each.summary.fingerprint is None for each in records):
            self.unread += 1
            return
        most = Counter(each.summary.fingerprint for each in records).most_common(1)[0][0]
        rest = [each for each in records if each.summary.fingerprint != most]
        first = next(each for each in records if each.summary.fingerprint == most)
        error = self._error(first, rest)
        near = error is not None and error <= constants.WRONG_LAYOUT
        if not (sure or near):
            return  # parts of one tensor
        self.count += 1
        if near and records[0].site.role not in ("weight", "grad") and _rounds(error, first):
            return
        alone = len(rest) < len(records) - len(rest)
        who = rest if alone else records
        ranks = tuple(sorted(each.site.rank for each in who))
        named = ", ".join(map(str, ranks))
        figure = "" if error is None else f" by {error:.2g}"
        says = (
            f"rank {named} differs{figure} from the {len(records) - len(rest)} others"
            if alone
            else f"ranks {named} should be equal and differ{figure}"
        )
        yield RankFault(REPLICAS, records[0].site, ranks, says)

    def _error(self, first: Record, others: Sequence[Record]) -> float | None:
        """Return the largest error of records against one; None without values."""
        if any(each.payload is None or each.kept is not None for each in (first, *others)):
            return None
        there = self._run.load(first).double()
        return max(relative_l2(there, self._run.load(each).double()) for each in others)


def _rounds(error: float | None, record: Record) -> bool:
    limit = constants.OPERATOR_EPSILONS * epsilon(record.summary.dtype)
    return error is not None and error <= limit


def _pass_of(record: Record) -> _Key:
    """Return what gradients of one backward pass have in common, and all weights."""
    s = record.site
    if s.role == "weight":
        return _WEIGHTS
    return s.role, s.generation, s.step, s.call, s.slot.endswith(ACCUMULATED)


def _parameter_of(record: Record) -> _Key:
    return record.site.path, unshared(record.site.slot)


def _are_equal(records: Sequence[Record]) -> bool:
    found = {each.summary.fingerprint for each in records}
    return len(found) == 1 and None not in found


def _is_constant(record: Record) -> bool:
    return record.summary.min == record.summary.max


def _line(record: Record) -> tuple[object, ...]:
    """Return the place of a record apart from the dimensions along which it is replicated."""
    placed = record.placed
    assert placed is not None
    at = placed.at(record.site.rank) or ()
    fixed = (here for here, part in zip(at, placed.parts, strict=False) if part != REPLICATE)
    return placed.ranks, placed.parts, tuple(fixed)
