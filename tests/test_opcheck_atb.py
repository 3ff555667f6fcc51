"""Operations of an ATB dump against formulas of their parameters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from layout_files import write
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.replay import checks
from llmdebug_nb.store.layouts.atb_bin import ACL_DTYPES

X = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
G = np.random.default_rng(2).standard_normal(16).astype(np.float32)
IDS = np.array([4, 0, 2], np.int64)
SUM = X + X[::-1]


def bin_bytes(x: np.ndarray) -> bytes:
    """Return a tensor file as ATB writes it."""
    names = {name: code for code, name in ACL_DTYPES.items()}
    code = names[DTYPE_NAMES[torch.from_numpy(x).dtype]]
    dims, length = ",".join(map(str, x.shape)), x.nbytes
    head = f"$Version=1.0\n$Object.Count=1\n$Object.Length={length}\nformat=2\ndtype={code}\n"
    return f"{head}dims={dims}\n$Object.data=0,{length}\n$End=1\n".encode() + x.tobytes()


def _rms(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def _layer_norm(x):
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def _swiglu_gradient(x):
    """Return the gradient by differences of the formula itself."""
    x, step, arriving = x.astype(np.float64), 1e-6, x[:, :8]

    def forward(y):
        return y[:, :8] * _sigmoid(y[:, :8]) * y[:, 8:]

    made = np.zeros_like(x)
    for column in range(16):
        moved = np.zeros_like(x)
        moved[:, column] = step
        slope = (forward(x + moved) - forward(x - moved)) / (2 * step)
        made[:, column] = (arriving * slope).sum(1)
    return made


def _with_part(x, part):
    made = x.copy()
    made[1:3, 2:6] = part
    return made


def _added(x, indices, rows):
    made = x.astype(np.float64)
    for at, row in zip(indices, rows, strict=True):
        made[at] += row
    return made


def _blocks(x):
    made = np.zeros((1, 1, 16, 16), np.float32)
    for row in range(6):
        made[0, 0, row] = x[row]
    return made


BYTES = np.random.default_rng(3).integers(-99, 99, (6, 16)).astype(np.int8)
COUNTS = np.arange(6, dtype=np.int32) * 100
SCALE = np.linspace(0.01, 0.02, 6, dtype=np.float32)
ANGLE = np.random.default_rng(4).uniform(0, 6, (6, 8))
ANGLES = [np.cos(ANGLE).astype(np.float32), np.sin(ANGLE).astype(np.float32)]
PAIRED = [np.repeat(x[:, ::2], 2, 1) for x in ANGLES]  # neighbours have one angle


def _rope(x, ways):
    """Turn pairs of channels one by one: which two are one pair is what ``ways`` says."""
    cos, sin = (a.astype(np.float64) for a in (PAIRED if ways == 8 else ANGLES))
    made = np.zeros(x.shape)
    pairs = {
        2: [(i, i + 4) for i in range(4)],
        4: [(0, 2), (1, 3), (4, 6), (5, 7)],
        8: [(0, 1), (2, 3), (4, 5), (6, 7)],
    }[ways]
    for row in range(6):
        for head in (0, 8):
            for a, b in pairs:
                one, two = float(x[row, head + a]), float(x[row, head + b])
                made[row, head + a] = one * cos[row, a] - two * sin[row, a]
                made[row, head + b] = two * cos[row, b] + one * sin[row, b]
    return made


def _random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


QUERIES, TABLE = _random(5, 2, 4, 8), np.array([[3, 1], [0, 2]], np.int32)
PAGES = [_random(6, 4, 4, 2, 8), _random(7, 4, 4, 2, 8)]  # blocks, rows, heads, width
MASK = _random(8, 2, 1, 8)
ROWS, KEYS, VALUES = _random(9, 6, 4, 8), _random(10, 6, 2, 8), _random(11, 6, 2, 8)
LENGTHS = np.array([2, 4], np.int32)
OWN = [_random(12 + i, 2, 16) for i in range(3)]  # one new row of each of two sequences
CACHES = [_random(15 + i, 2, 2, 4, 16) for i in range(2)]  # layers, sequences, rows, hidden


def _attention(q, k, v, scale, mask=None):
    """Attention row by row and head by head."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    each = q.shape[1] // k.shape[1]
    made = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            score = k[:, head // each] @ q[row, head] * scale
            if mask is not None:
                score = score + mask[row]
            share = np.exp(score - score.max())
            made[row, head] = share / share.sum() @ v[:, head // each]
    return made


def _paged(sequence, length):
    """Return the rows of a sequence: block number and row in the block from its table."""
    places = [(TABLE[sequence, i // 4], i % 4) for i in range(length)]
    return [np.stack([pages[place] for place in places]) for pages in PAGES]


def _cached():
    made = []
    for at, (past, q) in enumerate(zip((2, 1), OWN[0], strict=True)):
        rows = [np.concatenate([cache[1, at, :past], new[at : at + 1]]).reshape(-1, 2, 8)
                for cache, new in zip(CACHES, OWN[1:], strict=True)]  # fmt: skip
        made.append(_attention(q.reshape(1, 2, 8), *rows, 0.5).reshape(16))
    return np.stack(made)


def _stored(pages, rows):
    made = pages.copy()
    made[1, 3], made[0, 0] = rows[0], rows[2]  # slots 7 and 0
    return made


def _with_rows(cache, rows):
    made = cache.copy()
    made[1, 0, 2], made[1, 1, 1] = rows
    return made


# name of the operation, parameters, inputs, outputs
CASES = {
    "linear": ("Linear", {"transposeB": True, "hasBias": False}, [X, W], [X @ W.T]),
    "with bias": ("Linear", {"hasBias": True}, [X, W, W[:, 0]], [X @ W.T + W[:, 0]]),
    "untransposed": ("Linear", {"transposeB": False}, [X, np.ascontiguousarray(W.T)], [X @ W.T]),
    "norm": ("RmsNorm", {"layerType": 1, "normParam": {"epsilon": 1e-5}}, [X, G], [_rms(X) * G]),
    "gemma": (
        "RmsNorm", {"layerType": 1, "normParam": {"modelType": 1}}, [X, G], [_rms(X) * (1 + G)]
    ),
    "pre": (
        "RmsNorm", {"layerType": 2, "preNormParam": {}}, [X, X[::-1].copy(), G],
        [_rms(SUM) * G, SUM],
    ),
    "post": ("RmsNorm", {"layerType": 3}, [X, X[::-1].copy(), G], [_rms(SUM) * G]),
    "add": ("Elewise", {"elewiseType": 8}, [X, X[::-1].copy()], [SUM]),
    "muls": ("Elewise", {"elewiseType": 2, "mulsParam": {"varAttr": 0.5}}, [X], [X * 0.5]),
    "cos": ("Elewise", {"elewiseType": 3}, [X], [np.cos(X)]),
    "swish": ("Activation", {"activationType": 4, "scale": 1.0}, [X], [X * _sigmoid(X)]),
    "swiglu": (
        "Activation", {"activationType": 6, "dim": -1}, [X],
        [X[:, :8] * _sigmoid(X[:, :8]) * X[:, 8:]],
    ),
    "softmax": (
        "Softmax", {"axes": [1]}, [X], [np.exp(X) / np.exp(X).sum(1, keepdims=True)]
    ),
    "gather": ("Gather", {"axis": 0}, [X, IDS], [X[IDS]]),
    "split": ("Split", {"splitDim": 1, "splitNum": 2}, [X], [X[:, :8], X[:, 8:]]),
    "concat": ("Concat", {"concatDim": 1}, [X, X], [np.concatenate([X, X], 1)]),
    "transpose": ("Transpose", {"perm": [1, 0]}, [X], [X.T]),
    "accumulated": ("Linear", {"enAccum": True}, [X, W, X[:, :8]], [X @ W.T + X[:, :8]]),
    "dequantised": (
        "Linear", {"hasBias": True}, [BYTES, BYTES, COUNTS, SCALE.view(np.int32).astype(np.int64)],
        [(BYTES.astype(float) @ BYTES.T.astype(float) + COUNTS) * SCALE],
    ),
    "matmul": ("Matmul", {"transposeA": True}, [X, X], [X.T.astype(float) @ X]),
    "rstd": (
        "RmsNorm", {"layerType": 1, "normParam": {"rstd": True}}, [X, G],
        [_rms(X) * G, 1 / np.sqrt((X.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5)],
    ),
    "layer norm": (
        "LayerNorm", {"layerType": 1, "normParam": {"beginNormAxis": 1}}, [X, G, G[::-1].copy()],
        [_layer_norm(X) * G + G[::-1]],
    ),
    "layer norm of a sum": (
        "LayerNorm", {"layerType": 2, "preNormParam": {"zoomScaleValue": 0.5}},
        [X, X[::-1].copy(), G, G], [_layer_norm(X + X[::-1] / 2) * G + G, X + X[::-1] / 2],
    ),
    "swiglu gradient": (
        "Activation", {"activationType": 7, "dim": -1}, [X[:, :8], X], [_swiglu_gradient(X)],
    ),
    "dequant": (
        "Elewise", {"elewiseType": 18}, [BYTES, G, G[::-1].copy()], [(BYTES - G[::-1]) * G],
    ),
    "cumsum": ("Cumsum", {"axes": [1]}, [X], [np.cumsum(X.astype(float), 1)]),
    "largest": ("Reduce", {"reduceType": 1, "axis": [1]}, [X], [X.max(1)]),
    "sum": ("Reduce", {"reduceType": 3, "axis": [0]}, [X], [X.astype(float).sum(0)]),
    "sizes": ("Split", {"splitDim": 1, "splitSizes": [4, 12]}, [X], [X[:, :4], X[:, 4:]]),
    "slice": ("Slice", {"offsets": [1, -4], "size": [-1, 3]}, [X], [X[1:, 12:15]]),
    "set value": (
        "SetValue", {"starts": [1, 2], "ends": [3, 6], "strides": [1, 1]}, [X, W[:2, :4]],
        [_with_part(X, W[:2, :4])],
    ),
    "strided": (
        "AsStrided", {"size": [3, 4], "stride": [1, 2], "offset": [5]}, [X],
        [np.array([[X.reshape(-1)[5 + i + 2 * j] for j in range(4)] for i in range(3)])],
    ),
    "masked fill": (
        "Fill", {"withMask": True, "value": [2.5]}, [X, (X > 0).astype(np.int8)],
        [np.where(X > 0, 2.5, X).astype(np.float32)],
    ),
    "fill": (
        "Fill", {"withMask": False, "outDim": [2, 3], "value": [2.5]}, [],
        [np.full((2, 3), 2.5, np.float32)],
    ),
    "repeat": ("Repeat", {"multiples": [2, 3]}, [X], [np.tile(X, (2, 3))]),
    "onehot": ("Onehot", {"axis": -1, "depth": 5}, [IDS], [np.eye(5, dtype=np.int64)[IDS]]),
    "sort": (
        "Sort", {"num": [3]}, [X],
        [-np.sort(-X, 1)[:, :3], np.argsort(-X, 1, "stable")[:, :3].astype(np.int32)],
    ),
    "index add": (
        "IndexAdd", {"indexType": 1, "axis": 0}, [X, IDS.astype(np.int32), W[:3], G[:1]],
        [_added(X, IDS, W[:3] * G[0])],
    ),
    "to blocks": ("Transdata", {"transdataType": 2}, [X], [_blocks(X)]),
    "from blocks": (
        "Transdata", {"transdataType": 1, "outCrops": [6, 16]}, [_blocks(X)], [X[None]],
    ),
    "nonzero": ("Nonzero", {}, [np.array([[0, 3], [4, 0]], np.int64)],
                [np.array([[0, 1, 0, 0], [1, 0, 0, 0]], np.int64), np.array([2], np.int64)]),
    "last tokens": (
        "Pad", {}, [X, IDS, np.array([[2], [4]], np.int32), np.zeros((2, 4), np.int64)], [X[[1, 5]]]
    ),
    "unpad": (
        "Unpad", {},
        [np.array([[7, 8, 0], [9, 0, 0]], np.int64), np.array([[1], [3]], np.int32),
         np.array([[3]], np.int64), np.array([[2], [1]], np.int32)],
        [np.array([[7, 8, 9, 0, 0, 0]], np.int64), np.array([[0], [1]], np.int32),
         np.array([[0, 0, 1, 0, 0, 0]], np.int32)],
    ),
    "gating": (
        "Gating", {"topkExpertNum": 2, "cumSumNum": 3},
        [np.array([2, 0, 0, 1], np.int32), np.arange(4, dtype=np.int32)],
        [np.array([0, 1, 1, 0], np.int32), np.array([2, 3, 4], np.int32),
         np.array([1, 2, 3, 0], np.int32)],
    ),
    "rope": ("Rope", {"rotaryCoeff": 2}, [X, W[:6], *ANGLES], [_rope(X, 2), _rope(W[:6], 2)]),
    "rope of halves": ("Rope", {"rotaryCoeff": 4}, [X, X, *ANGLES], [_rope(X, 4), _rope(X, 4)]),
    "rope of neighbours": (
        "Rope", {"rotaryCoeff": 8}, [X, X, *PAIRED], [_rope(X, 8), _rope(X, 8)]
    ),
    "pages": (
        "PagedAttention", {"headNum": 4, "kvHeadNum": 2, "qkScale": 0.5},
        [QUERIES, PAGES[0], PAGES[1], TABLE, np.array([5, 3], np.int32)],
        [np.stack([_attention(QUERIES[i : i + 1], *_paged(i, n), 0.5)[0]
                   for i, n in enumerate((5, 3))])],
    ),
    "masked pages": (
        "PagedAttention", {"headNum": 4, "kvHeadNum": 2, "qkScale": 0.5, "maskType": 1},
        [QUERIES, PAGES[0], PAGES[1], TABLE, np.array([5, 3], np.int32), MASK],
        [np.stack([_attention(QUERIES[i : i + 1], *_paged(i, n), 0.5, MASK[i, :1, :n])[0]
                   for i, n in enumerate((5, 3))])],
    ),
    "prefill": (
        "SelfAttention",
        {"calcType": 3, "headNum": 4, "kvHeadNum": 2, "qkScale": 0.5, "maskType": 1,
         "kernelType": 1},
        [ROWS, KEYS, VALUES, np.triu(np.full((6, 6), -1e4, np.float32), 1), LENGTHS],
        [np.concatenate([_attention(ROWS[s], KEYS[s], VALUES[s], 0.5,
                                    np.triu(np.full((n, n), -1e4), 1))
                         for s, n in ((slice(0, 2), 2), (slice(2, 6), 4))])],
    ),
    "with a cache": (
        "SelfAttention", {"calcType": 2, "headNum": 2, "qScale": 0.5},
        [*OWN, *CACHES, np.zeros((4, 4), np.float32), np.array([3, 2], np.int32),
         np.array([1, 1], np.int32), np.array([1], np.int32)],
        [_cached()],
    ),
    "slots": (
        "ReshapeAndCache", {},
        [KEYS[:3], VALUES[:3], *PAGES, np.array([7, -1, 0], np.int32)],
        [_stored(PAGES[0], KEYS), _stored(PAGES[1], VALUES)],
    ),
    "rows of a cache": (
        "KvCache", {},
        [OWN[1], np.array([1], np.int32), CACHES[0], np.array([3, 2], np.int32),
         np.array([1, 1], np.int32)],
        [_with_rows(CACHES[0], OWN[1])],
    ),
}  # fmt: skip


def _dump(tmp_path, op, parameters, inputs, outputs, rank=0):
    folder = tmp_path / f"msit_dump_20250101_000000/tensors/{rank}_42/0/10_Layer/0_{op}Operation"
    for place, x in enumerate(inputs):
        write(folder / f"before/intensor{place}.bin", bin_bytes(np.ascontiguousarray(x)))
    for place, x in enumerate(outputs):
        x = np.ascontiguousarray(x)
        made = x.astype(np.float32) if x.dtype == np.float64 else x
        write(folder / f"after/outtensor{place}.bin", bin_bytes(made))
    if parameters is not None:
        write(folder / "op_param.json", json.dumps(parameters))
    return tmp_path


def _spoilt(x: np.ndarray) -> np.ndarray:
    return x * 1.001 if x.dtype.kind == "f" else x + (np.arange(x.size) == 0).reshape(x.shape)


@pytest.mark.parametrize("case", CASES)
def test_an_operation_is_right_or_wrong_by_its_parameters(case, tmp_path):
    op, parameters, inputs, outputs = CASES[case]
    right = ld.opcheck(_dump(tmp_path / "a", op, parameters, inputs, outputs)).result
    assert [each.verdict for each in right.calls] == ["right"], right.calls
    wrong = [np.array(x) for x in outputs]
    wrong[0] = _spoilt(wrong[0])
    found = ld.opcheck(_dump(tmp_path / "b", op, parameters, inputs, wrong)).result
    assert [each.verdict for each in found.calls] == ["wrong"]
    assert found.calls[0].id == "10_0"


@pytest.mark.parametrize(
    ("op", "parameters", "reason"),
    [
        ("Linear", None, checks.GAP),
        ("Linear", [], checks.GAP),
        ("Linear", {"matmulType": 1}, checks.UNKNOWN),
        ("LinearSparse", {}, checks.UNKNOWN),
        ("Multinomial", {"numSamples": 1}, checks.RANDOM),
        ("PagedAttention", {"quantType": 1}, checks.UNKNOWN),
        ("SelfAttention", {"calcType": 3, "qScale": 2.0}, checks.UNKNOWN),
        ("SelfAttention", {"calcType": 3, "headNum": 3}, checks.GAP),
        ("AllReduce", {"rankSize": 2}, checks.GAP),
        ("FastSoftMax", {}, checks.UNKNOWN),
        ("Slice", {"offsets": [0, 10**12], "size": [1, 1]}, checks.FAILS),
        ("Repeat", {"multiples": [10**6, 10**6]}, checks.FAILS),
        ("AsStrided", {"size": [4], "stride": [10**6], "offset": [0]}, checks.FAILS),
        ("AsStrided", {"size": [10**9], "stride": [0], "offset": [0]}, checks.FAILS),
        ("Onehot", {"axis": -1, "depth": 10**12}, checks.FAILS),
        ("Fill", {"withMask": False, "outDim": [10**12], "value": [1]}, checks.GAP),
        ("Elewise", {"elewiseType": 6}, checks.UNKNOWN),
        ("Softmax", {"axes": "x"}, checks.GAP),
        ("Gather", {"axis": 5.5}, checks.FAILS),
        ("RmsNorm", {"layerType": 1, "normParam": {"quantType": 2}}, checks.UNKNOWN),
    ],
)
def test_an_operation_that_cannot_be_checked_says_why(op, parameters, reason, tmp_path):
    result = ld.opcheck(_dump(tmp_path, op, parameters, [X, W], [X])).result
    assert [each.reason for each in result.calls] == [reason]
    assert result.verdict == "not checked"


# -- several ranks ---------------------------------------------------------------------------------

OF_RANKS = {
    "sum": ("AllReduce", {"allReduceType": "sum"}, lambda rank: [X + X[::-1]]),
    "largest": ("AllReduce", {"allReduceType": "max"}, lambda rank: [np.maximum(X, X[::-1])]),
    "gather": ("AllGather", {}, lambda rank: [np.stack([X, X[::-1]])]),
    "broadcast": ("Broadcast", {"rankRoot": 1}, lambda rank: [X[::-1]]),
    "product and sum": (
        "LinearParallel", {"type": 0}, lambda rank: [(X + X[::-1]).astype(float) @ W.T],
    ),
    "product and its part": (
        "LinearParallel", {"type": 1},
        lambda rank: [((X + X[::-1]).astype(float) @ W.T)[3 * rank : 3 * rank + 3]],
    ),
    "all rows and product": (
        "LinearParallel", {"type": 2},
        lambda rank: [np.concatenate([X, X[::-1]]).astype(float) @ W.T],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_RANKS)
def test_an_operation_of_several_ranks_is_checked_by_the_inputs_of_all(case, tmp_path):
    op, parameters, outputs = OF_RANKS[case]
    parameters = {"rankSize": 2, **parameters}
    for rank, x in enumerate((X, X[::-1])):
        given = [x, W] if op == "LinearParallel" else [x]
        _dump(tmp_path / "a", op, parameters, given, outputs(rank), rank)
        spoilt = [outputs(rank)[0] * (1.001 if rank else 1)]
        _dump(tmp_path / "b", op, parameters, given, spoilt, rank)
    right = ld.opcheck(tmp_path / "a").result
    assert [each.verdict for each in right.calls] == ["right", "right"], right.calls
    found = ld.opcheck(tmp_path / "b").result
    assert [each.key.rank for each in found.wrong] == [1]


def _sampled(tmp_path, token, probability):
    probabilities = np.array([[0.1, 0.5, 0.3, 0.1]], np.float32)
    given = [probabilities, np.array([[0.7]], np.float32)]
    made = [np.array([[token]], np.int32), np.array([[probability]], np.float32)]
    parameters = {"topkToppSamplingType": 0, "topk": 3}
    return ld.opcheck(_dump(tmp_path, "TopkToppSampling", parameters, given, made)).verdict


@pytest.mark.parametrize(
    ("token", "probability", "verdict"),
    [(1, 0.5, "right"), (2, 0.3, "right"), (1, 0.4, "wrong"), (0, 0.1, "wrong"), (9, 0, "wrong")],
)
def test_a_drawn_token_is_a_candidate_with_its_own_probability(
    token, probability, verdict, tmp_path
):
    assert _sampled(tmp_path, token, probability) == verdict
