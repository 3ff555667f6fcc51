"""The parts of OpenVINO's recorder that need no OpenVINO: names, types, other releases."""

from __future__ import annotations

import sys
import types

import pytest

from llmdebug_nb.capture.compat import openvino_api, openvino_models
from llmdebug_nb.capture.graphs.graph import Weight
from llmdebug_nb.capture.graphs.placed_graph import ExportedNode, PlacedGraph
from llmdebug_nb.capture.openvino.model_reader import called_modules, stated_module

NAMES = {"/fc/Gemm", "/fc/Gemm/WithoutBiases", "node_linear"}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("__module.model.layers.0.mlp/aten::mul/Multiply", "model.layers.0.mlp"),
        ("aten::add/Add", ""),
        ("/model/layers.0/mlp/Mul", "model.layers.0.mlp"),
        ("/fc/Gemm/WithoutBiases", "fc"),  # one of two nodes that stand for /fc/Gemm
        ("node_linear/WithoutBiases", None),
        ("Gather_10853", None),
    ],
)
def test_a_nodes_name_says_its_module_or_nothing(name: str, module: str | None) -> None:
    assert stated_module(name, NAMES) == module


def test_what_holds_modules_by_number_is_no_call() -> None:
    stated = {"model.layers.0.mlp.up", "model.layers.1", "head"}
    assert called_modules(stated) == {
        *stated, "model", "model.layers.0", "model.layers.0.mlp",
    }  # fmt: skip


def test_a_node_that_says_nothing_is_placed_by_its_neighbours_and_by_its_weight() -> None:
    nodes = [
        ExportedNode("a", "MatMul", ["x", "fc.weight"], ["a"]),
        ExportedNode("b", "Add", ["a", "c"], ["b"], module="top.body"),
        ExportedNode("c", "Relu", ["b"], ["y"]),
        ExportedNode("d", "Neg", ["y"], ["z"], module="top.rest"),
    ]
    placed = PlacedGraph(nodes, {"fc.weight": (3, 3)}, {}, {"top.body"}, {})
    assert placed.modules == ["fc", "top.body", "top", "top.rest"]
    assert placed.guessed == {"fc"}


def test_the_epsilon_below_a_root_is_the_modules() -> None:
    nodes = [
        ExportedNode("a", "Add", ["x", "c"], ["a"], module="norm"),
        ExportedNode("b", "Sqrt", ["a"], ["b"], module="norm"),
        ExportedNode("d", "MVN", ["b"], ["d"], module="norm", epsilon=1e-6),
    ]
    placed = PlacedGraph(nodes, {"c": (1,)}, {"c": 1e-5}, {"norm"}, {})
    assert [placed.epsilon(node) for node in nodes] == [1e-5, None, 1e-6]
    assert Weight("w").transposed is False


@pytest.mark.parametrize(
    ("kind", "epsilon"),
    [("f32", 2.0**-23), ("f16", 2.0**-10), ("bf16", 2.0**-7), ("u8", 2.0**-7), ("i4", 2.0**-3),
     ("i64", 0.0), ("", 0.0)],
)  # fmt: skip
def test_the_epsilon_of_a_type(kind: str, epsilon: float) -> None:
    assert openvino_models.epsilon_of(kind) == epsilon


@pytest.fixture
def other_release(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("openvino")
    for kind, names in openvino_api.NEEDED.items():
        setattr(module, kind, type(kind, (), dict.fromkeys(names)))
    monkeypatch.setitem(sys.modules, "openvino", module)
    return module


def test_what_another_release_lacks_is_named(other_release: types.ModuleType) -> None:
    assert openvino_api.missing() is None
    del other_release.InferRequest.query_state  # type: ignore[attr-defined]
    assert openvino_api.missing() == "InferRequest.query_state"
    del other_release.CompiledModel  # type: ignore[attr-defined]
    other_release.InferRequest.query_state = None  # type: ignore[attr-defined]
    assert openvino_api.missing() == "CompiledModel.inputs"


def test_wrappers_go_on_with_the_first_listener_and_off_with_the_last(
    other_release: types.ModuleType,
) -> None:
    ran: list[str] = []
    request = other_release.InferRequest
    request.infer = lambda self: ran.append("own")  # type: ignore[attr-defined]
    before = dict(vars(request))

    class Listener:
        def infers(self, request, own):  # type: ignore[no-untyped-def]
            ran.append("seen")
            return own()

        def resets(self, request) -> None:  # type: ignore[no-untyped-def]
            ran.append("reset")

    listener = Listener()
    openvino_api.listeners.add(listener)
    request().infer()
    ours = request()
    ours._llmdebug_tap = True
    ours.infer()
    openvino_api.end(listener)
    request().infer()
    assert ran == ["seen", "own", "own", "own"]
    assert dict(vars(request)) == before
