"""llama.cpp, as a recording knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmdebug_nb.capture.runtime import GraphSource, Runtime

if TYPE_CHECKING:
    from llmdebug_nb.capture.compat.llamacpp_api import Listener, Llama
    from llmdebug_nb.capture.listeners import Listeners
    from llmdebug_nb.capture.parts import Parts


def _source(parts: Parts, given: Sequence[Llama], only: bool) -> GraphSource:
    from llmdebug_nb.capture.engines.llamas import Llamas

    return Llamas(parts, given, only)


def _listeners() -> Listeners[Listener]:
    from llmdebug_nb.capture.compat import llamacpp_api

    return llamacpp_api.listeners


LLAMA_CPP = Runtime(
    package="llama_cpp",
    name="llama.cpp",
    model="a llama_cpp.Llama",
    classes=("llama_cpp.Llama",),
    libraries=("/libllama.",),
    requests=True,
    source=_source,
    listeners=_listeners,
)
