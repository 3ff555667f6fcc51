"""The nouns of `doctor`: what a set-up is made of, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Facts = Mapping[str, Mapping[str, str]]  # by section and name, as texts
Level = Literal["high", "medium", "low"]
Verdict = Literal["same", "suspicious", "not compared"]
SAME, SUSPICIOUS, NOT_COMPARED = "same", "suspicious", "not compared"
LEVELS: tuple[Level, ...] = ("high", "medium", "low")
# what the parts of a set-up are called, in the order in which they are shown
SECTIONS = (
    "tokenizer", "prompt", "config", "weights", "modules", "model", "generation", "switches",
    "random", "versions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer. ``fingerprint``: of its bytes. ``load``: reads it, if it is there.

    ``saved``: False for a buffer that a checkpoint leaves out.
    """

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None = None
    load: Callable[[], torch.Tensor] | None = None
    saved: bool = True


@dataclass(frozen=True)
class Setup:
    """What a run, a live model or a checkpoint says of how it came to be.

    ``ties``: groups of names of one weight. ``absent``: sections that are unknown, and why.
    ``partial``: why it may lack weights that the program has; "" if it has them all.
    """

    name: str
    kind: Literal["run", "model", "checkpoint"]
    facts: Facts
    weights: Mapping[str, Weight] = field(default_factory=dict)
    ties: tuple[frozenset[str], ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    partial: str = ""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One difference. ``golden``, ``mine``: both values in words. ``can``: what it can cause."""

    level: Level
    section: str
    name: str
    golden: str
    mine: str
    can: str
    do: str


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """All differences of two set-ups, the most suspicious first.

    ``compared``: how many facts of each section. ``not_compared``: how many were not, by reason.
    """

    golden: str
    mine: str
    symptoms: tuple[Symptom, ...]
    compared: Mapping[str, int]
    not_compared: Mapping[str, int]

    @property
    def verdict(self) -> Verdict:
        """``same`` if nothing differs but what is harmless as a rule."""
        if not sum(self.compared.values()):
            return "not compared"
        return "suspicious" if self.suspicious else "same"

    @property
    def suspicious(self) -> list[Symptom]:
        """Those that are not harmless as a rule."""
        return [each for each in self.symptoms if each.level != "low"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of this installation. ``works``: None if it is optional and absent."""

    name: str
    works: bool | None
    says: str
    do: str = ""
