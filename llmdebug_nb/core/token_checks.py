"""The nouns of a comparison of logits: a token, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PASS, FAIL, NOT_COMPARED = "pass", "fail", "not compared"
RULES = {
    "rounding": "the error of a token is what rounding in the coarser dtype explains",
    "msit": "cosine >= 0.999, KL <= 1e-4 and |l1_norm| <= 0.01, or the largest logits within 1 ULP",
    "tokens": "the most likely token is the same; equal logits share a place",
    "equal": "all logits are equal",
}
INTERRUPTED = "interrupted"
Verdict = Literal["pass", "fail", "not compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCheck:
    """Golden's distribution of one token against mine's, both given the same tokens before it.

    ``row``: of the step's logits. ``token``: the one that golden chose; if the next input was not
    recorded, its most likely one. ``best``: the most likely token of golden, of mine.
    ``rank``: of ``token`` in mine, 1 is the most likely; None if mine has a NaN.
    ``probability``: of ``token``, in golden and in mine. ``margin``: how far golden prefers its own
    best token to mine's, in logits. ``lost``: golden's k most likely tokens that are not among
    mine's. ``metrics``: of the row, see `comparison.metrics`. ``why``: what the rule says.
    """

    generation: int
    step: int
    sequence: int
    row: int
    token: int
    best: tuple[int, int]
    rank: int | None
    probability: tuple[float, float]
    margin: float
    lost: int
    metrics: Mapping[str, float | int | None]
    passed: bool
    why: str

    @property
    def flipped(self) -> bool:
        """True if mine prefers another token."""
        return self.best[0] != self.best[1]

    @property
    def kl(self) -> float | None:
        """KL(softmax(golden) || softmax(mine)), in nats."""
        return self.metrics.get("kl_divergence")


@dataclass(frozen=True, slots=True)
class Side:
    """Where logits come from. ``name``: of the run or model. ``place``: of the tensor."""

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class LogitsResult:
    """All tokens of a comparison of logits, in the order of golden.

    ``left_out``: tokens that were not compared, by reason. ``top``: the k of top-k.
    """

    sides: tuple[Side, Side]
    rule: str
    top: int
    tokens: tuple[TokenCheck, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return len(self.tokens) + sum(self.left_out.values())

    @property
    def failed(self) -> list[TokenCheck]:
        return [each for each in self.tokens if not each.passed]

    @property
    def flips(self) -> list[TokenCheck]:
        return [each for each in self.tokens if each.flipped]

    @property
    def first_flip(self) -> TokenCheck | None:
        """The first token that differs."""
        return next(iter(self.flips), None)

    @property
    def verdict(self) -> Verdict:
        """``not compared`` if no token was, or if none failed before an interrupt."""
        if self.failed:
            return "fail"
        return "pass" if self.tokens and INTERRUPTED not in self.left_out else "not compared"
