"""Run golden's module on what mine's code took: the error that mine makes itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.paths import module_name
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.execution import results
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import unit
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.replay.swap import LiveCall

_Load = Callable[[str], torch.Tensor]


def own_error(
    call: ComparedCall, before: Iterable[ComparedCall], row: Difference, runs: Runs
) -> float:
    """Return how far mine's tensor is from what golden's code makes of what mine's code took.

    ``row``: a result of the call, or what its code gives to a module inside of it. ``before``: the
    calls inside of it that come before: they give what they gave in mine.

    Raises:
        CannotReplay: the live module is gone, changed or random, or can't be called alone.
    """
    golden, own = row.pair.golden, row.pair.mine
    if call.golden is None or call.mine is None or golden is None or own is None:
        raise CannotReplay("only one run made this call")
    live = LiveCall(runs.golden, call.golden, runs.golden_module)
    again, rounds = _seen_at(live, golden, live.load), unit([golden.summary.dtype])
    if runs.error(runs.golden.load(golden), again) > constants.OPERATORS_EPSILONS * rounds:
        raise CannotReplay("the model no longer computes the recorded values")
    theirs = _seen_at(live, golden, _of_mine(call.inputs, runs), dict(_results(before, runs)))
    ours = runs.mine.load(own)
    try:
        theirs, ours = (theirs, ours) if row.pair.fit is None else row.pair.fit(theirs, ours)
        return runs.error(theirs, ours)
    except ValueError as error:
        raise CannotReplay(str(error)) from None


def _of_mine(rows: Iterable[Difference], runs: Runs) -> _Load:
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
    live: LiveCall, record: Record, load: _Load, gives: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Make a call again, and return the tensor at the place of a record in it.

    ``gives``: what replaces the results of modules inside, by their paths. Raises CannotReplay.
    """
    found: list[dict[str, torch.Tensor]] = []
    place, path = record.site, live.key.path

    def note(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        slots = [*results(args), *results({"kwargs": kwargs})]
        found.append({slot: tensor.detach().cpu() for slot, tensor in slots})

    def look(module: torch.nn.Module) -> None:
        def part(inner: str) -> torch.nn.Module:
            return module.get_submodule(module_name(inner[len(path) :].lstrip(".")))

        for inner, tensor in (gives or {}).items():
            part(inner).register_forward_hook(partial(_instead, tensor))
        if place.role == "input":
            part(place.path).register_forward_pre_hook(note, with_kwargs=True)

    result = live.results(load, look=look)
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
