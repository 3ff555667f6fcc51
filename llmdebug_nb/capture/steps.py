"""What is a token: numbering the forward calls of a root module.

Shapes can't tell: the last chunk of a prefill may have one row, assisted decoding has several, and
without a cache every call has all. `generate` itself knows (`generation.py`): how long its prompt
is, and how many tokens it prepares each call for. That needs no value from the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from llmdebug_nb.capture import generation
from llmdebug_nb.core import msit_rounds
from llmdebug_nb.core.records import WARMUP, RootCall

_Place = tuple[int, int, str, int | None]  # generation, step, kind, total


@dataclass
class _Generation:
    """One running `generate`: prompt length, the token count announced for the next call, where it stands."""

    number: int
    prompt: int | None
    step: int | None = None
    announced: tuple[int, int | None] | None = (
        None  # (prompt + generated, rows) of the call to come
    )


@dataclass
class _Counter:
    """Where one root stands: its generations so far, and the series of bare calls, if one is under way."""

    name: str
    warmups: int
    generations: int = 0
    loop: int | None = None
    loop_step: int = 0
    ran: set[str] = field(
        default_factory=set
    )  # entries that were called in this step of the series
    generated: bool = False


class StepTracker:
    """Tells generation, step and kind of every root call; listens to `generate` between `start` and `stop`."""

    def __init__(
        self, warmup: int, follow: Callable[[torch.nn.Module], torch.nn.Module | None]
    ) -> None:
        """``follow(model)``: the root that a `generate` of ``model`` concerns, or None."""
        self.calls: list[RootCall] = []
        self.follow = follow
        self._taken = 0
        self._warmup = warmup
        self._counters: dict[int, _Counter] = {}  # by id of the root
        self._running: dict[tuple[int, int], list[_Generation]] = {}  # by thread and id of the root
        self._step: int | None = None  # counted by hand
        self._lock = threading.RLock()

    def add_root(self, root: Any, name: str) -> None:
        self._counters[id(root)] = _Counter(name, self._warmup)

    def start(self) -> None:
        generation.listeners.add(self)

    def stop(self) -> None:
        generation.listeners.remove(self)

    # -- steps counted by hand ------------------------------------------------------------------

    @property
    def manual(self) -> bool:
        return self._step is not None

    def by_hand(self) -> None:
        """From now on, calls stay in one step until `advance`."""
        self._step = self._step or 0

    def advance(self) -> int:
        """Begin the next step and return its number."""
        with self._lock:
            if self._step is None:
                self._step = max((call.step for call in self.calls), default=-1)
            self._step += 1
            return self._step

    def here(self) -> RootCall:
        """Return the last root call of this step, or else a place for what a program records outside of all models."""
        with self._lock:
            last = self.calls[-1] if self.calls else None
            if last is None or (self._step is not None and last.step != self._step):
                last = RootCall(len(self.calls), step=self._step or 0)
                self.calls.append(last)
            return last

    # -- what generate tells ------------------------------------------------------------------

    def enter(self, root: torch.nn.Module, prompt: int | None) -> _Generation:
        with self._lock:
            counter = self._counters[id(root)]
            if not counter.generated and not self.manual:
                counter.generated = True
                self._relabel(counter)  # bare calls before the first generate only warmed up
            if not self.manual:
                counter.loop = None
            begun = _Generation(counter.generations, prompt)
            counter.generations += not self.manual
            self._running.setdefault((threading.get_ident(), id(root)), []).append(begun)
            return begun

    def announce(self, begun: _Generation, total: int, query: int | None) -> None:
        begun.announced = (total, query)

    def leave(self, root: torch.nn.Module) -> None:
        with self._lock:
            key = (threading.get_ident(), id(root))
            self._running[key].pop()
            if not self._running[key]:
                del self._running[key]

    def ends_series(self, root: Any) -> None:
        """The series of bare calls is over: the next one begins another."""
        with self._lock:
            self._counters[id(root)].loop = None

    # -- numbering ----------------------------------------------------------------------------

    def begin(
        self, root: Any, path: str, whole: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RootCall:
        """Number a root call that is about to run. ``path``: what is called, ``whole``: it is the root itself.

        The generation returned counts warm-ups from 0 like all others, so that it never changes; `calls` has
        them below zero as soon as they are known to be warm-ups.
        """
        given = (*(kwargs.get(name) for name in generation.ROWS), *args[:1])
        batch, query = next((sizes for sizes in map(generation.rows, given) if sizes), (None, None))
        with self._lock:
            counter = self._counters[id(root)]
            running = self._running.get((threading.get_ident(), id(root)))
            if self._step is not None:
                place = _by_hand(counter, self._step)
            elif running:
                place = _in_generate(running[-1], query)
            else:
                place = _bare(counter, path, whole, query, kwargs)
            number, step, kind, total = place
            call = RootCall(len(self.calls), number, step, kind, query, total, batch, counter.name)
            warm = call.generation < counter.warmups
            shown = replace(
                call, generation=number - counter.warmups, kind=WARMUP if warm else kind
            )
            self.calls.append(shown)
            return call

    def round_of(self, call: RootCall) -> int:
        """Return the round of a root call that `begin` gave."""
        with self._lock:
            warmups = next((c.warmups for c in self._counters.values() if c.name == call.root), 0)
        return msit_rounds.round_of(call.step, call.kind, call.generation < warmups, warmups > 0)

    def _relabel(self, counter: _Counter) -> None:
        """Turn the bare calls seen so far into warm-ups: only now is it known that they were."""
        shift = counter.generations - counter.warmups
        if shift <= 0:
            return
        counter.warmups = counter.generations
        self._taken = 0
        for i, call in enumerate(self.calls):
            if call.root == counter.name:
                self.calls[i] = replace(call, generation=call.generation - shift, kind=WARMUP)

    def take(self) -> list[RootCall]:
        """Return the calls that are new, or numbered anew, since the last time."""
        with self._lock:
            fresh = self.calls[self._taken :]
            self._taken = len(self.calls)
            return fresh


def _in_generate(now: _Generation, query: int | None) -> _Place:
    announced = now.announced
    if announced is None or (
        announced[1] is not None and query is not None and announced[1] != query
    ):
        return now.number, now.step or 0, "encoder" if now.step is None else "extra", None
    now.announced = None
    total = announced[0]
    if now.prompt is None:
        now.prompt = total
    if now.step is None or total <= now.prompt:
        now.step = 0
        return now.number, 0, "prefill", total
    now.step += 1
    kind = "decode" if query == 1 else "full" if query == total else "verify"
    return now.number, now.step, kind, total


def _by_hand(counter: _Counter, step: int) -> _Place:
    """Place a call in the step that the program says, also inside `generate`."""
    if counter.loop is None or counter.loop < counter.warmups:
        counter.loop = counter.generations
        counter.generations += 1
    return counter.loop, step, "forward", None


def _bare(
    counter: _Counter, path: str, whole: bool, query: int | None, kwargs: Mapping[str, Any]
) -> _Place:
    """Place a call outside `generate`: a new step, unless it is another part of the model in the same one."""
    root = counter.name
    if counter.loop is None or counter.loop < counter.warmups:
        counter.loop, counter.loop_step = counter.generations, 0
        counter.generations += 1
        counter.ran.clear()
    elif (root if whole else path) in counter.ran or root in counter.ran:
        counter.loop_step += 1
        counter.ran.clear()
    counter.ran.add(root if whole else path)
    kind = "forward"
    if query is not None and kwargs.get("use_cache") is not False:
        cached = kwargs.get("past_key_values") is not None and counter.loop_step > 0
        kind = (
            "decode"
            if cached and query == 1
            else "prefill"
            if kwargs.get("use_cache") and not cached
            else "forward"
        )
    return counter.loop, counter.loop_step, kind, None
