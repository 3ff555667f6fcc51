"""Making a program repeatable: seeds, and switches that make operators deterministic."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from llmdebug_nb.core import option_parsing

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

# environment variables of Ascend's libraries; they have no effect elsewhere
_ASCEND = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
# the deterministic workspaces; without one of them deterministic torch refuses matrix products
_CUBLAS = (":4096:8", ":16:8")
_DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


class Switched(list[str]):
    """A list of the changes, in words.

    `restore`, or the end of a ``with`` block, undoes everything except the seeds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._undo = ExitStack()

    def add(
        self, words: str, undo: Callable[P, object] | None = None, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Add a change in words, and the function that undoes it."""
        self.append(words)
        if undo is not None:
            self._undo.callback(undo, *args, **kwargs)

    def restore(self) -> None:
        """Set every switch back. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> Switched:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def seed_only(number: int) -> Switched:
    """Seed Python, NumPy and torch (all devices), and switch nothing. Raises OptionError."""
    import numpy
    import torch

    switched, number = Switched(), option_parsing.seed(number)
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    switched.add(f"random, numpy and torch seeded with {number}")
    return switched


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> Switched:
    """Seed everything; optionally make operators deterministic and disable dropout.

    Without ``mode``, switches that the program set itself stay as they are.

    Args:
        seed: a whole number from 0 to 2**32 - 1.
        mode: also make operators deterministic. torch then raises a RuntimeError for an operator
            that has no deterministic form.
        rm_dropout: the dropout functions of `torch.nn.functional`, which modules call, drop
            nothing. Attention with its own ``dropout_p`` is unchanged.

    Returns:
        What was switched. Use it as a context manager, or call ``restore()``, to undo it.

    Raises:
        OptionError: another seed, or a flag that is neither True nor False.
    """
    import torch

    deterministic = option_parsing.flag(mode, "mode")
    option_parsing.flag(rm_dropout, "rm_dropout")
    switched = seed_only(seed)
    _set_variable(switched, "PYTHONHASHSEED", str(seed), " (for processes started from here)")
    if torch.cuda.is_available():
        _make_cuda_repeatable(switched)
    if deterministic:
        for name, value in _ASCEND.items():
            _set_variable(switched, name, value)
        _make_operators_deterministic(switched)
    if rm_dropout:
        _remove_dropout(switched)
    return switched


def _set_variable(switched: Switched, name: str, value: str, note: str = "") -> None:
    before = os.environ.get(name)
    os.environ[name] = value
    words = f"{name}={value}{note}"
    if before is None:
        switched.add(words, os.environ.pop, name, None)
    else:
        switched.add(words, os.environ.__setitem__, name, before)


def _make_cuda_repeatable(switched: Switched) -> None:
    import torch

    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS:
        _set_variable(switched, "CUBLAS_WORKSPACE_CONFIG", _CUBLAS[0])
    cudnn = torch.backends.cudnn
    for name, value in (("deterministic", True), ("benchmark", False)):
        before = getattr(cudnn, name)
        setattr(cudnn, name, value)
        words = f"torch.backends.cudnn.{name} {'on' if value else 'off'}"
        switched.add(words, setattr, cudnn, name, before)


def _make_operators_deterministic(switched: Switched) -> None:
    import torch

    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    undo = functools.partial(torch.use_deterministic_algorithms, was_on, warn_only=only_warned)
    switched.add("torch.use_deterministic_algorithms on", undo)


def _remove_dropout(switched: Switched) -> None:
    from torch.nn import functional

    for name in _DROPOUTS:
        original = getattr(functional, name)
        setattr(functional, name, _without_dropout(original))
        words = f"torch.nn.functional.{name} drops nothing"
        switched.add(words, setattr, functional, name, original)


def _without_dropout(original: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, p: float = 0.5, *rest: object, **more: object) -> R:
        # an impossible p raises as it does without us
        return original(input, 0.0 if 0 <= p <= 1 else p, *rest, **more)

    return dropout


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads; 0: with as many as before."""
    import torch

    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


# the role of the states of a generator before a step that draws from it, and after it
GENERATOR = "generator"


def random_state() -> Callable[[], None]:
    """Return a function that sets all random numbers back to where they are now.

    Those of Python, NumPy and torch on all devices that are in use.
    """
    import numpy
    import torch

    of_python, of_numpy, of_torch = (
        random.getstate(),
        numpy.random.get_state(),
        torch.get_rng_state(),
    )
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_devices = torch.cuda.get_rng_state_all() if in_use else []

    def restore() -> None:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)

    return restore
