"""Numbers the root calls: the generation, step and kind of each one.

Shapes are not enough: the last chunk of a prefill may have one row, assisted decoding has several,
and without a cache every call has all rows. So `generate` is watched (`generation.py`): it knows
the length of its prompt, and for how many tokens it prepares each call. That needs no value from
the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from llmdebug_nb.capture import generation
from llmdebug_nb.capture.generation import RunningGenerate
from llmdebug_nb.capture.signatures import Signatures
from llmdebug_nb.core import msit_rounds
from llmdebug_nb.core.records import WARMUP, RootCall

_Place = tuple[int, int, str, int | None]  # generation, step, kind, total
_CACHE = "past_key_values"


class Numbering(Protocol):
    """Numbers the calls of a root in our place: an engine knows its steps."""

    def numbered(
        self, index: int, whole: bool, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> RootCall: ...


@dataclass
class _RootSteps:
    """The count of one root: its generations, and the current series of bare calls, if any.

    ``called``: entry modules that were called in this step of the series.
    """

    name: str
    warmups: int
    generations: int = 0
    series: int | None = None
    series_step: int = 0
    called: set[str] = field(default_factory=set)
    generated: bool = False


class StepTracker:
    """Finds generation, step and kind of every root call.

    Listens to `generate` between `start` and `stop`. ``follow(model)``: the root that a `generate`
    of that model concerns, or None.
    """

    def __init__(self, warmup: int) -> None:
        self.calls: list[RootCall] = []
        self.follow: Callable[[torch.nn.Module], torch.nn.Module | None] = lambda model: None
        self._taken = 0
        self._warmup = warmup
        self._roots: dict[int, _RootSteps] = {}  # by id of the root
        self._numbered: dict[int, Numbering] = {}  # likewise
        # by thread and id of the root
        self._running: dict[tuple[int, int], list[RunningGenerate]] = {}
        self._manual_step: int | None = None
        self._signatures = Signatures()
        self._lock = threading.RLock()

    def add_root(self, root: object, name: str) -> None:
        self._roots[id(root)] = _RootSteps(name, self._warmup)

    def numbered_by(self, root: object, numbering: Numbering) -> None:
        """Let the calls of a root be numbered by what runs it."""
        self._numbered[id(root)] = numbering

    def start(self, follow: Callable[[torch.nn.Module], torch.nn.Module | None]) -> None:
        self.follow = follow
        generation.listeners.add(self)

    def stop(self) -> None:
        generation.listeners.remove(self)

    # -- steps counted by hand ----------------------------------------------------------------

    @property
    def manual(self) -> bool:
        return self._manual_step is not None

    def count_by_hand(self) -> None:
        """Stay in one step from now on, until `advance`."""
        self._manual_step = self._manual_step or 0

    def begin_at(self, generation: int, step: int) -> None:
        """Count by hand from this generation and step on, for the roots that are there by now."""
        self._manual_step = step
        for root in self._roots.values():
            root.generations = generation

    def advance(self) -> int:
        """Begin the next step and return its number."""
        with self._lock:
            if self._manual_step is None:
                self._manual_step = max((call.step for call in self.calls), default=-1)
            self._manual_step += 1
            return self._manual_step

    def current(self) -> RootCall:
        """Return the last root call of this step; if there is none, add an empty one."""
        with self._lock:
            last = self.calls[-1] if self.calls else None
            if last is None or (self._manual_step is not None and last.step != self._manual_step):
                last = RootCall(len(self.calls), step=self._manual_step or 0)
                self.calls.append(last)
            return last

    # -- the listener of generate ---------------------------------------------------------------

    def enter(self, root: torch.nn.Module, prompt: int | None) -> RunningGenerate:
        with self._lock:
            steps = self._roots[id(root)]
            if not steps.generated and not self.manual:
                steps.generated = True
                self._relabel(steps)  # bare calls before the first generate were warm-ups
            if not self.manual:
                steps.series = None
            generate = RunningGenerate(steps.generations, prompt)
            steps.generations += not self.manual
            self._running.setdefault((threading.get_ident(), id(root)), []).append(generate)
            return generate

    def announce(self, generate: RunningGenerate, total: int, query: int | None) -> None:
        generate.announced = (total, query)

    def leave(self, root: torch.nn.Module) -> None:
        with self._lock:
            key = (threading.get_ident(), id(root))
            self._running[key].pop()
            if not self._running[key]:
                del self._running[key]

    def end_series(self, root: object) -> None:
        """End the series of bare calls of a root: the next call begins another."""
        with self._lock:
            self._roots[id(root)].series = None

    # -- numbering ------------------------------------------------------------------------------

    def begin(
        self,
        root: object,
        path: str,
        whole: bool,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> RootCall:
        """Number a root call that is about to run.

        ``path``: of the called module. ``whole``: it is the root itself. The generation of the
        result counts warm-ups from 0, so that it never changes; in `calls` they are below zero as
        soon as they are known to be warm-ups.
        """
        inputs = (*(kwargs.get(name) for name in generation.TOKEN_ARGUMENTS), *args[:1])
        sizes = (generation.batch_and_tokens(value) for value in inputs)
        batch, query = next((size for size in sizes if size), (None, None))
        with self._lock:
            steps = self._roots[id(root)]
            numbering = self._numbered.get(id(root))
            if numbering is not None:
                call = numbering.numbered(len(self.calls), whole, args, kwargs)
                step = call.step if self._manual_step is None else self._manual_step
                self.calls.append(replace(call, step=step, root=steps.name))
                return self.calls[-1]
            running = self._running.get((threading.get_ident(), id(root)))
            if self._manual_step is not None:
                place = _place_by_hand(steps, self._manual_step)
            elif running:
                place = _place_in_generate(running[-1], query)
            else:
                place = _place_in_series(steps, steps.name if whole else path, query, kwargs)
                if whole and self._begins_text(root, args, kwargs):
                    place = (*place[:3], query)
            number, step, kind, total = place
            call = RootCall(len(self.calls), number, step, kind, query, total, batch, steps.name)
            warm = call.generation < steps.warmups
            kind = WARMUP if warm else kind
            self.calls.append(replace(call, generation=number - steps.warmups, kind=kind))
            return call

    def _begins_text(
        self, root: object, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> bool:
        """Tell whether a root that takes a cache gets none."""
        names = self._signatures.of(root) if isinstance(root, torch.nn.Module) else tuple(kwargs)
        if _CACHE not in names:
            return False
        by_position = args[names.index(_CACHE) :][:1] or (None,)
        return kwargs.get(_CACHE, by_position[0]) is None

    def round_of(self, call: RootCall) -> int:
        """Return msit's round of a root call that `begin` returned."""
        with self._lock:
            roots = self._roots.values()
            warmups = next((root.warmups for root in roots if root.name == call.root), 0)
        return msit_rounds.round_of(call.step, call.kind, call.generation < warmups, warmups > 0)

    def _relabel(self, steps: _RootSteps) -> None:
        """Turn the bare calls seen so far into warm-ups, as a `generate` follows them."""
        shift = steps.generations - steps.warmups
        if shift <= 0:
            return
        steps.warmups = steps.generations
        self._taken = 0
        for i, call in enumerate(self.calls):
            if call.root == steps.name:
                self.calls[i] = replace(call, generation=call.generation - shift, kind=WARMUP)

    def take(self) -> list[RootCall]:
        """Return the calls that are new, or numbered anew, since the last `take`."""
        with self._lock:
            fresh = self.calls[self._taken :]
            self._taken = len(self.calls)
            return fresh

    def take_again(self) -> None:
        """Let the next `take` return all calls."""
        self._taken = 0


