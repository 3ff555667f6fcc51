"""llama.cpp, as a recording knows it."""

from __future__ import annotations

from llmdebug_nb.capture.runtime import GraphSource, Runtime


def _source() -> type[GraphSource]:
    from llmdebug_nb.capture.engines.llamas import Llamas

    return Llamas


LLAMA_CPP = Runtime(
    package="llama_cpp",
    name="llama.cpp",
    model="a llama_cpp.Llama",
    classes=("llama_cpp.Llama",),
    libraries=("/libllama.",),
    requests=True,
    source=_source,
)
