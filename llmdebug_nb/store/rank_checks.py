"""The nouns of a check of ranks against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import Site

REPLICAS, COLLECTIVE = "out of step", "wrong result"


@dataclass(frozen=True)
class Collective:
    """One collective that several ranks called together.

    ``site``: of the call, its rank the first one. ``op``: ``all_reduce``. ``facts``: by rank, what
    it said: ``ranks``, ``op``. ``takes``, ``gives``: by rank, the tensors, in the group's order.
    """

    site: Site
    op: str
    facts: Mapping[int, Mapping[str, str]]
    takes: Mapping[int, Sequence[torch.Tensor]]
    gives: Mapping[int, Sequence[torch.Tensor]]


class RankFault(NamedTuple):
    """Ranks that do not agree. ``kind``: `REPLICAS` or `COLLECTIVE`. ``says``: what is wrong.

    ``explained``: it says, too, what a collective gave instead.
    """

    kind: str
    site: Site
    ranks: tuple[int, ...]
    says: str
    explained: bool = False

    def __str__(self) -> str:
        return printable(f"{self.site}: {self.says}")


@dataclass(frozen=True)
class RankCheck:
    """The result of a check. ``ranks``: how many. ``faults``: in execution order.

    ``replicas``, ``collectives``: how many were checked. ``unchecked``: by reason, those that
    could not be.
    """

    label: str
    ranks: int
    faults: list[RankFault]
    replicas: int
    collectives: int
    unchecked: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """``agree``, ``do not agree``, or ``nothing checked``."""
        if self.faults:
            return "do not agree"
        return "agree" if self.replicas or self.collectives else "nothing checked"

    @property
    def ok(self) -> bool:
        """Whether something was checked, and all of it agrees."""
        return self.verdict == "agree"

    def __str__(self) -> str:
        counts = f"{self.replicas:,} replicas and {self.collectives:,} collectives were checked"
        state = {
            "agree": "agree",
            "do not agree": f"do not agree, {len(self.faults)} times",
            "nothing checked": "were not held against each other: nothing says that they share"
            " weights or gradients (--weights --tokens all records weights, and several steps)",
        }[self.verdict]
        lines = [f"{self.label}: {self.ranks} ranks {state}; {counts}", *map(str, self.faults)]
        lines += [f"not checked: {count:,} {why}" for why, count in self.unchecked.items()]
        return "\n".join(map(printable, lines))
