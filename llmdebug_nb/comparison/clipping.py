"""The integers of a quantised activation against golden's floats: what rounding does not explain.

Rounding to the nearest leaves at most half a step, and what the inputs' own error adds varies
around 0. Integers that pile up at an end which is no end of b bits, while golden goes on, were
clipped there: their errors have one sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from llmdebug_nb.comparison import grids
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.relative import ratio


def compare(
    golden: torch.Tensor, mine: torch.Tensor, grain: torch.Tensor, stored: torch.Tensor, side: int
) -> tuple[Metrics, str]:
    """Return the figures of a quantised activation, and a clause on them.

    All tensors have one shape; ``stored``: the integers, of golden (0) or mine (1) as ``side``.
    ``grain_share``: the relative L2 error that half a step in every element makes.
    ``clipped``: standard errors by which the mean of what was clipped is beyond half a step.
    """
    share = ratio(float(grain.norm()) * constants.CHANNEL_GRAINS, float(golden.double().norm()))
    floats, own = (mine, golden) if side == 0 else (golden, mine)
    apart = torch.where(grain > 0, (floats.double() - own.double()) / grain, 0.0)
    ends = [(int(stored.max()), 1), (int(stored.min()), -1)]
    found = [(_beyond(apart * sign, stored == end), end) for end, sign in ends if not _is_end(end)]
    worst, end = max(found, default=(0.0, 0))
    figures: Metrics = {"grain_share": share, "clipped": max(worst, 0.0)}
    if worst <= constants.EVEN_ERRORS:
        return figures, "quantised: its steps and the error of its inputs count as noise"
    places = stored == end
    most = float(apart[places].abs().max())
    which = f"{int(places.sum()):,} integers are {end}, the last of them"
    return figures, f"clipped: {which} up to {most:.0f} steps short of the other run's values"


def on_a_grid(golden: torch.Tensor, mine: torch.Tensor) -> tuple[Metrics, str]:
    """Return the figures of two tensors of floats of which one was made from integers.

    Its values are whole multiples of one number, as those of a quantised program are. Nothing if
    this is so of both, or of neither.
    """
    steps = grids.step(golden), grids.step(mine)
    if (steps[0] > 0) == (steps[1] > 0):
        return {}, ""
    side = int(steps[1] > 0)
    grain = torch.full_like(golden, steps[side], dtype=torch.float64)
    stored = ((golden, mine)[side].double() / steps[side]).round()
    return compare(golden, mine, grain, stored, side)


def says(differences: Iterable[Difference]) -> str:
    """Return a sentence on the integers that stand for golden's tensors; "" if there are none."""
    rows = [d for d in differences if "clipped" in d.metrics and d.verdict != "unmatched"]
    if not rows:
        return ""
    within = sum(d.verdict != "diverged" for d in rows)
    text = f"Quantised: {within:,} of {len(rows):,} inputs and outputs of whole numbers are, times "
    return f"{text}their scale, the other run's within rounding; what follows counts as noise."


def _beyond(apart: torch.Tensor, places: torch.Tensor) -> float:
    """Return by how many standard errors the mean error there is beyond half a step.

    ``apart``: in steps. Elsewhere their root mean square tells how far the inputs' error goes.
    """
    here, rest = apart[places], apart[~places]
    if here.numel() < 2 or rest.numel() < constants.FEWEST_ELEMENTS:
        return 0.0
    usual = max(float(rest.square().mean().sqrt()), constants.CHANNEL_GRAINS)
    return (float(here.mean()) - constants.CHANNEL_GRAINS) * math.sqrt(here.numel()) / usual


def _is_end(value: int) -> bool:
    """Tell whether integers of some number of bits end there: 127, -127, -128 or 255."""
    return any(n & (n - 1) == 0 for n in {abs(value), abs(value) + 1})