def _place_in_generate(generate: RunningGenerate, query: int | None) -> _Place:
    announced = generate.announced
    if announced is None or (
        announced[1] is not None and query is not None and announced[1] != query
    ):
        kind = "encoder" if generate.step is None else "extra"
        return generate.number, generate.step or 0, kind, None
    generate.announced = None
    total = announced[0]
    if generate.prompt is None:
        generate.prompt = total
    if generate.step is None or total <= generate.prompt:
        generate.step = 0
        return generate.number, 0, "prefill", total
    generate.step += 1
    kind = "decode" if query == 1 else "full" if query == total else "verify"
    return generate.number, generate.step, kind, total


def _place_by_hand(steps: _RootSteps, step: int) -> _Place:
    """Place a call in the step that the program chose, also inside `generate`."""
    if steps.series is None or steps.series < steps.warmups:
        steps.series = steps.generations
        steps.generations += 1
    return steps.series, step, "forward", None


def _place_in_series(
    steps: _RootSteps, called: str, query: int | None, kwargs: Mapping[str, object]
) -> _Place:
    """Place a call outside `generate`: a new step, or another part of the model in the same one.

    ``called``: name of the root, or path of the part of it. A step ends where one of them is
    called again: a program may embed before it calls the root, or compute logits behind it.
    """
    if steps.series is None or steps.series < steps.warmups:
        steps.series, steps.series_step = steps.generations, 0
        steps.generations += 1
        steps.called.clear()
    elif called in steps.called:
        steps.series_step += 1
        steps.called.clear()
    steps.called.add(called)
    kind = "forward"
    if query is not None and kwargs.get("use_cache") is not False:
        cached = kwargs.get(_CACHE) is not None and steps.series_step > 0
        if cached:
            kind = "decode" if query == 1 else "forward"
        elif kwargs.get("use_cache"):
            kind = "prefill"
    return steps.series, steps.series_step, kind, None
