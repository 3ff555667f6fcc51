"""The user's metrics: callables of two tensors that return a number.

A metric that fails does not end the comparison; the report mentions it once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from llmdebug_nb.comparison.metrics import FIELDS, LOGITS, Metrics
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.user_code import UserCode

if TYPE_CHECKING:
    import torch

Metric = Callable[["torch.Tensor", "torch.Tensor"], object]


class Custom:
    """The user's metrics, by name."""

    def __init__(self, metrics: object = None) -> None:
        """Read a callable, ``file.py:function``, a list of these, or a dict of name -> callable.

        Without a dict, the name of a metric is its ``__name__``.

        Raises:
            OptionError: no callable, a name that is taken, or a file without such a function.
        """
        self._functions: dict[str, Metric] = {}
        self._failed: dict[str, tuple[int, str]] = {}  # name -> count, first error
        for name, function in _named(metrics):
            if name in self._functions or name in FIELDS or name in LOGITS:
                other = f"metrics={{'my_{name}': ...}}"
                raise OptionError(f"metrics: the name {name!r} is taken; use another: {other}")
            self._functions[name] = function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def measure(self, golden: torch.Tensor, mine: torch.Tensor, where: object) -> Metrics:
        """Return each metric as a float; None if it raised, or returned no number.

        Each metric gets its own copy of the tensors. ``where``: the site, for the error message.
        """
        return {
            name: self._value(name, golden.clone(), mine.clone(), where) for name in self._functions
        }

    def notes(self) -> list[str]:
        """Return a line for each metric that failed anywhere."""
        return [
            f"metric {name} failed on {count:,} pair{'s' * (count != 1)}, first at {first}"
            for name, (count, first) in self._failed.items()
        ]

    def _value(
        self, name: str, golden: torch.Tensor, mine: torch.Tensor, where: object
    ) -> float | None:
        try:
            value = self._functions[name](golden, mine)
            value = value[0] if isinstance(value, tuple) else value  # msit's: (value, message)
            return float(cast(float, value))  # anything else raises
        except Exception as error:
            count, first = self._failed.get(name, (0, ""))
            line = str(error).partition("\n")[0]
            text = f"{where}: {type(error).__name__}{': ' if line else ''}{line}"
            self._failed[name] = count + 1, first or text
            return None


def _named(metrics: object) -> Iterator[tuple[str, Metric]]:
    """Yield the name and the function of each metric. Raises OptionError."""
    if metrics is None:
        return
    if isinstance(metrics, Mapping):
        pairs: Iterable[tuple[object, object]] = metrics.items()
    else:
        several = metrics if isinstance(metrics, (list, tuple)) else [metrics]
        pairs = [(None, item) for item in several]
    code = UserCode()
    for name, item in pairs:
        function = item
        if isinstance(item, (str, os.PathLike)):
            function = code.get(item, "metrics", "mine.py:psnr")
        if not callable(function) or not isinstance(name, (str, type(None))):
            wanted = "callable (golden, mine) -> float or 'file.py:function'"
            raise OptionError(f"metrics: {item!r} is not a {wanted}")
        yield str(name or getattr(function, "__name__", type(function).__name__)), function
