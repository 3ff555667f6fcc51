"""How finely ggml's types and operations round, as a machine epsilon."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmdebug_nb.core.dtypes import epsilon

_FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
# operations that round to f16, whatever they take; GELU is looked up in a table on a CPU
_HALF_PRECISION = {
    "FLASH_ATTN_EXT": "flash attention",
    **dict.fromkeys(("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"), "GELU from a table in f16"),
}
_INTEGERS = re.compile(r"i?q([1-8])_.*")


def half_precision(operations: Iterable[str]) -> list[str]:
    """Return what of these operations rounds to f16, in words, each once."""
    found = (_HALF_PRECISION.get(op) for op in operations)
    return list(dict.fromkeys(name for name in found if name))


def epsilon_of(kind: str) -> float:
    """Return the epsilon of a type, ``q4_K``; 0 if it is not known.

    Integers of b bits stand for values up to the largest of their block in magnitude, whose sign
    takes one bit: they are 2^(1 - b) of it apart. A float's epsilon says the same of its binade.
    """
    if kind in _FLOATS:
        return epsilon(_FLOATS[kind])
    bits = _INTEGERS.fullmatch(kind.lower())
    return 2.0 ** (1 - int(bits[1])) if bits and int(bits[1]) > 1 else 0.0
