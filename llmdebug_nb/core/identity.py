"""Does a tensor identify itself? Who takes equal values for one tensor asks here first."""

from __future__ import annotations

import math

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.records import Summary


def identifies_itself(s: Summary) -> bool:
    """Tell by the statistics whether no other tensor has the values of this one by chance.

    Those of a constant, of a small mask or of very few elements prove nothing: two tensors that
    have them may be two things.
    """
    if s.min is None or s.max is None or s.min == s.max:
        return False
    count = s.numel - (s.nan or 0)
    return count >= constants.FEWEST_ELEMENTS and count * _nats(s) >= constants.CERTAIN_NATS


def telling_bytes(s: Summary) -> str | None:
    """Return the fingerprint of a tensor that identifies itself; None if it tells nothing."""
    return s.fingerprint if identifies_itself(s) else None


def _nats(s: Summary) -> float:
    """Return the evidence in one element: the logarithm of how many values it may have."""
    if s.dtype == "bool" or _is_mask(s):
        return math.log(2)
    return -math.log(max(epsilon(s.dtype), constants.FINEST))


def _is_mask(s: Summary) -> bool:
    """Tell whether a tensor holds zeros and one other value: only then the sum is that of those."""
    other = (s.min or 0.0) + (s.max or 0.0)
    if not s.zero or s.mean is None or 0 not in (s.min, s.max):
        return False
    if s.inf:
        return s.zero + s.inf == s.numel
    return math.isclose(s.mean / other * s.numel, s.numel - s.zero, rel_tol=constants.SAME_SUM)
