"""Run a live module on the inputs of the other program: what it makes itself, what it inherits.

The live module is used if it still computes the recorded values.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.paths import module_name
from llmdebug_nb.core.records import CallKey, Site
from llmdebug_nb.core.torch_internals import HOOK_DICTS, register_again, registered
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.arguments import Arguments
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.execution import quiet, results
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import largest_error, same, unit
from llmdebug_nb.replay.runs import Runs


@dataclass(frozen=True)
class SwapResult:
    """The result of mine's module on golden's inputs.

    ``error``: the error against golden's output, which is the module's own error. ``random``: two
    calls gave two results. ``cache``: a cache was left out.
    """

    error: float
    random: bool
    cache: bool = False


def run_on_golden_inputs(call: ComparedCall, runs: Runs) -> SwapResult:
    """Run mine's module on golden's inputs.

    Raises:
        CannotReplay: the live module is gone, changed, or can't be called alone.
    """
    golden, mine = call.golden, call.mine
    if golden is None or mine is None:
        raise CannotReplay("only one run made this call")
    if call.key.phase != "forward":
        raise CannotReplay("calls of backward passes are not replayed")
    module = runs.module(mine.path)
    if module is None:
        raise CannotReplay("the model is gone")
    scalars = runs.mine.scalars(mine)
    cache = any(arguments.is_cache(slot, scalar) for slot, scalar in scalars.items())
    if cache and mine.step > 0:
        raise CannotReplay("it was called with a cache of earlier tokens, which is not recorded")
    own, theirs = runs.mine.records(mine, "input"), runs.golden.records(golden, "input")
    given = arguments.arguments_of(own, scalars, without_cache=True)
    dtypes = {record.site.slot: record.summary.dtype for record in own}
    load, load_golden = arguments.loader(runs.mine, own), arguments.loader(runs.golden, theirs)

    def load_as_mine(slot: str) -> torch.Tensor:
        tensor = load_golden(slot)
        return tensor.to(DTYPES[dtypes[slot]]) if tensor.is_floating_point() else tensor

    recorded = arguments.outputs(runs.mine, mine)
    again = _called(module, arguments.filled(given, load))
    limit = max((d.limit or 0.0 for d in call.outputs), default=0.0)
    other = _called(module, arguments.filled(given, load), seed=1)
    random = any(not same(tensor, other[slot]) for slot, tensor in again.items())
    if not random and largest_error(recorded, again, runs) > limit:
        raise CannotReplay("the model no longer computes the recorded values")
    result = _called(module, arguments.filled(given, load_as_mine))
    error = largest_error(arguments.outputs(runs.golden, golden), result, runs)
    return SwapResult(error, random, cache)


def own_error(
    call: ComparedCall, before: Iterable[ComparedCall], row: Difference, runs: Runs
) -> float:
    """Return how far mine's tensor is from what golden's code makes of what mine's code took.

    ``row``: a result of the call, or what its code gives to a module inside of it. ``before``: the
    calls inside of it that come before: they give what they gave in mine.

    Raises:
        CannotReplay: the live module is gone, changed or random, or can't be called alone.
    """
    golden, record, own = call.golden, row.pair.golden, row.pair.mine
    if golden is None or call.mine is None or record is None or own is None:
        raise CannotReplay("only one run made this call")
    module = runs.golden_module(golden.path)
    if module is None:
        raise CannotReplay("golden's model is gone")
    scalars, records = runs.golden.scalars(golden), runs.golden.records(golden, "input")
    if golden.step > 0 and any(arguments.is_cache(*each) for each in scalars.items()):
        raise CannotReplay("it was called with a cache of earlier tokens, which is not recorded")
    given = arguments.arguments_of(records, scalars, without_cache=True)
    load, takes = arguments.loader(runs.golden, records), _of_mine(call.inputs, runs)
    again = _seen_at(module, record.site, golden, arguments.filled(given, load))
    rounds = unit([record.summary.dtype])
    if runs.error(runs.golden.load(record), again) > constants.OPERATORS_EPSILONS * rounds:
        raise CannotReplay("the model no longer computes the recorded values")
    gives = dict(_results(before, runs))
    theirs = _seen_at(module, record.site, golden, arguments.filled(given, takes), gives)
    ours = runs.mine.load(own)
    try:
        theirs, ours = (theirs, ours) if row.pair.fit is None else row.pair.fit(theirs, ours)
        return runs.error(theirs, ours)
    except ValueError as error:
        raise CannotReplay(str(error)) from None


def _of_mine(rows: Iterable[Difference], runs: Runs) -> Callable[[str], torch.Tensor]:
    """Return a function that loads mine's tensor in a slot of golden, in golden's dtype.

    It raises CannotReplay.
    """
    partners = {d.pair.golden.site.slot: d.pair for d in rows if d.pair.golden is not None}

    def load(slot: str) -> torch.Tensor:
        pair = partners.get(slot)
        if pair is None or pair.mine is None or pair.fit is not None:
            raise CannotReplay(f"mine has nothing in place of {slot}", GAP)
        tensor = runs.mine.load(pair.mine)
        dtype = DTYPES[pair.either.summary.dtype]
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return load


def _results(calls: Iterable[ComparedCall], runs: Runs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths of golden's modules that run once and give a tensor, and mine's tensor."""
    calls = [call for call in calls if call.golden is not None and not call.is_operator]
    times = Counter(call.path for call in calls)
    for call in calls:
        if times[call.path] == 1:
            with contextlib.suppress(CannotReplay):
                yield call.path, _of_mine(call.outputs, runs)("0")


