"""Tensors of one kind, as they go through the calls of two programs."""

from __future__ import annotations

from dataclasses import replace

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.paths import ancestors, is_operator
from llmdebug_nb.core.records import CallKey, Record, Site


class Followed:
    """What such pairs of tensors hold, who takes them, and which outputs they are."""

    def __init__(self) -> None:
        self._calls: set[CallKey] = set()
        self._contents: set[object] = set()
        self._made: set[tuple[int | None, int | None]] = set()  # ids of outputs

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._contents)

    def add(self, pair: Pair) -> None:
        self._contents.add(_contents(pair))
        if pair.either.site.role == "input":
            self._calls.add(pair.either.site.key)
        elif pair.golden is not None and pair.mine is not None:
            self._made.add((pair.golden.id, pair.mine.id))

    def are_given_to(self, site: Site) -> bool:
        """Tell whether a call takes one."""
        return site.key in self._calls

    def make(self, pair: Pair) -> bool:
        """Tell whether both tensors of a pair are made of one, or are one that was seen before."""
        golden, mine = pair.golden, pair.mine
        if not self or golden is None or mine is None:
            return False
        if golden.site.role == "output":
            return self.are_given_to(golden.site)
        return self.hold(pair) or self.are_viewed(golden, mine)

    def hold(self, pair: Pair) -> bool:
        """Tell whether a pair is one that was seen before, in any step."""
        return _contents(pair) in self._contents

    def are_viewed(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors are views of one, or made of it by code that was not seen.

        A module inside one that takes such a tensor may be given what is made of it.
        """
        if golden.producer is not None or is_operator(golden.site.path):
            return (golden.producer, mine.producer) in self._made
        calls = (replace(golden.site, path=path, call=0) for path in ancestors(golden.site.path))
        return any(map(self.are_given_to, calls))


def _contents(pair: Pair) -> object:
    """Return what both tensors hold, in any step: caches hold the states of steps before.

    Two tensors that do not identify themselves may be anything.
    """
    records = [record for record in (pair.golden, pair.mine) if record is not None]
    prints = [record.summary.fingerprint for record in records]
    tells = any(identifies_itself(record.summary) for record in records)
    return tuple(prints) if tells and len(prints) == 2 and all(prints) else pair
