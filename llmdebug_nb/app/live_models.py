"""The models that the user passes: checking them, and finding their modules again by path."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.paths import within

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.store.run import Run


class OnnxSession(Protocol):
    """An ``onnxruntime.InferenceSession``."""

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, object], /
    ) -> Sequence[object]: ...
    def get_inputs(self) -> Sequence[object]: ...


class OpenVinoModel(Protocol):
    """An ``openvino.CompiledModel``, an ``InferRequest`` of one, or the ``Model`` of one."""

    @property
    def inputs(self) -> Sequence[object]: ...


class VllmEngine(Protocol):
    """A ``vllm.LLM``."""

    @property
    def llm_engine(self) -> object: ...


class Llama(Protocol):
    """A ``llama_cpp.Llama``."""

    @property
    def n_tokens(self) -> int: ...
    def eval(self, tokens: list[int]) -> None: ...


Model: TypeAlias = "nn.Module | OnnxSession | OpenVinoModel | VllmEngine | Llama"
Models: TypeAlias = "Model | Sequence[Model]"

_recorded_here: set[Path] = set()  # folders of runs
# folder of a run -> path and module of each root that was recorded there
_recorded_roots: dict[Path, list[tuple[str, weakref.ref[nn.Module]]]] = {}


def modules_in(models: object) -> tuple[nn.Module, ...]:
    """Return the modules in ``models``: None, one module, or several.

    Raises:
        OptionError: a value is not a module, or the same module comes twice.
    """
    return _checked(models, lambda model: False, "a torch.nn.Module")


def compilable_in(models: object) -> tuple[nn.Module | VllmEngine, ...]:
    """Return modules and engines in ``models``, whose compiled code can be recorded.

    Raises OptionError.
    """
    from llmdebug_nb.capture.compat.vllm_api import is_engine

    return _checked(models, is_engine, "a torch.nn.Module or a vllm.LLM")


def models_in(models: object) -> tuple[Model, ...]:
    """Return modules, models of runtimes and engines in ``models``. Raises OptionError."""
    expected = (
        "a torch.nn.Module, an onnxruntime.InferenceSession, an openvino.CompiledModel,"
        " a vllm.LLM or a llama_cpp.Llama"
    )
    return _checked(models, _is_of_runtime, expected)


def _is_of_runtime(model: object) -> bool:
    from llmdebug_nb.capture.compat.llamacpp_api import is_llama
    from llmdebug_nb.capture.compat.onnxruntime_api import is_session
    from llmdebug_nb.capture.compat.openvino_api import is_compiled, is_model
    from llmdebug_nb.capture.compat.vllm_api import is_engine

    return any(kind(model) for kind in (is_session, is_compiled, is_model, is_engine, is_llama))


def _checked(
    models: object, is_session: Callable[[object], bool], expected: str
) -> tuple[nn.Module, ...]:
    if models is None:
        return ()
    import torch

    each = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    for number, model in enumerate(each):
        kind = type(model).__name__
        if not isinstance(model, torch.nn.Module) and not is_session(model):
            raise OptionError(
                f"model: expected {expected}, got {kind}; leave it out to record whatever runs"
            )
        if any(model is other for other in each[:number]):
            raise OptionError(f"model: the same {kind} is given twice")
    return each


def remember_run(folder: Path) -> None:
    """Remember that this process records a run."""
    _recorded_here.add(folder)


def is_recorded_here(run: Run) -> bool:
    """Tell whether this process recorded a run, or holds it in memory."""
    return run.path is None or run.path in _recorded_here


def remember_roots(folder: Path, roots: Iterable[tuple[str, nn.Module]]) -> None:
    """Remember which modules were recorded into a run, for as long as they exist."""
    _recorded_roots[folder] = [(path, weakref.ref(root)) for path, root in roots]


def module_finder(run: Run, model: object = None) -> Callable[[str], nn.Module | None]:
    """Return a function from a module path of ``run`` to the live module, or None.

    It looks in ``model``; without one, in the modules that this process recorded into the run,
    as long as they exist.

    Raises:
        OptionError: ``model`` is not a module.
    """
    given = modules_in(model)
    remembered = [] if run.path is None or given else _recorded_roots.get(run.path, [])

    def find(path: str) -> nn.Module | None:
        roots: list[tuple[str, nn.Module | None]] = [("", root) for root in given]
        roots += [(at, root()) for at, root in remembered]
        for at, root in roots:
            if root is None or (at and not within(path, at)):
                continue
            with contextlib.suppress(AttributeError):
                return root.get_submodule(path.removeprefix(at).removeprefix(".") if at else path)
        return None

    return find
