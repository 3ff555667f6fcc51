"""Run mine's module on golden's inputs: an error that remains is its own, the rest is inherited.

The live module is used if it still computes the recorded values. Otherwise the module's recorded
operators are replayed along the dataflow edges. An operator's input is often a view of its
producer's output, and views are not recorded. The recorded values show which elements the view
took, as long as no two of them are equal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.core.torch_internals import HOOK_DICTS, register_again, registered
from llmdebug_nb.explain import arguments
from llmdebug_nb.explain.arguments import Arguments
from llmdebug_nb.explain.calls import Calls, ComparedCall
from llmdebug_nb.explain.execution import quiet, results
from llmdebug_nb.explain.operators import CannotReplay
from llmdebug_nb.explain.replay import Replayed, largest_error, same
from llmdebug_nb.explain.runs import Runs


@dataclass(frozen=True)
class SwapResult:
    """The result of mine's module on golden's inputs.

    ``error``: the error against golden's output, which is the module's own error. ``random``: two
    calls gave two results. ``by``: ``live`` or ``disk``. ``cache``: a cache was left out.
    """

    error: float
    random: bool
    by: str
    cache: bool = False


def run_on_golden_inputs(call: ComparedCall, calls: Calls, runs: Runs) -> SwapResult:
    """Run mine's module on golden's inputs.

    Raises:
        CannotReplay: neither the live module nor its recorded operators can be run.
    """
    if call.golden is None or call.mine is None:
        raise CannotReplay("only one run made this call")
    if call.key.phase != "forward":
        raise CannotReplay("calls of backward passes are not replayed")
    try:
        return _live(call.golden, call.mine, call, runs)
    except CannotReplay as why:
        try:
            return _from_disk(call.golden, call.mine, call, calls, runs)
        except CannotReplay as other:
            raise CannotReplay(f"{why}; {other}") from None


# -- the live module -------------------------------------------------------------------------------


def _live(golden: CallKey, mine: CallKey, call: ComparedCall, runs: Runs) -> SwapResult:
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
    return SwapResult(error, random, "live", cache)


def _called(module: torch.nn.Module, given: Arguments, seed: int = 0) -> dict[str, torch.Tensor]:
    """Call a module on its own device and return the results by slot. Raises CannotReplay."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    args = [_to(value, device) for value in given[0]]
    kwargs = {name: _to(value, device) for name, value in given[1].items()}
    try:
        with Unbroken(untouched(module), quiet(seed)):
            result = module(*args, **kwargs)
    except Exception as error:  # the module is the program's: it may raise anything
        line = str(error).partition("\n")[0]
        text = f"{type(error).__name__}: {line}"
        raise CannotReplay(f"the module fails when it is called alone: {text}") from None
    return {slot: tensor.cpu() for slot, tensor in results(result)}


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
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Restore a module afterwards: buffers, mode and attributes."""
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    buffers = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
    own = [registered(part) for part in parts]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in buffers:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        for part, before_attributes, before_own in zip(parts, attributes, own, strict=True):
            vars(part).clear()
            vars(part).update(before_attributes)
            register_again(part, before_own)


# -- from disk -------------------------------------------------------------------------------------


def _from_disk(
    golden: CallKey, mine: CallKey, call: ComparedCall, calls: Calls, runs: Runs
) -> SwapResult:
    """Run mine's operators of the module again, on golden's inputs of the module."""
    own, theirs = runs.mine.records(mine, "input"), runs.golden.records(golden, "input")
    load, load_golden = arguments.loader(runs.mine, own), arguments.loader(runs.golden, theirs)
    values = _ReplayedValues(calls, runs)
    for record in own:
        values.put(record.producer, load(record.site.slot), load_golden(record.site.slot))
    operators = [c.mine for c in calls.inside(call) if c.is_operator and c.mine is not None]
    if not operators:
        raise CannotReplay("its operators were not recorded")
    for key in operators:
        values.run(key)
    result = {
        record.site.slot: values.updated(record, runs.mine.load(record))
        for record in runs.mine.records(mine, "output")
    }
    error = largest_error(arguments.outputs(runs.golden, golden), result, runs)
    return SwapResult(error, False, "disk")


_Values = tuple[torch.Tensor, torch.Tensor]  # as recorded, and as computed again


class _ReplayedValues:
    """Mine's tensors, as recorded and as computed from golden's inputs of the module."""

    def __init__(self, calls: Calls, runs: Runs) -> None:
        self._calls, self._runs = calls, runs
        self._known: dict[int, _Values] = {}  # by the id of the record
        self._inputs: list[_Values] = []

    def put(self, number: int | None, recorded: torch.Tensor, golden: torch.Tensor) -> None:
        """Put golden's input of the module in place of mine's; ``number``: its producer's id."""
        if recorded.shape != golden.shape:
            raise CannotReplay("the two runs have inputs of different shapes")
        golden = golden.to(recorded.dtype)
        if number is not None:
            self._known[number] = recorded, golden
        self._inputs.append((recorded, golden))

    def run(self, key: CallKey) -> None:
        """Replay an operator. If none of its inputs changed, its output stays as recorded."""
        side = self._runs.mine
        inputs: dict[str, _Values] = {}
        for record in side.records(key, "input"):
            recorded = side.load(record)
            inputs[record.site.slot] = recorded, self.updated(record, recorded)
        outputs = [(record, side.load(record)) for record in side.records(key, "output")]
        if all(recorded is new for recorded, new in inputs.values()):
            result = {record.site.slot: recorded for record, recorded in outputs}
        else:
            result = Replayed(side, key).run_on(lambda slot: inputs[slot][1])
        for record, recorded in outputs:
            self._known[record.id] = recorded, result[record.site.slot]

    def updated(self, record: Record, recorded: torch.Tensor) -> torch.Tensor:
        """Return the new values of a recorded tensor: the same elements of its producer's output.

        A tensor from outside the module is unchanged.
        """
        producer = record.producer
        while producer is not None and producer not in self._known:
            # the output of a module was made inside it
            giver = self._calls.record_of_mine(producer)
            producer = giver.producer if giver is not None else None
        source = self._known.get(producer) if producer is not None else None
        if source is None:
            equal = (
                values
                for values in self._inputs
                if values[0].shape == recorded.shape and torch.equal(values[0], recorded)
            )
            source = next(equal, None)
        return recorded if source is None else _same_elements(*source, recorded)


def _same_elements(before: torch.Tensor, after: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``after`` that ``view`` takes of ``before``.

    Raises:
        CannotReplay: equal values leave several answers, or ``view`` is not a view of ``before``.
    """
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
        raise CannotReplay("an operator's input is not a part of the storage that it shares")
    return after.reshape(-1)[order[at]].reshape(view.shape)


def _same_order(before: torch.Tensor, after: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Permute the axes of ``after`` as ``view`` permutes those of ``before``.

    Raises CannotReplay.
    """
    permuted: list[torch.Tensor] = []
    if before.numel() == view.numel() and before.dim() <= constants.PERMUTED_AXES:
        for order in itertools.permutations(range(before.dim())):
            if torch.equal(before.permute(order).reshape(view.shape), view):
                permuted.append(after.permute(order).reshape(view.shape))
    if not permuted or not all(torch.equal(permuted[0], other) for other in permuted):
        raise CannotReplay("equal values leave open which elements an operator took")
    return permuted[0]
