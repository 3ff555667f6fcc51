"""Figures of one token: a row of golden's logits against mine's, over one vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.token_checks import RULES
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES, epsilon
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.kernels.narrow import rounding


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """See `core.token_checks.TokenCheck`."""

    best: tuple[int, int]
    rank: int | None
    logprob: tuple[float, float]
    margin: float
    lost: int
    metrics: Metrics


def figures(golden: torch.Tensor, mine: torch.Tensor, token: int | None, top: int) -> TokenFigures:
    """Return the figures of two rows of one length. ``token``: None takes golden's best.

    Log probabilities are those of softmax in float64. Tokens with equal logits share a rank.
    """
    g, m = (x.double().nan_to_num(nan=-math.inf, posinf=math.inf) for x in (golden, mine))
    best = int(g.argmax())
    chosen = best if token is None or not 0 <= token < len(g) else token
    top = min(top, len(g))
    mine_best = best if bool(m[best] == m.max()) else int(m.argmax())
    broken = bool(mine.isnan().any())
    lowest = m.topk(top).values[-1]
    return TokenFigures(
        best=(best, mine_best),
        rank=None if broken else 1 + int((m > m[chosen]).sum()),
        logprob=(_logprob(golden, chosen), _logprob(mine, chosen)),
        margin=float(g[best] - g[mine_best]) if mine_best != best else 0.0,
        lost=int((m[g.topk(top).indices] < lowest).sum()),
        metrics=metrics.compare(golden, mine, logits=True) | _ulp(golden, mine),
    )


def _ulp(golden: torch.Tensor, mine: torch.Tensor) -> Metrics:
    """Return |max m - max g|, and the ulp of max m in mine's dtype, over finite positions."""
    both = golden.isfinite() & mine.isfinite()
    if not bool(both.any()):
        return {"max_gap": None, "ulp": None}
    g, m = (float(x[both].max()) for x in (golden, mine))
    return {"max_gap": abs(m - g), "ulp": metrics.ulp(m, DTYPE_NAMES[mine.dtype])}


def _logprob(row: torch.Tensor, token: int) -> float:
    """Return the log probability of a token, in nats; NaN if a logit is NaN or none is finite."""
    return float(row.double().log_softmax(-1)[token])


def share_beyond(row: torch.Tensor, width: int) -> float:
    """Return the probability of all tokens from ``width`` on."""
    return float(row.double().softmax(-1)[width:].sum())


class Judge:
    """Judges tokens by a rule: a name of `RULES`, or bounds by metric (all must hold).

    ``stated``: the coarsest epsilon that a run states of its values, see `Run.rounding`.

    Raises OptionError.
    """

    def __init__(self, rule: object, stated: float = 0.0) -> None:
        self._stated = stated
        self._limits: Limits | None = None
        if isinstance(rule, str) and rule in RULES:
            self.name = rule
            if rule == "msit":
                self._limits = Limits.read({"*": "msit_logits"})
        elif isinstance(rule, str):
            raise OptionError(f"rule {rule!r} is not known{nearest(rule, RULES)}")
        else:
            self._limits = Limits.read({"*": rule})
            self.name = "given limits"

    def __call__(
        self, found: TokenFigures, golden: torch.Tensor, mine: torch.Tensor
    ) -> tuple[bool, str]:
        """Return whether a token passes, and why."""
        broken = [name for name in ("nan", "inf") if found.metrics[f"{name}_mismatch"]]
        if broken:
            kinds = " and ".join({"nan": "NaN", "inf": "infinite"}[name] for name in broken)
            return False, f"logits are {kinds} in one of the two only"
        if self._limits is not None:
            judged = self._limits.judge(found.metrics)
            if judged is None:
                return False, "no finite logits to judge by"
            return judged.error <= judged.limit, judged.says
        if self.name == "tokens":
            same = found.best[0] == found.best[1]
            return same, "the same token" if same else f"another token, margin {found.margin:.4g}"
        if self.name == "equal":
            count = int(found.metrics["mismatched"] or 0)
            return not count, f"{count:,} logits differ" if count else "equal"
        return _explained(found, golden, mine, self._stated)


def _explained(
    found: TokenFigures, golden: torch.Tensor, mine: torch.Tensor, stated: float
) -> tuple[bool, str]:
    """Judge by the coarsest rounding: of a dtype, of values, or that a program states."""
    error = found.metrics["relative_euclidean_distance"]
    if error is None:
        return False, "no finite logits to judge by"
    sides = (max(epsilon(DTYPE_NAMES[x.dtype]), rounding(x)) for x in (golden, mine))
    eps = max(stated, *sides)
    limit = constants.LOGITS_EPSILONS * eps
    return error <= limit, f"relative L2 error {error:.3g}, rounding explains {limit:.3g}"
