"""Making a program repeat itself: seeds, and the switches that make its operators deterministic."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from llmdebug_nb.core import option_parsing

# what Ascend's libraries read; they take no notice where they are not there
_ASCEND = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
_CUBLAS = (
    ":4096:8",
    ":16:8",
)  # the two workspaces that repeat; without one of them torch refuses matrix products
_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


class Switched(list[str]):
    """What was switched, in words. `restore`, or the end of a ``with`` block, takes all but the seeds back."""

    def __init__(self) -> None:
        super().__init__()
        self._undo = ExitStack()

    def add(self, words: str, undo: Callable[..., Any] | None = None, *args: Any) -> None:
        """Say what was done, and how it is taken back."""
        self.append(words)
        if undo is not None:
            self._undo.callback(undo, *args)

    def restore(self) -> None:
        """Set every switch to what it was before. A second time does nothing."""
        self._undo.close()

    def __enter__(self) -> Switched:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def seed_only(number: int) -> Switched:
    """Seed Python, NumPy and torch (every device), and switch nothing. Raises OptionError."""
    import numpy
    import torch

    done, number = Switched(), option_parsing.seed(number)
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    done.add(f"random, numpy and torch seeded with {number}")
    return done


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> Switched:
    """Seed everything; ``mode``: also make operators deterministic; ``rm_dropout``: dropout drops nothing.

    With ``mode``, torch raises a RuntimeError for an operator that has no deterministic form. Without it,
    whatever the program itself has switched stays as it is. Dropout is that of `torch.nn.functional`, which the
    modules call; attention with a ``dropout_p`` of its own is left alone.

    Returns what was switched; use it as a context, or call its ``restore()``, to take the switches back.

    Raises:
        OptionError: the seed is no whole number from 0 to 2**32 - 1, or a flag is neither True nor False.
    """
    import torch

    option_parsing.flag(mode, "mode")
    option_parsing.flag(rm_dropout, "rm_dropout")
    done = seed_only(seed)
    _set(done, "PYTHONHASHSEED", str(seed), " (for processes started from here)")
    if torch.cuda.is_available():
        _make_cuda_repeat(done)
    if mode:
        for name, value in _ASCEND.items():
            _set(done, name, value)
        _make_operators_deterministic(done)
    if rm_dropout:
        _remove_dropout(done)
    return done


def _set(done: Switched, name: str, value: str, note: str = "") -> None:
    """Set an environment variable."""
    before = os.environ.get(name)
    os.environ[name] = value
    if before is None:
        done.add(f"{name}={value}{note}", os.environ.pop, name, None)
    else:
        done.add(f"{name}={value}{note}", os.environ.__setitem__, name, before)


def _make_cuda_repeat(done: Switched) -> None:
    import torch

    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS:
        _set(done, "CUBLAS_WORKSPACE_CONFIG", _CUBLAS[0])
    cudnn = torch.backends.cudnn
    for name, value in (("deterministic", True), ("benchmark", False)):
        before = getattr(cudnn, name)
        setattr(cudnn, name, value)
        done.add(
            f"torch.backends.cudnn.{name} {'on' if value else 'off'}", setattr, cudnn, name, before
        )


def _make_operators_deterministic(done: Switched) -> None:
    import torch

    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    undo = functools.partial(torch.use_deterministic_algorithms, was_on, warn_only=only_warned)
    done.add("torch.use_deterministic_algorithms on", undo)


def _remove_dropout(done: Switched) -> None:
    from torch.nn import functional

    for name in _DROPOUTS:
        original = getattr(functional, name)
        setattr(functional, name, _without_dropout(original))
        done.add(f"torch.nn.functional.{name} drops nothing", setattr, functional, name, original)


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, *rest: Any, **more: Any) -> Any:
        return original(
            input, 0.0 if 0 <= p <= 1 else p, *rest, **more
        )  # an impossible p stays the error that it is

    return dropout
