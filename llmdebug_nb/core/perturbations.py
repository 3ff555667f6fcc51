"""The result of moving operators' inputs: the nouns that all stages exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

ULP, NOISE, PRECISE = "ulp", "noise", "precise"
DETERMINISTIC, MATH, ONE_THREAD = "deterministic", "math_sdpa", "one_thread"
# kinds of perturbations, in words
KINDS = {
    ULP: "inputs move by one unit in the last place, up or down by chance",
    NOISE: "inputs get random errors as large as those of 8 bits with one scale a row",
    PRECISE: "computed in a higher precision, and not rounded before it is used",
    DETERMINISTIC: "computed by deterministic algorithms",
    MATH: "attention computed step by step, without a fused kernel",
    ONE_THREAD: "computed by one thread",
}
OF_INPUTS = (ULP, NOISE)
SWITCHES = (DETERMINISTIC, MATH, ONE_THREAD)
MODES = ("module", "api", "aten")
Key: TypeAlias = tuple[str, int]  # path of a module or operator, and the number of the call


@dataclass(frozen=True)
class Unit:
    """A module, or one call of an operator, that can be perturbed alone.

    ``number``: n-th call of that path in a step, from 0; of a module always 0, which is all calls.
    ``source``: ``file:line function`` of the program; ``code``: the line.
    """

    path: str
    number: int = 0
    op: str = ""
    source: str = ""
    code: str = ""

    @property
    def key(self) -> Key:
        return self.path, self.number


@dataclass(frozen=True)
class Moved:
    """How far the result moves if some units are perturbed, all at once.

    ``moved``: relative L2 of the result, None if the run failed. ``given``: relative L2 of the
    inputs, as a root mean square over the input tensors; 0 if it is not the inputs that move.
    ``flips``: rows of the result whose largest element is at another index. ``loss``: how far the
    loss moves, relative; None if the program gives none beside the result. ``problem``: why the
    run failed, or what in it could not be perturbed.
    """

    kind: str
    units: tuple[Unit, ...]
    moved: float | None
    given: float = 0.0
    flips: int = 0
    loss: float | None = None
    problem: str = ""

    @property
    def alone(self) -> bool:
        return len(self.units) == 1

    @property
    def amplification(self) -> float | None:
        """Moved result over moved inputs; None if no input was moved."""
        return self.moved / self.given if self.moved is not None and self.given else None

    @property
    def rank(self) -> float:
        """What rows are sorted by: a result that becomes NaN or infinite has moved the most."""
        return -1.0 if self.moved is None else math.inf if self.moved != self.moved else self.moved


@dataclass
class Sensitivity:
    """All that was measured.

    ``rows``: by kind, each unit once: alone or in a group. ``result``: the name of what moves.
    ``spread``: how far repeated unperturbed runs differ, 0 for a deterministic program.
    ``positions``: rows of the result whose largest element counts. ``units``: by kind, how many.
    ``runs``: of the program. ``notes``: what was not done, and why. ``interrupted``: by the user.
    """

    mode: str
    result: str
    spread: float = 0.0
    positions: int = 0
    runs: int = 0
    rows: dict[str, list[Moved]] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def sorted(self, kind: str) -> list[Moved]:
        """Return the rows of a kind, the farthest moved first."""
        return sorted(self.rows.get(kind, ()), key=lambda row: -row.rank)

    def tells(self, row: Moved) -> bool:
        """Tell whether a row moves more than the program does by itself."""
        return row.moved is not None and row.rank > self.spread


def common_path(units: Iterable[Unit]) -> str:
    """Return the path of the innermost module around several units."""
    parts = [unit.path.partition("/")[0].split(".") for unit in units]
    shared: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