def _seen_at(
    module: torch.nn.Module,
    place: Site,
    call: CallKey,
    given: Arguments,
    gives: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call a module, and return the tensor at a place of it.

    ``gives``: what replaces the results of modules inside, by their paths. Raises CannotReplay.
    """
    found: list[dict[str, torch.Tensor]] = []

    def part(path: str) -> torch.nn.Module:
        return module.get_submodule(module_name(path[len(call.path) :].lstrip(".")))

    def note(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        slots = [*results(args), *results({"kwargs": kwargs})]
        found.append({slot: tensor.detach().cpu() for slot, tensor in slots})

    def look() -> None:
        for path, tensor in (gives or {}).items():
            part(path).register_forward_hook(partial(_instead, tensor))
        if place.role == "input":
            part(place.path).register_forward_pre_hook(note, with_kwargs=True)

    result = _called(module, given, look=look)
    if place.role == "output":
        found = [result]
    if len(found) != 1 or place.slot not in found[0]:
        raise CannotReplay(f"{place.path} is called {len(found)} times")
    return found[0][place.slot]


def _instead(tensor: torch.Tensor, _: object, args: object, result: object) -> object:
    """Return a tensor in place of a module's result, if that is one like it."""
    if isinstance(result, torch.Tensor) and result.shape == tensor.shape:
        return tensor.to(result.device)
    return result


def _called(
    module: torch.nn.Module,
    given: Arguments,
    seed: int = 0,
    look: Callable[[], object] = lambda: None,
) -> dict[str, torch.Tensor]:
    """Call a module on its own device and return the results by slot.

    ``look``: called before, to hook the module; hooks do not stay. Raises CannotReplay.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    args = [_to(value, device) for value in given[0]]
    kwargs = {name: _to(value, device) for name, value in given[1].items()}
    try:
        with Unbroken(untouched(module), quiet(seed)):
            look()
            result = module(*args, **kwargs)
    except Exception as error:  # the module is the program's: it may raise anything
        line = str(error).partition("\n")[0]
        text = f"{type(error).__name__}: {line}"
        raise CannotReplay(f"the module fails when it is called alone: {text}") from None
    return {slot: tensor.detach().cpu() for slot, tensor in results(result)}


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
