"""Pairing the records of two runs of the same architecture: by site, never by a running counter."""

from __future__ import annotations

from collections.abc import Iterable

from llmdebug_nb.records import Pair, Record

SAME_SITE = "same site"
# why a record stays alone: a closed set
NO_PATH = "the module is not in the other run"
NO_STEP = "the other run did not record this step"
NO_PHASE = "the other run did not record this phase"
NO_CALL = "the module was called fewer times in the other run"
NO_SLOT = "the other run has no such argument or output"

_Key = tuple[object, ...]


def _key(record: Record) -> _Key:
    s = record.site
    return s.rank, s.generation, s.step, s.path, s.call, s.phase, s.role, s.slot


def pair(golden: Iterable[Record], mine: Iterable[Record]) -> list[Pair]:
    """Pair records of equal site, in golden's execution order; the rest stays visible, each with its reason.

    A record only in ``mine`` stands after the pair that ran before it there.
    """
    golden, mine = list(golden), list(mine)
    theirs = {_key(record): record for record in mine}
    ours = {_key(record): record for record in golden}
    only_golden, only_mine = _Reasons(mine), _Reasons(golden)
    after: dict[_Key | None, list[Pair]] = {}
    last: _Key | None = None
    for record in mine:
        key = _key(record)
        if key in ours:
            last = key
        else:
            after.setdefault(last, []).append(Pair(None, record, only_mine.why(record)))
    pairs = after.pop(None, [])
    for record in golden:
        key = _key(record)
        partner = theirs.get(key)
        pairs.append(Pair(record, partner, SAME_SITE if partner else only_golden.why(record)))
        pairs.extend(after.pop(key, ()))
    return pairs


class _Reasons:
    """Says why a record has no partner among ``others``."""

    def __init__(self, others: Iterable[Record]) -> None:
        self._paths: set[_Key] = set()
        self._steps: set[_Key] = set()
        self._calls: set[_Key] = set()
        self._phases: set[_Key] = set()
        for record in others:
            s = record.site
            self._paths.add((s.path,))
            self._steps.add((s.generation, s.step))
            self._calls.add((s.generation, s.step, s.phase, s.path, s.call))
            self._phases.add((s.phase,))

    def why(self, record: Record) -> str:
        s = record.site
        if (s.path,) not in self._paths:
            return NO_PATH
        if (s.generation, s.step) not in self._steps:
            return NO_STEP
        if (s.phase,) not in self._phases:
            return NO_PHASE
        return NO_SLOT if (s.generation, s.step, s.phase, s.path, s.call) in self._calls else NO_CALL
