"""An exported ONNX graph: its nodes, and what they say of the modules that they ran in.

`torch.onnx.export(dynamo=True)` notes for each node its modules, its node in the traced program and
its source lines (``pkg.torch.onnx.*`` in ``metadata_props``, written by
``torch/onnx/_internal/exporter/_core.py``). Other exporters put the modules into the node's name
(``/model/layers.0/mlp/MatMul``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmdebug_nb.capture.graphs.graph import Weight, shortest
from llmdebug_nb.capture.graphs.placed_graph import ExportedNode, PlacedGraph, scoped
from llmdebug_nb.capture.onnx.proto import exporter_metadata, inner_inputs, names_in, small_constant

if TYPE_CHECKING:
    import onnx

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_SLICED = re.compile(r"\.slice\([^)]*\)")  # torch.export's name for model.layers[:n]
_PRODUCTS = (
    "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "Conv", "ConvTranspose",
)  # fmt: skip


def placed(proto: onnx.GraphProto) -> PlacedGraph:
    """Return the graph with each node in its module."""
    shapes = {one.name: tuple(one.dims) for one in proto.initializer}
    small = {one.name: small_constant(one) for one in proto.initializer}
    modules = _Modules()
    nodes = [
        ExportedNode(
            node.name, node.op_type, node.input, node.output, list(inner_inputs(node)),
            modules.of(node), _weights(node, shapes), _epsilon(node),
        )
        for node in proto.node
    ]  # fmt: skip
    return PlacedGraph(nodes, shapes, small, modules.called, modules.types)


class _Modules:
    """The modules that nodes say they ran in."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.called: set[str] = set()

    def of(self, node: onnx.NodeProto) -> str | None:
        """Return the module that a node belongs to by its own account, or None."""
        metadata = exporter_metadata(node)
        scopes = names_in(metadata.get("name_scopes"))
        if scopes and scopes[0] == _NO_MODULE:
            return ""
        if len(scopes) > 1:
            paths = [_SLICED.sub("", scope) for scope in scopes[:-1]]
            self.called.update(paths)
            types = names_in(metadata.get("class_hierarchy"))
            for path, name in zip(paths, types, strict=False):
                self.types.setdefault(path, name.rpartition(".")[2])
            return paths[-1]
        paths = scoped(node.name)
        self.called.update(paths)
        return paths[-1] if paths else None


def _weights(
    node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]
) -> dict[int, tuple[str, Weight]]:
    """Return the places of the weights of a product."""
    if node.op_type not in _PRODUCTS:
        return {}
    stored = any(one.name == "transB" and one.i for one in node.attribute)
    weights = {}
    for place, value in enumerate(node.input):
        if place in (1, 2) and value in shapes:
            is_matrix = len(shapes[value]) == 2 and node.op_type in ("MatMul", "Gemm")
            weight = Weight(value, transposed=is_matrix and place == 1 and not stored)
            weights[place] = (("weight", "bias")[place - 1], weight)
    return weights


def _epsilon(node: onnx.NodeProto) -> float | None:
    found = (shortest(one.f) for one in node.attribute if one.name == "epsilon")
    return next(found, None)
