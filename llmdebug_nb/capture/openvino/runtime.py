"""OpenVINO, as a recording knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from llmdebug_nb.capture.runtime import GraphSource, Runtime

if TYPE_CHECKING:
    from openvino import Model

    from llmdebug_nb.capture.compat.openvino_api import Listener, Target
    from llmdebug_nb.capture.listeners import Listeners
    from llmdebug_nb.capture.parts import Parts


class OpenVinoModel(Protocol):
    """An ``openvino.CompiledModel``, an ``InferRequest`` of one, or the ``Model`` of one."""

    @property
    def inputs(self) -> Sequence[object]: ...


def _source(parts: Parts, given: Sequence[Target | Model], only: bool) -> GraphSource:
    from llmdebug_nb.capture.openvino.compiled_models import CompiledModels

    return CompiledModels(parts, given, only)


def _listeners() -> Listeners[Listener]:
    from llmdebug_nb.capture.compat import openvino_api

    return openvino_api.listeners


OPENVINO = Runtime(
    package="openvino",
    name="OpenVINO",
    model="an openvino.CompiledModel",
    classes=("openvino.CompiledModel", "openvino.InferRequest", "openvino.Model"),
    libraries=("/libopenvino.",),
    extra=True,
    source=_source,
    listeners=_listeners,
)
