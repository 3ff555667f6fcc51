"""A module of mine alone on golden's inputs: what it makes wrong there, it makes; the rest it was given.

With the live model where that still computes what was recorded; else from disk, by making the module's recorded operators again along the
dataflow edges. An operator's input is a view of what its producer put out, and views are not recorded: which elements it
took is read off the recorded values, where these are all different.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain import arguments
from llmdebug_nb.explain.calls import Call, Calls, Key
from llmdebug_nb.explain.replay import Replayed, apart, quiet, same
from llmdebug_nb.explain.runs import NotAgain, Runs

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@dataclass(frozen=True)
class Swapped:
    """What mine's module gave on golden's inputs. ``error``: against golden's output, relative L2: what it makes itself.

    ``random``: it gives something else each time. ``by``: ``live`` or ``disk``. ``cache``: a cache was left out.
    """

    error: float
    random: bool
    by: str
    cache: bool = False


def swap(call: Call, calls: Calls, runs: Runs) -> Swapped:
    """Call mine's module on golden's inputs.

    Raises:
        NotAgain: neither the live module nor its recorded operators can be called so.
    """
    if call.golden is None or call.mine is None or call.key.phase != "forward":
        raise NotAgain(
            "only one run made this call"
            if call.one_sided
            else "calls of backward passes are not made again"
        )
    try:
        return _live(call, runs)
    except NotAgain as why:
        try:
            return _from_disk(call, calls, runs)
        except NotAgain as other:
            raise NotAgain(f"{why}; {other}") from None


# -- the live module -------------------------------------------------------------------------------


def _live(call: Call, runs: Runs) -> Swapped:
    assert call.golden is not None
    assert call.mine is not None
    module = runs.module(call.mine.path)
    if module is None:
        raise NotAgain("the model is gone")
    scalars = runs.mine.scalars(call.mine)
    cache = any(arguments.is_cache(slot, scalar) for slot, scalar in scalars.items())
    if cache and call.key.step > 0:
        raise NotAgain("it was called with a cache of earlier tokens, which is not recorded")
    own = runs.mine.records(call.mine, "input")
    theirs = runs.golden.records(call.golden, "input")
    given = arguments.given(own, scalars, caches=True)
    dtypes = {record.site.slot: record.summary.dtype for record in own}
    mine, golden = arguments.loader(runs.mine, own), arguments.loader(runs.golden, theirs)

    def as_mine(slot: str) -> torch.Tensor:
        tensor = golden(slot)
        return tensor.to(DTYPES[dtypes[slot]]) if tensor.is_floating_point() else tensor

    made = arguments.outputs(runs.mine, call.mine)
    again = _called(module, arguments.filled(given, mine))
    limit = max((d.limit or 0.0 for d in call.outputs), default=0.0)
    other = _called(module, arguments.filled(given, mine), seed=1)
    random = any(not same(tensor, other[slot]) for slot, tensor in again.items())
    if not random and apart(made, again, runs) > limit:
        raise NotAgain("the model no longer computes what was recorded")
    result = _called(module, arguments.filled(given, as_mine))
    return Swapped(
        apart(arguments.outputs(runs.golden, call.golden), result, runs), random, "live", cache
    )


def _called(
    module: torch.nn.Module, given: arguments.Given, seed: int = 0
) -> dict[str, torch.Tensor]:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    args, kwargs = (
        [_to(value, device) for value in given[0]],
        {name: _to(value, device) for name, value in given[1].items()},
    )
    try:
        with untouched(module), quiet(seed):
            result = module(*args, **kwargs)
    except Exception as error:  # the module is the program's: whatever it raises
        raise NotAgain(
            f"the module fails when it is called alone: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from None
    return {slot: tensor.cpu() for slot, tensor in arguments.results(result)}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_to(part, device) for part in value) if isinstance(value, tuple) else value


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Call a module without its hooks, and leave it as it was: hooks, buffers, mode and attributes of it and its parts."""
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    buffers = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
    own = [(dict(part._buffers), dict(part._parameters)) for part in parts]
    try:
        for part in parts:
            for name in _HOOKS:
                if name in vars(part):
                    vars(part)[name] = OrderedDict()
        yield
    finally:
        with torch.no_grad():
            for tensor, before in buffers:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        for part, before_attributes, (own_buffers, own_parameters) in zip(
            parts, attributes, own, strict=True
        ):
            vars(part).clear()
            vars(part).update(before_attributes)
            part._buffers.update(own_buffers)
            part._parameters.update(own_parameters)


