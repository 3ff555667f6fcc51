"""A session of ONNX Runtime that gives what every node of another one gives.

A session gives only what its graph calls outputs. So another one is made of the same model, with the same providers and options, in which every value is
an output: the graph is optimised as the program's session optimises it, written down, and run as it is. It computes the same bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llmdebug_nb.capture.compat import onnxruntime_api
from llmdebug_nb.capture.compat.onnxruntime_api import Remake, tensor_of
from llmdebug_nb.capture.onnx import graph
from llmdebug_nb.capture.onnx.graph import Weight
from llmdebug_nb.capture.onnx.proto import base_of
from llmdebug_nb.core.errors import CaptureError


class ExposedSession:
    """A session that gives what every node of another one gives. ``graph``: what it runs. ``same``: it computes what the other one does."""

    def __init__(self, session: Any, times: bool = False) -> None:
        """``times``: have onnxruntime profile it. Raises CaptureError where nothing of the session can be made again."""
        import onnx

        self._remake = Remake(session)
        self._folder = tempfile.TemporaryDirectory(
            prefix="llmdebug-onnx-", ignore_cleanup_errors=True
        )
        self.problem: str | None = None
        self._times = os.path.join(self._folder.name, "times") if times else None
        self.same = True
        try:
            model = self._exported(onnx)
            self._expose(onnx, model)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._folder.cleanup()

    def _exported(self, onnx: Any) -> Any:
        path, data = self._remake.path, self._remake.data
        try:
            model = (
                onnx.load_model_from_string(data)
                if path is None
                else onnx.load(path, load_external_data=False)
            )
            if not model.graph.node:
                raise CaptureError("there is no node in it")
            if model.functions:
                from onnx import inliner

                model = inliner.inline_local_functions(model)
        except Exception as error:
            name = "the bytes it was made of" if path is None else os.path.basename(path)
            raise CaptureError(
                f"{name} can't be read as an ONNX model ({first_line(error)}), so its nodes can't be seen"
            ) from None
        return model

    def _expose(self, onnx: Any, model: Any) -> None:
        """Make the session, of the optimised graph where that can be written down, else of the exported one."""
        home = base_of(self._remake.path)
        self._held = {one.name: (one, home) for one in model.graph.initializer}
        optimised = None
        try:
            if self._remake.optimises:
                file = os.path.join(self._folder.name, "optimised.onnx")
                self._remake.optimised(file)
                optimised = onnx.load(file, load_external_data=False)
                self._held |= {
                    one.name: (one, self._folder.name) for one in optimised.graph.initializer
                }
            self.graph = graph.read(model, optimised)
            self._open(
                onnx, optimised or model, self._folder.name if optimised is not None else home
            )
        except Exception as error:  # a provider whose graph can't be written down, say
            if optimised is None and not self._remake.optimises:
                raise CaptureError(f"its nodes can't be seen: {first_line(error)}") from None
            self.problem = f"the optimised graph can't be seen ({first_line(error)}); recorded is the graph before optimisation, run beside it"
            self.same = False
            self.graph = graph.read(model)
            try:
                self._open(onnx, model, home)
            except Exception as again:
                raise CaptureError(f"its nodes can't be seen: {first_line(again)}") from None

    def _open(self, onnx: Any, model: Any, folder: str | None) -> None:
        graph = model.graph
        known = {one.name for one in graph.output}
        for node in graph.node:
            for value in node.output:
                if value and value not in known:
                    known.add(value)
                    graph.output.append(onnx.ValueInfoProto(name=value))
        self._session = self._remake.as_it_is(model.SerializeToString(), folder, self._times)
        self.kinds = {
            one.name: one.type
            for one in self._session.get_outputs()
            if onnxruntime_api.is_tensor(one.type)
        }
        self.hidden = [
            one.name
            for one in self._session.get_outputs()
            if not onnxruntime_api.is_tensor(one.type)
        ]
        self.plain = (
            all(onnxruntime_api.is_plain(kind) for kind in self.kinds.values()) and not self.hidden
        )
        self.same = self.same and self.plain and not self.graph.random
        self.providers = onnxruntime_api.providers_of(self._session)

    def run(
        self, names: Sequence[str], feed: Mapping[str, Any], options: Any = None
    ) -> dict[str, Any]:
        """Return the values of these names, as onnxruntime gives them (``plain``), or as tensors."""
        if self.plain and not any(hasattr(value, "_ortvalue") for value in feed.values()):
            values = self._session.run(list(names), feed, options)
        else:
            values = onnxruntime_api.values_of(self._session, names, feed)
        return dict(zip(names, values, strict=True))

    def profile(self) -> str | None:
        """End the profile and return its file, which goes with `close`; None where there is none."""
        return None if self._times is None else str(self._session.end_profiling())

    def constant(self, name: str) -> torch.Tensor | None:
        """Return the values of an initializer; None where torch has no such dtype. Raises ValueError, OSError: its external data is gone."""
        import onnx

        found, folder = self._held[name]
        array = onnx.numpy_helper.to_array(found, folder or "")
        kind = onnxruntime_api.ELEMENTS.get(found.data_type)
        if kind is None or not hasattr(torch, kind):
            return None
        if array.dtype.name == kind or kind == "bool":
            return tensor_of(array) if isinstance(tensor_of(array), torch.Tensor) else None
        data = bytearray(array.tobytes())
        return (
            torch.frombuffer(data, dtype=getattr(torch, kind)).reshape(array.shape)
            if data
            else None
        )

    def has_constant(self, name: str) -> bool:
        return name in self._held

    def shape(self, weight: Weight) -> list[int]:
        """Return the sizes of a weight, as the module has it."""
        sizes = list(self._held[weight.name][0].dims)
        return sizes[::-1] if weight.turned else sizes


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return str(error).partition("\n")[0][:300] or type(error).__name__
