"""A pair: two records that hold one thing in two runs, or one that has no partner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from llmdebug_nb.align.fit import Fit
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.quick import quick
from llmdebug_nb.core.records import Record


@quick
@dataclass(frozen=True, slots=True)
class Pair:
    """Two records and why they were matched, or one record and why it has no partner.

    ``why``: that in words. ``reason``: that as one of a closed set, None if nobody asked. ``fit``:
    brings tensors of different layouts to one shape; see `align/fit.py`. ``elsewhere``: the side
    whose tensor has no partner at its own place: the other side's tensor holds the same values at
    another place. With "both", neither has. ``alone``: why that side's tensor has none.
    ``other_batch``: the runs were given other rows or tokens, and no layout tells which these are.
    """

    golden: Record | None
    mine: Record | None
    why: str
    fit: Fit | None = None
    elsewhere: Literal["", "golden", "mine", "both"] = ""
    alone: Reason | None = None
    other_batch: bool = False
    reason: Reason | None = None

    @property
    def either(self) -> Record:
        record = self.golden or self.mine
        assert record is not None
        return record

    @property
    def at_its_place(self) -> bool:
        """False if the tensors stand at two places: one program has the value somewhere else."""
        return not self.elsewhere

    @property
    def content(self) -> object:
        """What both tensors hold, the same wherever they are seen; None if it is unknown.

        Two pairs of constants are one only if they are the same outputs, or if code that was not
        seen gave both to calls.
        """
        return self._content(_origin)

    @property
    def handed_on(self) -> object:
        """The content of the pair in which these outputs are seen next."""
        return self._content(attrgetter("id"))

    def _content(self, origin: Callable[[Record], int | None]) -> object:
        golden, mine, site = self.golden, self.mine, self.either.site
        if golden is None or mine is None:
            return None
        prints = golden.summary.fingerprint, mine.summary.fingerprint
        if None in prints:
            return None
        tells = identifies_itself(golden.summary) or identifies_itself(mine.summary)
        origins = () if tells else (origin(golden), origin(mine))
        return site.generation, site.step, site.rank, *prints, *origins

    def own(self, side: int) -> Record | None:
        """Return a side's record if this is its own row, and not only where it is seen again.

        ``side``: 0 for golden, 1 for mine.
        """
        record, other = (self.mine, "golden") if side else (self.golden, "mine")
        return None if self.elsewhere == other else record


def _origin(record: Record) -> int | None:
    """Return the output that a tensor is; its own id if it is made there; None if it is unknown.

    A backward pass is given gradients of outputs, and makes those of inputs.
    """
    given = "output" if record.site.phase == "backward" else "input"
    return record.id if record.producer is None and record.site.role != given else record.producer