# -- from disk -------------------------------------------------------------------------------------


def _from_disk(call: Call, calls: Calls, runs: Runs) -> Swapped:
    """Make mine's operators of the module again, with golden's inputs of the module in place of its own."""
    assert call.golden is not None
    assert call.mine is not None
    own, theirs = runs.mine.records(call.mine, "input"), runs.golden.records(call.golden, "input")
    mine, golden = arguments.loader(runs.mine, own), arguments.loader(runs.golden, theirs)
    flow = _Flow(calls, runs)
    for record in own:
        flow.put(record.producer, mine(record.site.slot), golden(record.site.slot))
    operators = [c.mine for c in calls.inside(call) if c.is_operator and c.mine is not None]
    if not operators:
        raise NotAgain("its operators were not recorded")
    for key in operators:
        flow.make(key)
    made = {
        record.site.slot: flow.taken(record, runs.mine.load(record))
        for record in runs.mine.records(call.mine, "output")
    }
    return Swapped(apart(arguments.outputs(runs.golden, call.golden), made, runs), False, "disk")


class _Flow:
    """Values as mine recorded them, and as they are with golden's in front of them. By record, or by their values."""

    def __init__(self, calls: Calls, runs: Runs) -> None:
        self._calls = calls
        self._runs = runs
        self._made: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # id of record -> recorded, made
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, number: int | None, recorded: torch.Tensor, made: torch.Tensor) -> None:
        if recorded.shape != made.shape:
            raise NotAgain("the two runs were given inputs of different shapes")
        made = made.to(recorded.dtype)
        if number is not None:
            self._made[number] = recorded, made
        self._first.append((recorded, made))

    def make(self, key: Key) -> None:
        """Make an operator again; one that is given nothing new gave what is recorded."""
        side = self._runs.mine
        records = side.records(key, "input")
        values = {
            record.site.slot: (load := side.load(record), self.taken(record, load))
            for record in records
        }
        made = [(record, side.load(record)) for record in side.records(key, "output")]
        if all(recorded is new for recorded, new in values.values()):
            result = {record.site.slot: recorded for record, recorded in made}
        else:
            result = Replayed(side, key).run_on(lambda slot: values[slot][1])
        for record, recorded in made:
            self._made[record.id] = recorded, result[record.site.slot]

    def taken(self, record: Record, recorded: torch.Tensor) -> torch.Tensor:
        """Return what a recorded tensor is now: the same elements of what it was taken from; itself if it is from elsewhere."""
        producer = record.producer
        while (
            producer is not None and producer not in self._made
        ):  # what a module gave is what was made inside it
            giver = self._calls.of_mine(producer)
            producer = giver.producer if giver is not None else None
        source = self._made.get(producer) if producer is not None else None
        if source is None:
            source = next(
                (
                    each
                    for each in self._first
                    if each[0].shape == recorded.shape and torch.equal(each[0], recorded)
                ),
                None,
            )
        return recorded if source is None else _same_elements(*source, recorded)


def _same_elements(before: torch.Tensor, after: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return of ``after`` the elements that ``view`` is of ``before``. Raises NotAgain where that can't be told."""
    if torch.equal(before, after):
        return view
    if before.shape == view.shape and torch.equal(before, view):
        return after
    flat = before.reshape(-1)
    values, order = flat.sort()
    if bool((values[1:] == values[:-1]).any()):
        return _same_order(before, after, view)
    at = torch.searchsorted(values, view.reshape(-1)).clamp(max=len(values) - 1)
    if not torch.equal(values[at], view.reshape(-1)):
        raise NotAgain(
            "an operator was given something else than what is in the storage that it shares"
        )
    return after.reshape(-1)[order[at]].reshape(view.shape)


def _same_order(before: torch.Tensor, after: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return ``after`` with its dimensions in the order in which ``view`` has those of ``before``. Raises NotAgain."""
    found: list[torch.Tensor] = []
    orders = (
        itertools.permutations(range(before.dim()))
        if before.numel() == view.numel() and before.dim() < 6
        else ()
    )
    for order in orders:
        if torch.equal(before.permute(order).reshape(view.shape), view):
            found.append(after.permute(order).reshape(view.shape))
    if not found or not all(torch.equal(found[0], other) for other in found):
        raise NotAgain("which elements an operator took can't be told: some are equal")
    return found[0]
