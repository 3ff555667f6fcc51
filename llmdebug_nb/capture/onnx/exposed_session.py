"""An ONNX Runtime session that returns the output of every node of another session.

A session returns only the outputs of its graph. So a second session is made of the same model, with
the same providers and options, in which every value is an output. The graph is first optimised as
the program's session optimises it, written to a file and then run unchanged: the results are equal
bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compat import onnxruntime_api
from llmdebug_nb.capture.compat.onnxruntime_api import SessionMaker, tensor_of
from llmdebug_nb.capture.graphs.graph import GraphNode, Scalar, Weight
from llmdebug_nb.capture.onnx import graph_reader
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CaptureError, first_line

if TYPE_CHECKING:
    import onnx
    from onnxruntime import InferenceSession, RunOptions

_UNSEEN = "its nodes can't be seen"


class ExposedSession:
    """A session that returns the output of every node of another one.

    ``graph``: the graph that it runs. ``same``: its results can replace those of the other session.
    ``kinds``: onnxruntime's type of each tensor. ``hidden``: values that are not tensors.
    ``plain``: all values are tensors of types that NumPy has. ``problem``: why it runs the graph
    before optimisation, or None. ``coarse``, ``rounding``: see `Run`.
    """

    coarse, rounding = (), 0.0  # its tensors show what it rounds to

    def __init__(self, session: InferenceSession, times: bool = False) -> None:
        """``times``: have onnxruntime profile it.

        Raises:
            CaptureError: no such session can be made.
        """
        self._maker = SessionMaker(session)
        self._folder = tempfile.TemporaryDirectory(
            prefix="llmdebug-onnx-", ignore_cleanup_errors=True
        )
        self._times = os.path.join(self._folder.name, "times") if times else None
        self.problem: str | None = None
        self.same = True
        path = self._maker.path
        self._model_folder = None if path is None else os.path.dirname(os.path.abspath(path))
        try:
            self._expose(self._exported())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Delete its files."""
        self._folder.cleanup()

    def _exported(self) -> onnx.ModelProto:
        """Read the model that the session was made of, with its functions inlined."""
        import onnx

        path, data = self._maker.path, self._maker.data
        try:
            if path is None:
                model = onnx.load_model_from_string(data)
            else:
                model = onnx.load(path, load_external_data=False)
            if not model.graph.node:
                raise CaptureError("it has no nodes")
            if model.functions:
                from onnx import inliner

                model = inliner.inline_local_functions(model)
        except Exception as error:
            name = "the bytes it was made of" if path is None else os.path.basename(path)
            why = f"{name} can't be read as an ONNX model ({first_line(error)})"
            raise CaptureError(f"{why}, so its nodes can't be seen") from None
        return model

    def _expose(self, model: onnx.ModelProto) -> None:
        """Make the session of the optimised graph, or of the exported one if that fails."""
        self._constants: dict[str, tuple[onnx.TensorProto, str | None]] = {}
        self._add_constants(model, self._model_folder)
        if not self._maker.optimises:
            self._open_exported(model)
            return
        try:
            self._open_optimised(model)
        except Exception as error:  # for example, a provider whose graph can't be written
            self.problem = (
                f"the optimised graph can't be seen ({first_line(error)}); "
                "recorded is the graph before optimisation, run beside it"
            )
            self.same = False
            self._open_exported(model)

    def _open_exported(self, model: onnx.ModelProto) -> None:
        try:
            self.graph = graph_reader.read(model)
            self._open(model, self._model_folder)
        except Exception as error:
            raise CaptureError(f"{_UNSEEN}: {first_line(error)}") from None

    def _open_optimised(self, model: onnx.ModelProto) -> None:
        import onnx

        file = os.path.join(self._folder.name, "optimised.onnx")
        self._maker.write_optimised(file)
        optimised = onnx.load(file, load_external_data=False)
        self._add_constants(optimised, self._folder.name)
        self.graph = graph_reader.read(model, optimised)
        self._open(optimised, self._folder.name)

    def _add_constants(self, model: onnx.ModelProto, folder: str | None) -> None:
        """Add the initializers of a model. ``folder``: that of its external data."""
        self._constants |= {one.name: (one, folder) for one in model.graph.initializer}

    def _open(self, model: onnx.ModelProto, folder: str | None) -> None:
        """Make the session of a model, with every value as an output."""
        import onnx

        graph = model.graph
        outputs = {one.name for one in graph.output}
        for value in (value for node in graph.node for value in node.output):
            if value and value not in outputs:
                outputs.add(value)
                graph.output.append(onnx.ValueInfoProto(name=value))
        self._session = self._maker.make_unchanged(model.SerializeToString(), folder, self._times)
        kinds = {one.name: one.type for one in self._session.get_outputs()}
        self.kinds = {name: one for name, one in kinds.items() if onnxruntime_api.is_tensor(one)}
        self.hidden = [name for name in kinds if name not in self.kinds]
        self.plain = not self.hidden and all(map(onnxruntime_api.is_plain, self.kinds.values()))
        self.same = self.same and self.plain and not self.graph.random
        self._providers = onnxruntime_api.providers_of(self._session)

    def run(
        self, names: Sequence[str], feed: Mapping[str, object], options: RunOptions | None = None
    ) -> dict[str, object]:
        """Return the values of these names: as onnxruntime returns them, or as tensors."""
        values: Sequence[object]
        if self.plain and not any(hasattr(value, "_ortvalue") for value in feed.values()):
            values = self._session.run(list(names), feed, options)
        else:
            values = onnxruntime_api.values_of(self._session, names, feed)
        return dict(zip(names, values, strict=True))

    def end_profile(self) -> str | None:
        """End the profile and return its file, which `close` deletes; None if there is none."""
        return None if self._times is None else str(self._session.end_profiling())

    def gives(self, name: str) -> bool:
        """Tell whether it returns a value."""
        return name in self.kinds

    def facts(self, node: GraphNode) -> list[Scalar]:
        """Return the execution provider of a node, if it is known."""
        provider = self._providers.get(node.name)
        return [("provider", provider)] if provider else []

    # -- constants ------------------------------------------------------------------------------

    def has_constant(self, name: str) -> bool:
        """Tell whether a value is an initializer."""
        return name in self._constants

    def constant(self, name: str) -> torch.Tensor | None:
        """Return the values of an initializer; None if torch has no such dtype.

        Raises:
            ValueError, OSError: its external data is missing.
        """
        import onnx

        proto, folder = self._constants[name]
        array = onnx.numpy_helper.to_array(proto, folder or "")
        dtype = onnxruntime_api.ELEMENTS.get(proto.data_type)
        if dtype not in DTYPES:
            return None
        if array.dtype.name == dtype or dtype == "bool":
            tensor = tensor_of(array)
            return tensor if isinstance(tensor, torch.Tensor) else None
        data = bytearray(array.tobytes())
        return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(array.shape) if data else None

    def shape(self, weight: Weight) -> list[int]:
        """Return the shape of a weight in its module."""
        shape = list(self._constants[weight.name][0].dims)
        return shape[::-1] if weight.transposed else shape
