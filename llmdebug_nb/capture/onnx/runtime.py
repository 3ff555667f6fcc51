"""ONNX Runtime, as a recording knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llmdebug_nb.capture.runtime import GraphSource, Runtime


class OnnxSession(Protocol):
    """An ``onnxruntime.InferenceSession``."""

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, object], /
    ) -> Sequence[object]: ...
    def get_inputs(self) -> Sequence[object]: ...


def _source() -> type[GraphSource]:
    from llmdebug_nb.capture.onnx.sessions import Sessions

    return Sessions


ONNX_RUNTIME = Runtime(
    package="onnxruntime",
    name="ONNX Runtime",
    model="an onnxruntime.InferenceSession",
    classes=("onnxruntime.InferenceSession",),
    libraries=("onnxruntime_pybind11_state",),
    extra=True,
    source=_source,
)
