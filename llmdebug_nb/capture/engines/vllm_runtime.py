"""vLLM, as a recording knows it."""

from __future__ import annotations

from typing import Protocol

from llmdebug_nb.capture.runtime import Engine, Runtime


class VllmEngine(Protocol):
    """A ``vllm.LLM``."""

    @property
    def llm_engine(self) -> object: ...


def _engine() -> type[Engine]:
    from llmdebug_nb.capture.engines.vllm_steps import VllmSteps

    return VllmSteps


VLLM = Runtime(
    package="vllm",
    name="vLLM",
    model="a vllm.LLM",
    classes=("vllm.entrypoints.llm.LLM",),
    requests=True,
    engine=_engine,
)
