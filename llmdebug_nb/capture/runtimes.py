"""The runtimes whose models are recorded: `RUNTIMES` is the one list of them.

A new one is a line of it, and a folder that follows its models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.capture.engines.llamacpp_runtime import LLAMA_CPP
from llmdebug_nb.capture.engines.vllm_runtime import VLLM
from llmdebug_nb.capture.onnx.runtime import ONNX_RUNTIME
from llmdebug_nb.capture.openvino.runtime import OPENVINO
from llmdebug_nb.capture.runtime import Engine, Runtime

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.capture.compat.llamacpp_api import Llama
    from llmdebug_nb.capture.engines.vllm_runtime import VllmEngine
    from llmdebug_nb.capture.onnx.runtime import OnnxSession
    from llmdebug_nb.capture.openvino.runtime import OpenVinoModel

    RuntimeModel: TypeAlias = OnnxSession | OpenVinoModel | VllmEngine | Llama

RUNTIMES: tuple[Runtime, ...] = (
    ONNX_RUNTIME,
    OPENVINO,
    VLLM,
    LLAMA_CPP,
)
# a program that uses one of these may run models: engines run modules of PyTorch
PACKAGES = ("torch", *(each.package for each in RUNTIMES if each.engine is None))


def either(words: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


# -- engines ---------------------------------------------------------------------------------------


def engines_in(models: Iterable[object]) -> list[Engine]:
    """Return what follows the engines among some models. Raises CaptureError."""
    return [
        runtime.engine().of(model)
        for model in models
        for runtime in RUNTIMES
        if runtime.engine is not None and runtime.is_model(model)
    ]


def _loaded() -> list[type[Engine]]:
    """Return what follows engines, of each runtime that the program has imported."""
    found = (each.engine for each in RUNTIMES if each.package in sys.modules)
    return [engine() for engine in found if engine is not None]


def engine_calling(module: nn.Module) -> Engine | None:
    """Return what follows the engine that calls a module now; None if none does."""
    return next(filter(None, (engine.calling(module) for engine in _loaded())), None)


def engine_compiles(module: nn.Module) -> bool:
    """Tell whether a part of a module runs as code that an engine compiled."""
    return any(engine.compiles(module) for engine in _loaded())
