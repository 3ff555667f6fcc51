"""The runtimes whose models are recorded: `RUNTIMES` is the one list of them.

A new one is a line of it, and a folder that follows its models.
"""

from __future__ import annotations

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


def of_package(package: str) -> Runtime:
    """Return the runtime of a package."""
    return next(each for each in RUNTIMES if each.package == package)


def runtime_of(model: object) -> Runtime | None:
    """Return the runtime that a model is of; None for a module of PyTorch, and all else."""
    return next((each for each in RUNTIMES if each.is_model(model)), None)


def takes_requests(models: Iterable[object]) -> bool:
    """Tell whether one of some models computes several requests at once."""
    found = map(runtime_of, models)
    return any(each is not None and each.requests for each in found)


def either(words: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


# -- engines ---------------------------------------------------------------------------------------


def _kinds() -> Iterable[type[Engine]]:
    """Return what follows the engines of each runtime that the program has imported."""
    return [each.engine() for each in RUNTIMES if each.engine is not None and each.imported]


def engines_in(models: Iterable[object]) -> list[Engine]:
    """Return what follows the engines among some models. Raises CaptureError."""
    runtimes = ((runtime_of(model), model) for model in models)
    return [
        runtime.engine().of(model)
        for runtime, model in runtimes
        if runtime is not None and runtime.engine is not None
    ]


def engine_calling(module: nn.Module) -> Engine | None:
    """Return what follows the engine that calls a module now; None if none does."""
    return next(filter(None, (kind.calling(module) for kind in _kinds())), None)


def engine_compiles(module: nn.Module) -> bool:
    """Tell whether a part of a module runs as code that an engine compiled."""
    return any(kind.compiles(module) for kind in _kinds())
