"""The nouns of a comparison of logits: a token, and the result."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

_LARGEST = math.log(sys.float_info.max)
PASS, FAIL, NOT_COMPARED = "pass", "fail", "not compared"
RULES = {
    "rounding": "the error of a token is what the coarser rounding explains",
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
    ``logprob``: of ``token``, in golden and in mine, in nats. ``margin``: how far golden prefers
    its own best token to mine's, in logits. ``lost``: golden's k most likely tokens that are not
    among mine's. ``metrics``: of the row, see `comparison.metrics`. ``why``: what the rule says.
    ``sampled``: ``token`` came next in the text, and is not known to be of the prompt.
    """

    generation: int
    step: int
    sequence: int
    row: int
    token: int
    best: tuple[int, int]
    rank: int | None
    logprob: tuple[float, float]
    margin: float
    lost: int
    metrics: Mapping[str, float | int | None]
    passed: bool
    why: str
    sampled: bool

    @property
    def probability(self) -> tuple[float, float]:
        """Of ``token``, in golden and in mine."""
        return math.exp(self.logprob[0]), math.exp(self.logprob[1])

    @property
    def ratio(self) -> float:
        """The importance ratio: golden's probability of ``token`` over mine's."""
        return math.exp(min(self.logprob[0] - self.logprob[1], _LARGEST))

    @property
    def flipped(self) -> bool:
        """True if mine prefers another token."""
        return self.best[0] != self.best[1]

    @property
    def kl(self) -> float | None:
        """KL(softmax(golden) || softmax(mine)), in nats."""
        return self.metrics.get("kl_divergence")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far mine's probabilities of sampled tokens are from golden's.

    ``ratio``: mean, least and largest importance ratio, see `TokenCheck.ratio`. ``clipped``: how
    many ratios lie outside of ``1 - clip`` to ``1 + clip``, where PPO has no gradient (Schulman et
    al. 2017, arXiv 1707.06347). ``kl``: mean KL(golden || mine) in nats. ``worst``: the token whose
    ratio is farthest from 1, as a factor.
    """

    tokens: int
    ratio: tuple[float, float, float]
    clipped: int
    kl: float
    worst: TokenCheck


def mismatch(tokens: Sequence[TokenCheck], clip: float) -> Mismatch | None:
    """Return the mismatch over the sampled ones of some tokens; None if there are none.

    Tokens whose ratio or KL is no number are left out.
    """
    known = [
        (each, each.ratio, each.kl)
        for each in tokens
        if each.sampled and each.kl is not None and not math.isnan(each.ratio)
    ]
    if not known:
        return None
    ratios = [ratio for _, ratio, _ in known]
    worst = max(known, key=lambda one: abs(one[0].logprob[0] - one[0].logprob[1]))[0]
    return Mismatch(
        len(known),
        (math.fsum(ratios) / len(known), min(ratios), max(ratios)),
        sum(not 1 - clip <= ratio <= 1 + clip for ratio in ratios),
        math.fsum(kl for _, _, kl in known) / len(known),
        worst,
    )


@dataclass(frozen=True, slots=True)
class Side:
    """Where logits come from. ``name``: of the run or model. ``place``: of the tensor."""

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class LogitsResult:
    """All tokens of a comparison of logits, in the order of golden.

    ``left_out``: tokens that were not compared, by reason. ``top``: the k of top-k. ``requests``:
    the names of an engine's requests; then generation n is request n, and a step is a position.
    ``clip``: see `Mismatch`.
    """

    sides: tuple[Side, Side]
    rule: str
    top: int
    clip: float
    tokens: tuple[TokenCheck, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()

    @property
    def mismatch(self) -> Mismatch | None:
        """That of all sampled tokens; None if none is known."""
        return mismatch(self.tokens, self.clip)

    def by_sequence(self) -> list[tuple[TokenCheck, Mismatch]]:
        """Return the mismatch of each sequence with sampled tokens, and its first token."""
        found: dict[tuple[int, int], list[TokenCheck]] = {}
        for each in self.tokens:
            found.setdefault((each.generation, each.sequence), []).append(each)
        each_one = ((tokens[0], mismatch(tokens, self.clip)) for tokens in found.values())
        return [(first, one) for first, one in each_one if one is not None]

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
