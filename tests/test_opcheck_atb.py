"""Operations of an ATB dump against formulas of their parameters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from layout_files import write
from llmdebug_nb.core import opchecks
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.store.layouts.atb import ACL_DTYPES

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
}  # fmt: skip


def _dump(tmp_path, op, parameters, inputs, outputs):
    folder = tmp_path / f"msit_dump_20250101_000000/tensors/0_42/0/10_Layer/0_{op}Operation"
    for place, x in enumerate(inputs):
        write(folder / f"before/intensor{place}.bin", bin_bytes(np.ascontiguousarray(x)))
    for place, x in enumerate(outputs):
        made = np.ascontiguousarray(x).astype(np.float32)
        write(folder / f"after/outtensor{place}.bin", bin_bytes(made))
    if parameters is not None:
        write(folder / "op_param.json", json.dumps(parameters))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_an_operation_is_right_or_wrong_by_its_parameters(case, tmp_path):
    op, parameters, inputs, outputs = CASES[case]
    right = ld.opcheck(_dump(tmp_path / "a", op, parameters, inputs, outputs)).result
    assert [each.verdict for each in right.calls] == ["right"], right.calls
    wrong = [np.array(x) for x in outputs]
    wrong[0] = wrong[0] * 1.001
    found = ld.opcheck(_dump(tmp_path / "b", op, parameters, inputs, wrong)).result
    assert [each.verdict for each in found.calls] == ["wrong"]
    assert found.calls[0].id == "10_0"


@pytest.mark.parametrize(
    ("op", "parameters", "reason"),
    [
        ("Linear", None, opchecks.GAP),
        ("Linear", [], opchecks.GAP),
        ("Linear", {"enAccum": True}, opchecks.UNKNOWN),
        ("PagedAttention", {}, opchecks.UNKNOWN),
        ("Elewise", {"elewiseType": 6}, opchecks.UNKNOWN),
        ("Softmax", {"axes": "x"}, opchecks.GAP),
        ("Gather", {"axis": 5.5}, opchecks.FAILS),
        ("RmsNorm", {"layerType": 1, "normParam": {"quantType": 2}}, opchecks.UNKNOWN),
    ],
)
def test_an_operation_that_cannot_be_checked_says_why(op, parameters, reason, tmp_path):
    result = ld.opcheck(_dump(tmp_path, op, parameters, [X, W], [X])).result
    assert [each.reason for each in result.calls] == [reason]
    assert result.verdict == "not checked"
