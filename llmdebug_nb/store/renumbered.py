"""Ranks that number modules of their own: the first layer of a stage is golden's third.

Equal weights tell it: their fingerprints are in every recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from llmdebug_nb.store.run import Run

_Weights: TypeAlias = frozenset[tuple[str, str]]  # name and fingerprint of those of a module


class Renumbered:
    """The paths of a rank that numbers modules of its own: its first layer is golden's third."""

    def __init__(self, shifts: Mapping[str, int]) -> None:
        """``shifts``: what is added to the numbers directly below a path."""
        self._shifts = shifts

    def __call__(self, path: str) -> str:
        if not self._shifts:
            return path
        module, slash, operator = path.partition("/")
        names = module.split(".")
        moved = list(names)
        for at, name in enumerate(names):
            shift = self._shifts.get(".".join(names[:at]))
            if shift is not None and name.isdecimal():
                moved[at] = str(int(name) + shift)
        return f"{'.'.join(moved)}{slash}{operator}"


def renumbered(run: Run, other: Run | None, ranks: Iterable[int]) -> dict[int, Renumbered]:
    """Return how the paths of each rank are renamed to those of another run."""
    found: dict[int, Mapping[str, int]] = {rank: {} for rank in ranks}
    if other is not None and len(found) > 1:
        there: dict[_Weights, list[str]] = defaultdict(list)
        for modules in _weights(other).values():
            for path, weights in modules.items():
                there[weights].append(path)
        for rank, modules in _weights(run).items():
            found[rank] = _shifts(modules, there)
    return {rank: Renumbered(shifts) for rank, shifts in found.items()}


def _shifts(modules: Mapping[str, _Weights], there: Mapping[_Weights, list[str]]) -> dict[str, int]:
    """Return what is added to the numbers below a path, where all that tell it say the same."""
    shifts: dict[str, set[int]] = defaultdict(set)
    for path, weights in modules.items():
        others = there.get(weights, [])
        if len(others) != 1:
            continue
        names, theirs = path.split("."), others[0].split(".")
        if len(names) != len(theirs):
            continue
        apart = [
            at for at, pair in enumerate(zip(names, theirs, strict=True)) if len(set(pair)) > 1
        ]
        for at, name in enumerate(names):
            if name.isdecimal() and theirs[at].isdecimal() and set(apart) <= {at}:
                shifts[".".join(names[:at])].add(int(theirs[at]) - int(name))
    return {path: each for path, (each, *more) in shifts.items() if each and not more}


def _weights(run: Run) -> dict[int, dict[str, _Weights]]:
    """Return the weights of each module of each rank."""
    sql = """SELECT rank, path, slot, fingerprint FROM rows WHERE role = 'weight'
 UNION ALL SELECT rank, path, slot, value FROM scalar_rows WHERE role = 'weight'"""
    found: dict[int, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for rank, path, slot, text in run.index.query(tuple[int, str, str, str | None], sql):
        if text is not None:
            found[rank][path].add((slot, text))
    return {
        rank: {path: frozenset(weights) for path, weights in modules.items()}
        for rank, modules in found.items()
    }
