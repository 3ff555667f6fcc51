"""Nodes of ONNX graphs that ran in ONNX Runtime, against onnx's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import llmdebug_nb as ld
from llmdebug_nb.reference.onnx_calls import OnnxFacts
from llmdebug_nb.replay import checks
from llmdebug_nb.store.run import Run
from models import prompt
from onnx_models import exported

ALL, NONE = ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def _recorded(model: bytes, feed: dict[str, np.ndarray], level: object = NONE, **options) -> Run:
    chosen = ort.SessionOptions()
    chosen.graph_optimization_level = level
    session = ort.InferenceSession(model, chosen)
    with ld.dump(session, name="ort", **{"weights": True, **options}) as run:
        session.run(None, feed)
    return run


def _model(name: str, level: object = NONE, **options) -> Run:
    feed = {"input_ids": prompt().numpy()}
    return _recorded(exported(name).SerializeToString(), feed, level, **options)


def _one(
    op: str, inputs: list[np.ndarray], opset: int = 18, large: tuple = (), **attributes
) -> Run:
    """Record a graph of one node; ``large``: more inputs, as constants of the graph."""
    names = [f"x{at}" for at in range(len(inputs))]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape))
        for name, x in zip(names, inputs, strict=True)
    ]
    constants = [numpy_helper.from_array(x, f"c{at}") for at, x in enumerate(large)]
    node = helper.make_node(op, [*names, *(c.name for c in constants)], ["y"], **attributes)
    out = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "one", values, [out], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return _recorded(made.SerializeToString(), dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize("level", [ALL, NONE], ids=["optimised", "as exported"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_model_raises_no_alarm_and_all_standard_nodes_are_checked(name, level):
    result = ld.opcheck(_model(name, level)).result
    assert [str(each) for each in result.wrong] == []
    assert result.checked + sum(result.not_checked.values()) == result.total
    assert result.checked > 50
    assert {each.detail for each in result.calls if each.reason} <= {
        "onnx defines no operators of com.microsoft"
    }
    assert level == ALL or result.checked == result.total


@pytest.mark.parametrize("op", ["Onnx.Softmax", "Onnx.MatMul", "Onnx.Reciprocal"])
def test_a_wrong_node_is_found_and_nothing_else(op, monkeypatch):
    run, load = _model("llama"), Run.load

    def planted(self, record):
        x = load(self, record)
        is_it = (record.op, record.site.role) == (op, "output")
        return x * 1.001 if is_it else x

    monkeypatch.setattr(Run, "load", planted)
    assert {each.op for each in ld.opcheck(run).wrong} == {op}


def test_without_weights_products_with_them_are_not_checked():
    result = ld.opcheck(_model("llama", weights=False)).result
    reasons = {each.reason for each in result.calls if each.op == "Onnx.MatMul"}
    assert reasons == {"", checks.GAP}  # queries by keys have none
    assert any("weights=True" in each.detail for each in result.calls)


def test_a_recording_of_before_that_says_no_opset_is_not_checked(monkeypatch):
    run = _one("Relu", [X])
    of = OnnxFacts.of
    monkeypatch.setattr(
        OnnxFacts, "of", lambda *a: {k: v for k, v in of(*a).items() if k != "opset"}
    )
    (call,) = ld.opcheck(run).result.calls
    assert (call.reason, "opset" in call.detail) == (checks.GAP, True)


# (operator, inputs, attributes, constants of the graph): where opsets and absent inputs matter
CASES = {
    "axes as an attribute": ("ReduceMean", [X], {"axes": [1], "opset": 13}, ()),
    "axes as an input": ("ReduceMean", [X], {}, (np.array([1]),)),
    "softmax of old": ("Softmax", [X], {"axis": 1, "opset": 11}, ()),
    "one index": ("Gather", [X], {"axis": 0}, (np.array(1),)),
    "a list of one index": ("Gather", [X], {"axis": 0}, (np.array([1]),)),
    "limits": ("Clip", [X], {}, (np.array(-0.5, np.float32), np.array(0.5, np.float32))),
    "half": ("Exp", [X.astype(np.float16)], {}, ()),
    "whole": ("Add", [np.arange(4), np.arange(4)], {}, ()),
    "expand": ("Expand", [X], {}, (np.array([2, 3, 4]),)),
    "pad": ("Pad", [X], {}, (np.array([0, 1, 0, 1]),)),
    "cast": ("Cast", [X], {"to": TensorProto.FLOAT16}, ()),
    "norm": ("LayerNormalization", [X, X[0]], {"axis": -1, "epsilon": 1e-6}, ()),
    "largest": ("ArgMax", [X], {"axis": 1, "keepdims": 0}, ()),
    "product": ("Gemm", [X, X], {"transB": 1, "alpha": 0.5}, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_node_alone_is_right(case):
    op, inputs, attributes, constants = CASES[case]
    (call,) = ld.opcheck(_one(op, inputs, large=constants, **attributes)).result.calls
    assert (call.verdict, call.detail) == ("right", "")


def test_a_node_that_asks_for_far_more_than_was_recorded_is_not_run(monkeypatch):
    run = _one("Expand", [X], large=(np.array([2, 3, 4]),))
    monkeypatch.setattr(
        "llmdebug_nb.reference.onnx_calls.OnnxCall._constants",
        lambda self, axes, wide: {"1": np.array([10**6, 10**6, 3, 4])},
    )
    (call,) = ld.opcheck(run).result.calls
    assert call.detail == "its result would be far larger than recorded"
