"""OpenVINO, as a recording knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmdebug_nb.capture.runtime import GraphSource, Runtime


class OpenVinoModel(Protocol):
    """An ``openvino.CompiledModel``, an ``InferRequest`` of one, or the ``Model`` of one."""

    @property
    def inputs(self) -> Sequence[object]: ...


def _source() -> type[GraphSource]:
    from llmdebug_nb.capture.openvino.compiled_models import CompiledModels

    return CompiledModels


OPENVINO = Runtime(
    package="openvino",
    name="OpenVINO",
    model="an openvino.CompiledModel",
    classes=("openvino.CompiledModel", "openvino.InferRequest", "openvino.Model"),
    libraries=("/libopenvino.",),
    extra=True,
    source=_source,
)
