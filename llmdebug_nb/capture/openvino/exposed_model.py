"""A compiled model of OpenVINO that returns the outputs of the nodes of another one.

It is compiled of the same model, on the same device, with the same properties. A node that returns
its value can't be fused into the next one, and that may change bits. So there are two of them: one
returns all values, the other only those that are still there in what the program compiled.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compat import openvino_api, openvino_models
from llmdebug_nb.capture.graphs.graph import GraphNode, Scalar, Weight
from llmdebug_nb.capture.openvino import model_reader
from llmdebug_nb.core.errors import CaptureError, first_line

if TYPE_CHECKING:
    from openvino import CompiledModel, InferRequest, Model

    from llmdebug_nb.capture.compat.openvino_api import Target


class ExposedModel:
    """A compiled model that returns the outputs of the nodes of another one.

    ``graph``: of the nodes whose values it returns. ``is_whole``: these are all nodes.
    ``hidden``: how many values it does not return, as they would change bits. ``has_state``: values
    outlive a run. ``coarse``, ``rounding``: see `Run`.
    """

    def __init__(self, target: Target, given: tuple[Model, ...] = ()) -> None:
        """``given``: models that it may have been compiled of.

        Raises:
            CaptureError: no such model can be made.
        """
        source = openvino_api.source_of(target, given)
        self._core, self._model = source.core, source.open()
        self._runs = openvino_models.runs_of(openvino_api.compiled_of(target), self._core)
        try:
            self._read = model_reader.read(self._model)
        except (RuntimeError, KeyError) as error:
            raise CaptureError(f"its nodes can't be read: {first_line(error)}") from None
        self.has_state = self._read.has_state
        self._compile(is_whole=not self.has_state)

    def narrow(self) -> None:
        """Return only the values that the program's compiled model has. Raises CaptureError."""
        self._compile(is_whole=False)

    def close(self) -> None:
        """Free what it holds."""
        self._requests.clear()

    def _compile(self, is_whole: bool) -> None:
        graph, ports = self._read.graph, self._read.ports
        nodes = [
            node
            for node in graph.nodes
            if is_whole or (node.name in self._runs.nodes and node.op != "OpenVINO.ReadValue")
        ]
        kept = [value for node in nodes for value in node.outputs if value not in graph.outputs]
        outputs = set(graph.outputs)
        self.graph = replace(
            graph, nodes=[n for n in graph.nodes if n in nodes or outputs & {*n.outputs}]
        )
        self.is_whole = is_whole
        self.hidden = len(ports) - len(kept) - len(outputs & {*ports})
        self._names = [*graph.outputs, *kept]
        self._given = {*self._names}
        # the states of a request go on from run to run, so each one of the program has one of ours
        self._requests: weakref.WeakKeyDictionary[InferRequest, InferRequest] = (
            weakref.WeakKeyDictionary()
        )
        try:
            self._compiled: CompiledModel = openvino_models.compile_with_outputs(
                self._core, self._model, self._runs, [ports[value] for value in kept]
            )
        except (RuntimeError, KeyError) as error:
            raise CaptureError(
                f"it can't be compiled on {self._runs.device} with its nodes as outputs:"
                f" {first_line(error)}"
            ) from None

    # -- runs -----------------------------------------------------------------------------------

    def request_for(self, theirs: InferRequest) -> InferRequest:
        """Return our request for one of the program's that is about to run, with its states."""
        ours = self._requests.get(theirs)
        if ours is None:
            ours = self._requests[theirs] = openvino_api.own_request(self._compiled)
        if self.has_state:
            openvino_models.take_states(ours, theirs)
        return ours

    def reset(self, theirs: InferRequest) -> None:
        """Reset the states of our request, as the program did with its own."""
        if theirs in self._requests:
            self._requests[theirs].reset_state()

    def run(self, ours: InferRequest, theirs: InferRequest) -> tuple[dict[str, object], bool]:
        """Run our request like the program's, which has run.

        Return the values by name, and whether the outputs are the same bits.
        """
        outputs = openvino_models.infer_like(ours, theirs)
        results = theirs.output_tensors
        agree = all(map(openvino_models.same, outputs[: len(results)], results))
        values = map(openvino_models.tensor_of, outputs)
        return dict(zip(self._names, values, strict=True)), agree

    # -- what it knows --------------------------------------------------------------------------

    @property
    def coarse(self) -> list[str]:
        kinds = {
            "values": self._runs.precisions,
            "weights": self._read.stored,
            "cache": {self._runs.cache or ""},
        }
        found = {what: sorted(filter(self._is_coarse, each)) for what, each in kinds.items()}
        return [f"{what} in {', '.join(each)}" for what, each in found.items() if each]

    @property
    def rounding(self) -> float:
        kinds = {*self._runs.precisions, *self._read.stored, self._runs.cache or ""}
        coarse = [openvino_models.epsilon_of(kind) for kind in kinds if self._is_coarse(kind)]
        return max(coarse, default=0.0)

    def _is_coarse(self, kind: str) -> bool:
        return openvino_models.epsilon_of(kind) > openvino_models.epsilon_of("f32")

    def gives(self, name: str) -> bool:
        """Tell whether it returns a value."""
        return name in self._given

    def facts(self, node: GraphNode) -> list[Scalar]:
        """Return what node runs in its place, if one does: its kind, kernel and precision."""
        return list(self._runs.nodes.get(node.name, {}).items())

    def has_constant(self, name: str) -> bool:
        """Tell whether a value is a constant."""
        return name in self._read.constants

    def constant(self, name: str) -> torch.Tensor | None:
        """Return the values of a constant; None if torch has no such dtype."""
        return openvino_models.tensor_of(self._read.constants[name])

    def shape(self, weight: Weight) -> list[int]:
        """Return the shape of a weight in its module."""
        shape = [int(size) for size in self._read.constants[weight.name].get_output_shape(0)]
        return shape[::-1] if weight.transposed else shape
