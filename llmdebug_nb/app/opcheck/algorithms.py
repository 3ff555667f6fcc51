"""Comparisons of the user's own, as msit's ``-alg`` takes them: a function in a Python file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from llmdebug_nb.core.errors import OptionError

Algorithm = Callable[[torch.Tensor, torch.Tensor], object]
_EXPECTED = "expected FILE.py:FUNCTION, a function (golden, mine) -> (number, message)"


def name_of(text: str) -> str:
    """Return the name of the function, which is that of its column."""
    return text.rpartition(":")[2]


@functools.cache
def load(text: str) -> Algorithm:
    """Run the file and return its function. Raises OptionError."""
    place, _, name = text.rpartition(":")
    file = Path(place).expanduser()
    if not place or not name.isidentifier() or not file.is_file():
        raise OptionError(f"alg: {text!r} names no function in a file; {_EXPECTED}")
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"alg: {place!r} is no Python file; {_EXPECTED}")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: it is the user's program
        raise OptionError(f"alg: {place} fails: {type(error).__name__}: {error}") from None
    found: Algorithm | None = getattr(module, name, None)
    if found is None or not callable(found):
        raise OptionError(f"alg: {place} has no function {name}; {_EXPECTED}")
    return found


def measured(text: str, golden: torch.Tensor, mine: torch.Tensor) -> tuple[str, float, str]:
    """Return the name of a function, its number and its message; NaN and why if it fails."""
    name = name_of(text)
    try:
        made = load(text)(golden.clone(), mine.clone())
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError("it returns no (number, message)")
        return name, float(made[0]), str(made[1] or "")
    except OptionError:
        raise
    except Exception as error:  # of any kind: it is the user's program
        return name, math.nan, f"{name} fails: {type(error).__name__}: {error}"
