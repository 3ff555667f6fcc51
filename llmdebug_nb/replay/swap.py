"""Run mine's module on golden's inputs: an error that remains is its own, the rest is inherited.

The live module is used if it still computes the recorded values.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.paths import module_name
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.core.torch_internals import HOOK_DICTS, register_again, registered
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.execution import quiet, results
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import largest_error, same
from llmdebug_nb.replay.runs import Runs, Side

LEFT_OUT = object()


@dataclass(frozen=True)
class SwapResult:
    """The result of mine's module on golden's inputs.

    ``error``: the error against golden's output, which is the module's own error. ``random``: two
    calls gave two results. ``cache``: a cache was left out.
    """

    error: float
    random: bool
    cache: bool = False


class LiveCall:
    """A recorded call of a live module, to be made again: as it was, or with one thing changed.

    ``find(path)``: the live module, or None. ``cache``: a cache, which was still empty, is left
    out.

    Raises:
        CannotReplay: the module is gone, or its arguments can't be rebuilt.
    """

    def __init__(
        self, side: Side, key: CallKey, find: Callable[[str], torch.nn.Module | None]
    ) -> None:
        module = find(key.path)
        if key.phase != "forward":
            raise CannotReplay("calls of backward passes are not replayed")
        if module is None:
            raise CannotReplay("the model is gone")
        self.side, self.key, self._module = side, key, module
        scalars = side.scalars(key)
        self.cache = any(arguments.is_cache(slot, scalar) for slot, scalar in scalars.items())
        if self.cache and key.step > 0:
            raise CannotReplay(
                "it was called with a cache of earlier tokens, which is not recorded"
            )
        self.records = side.records(key, "input")
        self._given = arguments.arguments_of(self.records, scalars, without_cache=True)
        self.load = arguments.loader(side, self.records)
        self.recorded = arguments.outputs(side, key)

    def check(self, limit: float, runs: Runs) -> bool:
        """Tell whether two calls give two results. Raises CannotReplay: the model has changed."""
        again, other = self.results(), self.results(seed=1)
        random = any(not same(tensor, other[slot]) for slot, tensor in again.items())
        if not random and largest_error(self.recorded, again, runs) > limit:
            raise CannotReplay("the model no longer computes the recorded values")
        return random

    def results(
        self,
        load: Callable[[str], torch.Tensor] | None = None,
        seed: int = 0,
        settings: Mapping[str, object] | None = None,
        given: Mapping[str, object] | None = None,
        idle: Sequence[str] = (),
        look: Callable[[torch.nn.Module], object] = lambda module: None,
    ) -> dict[str, torch.Tensor]:
        """Make the call again and return its results by slot.

        ``load``: gives the tensors. ``settings``: other values of attributes of the module.
        ``given``: other arguments, by slot; `LEFT_OUT` for none. ``idle``: paths below the module
        of those that give what they take. ``look(module)``: called before, to hook it; hooks do not
        stay.

        Raises:
            CannotReplay: the call fails.
        """
        module = self._module
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        args, kwargs = arguments.filled(self._given, load or self.load)
        for slot, other in (given or {}).items():
            _put(args, kwargs, slot, other)
        args = [_to(value, device) for value in args]
        kwargs = {name: _to(value, device) for name, value in kwargs.items()}
        try:
            with Unbroken(untouched(module), quiet(seed)):
                for name, value in (settings or {}).items():
                    setattr(module, name, value)
                for path in idle:
                    vars(module.get_submodule(module_name(path)))["forward"] = _first
                look(module)
                result = module(*args, **kwargs)
        except Exception as error:  # the module is the program's: it may raise anything
            line = str(error).partition("\n")[0]
            text = f"{type(error).__name__}: {line}"
            raise CannotReplay(f"the module fails when it is called alone: {text}") from None
        return {slot: tensor.detach().cpu() for slot, tensor in results(result)}


def _put(args: list[object], kwargs: dict[str, object], slot: str, value: object) -> None:
    """Put another argument at a slot, or leave it out. Raises CannotReplay."""
    name = slot.removeprefix("kwargs.")
    if name.isdigit() and int(name) < len(args) and value is not LEFT_OUT:
        args[int(name)] = value
    elif name == slot or not name.isidentifier():
        raise CannotReplay(f"argument {slot} can't be changed")
    elif value is LEFT_OUT:
        kwargs.pop(name, None)
    else:
        kwargs[name] = value


def _first(x: object, *_: object, **__: object) -> object:
    return x


def run_on_golden_inputs(
    call: ComparedCall,
    runs: Runs,
    settings: Mapping[str, object] | None = None,
    given: Mapping[str, object] | None = None,
) -> SwapResult:
    """Run mine's module on golden's inputs. ``settings``, ``given``: see `LiveCall.results`.

    Raises:
        CannotReplay: the live module is gone, changed, or can't be called alone.
    """
    golden, mine = call.golden, call.mine
    if golden is None or mine is None:
        raise CannotReplay("only one run made this call")
    live = LiveCall(runs.mine, mine, runs.module)
    theirs = runs.golden.records(golden, "input")
    dtypes = {record.site.slot: record.summary.dtype for record in live.records}
    load_golden = arguments.loader(runs.golden, theirs)

    def load_as_mine(slot: str) -> torch.Tensor:
        tensor = load_golden(slot)
        return tensor.to(DTYPES[dtypes[slot]]) if tensor.is_floating_point() else tensor

    random = live.check(max((d.limit or 0.0 for d in call.outputs), default=0.0), runs)
    result = live.results(load_as_mine, settings=settings, given=given)
    error = largest_error(arguments.outputs(runs.golden, golden), result, runs)
    return SwapResult(error, random, live.cache)


def _to(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_to(part, device) for part in value) if isinstance(value, tuple) else value


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Call a module without its hooks, and restore it: hooks, buffers, mode and attributes."""
    with restored(module):
        for part in module.modules():
            for name in HOOK_DICTS:
                if name in vars(part):
                    vars(part)[name] = OrderedDict()
        yield


