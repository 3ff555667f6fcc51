"""The views on the way from one recorded tensor to the next: transposes, splits, slices.

A view makes no new values, so it is no record. It is noted under the place of its result in memory,
and a record that lies at that place gets all views since the record that it was made of. Places are
compared, not tensors: PyTorch may wrap one tensor twice. No tensor is held.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.tape.native import AnyTensor, Seen, place_of
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.records import View

_LONGEST = 80  # characters of arguments: a view has a few numbers


class _Step:
    """A place that a view led to. ``recorded``: a record with its values tells the way to it.

    C makes them, too, without `__init__`: see playing.h.
    """

    __slots__ = ("before", "recorded", "view")

    def __init__(self, before: _Step | None, view: View | None) -> None:
        self.before, self.view, self.recorded = before, view, view is None

    def way_back(self) -> Iterator[_Step]:
        """Yield this step and those before it, to the first one that is recorded."""
        step: _Step | None = self
        while step is not None:
            yield step
            step = None if step.recorded else step.before


class ViewChains:
    """The views of a root call, by storage number and place. Not thread-safe.

    ``storages``: the storages that have views; their numbers are reserved until `clear`.
    ``new``: numbered chains, as JSON, that are not in the dump yet.
    """

    def __init__(self) -> None:
        self.storages: dict[int, dict[Hashable, _Step]] = {}
        self.new: list[tuple[int, str]] = []
        self._reserved: list[int] = []
        self._seen: list[Seen] = []  # they reserve the numbers of their storages
        self._numbers: dict[tuple[View, ...], int] = {}

    def add(self, view: View, base: AnyTensor, result: AnyTensor) -> None:
        """Note that ``view`` made ``result`` of ``base``, which has the same storage.

        The tape has reserved the number of a storage that it saw a view of.
        """
        if isinstance(base, torch.Tensor) and isinstance(result, torch.Tensor):
            self._add_tensor(view, base, result)
        elif not isinstance(base, torch.Tensor) and not isinstance(result, torch.Tensor):
            self._add_seen(view, base, result)

    def _add_tensor(self, view: View, base: torch.Tensor, result: torch.Tensor) -> None:
        try:
            base, result = pytorch.plain(base), pytorch.plain(result)
            old, new = place_of(base), place_of(result)
            storage = result.untyped_storage()
            number = pytorch.storage_number(storage)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError):
            return  # nested or sparse: it has no such place
        if old == new:
            return  # expanded to the size it had, say
        if number not in self.storages:
            self._reserved.append(pytorch.reserve_storage_number(storage))
        self._add(view, number, old, new)

    def _add_seen(self, view: View, base: Seen, result: Seen) -> None:
        old, new = base.place(), result.place()
        if old != new:
            if result.storage not in self.storages:
                self._seen.append(result)
            self._add(view, result.storage, old, new)

    def _add(self, view: View, storage: int, old: Hashable, new: Hashable) -> None:
        steps = self.storages.setdefault(storage, {})
        before = steps.get(old)
        if before is None:
            before = steps[old] = _Step(None, None)
        known = steps.get(new)
        if known is None or known not in before.way_back():  # else it is back where it was
            steps[new] = _Step(before, view)

    def in_c(self) -> tuple[object, ...]:
        """Return what C needs to do the same with what the tape saw, see playing.h."""
        return self.storages, self._seen, self._numbers, self._number, _Step

    def number_of(self, tensor: torch.Tensor, storage: int, is_output: bool) -> int | None:
        """Return the number of the chain that a tensor has in ``storages``; None if it has none.

        The chain of what is made of an output begins anew.
        """
        return self._number_at(place_of(tensor), storage, is_output)

    def number_of_seen(self, seen: Seen, is_output: bool) -> int | None:
        """Return the same of a tensor that the tape saw."""
        if seen.storage not in self.storages:
            return None
        return self._number_at(seen.place(), seen.storage, is_output)

    def _number_at(self, place: Hashable, storage: int, is_output: bool) -> int | None:
        step = self.storages[storage].get(place)
        if step is None:
            return None
        way = [each.view for each in step.way_back() if not each.recorded]
        views = [view for view in reversed(way) if view is not None]
        step.recorded = step.recorded or is_output
        return self._number(tuple(views)) if views else None

    def _number(self, chain: tuple[View, ...]) -> int:
        number = self._numbers.get(chain)
        if number is None:
            number = self._numbers[chain] = len(self._numbers)
            self.new.append((number, json.dumps(chain)))
        return number

    def clear(self) -> None:
        """Forget all views, but not the numbers of chains."""
        reserved, self._reserved = self._reserved, []
        self.storages.clear()
        self._seen.clear()
        pytorch.release_storage_numbers(reserved)


def arguments_text(args: tuple[object, ...], kwargs: Mapping[str, object], part: int | None) -> str:
    """Return the arguments that are not tensors: ``1, 2``. ``part``: n-th of several results."""
    values = [value for value in args if not isinstance(value, torch.Tensor)]
    named = {k: value for k, value in kwargs.items() if not isinstance(value, torch.Tensor)}
    if len(values) == 1 and isinstance(values[0], (tuple, list)) and not named:
        values = list(values[0])  # of sizes, axes or an index
    texts = [*map(_text, values), *(f"{name}={_text(value)}" for name, value in named.items())]
    text = ", ".join(texts)[:_LONGEST]
    return text if part is None else f"{text} [{part}]".lstrip()


def _text(value: object) -> str:
    if isinstance(value, slice):
        ends = [value.start, value.stop, *([] if value.step is None else [value.step])]
        return ":".join("" if end is None else _text(end) for end in ends)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if value is Ellipsis:
        return "..."
    if isinstance(value, str):
        return masked(value)
    return "tensor" if isinstance(value, torch.Tensor) else str(value)
