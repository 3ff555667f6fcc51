"""Changes what chosen operators or modules are given, or how they compute, and lists them."""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmdebug_nb.capture import moves
from llmdebug_nb.capture.calls import Leaf, OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.hooks.handles import Handle
from llmdebug_nb.capture.intervention import Args, Intervention, Kwargs
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.capture.perturbing.unrounded import Precise
from llmdebug_nb.capture.substitution import replaced
from llmdebug_nb.capture.walk import call_inputs, operator_inputs
from llmdebug_nb.core.determinism import threads
from llmdebug_nb.core.perturbations import (
    DETERMINISTIC,
    MATH,
    OF_INPUTS,
    ONE_THREAD,
    PRECISE,
    ULP,
    Key,
    Unit,
)

_PLAIN = (torch.Tensor, nn.Parameter)
Modules = Mapping[str, nn.Module]


class Perturbation(Intervention):
    """Perturbs units of a program.

    ``units``: their keys. ``by_module``: those are modules, and it is the operators
    that run directly in them that compute otherwise. ``given``: squared relative L2 of each input
    tensor that was moved, if ``measures``. ``narrow``: calls without a higher precision.
    """

    def __init__(
        self, kind: str, units: Collection[Key], modules: Iterable[str] = (),
        by_module: bool = False, measures: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        """``modules``: paths of those whose inputs are moved. ``seed``: of what is random."""
        self._kind, self._units, self._seed = kind, units, seed
        self._modules, self._by_module, self._measures = tuple(modules), by_module, measures
        self.given: list[float] = []
        self.narrow = 0
        self.problem: Exception | None = None

    def hook(self, module_at: Callable[[str], nn.Module | None]) -> list[Handle]:
        if self._kind not in OF_INPUTS:
            return []
        found = ((path, module_at(path)) for path in self._modules)
        return [_before(module, path, self._of_module) for path, module in found if module]

    def _of_module(self, path: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return self._moved((path, 0), args, kwargs, call_inputs(args, kwargs), frozenset())

    def operator_inputs(
        self, thread: ThreadState, name: str, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        if self._kind not in OF_INPUTS or self._by_module or pytorch.in_backward():
            return args, kwargs
        parent = thread.open_calls[-1] if thread.open_calls else None
        path = f"{(parent.module if parent else None) or ''}/{name}"
        key = path, thread.upcoming(path)
        if key not in self._units:
            return args, kwargs
        return self._moved(key, args, kwargs, operator_inputs(args, kwargs), _written(name, kwargs))

    def run(
        self, call: OpenCall, func: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        if self._kind in OF_INPUTS or not self._concerns(call):
            return func(*args, **kwargs)
        if self._kind == PRECISE:
            with Precise() as precise:
                result = func(*args, **kwargs)
            self.narrow += precise.narrow
            return result
        with switched(self._kind):
            return func(*args, **kwargs)

    def _concerns(self, call: OpenCall) -> bool:
        if call.phase != "forward":
            return False
        key = (call.module or "", 0) if self._by_module else (call.path, call.number)
        return key in self._units

    def _moved(
        self, key: Key, args: Args, kwargs: Kwargs, given: Iterable[Leaf], left: Collection[str]
    ) -> tuple[Args, Kwargs]:
        """Return arguments with moved tensors. ``left``: slots that stay as they are."""
        both = torch_modes.run_unseen(self._puts, key, given, left)
        named = {name: replaced(value, both) for name, value in kwargs.items()}
        return tuple(replaced(value, both) for value in args), named

    def _puts(
        self, key: Key, given: Iterable[Leaf], left: Collection[str]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that move, each with the one that takes its place."""
        puts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        move = moves.by_one_ulp if self._kind == ULP else moves.by_noise
        for slot, leaf in given:
            if slot in left or not _is_movable(leaf) or id(leaf) in puts:
                continue
            seed = zlib.crc32(f"{self._seed} {key} {slot}".encode())
            draws = torch.Generator(leaf.device).manual_seed(seed)
            puts[id(leaf)] = leaf, move(leaf, draws)
        if self._measures:
            self.given += [moves.relative_square(*both) for both in puts.values()]
        return list(puts.values())

    @property
    def moved_inputs(self) -> float:
        """The root mean square of the inputs' relative L2."""
        return math.sqrt(sum(self.given) / len(self.given)) if self.given else 0.0


class Listing(Intervention):
    """Lists the units of a program while it runs.

    ``units``: in execution order. ``movable``: the keys of those with inputs that can move.
    """

    def __init__(self, modules: Modules, by_module: bool, outside: CodeType | None = None) -> None:
        """``modules``: by path, if they are the units; ``by_module``: those that compute.

        ``outside``: the function that runs the program.
        """
        self._modules, self._by_module = modules, by_module
        self._stacks, self._outside = CallStacks(lambda frames, code, inside: 0), outside
        self._called: dict[str, Unit] = {}
        self.units: dict[Key, Unit] = {}
        self.movable: set[Key] = set()

    def hook(self, module_at: Callable[[str], nn.Module | None]) -> list[Handle]:
        return [_before(module, path, self._note_module) for path, module in self._modules.items()]

    def run(
        self, call: OpenCall, func: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        if call.phase == "forward" and self._by_module:
            path = call.module or ""
            self.units.setdefault((path, 0), self._called.get(path) or Unit(path, op=call.op))
        elif call.phase == "forward":
            left = _written(call.op, kwargs)
            given = [leaf for slot, leaf in operator_inputs(args, kwargs) if slot not in left]
            key = call.path, call.number
            if key not in self.units:
                self.units[key] = Unit(*key, call.op, *self._stacks.innermost_line(self._outside))
            self._note_inputs(key, given)
        return func(*args, **kwargs)

    def _note_module(self, path: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if path not in self._called:
            op = type(self._modules[path]).__name__
            self._called[path] = Unit(path, 0, op, *self._stacks.innermost_line(self._outside))
        if not self._by_module:
            self.units.setdefault((path, 0), self._called[path])
            self._note_inputs((path, 0), [leaf for _, leaf in call_inputs(args, kwargs)])
        return args, kwargs

    def _note_inputs(self, key: Key, given: Iterable[object]) -> None:
        if any(map(_is_movable, given)):
            self.movable.add(key)


def _before(
    module: nn.Module, path: str, change: Callable[[str, Args, Kwargs], tuple[Args, Kwargs]]
) -> Handle:
    """Let a function change the arguments of a module."""

    def hook(_: nn.Module, args: Args, kwargs: dict[str, object]) -> tuple[Args, dict[str, object]]:
        args, named = change(path, args, kwargs)
        return args, dict(named)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _is_movable(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and type(leaf) in _PLAIN and moves.can_move(leaf)


def _written(name: str, kwargs: Kwargs) -> frozenset[str]:
    """Return the slots that an operator writes to: moving what lies there is not its input's."""
    bare = name.split(".")[1] if "." in name else name
    first = bare.startswith(("__i", "__set")) or (bare.endswith("_") and not bare.endswith("__"))
    first = first or kwargs.get("inplace") is True
    return frozenset(("0", "kwargs.out") if first else ("kwargs.out",))


@contextlib.contextmanager
def switched(kind: str) -> Iterator[None]:
    """Let operators choose another kernel."""
    with contextlib.ExitStack() as undo:
        if kind == MATH:
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif kind == ONE_THREAD:
            undo.enter_context(threads(1))
        elif kind == DETERMINISTIC:
            undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*deterministic.*", UserWarning)
            undo.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield
