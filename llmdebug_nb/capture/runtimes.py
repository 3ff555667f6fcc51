"""The graphs of other runtimes that one recording follows, beside modules of PyTorch.

What follows a runtime is loaded when the program has imported that runtime: most never do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.session_parts import Parts


class GraphSource(Protocol):
    """A source of calls of graphs that are no modules of PyTorch.

    ``labels``: of its roots. ``keeps_any``: the filters ask for a module. ``operators``: the names
    of its nodes. ``coarse``, ``rounding``: see `Run`.
    """

    @property
    def labels(self) -> list[str]: ...
    @property
    def keeps_any(self) -> bool: ...
    @property
    def operators(self) -> list[str]: ...
    @property
    def coarse(self) -> list[str]: ...
    @property
    def rounding(self) -> float: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


def _sessions(parts: Parts, given: Sequence[object], only: bool) -> GraphSource:
    from llmdebug_nb.capture.compat.onnxruntime_api import is_session
    from llmdebug_nb.capture.graphs.graph_runs import GraphRuns
    from llmdebug_nb.capture.onnx.sessions import Sessions

    return Sessions(GraphRuns(parts), [model for model in given if is_session(model)], only)


def _compiled_models(parts: Parts, given: Sequence[object], only: bool) -> GraphSource:
    from llmdebug_nb.capture.compat.openvino_api import is_compiled, is_model
    from llmdebug_nb.capture.graphs.graph_runs import GraphRuns
    from llmdebug_nb.capture.openvino.compiled_models import CompiledModels

    compiled = [model for model in given if is_compiled(model)]
    models = [model for model in given if is_model(model)]
    return CompiledModels(GraphRuns(parts), compiled, models, only)


def _llamas(parts: Parts, given: Sequence[object], only: bool) -> GraphSource:
    from llmdebug_nb.capture.compat.llamacpp_api import is_llama
    from llmdebug_nb.capture.engines.llamas import Llamas

    return Llamas(parts, [model for model in given if is_llama(model)], only)


_MAKERS: dict[str, Callable[[Parts, Sequence[object], bool], GraphSource]] = {
    "onnxruntime": _sessions,
    "openvino": _compiled_models,
    "llama_cpp": _llamas,
}


def has_llama(models: Iterable[object]) -> bool:
    """Tell whether one of some models is a ``Llama`` of llama.cpp."""
    from llmdebug_nb.capture.compat.llamacpp_api import is_llama

    return any(is_llama(model) for model in models)


class Runtimes:
    """Follows sessions of ONNX Runtime, compiled models of OpenVINO, and Llamas of llama.cpp.

    ``sources``: what follows them, by the package of each runtime that the program has imported.
    """

    def __init__(self, parts: Parts, given: Sequence[object], only: bool) -> None:
        """``given``: models of theirs. ``only``: no others are recorded.

        Raises CaptureError: one can't be recorded.
        """
        self._parts, self._only = parts, only
        self.sources: dict[str, GraphSource] = {}
        self._undo = ExitStack()
        try:
            for package in _MAKERS if given else ():
                if package in sys.modules:
                    self._undo.callback(self._made(package, given).stop)
        except BaseException:
            self.stop()
            raise

    def _made(self, package: str, given: Sequence[object] = ()) -> GraphSource:
        source = self.sources[package] = _MAKERS[package](self._parts, given, self._only)
        return source

    def start(self) -> None:
        """Follow the given ones, and listen to others. Raises CaptureError."""
        for source in self.sources.values():
            source.start()
        for package in () if self._only else _MAKERS:
            follow = functools.partial(self._follow, package)
            self._undo.callback(pytorch.with_module(package, follow))

    def _follow(self, package: str, _: object) -> Callable[[], None]:
        source = self._made(package)
        source.start()
        return source.stop

    def stop(self) -> None:
        """Stop following, and listening."""
        self._undo.close()
