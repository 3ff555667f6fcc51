"""The masked entries of a tensor: what they hold does not matter, only where they are."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating, lowest
from llmdebug_nb.core.records import Summary


def hidden(x: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is masked (bool), or None if it is nowhere.

    Masked are entries that are not finite, and the fill: what is below half of the least entry, as
    scores may be added to it.
    """
    x = x.float() if x.is_floating_point() and x.element_size() == 1 else x  # torch lacks minima
    least, most = (float(each) for each in x.aminmax()) if x.numel() else (0.0, 0.0)
    if least > constants.MASK_FILL and most < math.inf:  # false for NaN
        return None
    places = ~x.isfinite()
    least = float(x.masked_fill(places, 0.0).min())
    return places | (x <= constants.MASK_SHARE * least) if least <= constants.MASK_FILL else places


def is_surely_masked(x: torch.Tensor) -> torch.Tensor:
    """Return where a floating tensor is -inf or so low that no activation is (bool).

    Scores may be divided after they were masked, so a share of the lowest number counts, too.
    """
    return x < max(constants.MASK_SHARE * torch.finfo(x.dtype).min, constants.NO_ACTIVATION)


def _is_filled(x: torch.Tensor) -> torch.Tensor:
    """Return where a floating tensor is -inf or has a fill (bool), which another dtype may give.

    A fill stands in several entries, far from all others; large activations do not.
    """
    finite = x.masked_fill(~x.isfinite(), 0.0)
    least = float(finite.min())
    low = finite <= constants.MASK_SHARE * least
    near = finite <= constants.MASK_SHARE**2 * least
    count = int(low.count_nonzero())
    if least > constants.MASK_FILL or count < 2 or count != int(near.count_nonzero()):
        return x == -math.inf
    return low | (x == -math.inf)


def fill_count(s: Summary) -> int:
    """Return how many entries have the fill of a mask, by the statistics; 0 if that is none.

    All other entries are next to nothing beside it, so the sum tells.
    """
    if s.min is None or s.mean is None or s.min > constants.MASK_FILL or not math.isfinite(s.min):
        return 0
    count = s.mean / s.min * s.numel  # their sum need not be finite
    return round(count) if math.isfinite(count) else 0


def is_added(s: Summary) -> bool:
    """Tell whether a tensor holds zeros and a fill alone, as a mask does that is added to scores.

    Masked scores less their maximum begin and end there, too.
    """
    if s.max != 0.0 or s.min is None or s.min > constants.MASK_FILL:
        return False
    return s.zero is None or s.zero + (s.inf or fill_count(s)) == s.numel


def have_other_forms(golden: Summary, mine: Summary) -> bool:
    """Tell whether one tensor marks tokens, and the other is a mask of scores."""
    return any(_is_marks(x) and _is_mask(y) for x, y in ((golden, mine), (mine, golden)))


def _is_mask(s: Summary) -> bool:
    """Tell whether a tensor is a mask of scores: booleans, or nothing but zeros and a fill."""
    return len(s.shape) > 2 and (s.dtype == "bool" or s.min == s.max == 0.0 or is_added(s))


def _is_marks(s: Summary) -> bool:
    """Tell whether a tensor marks tokens: [batch, tokens], nothing but 0 and 1."""
    if len(s.shape) != 2 or (s.min, s.max) not in ((0, 1), (1, 1)):
        return False
    # of all numbers up to 1, only these add up to as many as there are apart from the zeros
    return s.zero is None or s.mean is None or round(s.mean * s.numel, 3) == s.numel - s.zero


def may_hide(summary: Summary) -> bool:
    """Tell by the statistics whether a tensor may have masked entries."""
    s = summary
    return bool(s.inf) or (s.min is not None and s.min <= constants.MASK_FILL)


def hide_as_much(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors have as many masked entries, which their statistics are made of."""
    return 0 < _surely_hidden(golden) == _surely_hidden(mine)


def _surely_hidden(s: Summary) -> int:
    """Return how many entries are -inf or lower than any activation, as far as that is sure."""
    if not is_floating(s.dtype) or s.min is None or s.max == math.inf:
        return 0
    if s.min == -math.inf:
        return s.inf or 0
    surely = max(constants.MASK_SHARE * lowest(s.dtype), constants.NO_ACTIVATION)
    return fill_count(s) if s.min < surely else 0


def hides_tokens(s: Summary) -> bool:
    """Tell by the statistics whether a mask of scores hides more than order alone does."""
    if len(s.shape) not in (3, 4) or not s.numel:
        return False
    hidden = s.zero if s.dtype == "bool" else s.inf or fill_count(s)
    queries, keys = s.shape[-2:]
    masks = s.numel // (queries * keys)
    return (hidden or 0) > masks * queries * (queries - 1) // 2


def without_masked(golden: torch.Tensor, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two floating tensors of one shape, zeros where both are masked, one of them surely.

    An entry that only one side masks stays as it is.
    """
    both = is_surely_masked(golden) & _is_filled(mine) | _is_filled(golden) & is_surely_masked(mine)
    if not bool(both.any()) or bool(both.all()):
        return golden, mine
    return golden.masked_fill(both, 0.0), mine.masked_fill(both, 0.0)
