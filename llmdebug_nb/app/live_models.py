"""The models that the user passes: checking them, and finding their modules again by path."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.capture.runtimes import RUNTIMES, either
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.paths import module_name, within

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.capture.runtime import Runtime
    from llmdebug_nb.capture.runtimes import RuntimeModel
    from llmdebug_nb.store.run import Run


Model: TypeAlias = "nn.Module | RuntimeModel"
Models: TypeAlias = "Model | Sequence[Model]"

_recorded_here: set[Path] = set()  # folders of runs
# folder of a run -> path and module of each root that was recorded there
_recorded_roots: dict[Path, list[tuple[str, weakref.ref[nn.Module]]]] = {}


def modules_in(models: object) -> tuple[nn.Module, ...]:
    """Return the modules in ``models``: None, one module, or several.

    Raises:
        OptionError: a value is not a module, or the same module comes twice.
    """
    return _checked(models, ())


def compilable_in(models: object) -> tuple[Model, ...]:
    """Return modules and engines in ``models``, whose compiled code can be recorded.

    Raises OptionError.
    """
    return _checked(models, [each for each in RUNTIMES if each.engine is not None])


def models_in(models: object) -> tuple[Model, ...]:
    """Return modules and models of runtimes in ``models``. Raises OptionError."""
    return _checked(models, RUNTIMES)


def _checked(models: object, runtimes: Sequence[Runtime]) -> tuple[nn.Module, ...]:
    if models is None:
        return ()
    import torch

    each = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    for number, model in enumerate(each):
        kind = type(model).__name__
        known = any(runtime.is_model(model) for runtime in runtimes)
        if not known and not isinstance(model, torch.nn.Module):
            expected = either(["a torch.nn.Module", *(runtime.model for runtime in runtimes)])
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
                inner = path.removeprefix(at).removeprefix(".") if at else path
                return root.get_submodule(module_name(inner))
        return None

    return find
