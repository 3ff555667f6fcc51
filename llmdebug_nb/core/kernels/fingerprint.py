"""Content fingerprints: equal bytes, equal fingerprint; the name of the algorithm travels along.

XXH3 is what equal contents are known by. The other two are there to be held against dumps of other
tools; both say "equal" of bytes that differ too often to be trusted (a permuted tensor has the same XOR).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

Buffer = Any  # uint8[n]: an array, or a memoryview

ALGORITHM = "xxh3"


def fingerprint(data: Buffer) -> str:
    """Return ``xxh3:`` and 16 hex digits: XXH3-64 of the raw little-endian row-major bytes."""
    return "xxh3:" + xxhash.xxh3_64_hexdigest(data)


def crc32(data: Buffer) -> str:
    """Return ``crc32:`` and 8 hex digits: CRC-32 (that of zlib) of the same bytes."""
    return f"crc32:{zlib.crc32(data):08x}"


def xor(data: Buffer) -> str:
    """Return ``xor:0x`` and 16 hex digits: XOR of the same bytes as little-endian 64-bit words, the last one zero-padded."""
    raw = np.frombuffer(data, np.uint8)
    whole = raw.nbytes // 8 * 8
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    return f"xor:{int(np.bitwise_xor.reduce(raw[:whole].view('<u8'))) ^ rest:#018x}"


ALGORITHMS: dict[str, Callable[[Buffer], str]] = {
    ALGORITHM: fingerprint,
    "crc32": crc32,
    "xor": xor,
}


def same(a: str | None, b: str | None) -> bool | None:
    """Tell whether two fingerprints say equal bytes; None if they can't (absent, other algorithm)."""
    if not a or not b or a.partition(":")[0] != b.partition(":")[0]:
        return None
    return a == b
