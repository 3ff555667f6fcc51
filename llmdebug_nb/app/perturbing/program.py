"""The program that is run again and again: a model on its inputs, each time from the same state."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import nn

from llmdebug_nb.capture import generation
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.perturbing.session import PerturbedSession
from llmdebug_nb.capture.perturbing.unrounded import values
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.comparison import metrics
from llmdebug_nb.core.determinism import random_state
from llmdebug_nb.core.errors import CaptureError, OptionError, first_line, nearest
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.paths import module_path
from llmdebug_nb.replay.swap import restored

Inputs: TypeAlias = (
    "torch.Tensor | Mapping[str, object] | tuple[object, ...] | list[object] | Callable[[], object]"
)
Wanted: TypeAlias = "str | Callable[[object], torch.Tensor] | None"


@dataclass(frozen=True)
class Result:
    """What a run gave. ``name``: of the tensor that counts; ``loss``: None if that is all."""

    name: str
    tensor: torch.Tensor
    loss: float | None


@dataclass(frozen=True)
class Distance:
    """How far two results are apart: relative L2, flips of the argmax of rows, relative loss."""

    moved: float
    flips: int
    loss: float | None


class Program:
    """Runs a model and leaves no trace: parameters, buffers, attributes, gradients, random numbers.

    ``wanted``: the slot of the result, or a function that takes it from what the model returns.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, wanted: Wanted = None) -> None:
        """Raises OptionError: not a module, or inputs that can't be copied for each run."""
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise OptionError(f"model: expected a torch.nn.Module, got {kind}")
        self.model = pytorch.compiled_root(model)
        self._inputs, self._wanted = inputs, wanted
        arguments(inputs)  # refuses what can't be copied before anything runs
        self._restart = random_state()

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules by path."""
        return {module_path(name): part for name, part in self.model.named_modules()}

    @contextlib.contextmanager
    def followed(self, mode: str) -> Iterator[PerturbedSession]:
        """Hook the model. Raises CaptureError: a recording is running, which would record this."""
        if any(True for _ in generation.listeners):
            raise CaptureError("a recording is running: end it first, or it would record this too")
        session = PerturbedSession([self.model], mode, module_tree.build)
        try:
            session.start()
            yield session
        finally:
            session.abandon()

    def run(self, session: PerturbedSession, intervention: Intervention) -> Result:
        """Run the model once. Raises whatever it raises, and OptionError: it has no such result."""
        modules = self.modules()
        state = (
            _chance(self._restart), restored(self.model), without_gradients(self.model),
            torch.no_grad(),
        )  # fmt: skip
        args, kwargs = arguments(self._inputs)
        with Unbroken(*state):
            with Unbroken(_hooked(session, intervention, modules.get)):
                output = self._program()(*args, **kwargs)
            return self._result(output)

    def _program(self) -> Callable[..., object]:
        own = callable(self._inputs) and not isinstance(self._inputs, torch.Tensor)
        return cast("Callable[..., object]", self._inputs) if own else self.model

    def _result(self, output: object) -> Result:
        if callable(self._wanted):
            made = self._wanted(output)
            if not isinstance(made, torch.Tensor):
                raise OptionError(f"result: the function gave {type(made).__name__}, not a tensor")
            return Result("result", _kept(made), None)
        floats = {
            slot: leaf for slot, leaf in leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
        }  # fmt: skip
        if not floats:
            raise OptionError("the model returns no floating-point tensor; name one with result=")
        name = self._wanted
        if name is None:
            several = (slot for slot, leaf in floats.items() if leaf.numel() > 1)
            name = "logits" if "logits" in floats else next(several, next(iter(floats)))
        if name not in floats:
            raise OptionError(f"result: the model returns no {name!r}{nearest(name, floats)}")
        loss = floats.get("loss") if name != "loss" else None
        return Result(name, _kept(floats[name]), None if loss is None else float(values(loss)))


def distance(before: Result, after: Result) -> Distance:
    """Compare two results. A shape that changed, and NaN, count as infinitely far."""
    old, new = before.tensor, after.tensor
    if old.shape != new.shape:
        return Distance(math.inf, 0, None)
    is_line = old.dim() > 0 and old.shape[-1] > 1
    found = metrics.compare(old, new, logits=is_line)
    broken = found.get("nan_mismatch") or found.get("inf_mismatch")
    moved = math.inf if broken else float(found["relative_euclidean_distance"] or 0.0)
    loss = None
    if before.loss is not None and after.loss is not None:
        change = abs(after.loss - before.loss)
        loss = change / abs(before.loss) if before.loss else math.inf if change else 0.0
    return Distance(moved, int(found.get("top1_flips") or 0), loss)


def arguments(given: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return copies of inputs: a model may write to them, or to a cache among them.

    None of a function. Raises OptionError.
    """
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, Mapping):
        return (), {str(name): _copied(each) for name, each in given.items()}
    if isinstance(given, (tuple, list)):
        return tuple(_copied(each) for each in given), {}
    if callable(given):
        return (), {}
    raise OptionError(
        f"inputs: expected a tensor, a tuple, a mapping of arguments, or a function that runs "
        f"the model, got {type(given).__name__}"
    )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return values(tensor.detach()).cpu().clone()


def _copied(value: object) -> object:
    """Return a copy of an argument. Raises OptionError."""
    memo: dict[int, object] = {}
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):  # one inside a graph can't be copied with it
            memo[id(leaf)] = leaf.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # of whatever class the value is
        raise OptionError(
            f"inputs: {type(value).__name__} can't be copied for each run ({first_line(error)});"
            " give a function that makes it and runs the model"
        ) from None


@contextlib.contextmanager
def _chance(restart: Callable[[], None]) -> Iterator[None]:
    """Begin with the same random numbers, and leave those of the program as they were."""
    back = random_state()
    restart()
    try:
        yield
    finally:
        back()


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Put gradients aside, so that a program with a backward pass adds nothing to them."""
    kept = [(each, each.grad) for each in model.parameters()]
    try:
        for each, _ in kept:
            each.grad = None
        yield
    finally:
        for each, gradient in kept:
            each.grad = gradient


@contextlib.contextmanager
def _hooked(
    session: PerturbedSession,
    intervention: Intervention,
    module_at: Callable[[str], nn.Module | None],
) -> Iterator[None]:
    handles = intervention.hook(module_at)
    try:
        session.intervene(intervention)
        yield
    finally:
        session.intervene(None)
        for handle in handles:
            handle.remove()
