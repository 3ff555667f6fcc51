"""Dtypes narrower than torch's, decoded: each code has one value.

    int4                        two a byte, the first one in the low bits; becomes int8
    float4_e2m1, float4_e1m2    likewise; becomes float32, as do the others
    float6_e2m3, float6_e3m2    one a byte; how they lie when they are packed is not published
    hifloat8                    one a byte: Luo et al. 2024, arXiv 2409.16626
    uint1                       one a byte; becomes uint8. The order of packed bits is not published

The floats of 4 and 6 bits have neither infinity nor NaN (OCP Microscaling Formats 1.0; e1m2 as in
``en_dtypes``: its exponent has a bias of 1).
"""

from __future__ import annotations

import functools
import math

import torch

from llmdebug_nb.core.kernels.raw import from_bytes

_SMALL = {  # bits of exponent and mantissa, and the bias
    "float4_e2m1": (2, 1, 1), "float4_e1m2": (1, 2, 1),
    "float6_e2m3": (2, 3, 1), "float6_e3m2": (3, 2, 3),
}  # fmt: skip
_WHOLE = {"int4": torch.int8, "uint1": torch.uint8}
_PACKED = ("int4", "float4_e2m1", "float4_e1m2")  # two a byte
NAMES = frozenset((*_SMALL, *_WHOLE, "hifloat8"))
_DENORMAL = 23  # 2^(M - 23) is a denormal hifloat8


def fits(dtype: str, count: int, length: int) -> bool:
    """Tell whether so many bytes hold so many elements of a dtype of `NAMES`, as they are read."""
    return length == ((count + 1) // 2 if dtype in _PACKED else count)


def decoded(content: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a dtype of `NAMES`: as float32, int4 as int8, uint1 as uint8.

    ``content`` has as many bytes as `fits` wants.
    """
    codes = from_bytes(content, "uint8", (len(content),))
    if dtype in _PACKED:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten()
    return values(dtype)[codes[: math.prod(shape)].int()].reshape(shape)


@functools.cache
def values(dtype: str) -> torch.Tensor:
    """Return the value of each byte; bits above those of a narrow dtype don't count."""
    codes = range(256)
    if dtype in _WHOLE:
        whole = [(code & 7) - (code & 8) if dtype == "int4" else code & 1 for code in codes]
        return torch.tensor(whole, dtype=_WHOLE[dtype])
    if dtype in _SMALL:
        return torch.tensor([_small(code, *_SMALL[dtype]) for code in codes])
    return torch.tensor([_hifloat8(code) for code in codes])


def _small(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    scaled = (mantissa + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return -scaled if code >> exponent_bits + mantissa_bits & 1 else scaled


def _hifloat8(code: int) -> float:
    """Return the value of a code: sign, dot, exponent, mantissa.

    The dot is a prefix code of the number of bits of the exponent: 11 of 4, 10 of 3, 01 of 2, 001
    of 1, 0001 of none; 0000 says that the number is denormal. The exponent has a sign, and a
    leading one that is not stored.
    """
    if code in (0x00, 0x80):
        return math.nan if code else 0.0
    if code in (0x6F, 0xEF):
        return math.copysign(math.inf, 0x80 - code)
    sign, rest = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if rest < 8:
        return sign * 2.0 ** (rest - _DENORMAL)
    bits = {3: 4, 2: 3, 1: 2}.get(rest >> 5, 1 if rest >> 4 else 0)
    mantissa_bits = 3 if bits < 3 else 5 - bits
    exponent = 0
    if bits:
        field = rest >> mantissa_bits & (1 << bits) - 1
        leading = 1 << bits - 1
        exponent = (field | leading) * (-1 if field & leading else 1)
    mantissa = (rest & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    return sign * (1 + mantissa) * 2.0**exponent
