"""Formulas of ATB operations of attention: turned heads, caches, attention over rows and pages."""

from __future__ import annotations

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.reference.atb_parameters import Inputs, Parameters
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay

_MASK_ALIBI = 2  # maskType: the mask is a bias that is added
# A mask of ones is times this, and no weight is left: near the lowest number of bfloat16, as in
# msit's opcheck. float16 ends at 65,504, so there the mask holds low numbers itself.
_BIAS_OF_MASKED = -3e38


def rope(given: Parameters, inputs: Inputs) -> Inputs:
    """Queries and keys, turned by the angles of their rows.

    ``rotaryCoeff``: 2 turns the two halves of a head, 4 those of each half, the width of a head
    neighbours.
    """
    given.refuse("cosFormat")
    cos, sin = (x.reshape(-1, 1, x.shape[-1]) for x in inputs[2:4])
    width, ways = cos.shape[-1], given.integer("rotaryCoeff", 4)
    if ways not in (2, 4, width):
        raise CannotReplay(f"no formula for rotaryCoeff={ways} with {width} angles is known")
    return [_turned(x, cos, sin, ways) for x in inputs[:2]]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ways: int) -> torch.Tensor:
    rows, width = cos.shape[0], cos.shape[-1]
    heads = x.reshape(rows, -1, width)
    if ways in (2, 4):
        parts = (rows, -1, ways // 2, 2, width // ways)
        a, b = heads.reshape(parts).unbind(-2)
        c, s = (each.reshape(parts) for each in (cos, sin))
        made = torch.stack([a * c[..., 0, :] - b * s[..., 0, :],
                            b * c[..., 1, :] + a * s[..., 1, :]], -2)  # fmt: skip
    else:
        a, b = heads.reshape(rows, -1, width // 2, 2).unbind(-1)
        c, s = cos[..., ::2], sin[..., ::2]
        made = torch.stack([a * c - b * s, b * c + a * s], -1)
    return made.reshape(x.shape)


# -- caches ----------------------------------------------------------------------------------------


def reshape_and_cache(given: Parameters, inputs: Inputs) -> Inputs:
    """Caches of keys and values with a row of each token at its slot; none at a slot below 0."""
    given.refuse("compressType", "kvCacheCfg")
    slots = inputs[4].flatten().long()
    kept = slots >= 0
    made = []
    for rows, cache in zip(inputs[:2], inputs[2:4], strict=True):
        if cache.shape[2:] != rows.shape[1:]:
            raise CannotReplay("no formula for a cache of fractal blocks is known", UNKNOWN)
        flat = cache.reshape(-1, *cache.shape[2:]).clone()
        flat[slots[kept]] = rows[kept].to(flat.dtype)
        made.append(flat.reshape(cache.shape))
    return made


def kv_cache(given: Parameters, inputs: Inputs) -> Inputs:
    """The cache of a layer with new rows before the ends of its sequences."""
    rows, layer, cache, ends, lengths = inputs[:5]
    made, start = cache.clone(), 0
    for batch, (end, length) in enumerate(zip(*_lists(ends, lengths), strict=True)):
        made[int(layer.flatten()[0]), batch, end - length : end] = rows[start : start + length]
        start += length
    return [made]


# -- attention -------------------------------------------------------------------------------------


def paged_attention(given: Parameters, inputs: Inputs) -> Inputs:
    """Attention of one row of queries for each sequence to the pages of its cache."""
    given.refuse("quantType", "hasQuantOffset", "compressType", "calcType", "batchRunStatusEnable",
                 "mlaVHeadSize", "scaleType", "inputLayout", "outDataType")  # fmt: skip
    masked = given.choice("maskType", (0, 1, _MASK_ALIBI))
    queries, keys, values, pages, lengths, *rest = inputs
    made, scale = torch.zeros_like(queries), given.number("qkScale", 1.0)
    for at, length in enumerate(_lists(lengths)[0][: len(queries)]):
        if length < 1:
            continue
        used = pages[at, : -(-length // keys.shape[1])].long()
        k, v = (cache[used].flatten(0, 1)[:length] for cache in (keys, values))
        mask = rest[0][at, ..., :1, :length] if masked else None
        made[at] = _attention(given, queries[at : at + 1], k, v, scale, mask)[0]
    return [made]


def self_attention(given: Parameters, inputs: Inputs) -> Inputs:
    """Attention inside each sequence, and to what a cache holds of it."""
    given.refuse("quantType", "batchRunStatusEnable", "kvcacheCfg", "scaleType", "inputLayout",
                 "mlaVHeadSize", "cacheType", "windowSize", "outDataType")  # fmt: skip
    if given.choice("calcType", (0, 1, 2, 3)) == 3:
        return [_of_rows(given, inputs)]
    return [_of_cache(given, inputs)]


def _of_rows(given: Parameters, inputs: Inputs) -> torch.Tensor:
    """Return the attention of sequences one after the other, as in a prefill."""
    if given.number("qScale", 1.0) != 1:
        raise CannotReplay("no formula for qScale here is known", UNKNOWN)
    masked = given.choice("maskType", (0, 1, _MASK_ALIBI))
    heads = given.integer("headNum")
    shared = given.integer("kvHeadNum") or heads
    queries, *kv = (_by_heads(x, n) for x, n in zip(inputs, (heads, shared, shared), strict=False))
    mask, lengths = (inputs[3] * _weight(given), inputs[4]) if masked else (None, inputs[3])
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 2 else mask
    made, start = torch.zeros(*queries.shape[:2], kv[1].shape[-1], dtype=torch.float64), 0
    for at, length in enumerate(_lists(lengths)[0]):
        rows = slice(start, start + length)
        own = mask[at] if mask is not None and mask.dim() == 4 else mask
        own = None if own is None else own[:, :length, :length]
        scale = given.number("qkScale", 1.0)
        made[rows] = _attention(given, queries[rows], kv[0][rows], kv[1][rows], scale, own)
        start += length
    return made.reshape(given.outputs[0].shape)


def _of_cache(given: Parameters, inputs: Inputs) -> torch.Tensor:
    """Return the attention of new rows to those that a cache holds, and to themselves."""
    given.refuse("clampType")
    q, k, v, *caches = inputs[:5]
    mask, ends, lengths, layer = inputs[5:9]
    heads, scale = given.integer("headNum"), given.number("qkScale", 1.0)
    if given.integer("kvHeadNum") not in (0, heads):
        raise CannotReplay("no formula for shared heads with this cache is known", UNKNOWN)
    q = _by_heads(q * given.number("qScale", 1.0), heads)
    made, start = torch.zeros_like(q), 0
    for at, (end, length) in enumerate(zip(*_lists(ends, lengths), strict=True)):
        rows = slice(start, start + length)
        past = (cache[int(layer.flatten()[0]), at, : end - length] for cache in caches)
        both = (torch.cat([old, new.reshape(len(new), -1)[rows]])
                for old, new in zip(past, (k, v), strict=True))  # fmt: skip
        keys, values = (_by_heads(x, heads) for x in both)
        own = mask[at] if mask.dim() == 3 else mask
        own = scale * own[:length, :end]  # the mask is added before the scale
        made[rows] = _attention(given, q[rows], keys, values, scale, own)
        start += length
    return made.reshape(given.outputs[0].shape)


def _attention(
    given: Parameters, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of rows x heads x width; several heads may share keys and values."""
    heads, shared = q.shape[1], k.shape[1]
    if not shared or heads % shared:
        raise CannotReplay(f"{heads} heads can't share {shared}", GAP)
    clamps = given.choice("clampType", (0, 1))
    k, v = (x.repeat_interleave(heads // shared, 1).transpose(0, 1) for x in (k, v))
    most = max(1, constants.REPLAY_ROWS // max(1, heads * k.shape[1]))
    made = []
    for start in range(0, len(q), most):  # the products of all rows at once may not fit
        score = q[start : start + most].transpose(0, 1) @ k.transpose(1, 2) * scale
        if clamps:
            low, high = given.number("clampMin", 0.0), given.number("clampMax", 0.0)
            score = score.clamp(low, high)
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., start : start + most, :]
            score = score + rows
        made.append((score.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(made) if made else torch.zeros(0, heads, v.shape[-1], dtype=torch.float64)


def _weight(given: Parameters) -> float:
    """Return what the mask is times: one of ones in dtypes wide enough, else one of low numbers."""
    adds = given.integer("kernelType") == 1 or given.integer("maskType") == _MASK_ALIBI
    return 1.0 if adds or given.dtypes[0] == torch.float16 else _BIAS_OF_MASKED


def _by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows x heads x width. Raises CannotReplay."""
    rows = x.flatten(0, 1) if x.dim() == 4 else x
    if heads < 1 or rows[:1].numel() % heads:
        raise CannotReplay(f"rows of {rows[:1].numel()} elements have no {heads} heads", GAP)
    return rows.reshape(len(rows), heads, -1)


def _lists(*tensors: torch.Tensor) -> list[list[int]]:
    return [[int(each) for each in tensor.flatten().tolist()] for tensor in tensors]
