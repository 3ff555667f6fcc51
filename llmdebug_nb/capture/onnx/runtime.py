"""ONNX Runtime, as a recording knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from llmdebug_nb.capture.runtime import GraphSource, Runtime

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from llmdebug_nb.capture.compat.onnxruntime_api import Listener
    from llmdebug_nb.capture.listeners import Listeners
    from llmdebug_nb.capture.parts import Parts


class OnnxSession(Protocol):
    """An ``onnxruntime.InferenceSession``."""

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, object], /
    ) -> Sequence[object]: ...
    def get_inputs(self) -> Sequence[object]: ...


def _source(parts: Parts, given: Sequence[InferenceSession], only: bool) -> GraphSource:
    from llmdebug_nb.capture.onnx.sessions import Sessions

    return Sessions(parts, given, only)


def _listeners() -> Listeners[Listener]:
    from llmdebug_nb.capture.compat import onnxruntime_api

    return onnxruntime_api.listeners


ONNX_RUNTIME = Runtime(
    package="onnxruntime",
    name="ONNX Runtime",
    model="an onnxruntime.InferenceSession",
    classes=("onnxruntime.InferenceSession",),
    libraries=("onnxruntime_pybind11_state",),
    extra=True,
    source=_source,
    listeners=_listeners,
)