@contextlib.contextmanager
def without_new_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Take the hooks off that a program put on meanwhile: it may be stopped before it does so."""
    before = [(part, registered(part, HOOK_DICTS)) for part in module.modules()]
    try:
        yield
    finally:
        for part, hooks in before:
            register_again(part, hooks)


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device)


@contextlib.contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Restore a module afterwards: buffers, mode and attributes.

    Meanwhile it has copies of the containers and caches among its attributes.
    """
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    buffers = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
    own = [registered(part) for part in parts]
    try:
        _copy_attributes(parts, [*parts, *module.parameters(), *module.buffers()])
        yield
    finally:
        with torch.no_grad():
            for tensor, before in buffers:
                # of sparse tensors, torch does not say whether they are equal
                if tensor.layout is not torch.strided or not torch.equal(tensor, before):
                    tensor.copy_(before)
        for part, before_attributes, before_own in zip(parts, attributes, own, strict=True):
            vars(part).clear()
            vars(part).update(before_attributes)
            register_again(part, before_own)


def _copy_attributes(parts: Sequence[torch.nn.Module], shared: Iterable[object]) -> None:
    """Give modules copies of what may hold their state. ``shared``: is not copied with it."""
    memo: dict[int, object] = {id(each): each for each in shared}
    for part in parts:
        for name, value in vars(part).items():
            if name in _OF_EVERY_MODULE or id(value) in memo or not _may_hold_state(value):
                continue
            with contextlib.suppress(Exception):  # a lock, say: that can't be copied
                vars(part)[name] = copy.deepcopy(value, memo)


def _may_hold_state(value: object, depth: int | None = None) -> bool:
    """Tell whether a value is a container, or an object with a tensor somewhere in it."""
    depth = constants.STATE_DEPTH if depth is None else depth
    if isinstance(value, (torch.Tensor, list, dict, set, deque, bytearray)):
        return True
    if isinstance(value, (*_PLAIN, torch.nn.Module)) or callable(value) or not depth:
        return False
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(_holds_tensor(each, depth - 1) for each in inside)


def _holds_tensor(value: object, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(_holds_tensor(each, depth - 1) for each in value[:1])
    return not isinstance(value, (dict, set)) and _may_hold_state(value, depth)
