"""What runs on the workers of a cluster. Results must be those that this machine would get."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmdebug_nb.comparison.jobs import Job, Outcome, measured
from llmdebug_nb.core.allocator import reused_memory
from llmdebug_nb.core.determinism import threads
from llmdebug_nb.core.errors import PACKAGE, StoreError
from llmdebug_nb.store.shards import Load, Portion, Shards

Versions = dict[str, str]


class UnfitError(Exception):
    """This worker can't do the work, and another one may. ``address``: its own; ``why``."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(address, why)
        self.address, self.why = address, why


@functools.cache
def versions() -> Versions:
    """Return what decides the bits of a result, by name."""
    import numpy
    import torch

    digest = hashlib.sha256()
    for file in sorted(Path(PACKAGE).rglob("*.py")):
        digest.update(file.read_bytes())
    return {
        "llmdebug_nb": str(vars(sys.modules[__name__.partition(".")[0]])["__version__"]),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "state of llmdebug_nb's code": digest.hexdigest()[:12],
    }


def differences(theirs: Versions, ours: Versions) -> str:
    """Return what a worker has in other versions, in words; "" if nothing."""
    return ", ".join(
        f"{name} {theirs.get(name)} against {own} here"
        for name, own in ours.items()
        if theirs.get(name) != own
    )


class Unfit(NamedTuple):
    """Why a worker can't do the work. ``other_version``: it has not our versions."""

    why: str
    other_version: bool


def probe(places: Sequence[Shards], ours: Versions) -> Unfit | None:
    """Return why this worker can't do the work; None if it can."""
    apart = differences(versions(), ours)
    if apart:
        return Unfit(apart, True)
    try:
        for place in places:
            _opened(place)
    except StoreError as error:
        return Unfit(str(error), False)
    return None


@functools.lru_cache(8)
def _opened(place: Shards) -> Load:
    return place.opened()


def measure(
    portions: tuple[Portion, Portion], jobs: Sequence[Job], ours: Versions
) -> list[Outcome]:
    """Measure pairs of payloads, of golden and mine. Raises UnfitError."""
    fit_for([portion.shards for portion in portions], ours)
    golden, mine = (portion.loading(_opened(portion.shards)) for portion in portions)
    with reused_memory(), threads(1):
        return [measured(job, golden, mine) for job in jobs]


def fit_for(places: Sequence[Shards], ours: Versions) -> None:
    """Raise UnfitError if this worker can't do the work: it may have come later."""
    unfit = probe(places, ours)
    if unfit is not None:
        from distributed import get_worker

        raise UnfitError(get_worker().address, unfit.why)
