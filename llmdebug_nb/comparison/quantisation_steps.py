"""A quantised weight against the float weight that it stands for: what its grain explains.

The grain of an element is the distance of the values that it can have. Rounding to the nearest of
them leaves an error of at most half a grain, and grain / sqrt(12) on average. So the errors of a
channel, each in grains, have a root mean square of at most 0.5, whatever the weight is. A quantiser
that clips a few outliers, or moves errors from one element to the next, stays below that too: the
rounding that it adds to leaves only 0.29.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.core import constants


def compare(golden: torch.Tensor, mine: torch.Tensor, grain: torch.Tensor) -> tuple[Metrics, str]:
    """Return the figures of a weight, and a clause on its channels.

    ``grain_share``: the relative L2 error that half a grain in every element makes.
    ``worst_channel``: root mean square of the error of the worst channel, in grains. A channel is a
    row, or a column if only columns, or a smaller share of these, are beyond 0.5.
    ``channels_off``: how many are; 0 if mine has golden's rows in another order, of which only
    what follows can tell whether that is a bug.
    """
    error = (mine.double() - golden.double()).abs()
    # a channel of zeros has no grain: any error is beyond it
    grains = torch.where(error > 0, error / grain, 0.0).square()
    grains = grains if grains.dim() > 1 else grains.reshape(1, -1)
    share = float(grain.norm()) * constants.CHANNEL_GRAINS / (float(golden.double().norm()) or 1.0)
    names = ("row", "column") if grains.dim() == 2 and len(grains) > 1 else ("row",)
    sides = [grains.movedim(axis, 0).flatten(1).mean(1).sqrt() for axis in range(len(names))]
    name, channels = min(zip(names, sides, strict=True), key=lambda each: _share(each[1]))
    worst = float(channels.max()) if channels.numel() else 0.0
    bad = (~(channels <= constants.CHANNEL_GRAINS)).nonzero().flatten().tolist()
    moved = bad and len(channels) > 1 and _are_reordered(golden.double(), mine.double(), grain)
    off = 0 if moved else len(bad)
    figures: Metrics = {"grain_share": share, "worst_channel": worst, "channels_off": off}
    if not bad:
        return figures, f"quantised: at most {worst:.2g} of its steps off in any channel"
    which = ", ".join(map(str, bad[: constants.NAMES_SHOWN]))
    if len(bad) > constants.NAMES_SHOWN:
        which += f" and {len(bad) - constants.NAMES_SHOWN:,} more"
    are = f"{name} {which} is" if len(bad) == 1 else f"{name}s {which} are"
    far = "not a number" if math.isnan(worst) else f"{worst:.2g} quantisation steps off"
    rounding = f"rounding leaves {constants.CHANNEL_GRAINS:g}"
    return figures, f"{are} up to {far} (of {channels.numel():,}; {rounding})"


def says(differences: Iterable[Difference]) -> str:
    """Return a sentence on the quantised weights that stand for golden's; "" if there are none."""
    channels = [d.metrics.get("worst_channel") for d in differences if d.verdict != "unmatched"]
    steps = [float(steps) for steps in channels if steps is not None]
    within = [each for each in steps if each <= constants.CHANNEL_GRAINS]
    if not steps:
        return ""
    text = f"Quantised: {len(within):,} of {len(steps):,} weights of mine are golden's within "
    text += "rounding to their own steps"
    if within:
        text += f" (at most {max(within):.2g} of a step, as root mean square of a channel)"
    return f"{text}; what follows from that counts as noise."


def _are_reordered(golden: torch.Tensor, mine: torch.Tensor, grain: torch.Tensor) -> bool:
    """Tell whether the rows that differ are golden's rows, each within its grain, reordered."""
    most = (grain * constants.CHANNEL_GRAINS).flatten(1).norm(dim=1)
    bad = ((mine - golden).flatten(1).norm(dim=1) > most).nonzero().flatten()
    apart = torch.cdist(golden[bad].flatten(1), mine[bad].flatten(1))
    near = apart <= most[bad]
    return bool(near.any(0).all() and near.any(1).all())


def _share(channels: torch.Tensor) -> float:
    """Return the share of the channels that are beyond their grain; 2 if none is."""
    bad = ~(channels <= constants.CHANNEL_GRAINS)
    return float(bad.double().mean()) if bool(bad.any()) else 2.0
