"""The Triton kernel that measures a tensor where it lies, in one launch. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "inner", "stride", "first"])  # type: ignore[untyped-decorator]
def measure(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    data,
    rows,
    count,
    inner,
    stride,
    first,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program writes one row: min, max, sum, sum of squares, counts of nan, inf and zero.

    The elements are ``count // inner`` runs of ``inner`` elements, ``stride`` elements apart; one
    run if ``PACKED``. Which of them a program takes depends on their number alone, so sums are the
    same on all devices. ``WIDE``: values do not fit into float32.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    low = tl.full([BLOCK], float("inf"), kind)
    high = tl.full([BLOCK], float("-inf"), kind)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    nan = tl.zeros([BLOCK], tl.int32)
    inf = tl.zeros([BLOCK], tl.int32)
    zero = tl.zeros([BLOCK], tl.int32)
    for start in range(program * BLOCK, count, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        where = at if PACKED else (at // inner) * stride + at % inner
        x = tl.load(data + where, mask=inside, other=0).to(kind)
        is_nan = x != x
        known = inside & (x == x)
        low = tl.minimum(low, tl.where(known, x, float("inf")))
        high = tl.maximum(high, tl.where(known, x, float("-inf")))
        wide = x.to(tl.float64)
        total += wide
        squares += wide * wide
        nan += is_nan.to(tl.int32)
        inf += (tl.abs(x) == float("inf")).to(tl.int32)
        zero += (inside & (x == 0)).to(tl.int32)
    row = rows + (first + program) * 8
    tl.store(row, tl.min(low, 0).to(tl.float64))
    tl.store(row + 1, tl.max(high, 0).to(tl.float64))
    tl.store(row + 2, tl.sum(total, 0))
    tl.store(row + 3, tl.sum(squares, 0))
    tl.store(row + 4, tl.sum(nan, 0).to(tl.float64))
    tl.store(row + 5, tl.sum(inf, 0).to(tl.float64))
    tl.store(row + 6, tl.sum(zero, 0).to(tl.float64))
