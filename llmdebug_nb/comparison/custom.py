"""Metrics of the user: any callable of two tensors that returns a number. An error of one is said once and ends nothing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.comparison.metrics import FIELDS, LOGITS, Metrics
from llmdebug_nb.core.errors import OptionError

if TYPE_CHECKING:
    import torch

Metric = Callable[["torch.Tensor", "torch.Tensor"], Any]


class Custom:
    """The user's metrics, by name."""

    def __init__(self, given: Any = None) -> None:
        """Read a callable, ``file.py:function``, several of these (named by their ``__name__``), or a dict of name -> callable.

        Raises:
            OptionError: what is no callable, a name that is taken, or a file that has no such function.
        """
        self._functions: dict[str, Metric] = {}
        self._failed: dict[str, tuple[int, str]] = {}  # name -> how often, and how first
        for name, function in _named(given):
            if name in self._functions or name in FIELDS or name in LOGITS:
                raise OptionError(
                    f"metrics: the name {name!r} is taken; give it another one: metrics={{'my_{name}': ...}}"
                )
            self._functions[name] = function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def measure(self, golden: torch.Tensor, mine: torch.Tensor, where: object) -> Metrics:
        """Return each metric as a float; None where it raised, or returned no number. Each gets tensors of its own."""
        return {
            name: self._value(name, golden.clone(), mine.clone(), where) for name in self._functions
        }

    def notes(self) -> list[str]:
        """Return a line for each metric that failed anywhere."""
        return [
            f"metric {name} failed on {count:,} {'pair' if count == 1 else 'pairs'}, first at {first}"
            for name, (count, first) in self._failed.items()
        ]

    def _value(
        self, name: str, golden: torch.Tensor, mine: torch.Tensor, where: object
    ) -> float | None:
        try:
            value = self._functions[name](golden, mine)
            return float(
                value[0] if isinstance(value, tuple) else value
            )  # msit's return (value, message)
        except Exception as error:
            count, first = self._failed.get(name, (0, ""))
            says = str(error).partition("\n")[0]
            self._failed[name] = (
                count + 1,
                first or f"{where}: {type(error).__name__}{': ' if says else ''}{says}",
            )
            return None


def _named(given: Any) -> Iterator[tuple[str, Metric]]:
    if given is None:
        return
    if isinstance(given, Mapping):
        pairs: Iterable[tuple[Any, Any]] = given.items()
    else:
        several = given if isinstance(given, (list, tuple)) else [given]
        pairs = [(None, item) for item in several]
    for name, item in pairs:
        function = _from_file(item) if isinstance(item, (str, os.PathLike)) else item
        if not callable(function) or not isinstance(name, (str, type(None))):
            raise OptionError(
                f"metrics: {item!r} is no callable (golden, mine) -> float, and no 'file.py:function'"
            )
        yield str(name or getattr(function, "__name__", type(function).__name__)), function


def _from_file(spec: str | os.PathLike[str]) -> Any:
    """Run the user's file and return the function that is named after the colon."""
    place, _, name = os.fspath(spec).rpartition(":")
    path = Path(place)
    if not name or not path.is_file():
        raise OptionError(
            f"metrics {os.fspath(spec)!r}: expected a file and a function in it, such as mine.py:psnr"
        )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise OptionError(f"metrics {os.fspath(spec)!r}: {path.name} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(
            f"metrics: {path} can't be run: {type(error).__name__}: {error}"
        ) from None
    if not hasattr(module, name):
        raise OptionError(f"metrics: {path} has no function {name!r}")
    return getattr(module, name)
