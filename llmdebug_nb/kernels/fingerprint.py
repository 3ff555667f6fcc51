"""Content fingerprints: equal bytes, equal fingerprint; the name of the algorithm travels along."""

from __future__ import annotations

import numpy as np
import xxhash

ALGORITHM = "xxh3"


def fingerprint(data: np.ndarray) -> str:
    """Return ``xxh3:`` and 16 hex digits: XXH3-64 of the raw little-endian row-major bytes."""
    return f"{ALGORITHM}:{xxhash.xxh3_64_intdigest(data.data):016x}"


def same(a: str | None, b: str | None) -> bool | None:
    """Tell whether two fingerprints say equal bytes; None if they can't (absent, other algorithm)."""
    if not a or not b or a.partition(":")[0] != b.partition(":")[0]:
        return None
    return a == b
