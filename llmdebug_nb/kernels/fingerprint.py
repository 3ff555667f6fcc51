"""Content fingerprints: equal bytes, equal fingerprint; the name of the algorithm travels along.

XXH3 is what equal contents are known by. The other two are there to be held against dumps of other
tools; both say "equal" of bytes that differ too often to be trusted (a permuted tensor has the same XOR).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import xxhash

ALGORITHM = "xxh3"


def fingerprint(data: np.ndarray) -> str:
    """Return ``xxh3:`` and 16 hex digits: XXH3-64 of the raw little-endian row-major bytes, ``uint8[n]``."""
    return f"{ALGORITHM}:{xxhash.xxh3_64_intdigest(data.data):016x}"


def crc32(data: np.ndarray) -> str:
    """Return ``crc32:`` and 8 hex digits: CRC-32 (that of zlib) of the same bytes."""
    return f"crc32:{zlib.crc32(data.data):08x}"


def xor(data: np.ndarray) -> str:
    """Return ``xor:0x`` and 16 hex digits: XOR of the same bytes as little-endian 64-bit words, the last one zero-padded."""
    whole = data.nbytes // 8 * 8
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    return f"xor:{int(np.bitwise_xor.reduce(data[:whole].view('<u8'))) ^ rest:#018x}"


ALGORITHMS: dict[str, Callable[[np.ndarray], str]] = {ALGORITHM: fingerprint, "crc32": crc32, "xor": xor}


def same(a: str | None, b: str | None) -> bool | None:
    """Tell whether two fingerprints say equal bytes; None if they can't (absent, other algorithm)."""
    if not a or not b or a.partition(":")[0] != b.partition(":")[0]:
        return None
    return a == b
