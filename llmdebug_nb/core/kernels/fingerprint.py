"""Fingerprints of contents, each with the name of its algorithm: equal bytes give equal ones.

XXH3 identifies equal contents. The other two are compared with dumps of other tools; they are equal
for different bytes too often to be trusted (a permuted tensor has the same XOR).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import xxhash

Buffer = np.ndarray | memoryview | bytes  # uint8[n]
# below, arg-type: an array is a buffer, but its stubs say so from Python 3.12 on alone

ALGORITHM = "xxh3"


def fingerprint(data: Buffer) -> str:
    """Return ``xxh3:`` and 16 hex digits: XXH3-64 of the raw little-endian row-major bytes."""
    return "xxh3:" + xxhash.xxh3_64_hexdigest(data)  # type: ignore[arg-type]


def crc32(data: Buffer) -> str:
    """Return ``crc32:`` and 8 hex digits: CRC-32 (that of zlib) of the same bytes."""
    checksum = zlib.crc32(data)  # type: ignore[arg-type]
    return f"crc32:{checksum:08x}"


def xor(data: Buffer) -> str:
    """Return ``xor:0x`` and 16 hex digits: the XOR of the bytes as little-endian 64-bit words.

    The last word is padded with zeros.
    """
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
    """Tell whether two fingerprints are equal; None if they are absent or not comparable."""
    if not a or not b or a.partition(":")[0] != b.partition(":")[0]:
        return None
    return a == b
