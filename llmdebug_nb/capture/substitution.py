"""Puts other tensors in the place of a program's own while it runs again.

It sits where calls are recorded, so the recording shows what was put in, and calls have the paths
and numbers that recordings use.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from llmdebug_nb.capture.calls import Leaf, OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.hooks.handles import Handle
from llmdebug_nb.capture.intervention import Args, Kwargs
from llmdebug_nb.capture.walk import call_inputs, leaves, operator_inputs

Put = Callable[[torch.Tensor], torch.Tensor]  # from the program's own tensor to the one put in


class Place(NamedTuple):
    """A tensor of a call. ``number``: n-th call of that path in the step, from 0."""

    path: str
    number: int
    role: Literal["input", "output"]
    slot: str


class Substitution:
    """The tensors that are put in. ``done``: the places where one was, by now.

    ``problem``: the first error of a ``Put``; the program's own tensor stays then.
    """

    def __init__(self, puts: Mapping[Place, Sequence[Put]]) -> None:
        self._puts = dict(puts)
        self._calls = {(place.path, place.number, place.role) for place in puts}
        self.done: set[Place] = set()
        self.problem: Exception | None = None

    def hook(self, module_at: Callable[[str], nn.Module | None]) -> list[Handle]:
        """Hook the modules that are concerned. Hooks of a recording must come after these."""
        paths = dict.fromkeys(place.path for place in self._puts if "/" not in place.path)
        found = ((path, module_at(path)) for path in paths)
        hooked = [_HookedModule(self, path, module) for path, module in found if module is not None]
        return [handle for each in hooked for handle in each.handles]

    def operator_inputs(
        self, thread: ThreadState, name: str, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        """Return the arguments of an operator that is about to be called."""
        parent = thread.open_calls[-1] if thread.open_calls else None
        path = f"{(parent.module if parent else None) or ''}/{name}"
        call = path, thread.upcoming(path)
        return self.inputs(*call, args, kwargs, operator_inputs(args, kwargs))

    def run(
        self, call: OpenCall, func: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        """Run an operator, and return its result; what it wrote in place is written to again."""
        result, given = func(*args, **kwargs), (args, kwargs)
        if (call.path, call.number, "output") not in self._calls:
            return result
        own = result if result is not None else args[:1]
        puts = self._wanted(call.path, call.number, "output", leaves(own))
        inputs = {
            pytorch.storage_of(leaf) for _, leaf in leaves(given) if isinstance(leaf, torch.Tensor)
        }
        written = [put for put in puts if pytorch.storage_of(put[0]) in inputs]
        torch_modes.run_unseen(_write, written)
        return replaced(result, [put for put in puts if all(put is not other for other in written)])

    def inputs(
        self, path: str, number: int, args: Args, kwargs: Kwargs, given: Iterable[Leaf]
    ) -> tuple[Args, Kwargs]:
        """Return the arguments of a call."""
        if (path, number, "input") not in self._calls:
            return args, kwargs
        puts = self._wanted(path, number, "input", given)
        return tuple(replaced(value, puts) for value in args), {
            name: replaced(value, puts) for name, value in kwargs.items()
        }

    def output(self, path: str, number: int, result: object) -> object:
        """Return the result of a module."""
        if (path, number, "output") not in self._calls:
            return result
        return replaced(result, self._wanted(path, number, "output", leaves(result)))

    def _wanted(
        self, path: str, number: int, role: Literal["input", "output"], own: Iterable[Leaf]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors of a call that are replaced, each with the one that is put in."""
        puts = []
        for slot, leaf in own:
            place = Place(path, number, role, slot)
            if place not in self._puts or not isinstance(leaf, torch.Tensor):
                continue
            try:  # it is no part of the program
                new = torch_modes.run_unseen(_put, leaf, self._puts[place])
            except Exception as error:
                self.problem = self.problem or error
                continue
            puts.append((leaf, new))
            self.done.add(place)
        return puts


class _HookedModule:
    """Counts the calls of a module, and puts tensors in."""

    def __init__(self, substitution: Substitution, path: str, module: nn.Module) -> None:
        self._substitution, self._path, self._number = substitution, path, -1
        self.handles: list[Handle] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def _before(
        self, module: nn.Module, args: Args, kwargs: dict[str, object]
    ) -> tuple[Args, dict[str, object]]:
        self._number += 1
        given = call_inputs(args, kwargs)
        args, named = self._substitution.inputs(self._path, self._number, args, kwargs, given)
        return args, dict(named)

    def _after(self, module: nn.Module, args: Args, result: object) -> object:
        return self._substitution.output(self._path, self._number, result)


def replaced(value: object, puts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> object:
    """Return a value with other tensors in it; containers are copied, never written to."""
    for tensor, new in puts:
        if value is tensor:
            return new
    if not puts or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):
        parts: list[Any] = [replaced(part, puts) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [replaced(part, puts) for part in value]
    if isinstance(value, Mapping):
        return _with_parts(value, dict(value), puts, lambda new, k, v: new.__setitem__(k, v))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_parts(value, vars(value), puts, setattr)
    return value


def _write(written: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, new in written:
        tensor.copy_(new)


def _put(tensor: torch.Tensor, puts: Iterable[Put]) -> torch.Tensor:
    for put in puts:
        tensor = put(tensor)
    return tensor


def _with_parts(
    value: object,
    parts: Mapping[str, object],
    puts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    store: Callable[..., object],
) -> object:
    """Return a copy of a container, with other tensors in its parts; itself if none differs."""
    changed = {name: replaced(part, puts) for name, part in parts.items()}
    changed = {name: part for name, part in changed.items() if part is not parts[name]}
    if not changed:
        return value
    new = copy.copy(value)
    for name, part in changed.items():
        store(new, name, part)
    return new
