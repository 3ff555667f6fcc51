"""The state of one thread: its root call, the calls open in it, and their numbers."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.signatures import Parameters
from llmdebug_nb.core.part_ids import PartIds
from llmdebug_nb.core.paths import ancestors, bounded
from llmdebug_nb.core.records import RootCall

if TYPE_CHECKING:
    from torch.autograd.graph import Node as AutogradNode

# an argument, result or part of one, with its slot: a tensor or anything else
Leaf: TypeAlias = tuple[str, object]


class OpenCall:
    """A call of a module or operator that has not ended yet.

    ``module``: path of the module that is called or that the operator runs in; None outside of
    all modules. ``module_id``: the execution id of that module call.
    ``id``: its own execution id; None in a backward pass that recomputes nothing. ``part_id``: as
    msit counts, if the user asked for such ids and the call has one.
    ``selected``: the filters select it or a module around it. ``recorded``: it is recorded.
    ``recomputed``: a checkpoint runs it a second time, to build the autograd graph.
    ``since``, ``edges``: if gradients are on, the autograd clock when it began, and for each
    input that needs a gradient its slot and its node in the graph.
    ``parameters``: the names of its arguments by position; None if they are unknown.
    ``inputs``: kept where they are needed after the call.
    ``arguments``: positional and by keyword, if they may have to be looked at after the call.
    ``gives``: what a collective writes to.
    ``pending``: role, slot and leaf seen so far, if only overflowing calls are recorded.
    ``noted``: what C knows of a call that it has opened.
    """

    # defaults of the class: a call is made between two operators of the program, as fast as can be
    # (in C, too, without `__init__`: see playing.h)
    inputs: list[Leaf]
    name, phase, module_id = "", "forward", ""
    id: str | None = None
    part_id: str | None = None
    selected = recorded = recomputed = False
    since: int | None = None
    edges: Sequence[tuple[str, tuple[AutogradNode, int]]] = ()
    gives: object = None
    noted: object = None
    parameters: Parameters | None = None
    pending: Sequence[tuple[str, str, object]] = ()
    arguments: tuple[tuple[object, ...], Mapping[str, object]] | None = None

    def __init__(
        self, path: str, op: str, level: str, module: str | None, number: int, root_call: int
    ) -> None:
        self.path, self.op, self.level, self.module = path, op, level, module
        self.number, self.root_call = number, root_call


def innermost(calls: Mapping[str, OpenCall], module: str) -> OpenCall | None:
    """Return the open call of a module or of the nearest one around it. ``calls``: by path."""
    return next((calls[path] for path in (module, *ancestors(module)) if path in calls), None)


class Counts(NamedTuple):
    """The counters of a step: see `_Numbers`, whose own they are."""

    numbers: dict[str, int]
    children: dict[tuple[str, str], int]
    ids: dict[tuple[str, int], str]


class _Numbers:
    """The numbers of the calls of one step: by path, and in the tree of calls.

    A plain object: an attribute of a `threading.local` takes ten times as long to read.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._recomputed: dict[str, int] = {}
        self._children: dict[tuple[str, str], int] = {}  # id of a module call, level -> calls in it
        self.ids: dict[tuple[str, int], str] = {}  # path and number of a call -> its id
        self.part_ids: PartIds | None = None

    def begin_step(self, part_ids: PartIds | None) -> None:
        self._next.clear()
        self._children.clear()
        self.ids.clear()
        self.part_ids = part_ids

    def begin_call(self) -> None:
        """Begin a root call, of the same step or of another one."""
        self._recomputed.clear()

    def counts(self) -> Counts | None:
        """Return the counters; None if calls are also numbered as msit does."""
        return Counts(self._next, self._children, self.ids) if self.part_ids is None else None

    def upcoming(self, path: str) -> int:
        """Return the number that the next call of a path will have."""
        return self._next.get(path, 0)

    def count(self, path: str) -> int:
        """Return the number of the call of a path that begins now, and count it."""
        number = self._next.get(path, 0)
        self._next[path] = number + 1
        return number

    def recomputed(self, path: str) -> int:
        """Return the number of the call that a checkpoint recomputes, beginning with the last."""
        times = self._recomputed.get(path, 0)
        self._recomputed[path] = times + 1
        return max(self._next.get(path, 0) - 1 - times, 0)

    def child(self, parent: str, level: str) -> int:
        """Return how many calls of a level began in a module call, and count one more."""
        key = parent, level
        number = self._children.get(key, 0)
        self._children[key] = number + 1
        return number


class ThreadState(threading.local):
    """The state of the running thread.

    ``entries``: the entry modules it is in, outermost first, each with the frame of its call.
    ``recording``: it runs a root call that is recorded. ``after_recorded``: the last root call was
    recorded and is over. ``root_call``, ``step``: of the current or last root call.
    ``step_key``: the scope in which call numbers count: root, generation and step.
    ``root``: path of its root. ``open_calls``: calls under way, outermost first.
    ``last_output``: of a module inside the root, if only logits are recorded.
    ``generators``: their states when the recorded root call began.
    ``in_scope``: between the first and the last call of the option ``scope``.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[object, FrameType | None]] = []
        self.recording = self.after_recorded = False
        self.root_call = self.step = 0
        self.root = ""
        self.open_calls: list[OpenCall] = []
        self.last_output: tuple[OpenCall, object] | None = None
        self.in_scope = False
        self.generators: dict[str, str] = {}
        self.step_key: tuple[object, ...] = ()
        self._numbers = _Numbers()

    def outermost(self) -> bool:
        """Return whether no root call is running. An interrupted one may still seem open."""
        while self.entries and not pytorch.is_running(self.entries[-1][1]):
            self.entries.pop()
        return not self.entries

    def begin(
        self, call: RootCall, recording: bool, root: str = "", part_ids: PartIds | None = None
    ) -> None:
        """Begin a root call of ``root`` or of a part of it.

        ``part_ids``: numbers the calls of a step as msit does, if that is asked for.
        """
        self.recording, self.after_recorded = recording, False
        self.root_call, self.step, self.root = call.index, call.step, root
        step_key = (call.root, call.generation, call.step)
        if step_key != self.step_key:
            self.step_key = step_key
            self._numbers.begin_step(part_ids)
        self._numbers.begin_call()
        self.open_calls.clear()
        self.last_output = None
        self.in_scope = False

    def end(self) -> None:
        self.after_recorded, self.recording = self.recording, False
        self.open_calls.clear()

    def counts(self) -> Counts | None:
        """Return what calls are numbered with, for who numbers them itself; see `_Numbers`."""
        return self._numbers.counts()

    def count(self, path: str) -> int:
        """Return the number of the call of a path that begins now, and count it."""
        return self._numbers.count(path)

    def upcoming(self, path: str) -> int:
        """Return the number that the next call of a path will have."""
        return self._numbers.upcoming(path)

    def enter(
        self, path: str, op: str, level: str, module: str | None, recomputed: bool
    ) -> OpenCall:
        """Open a call inside of those that are open."""
        numbers, open_calls = self._numbers, self.open_calls
        number = numbers.recomputed(path) if recomputed else numbers.count(path)
        call = OpenCall(path, op, level, module, number, self.root_call)
        parent = open_calls[-1].module_id if open_calls else ""
        if recomputed:
            call.recomputed, call.id = True, numbers.ids.get((path, number))
        else:
            call.id = self.next_id(path, level, parent)
        if call.id is not None:
            numbers.ids[path, number] = call.id
            if numbers.part_ids is not None:
                call.part_id = numbers.part_ids.of(path, call.id)
        call.module_id = call.id or "" if level == "module" else parent
        open_calls.append(call)
        return call

    def of_graph(
        self, path: str, op: str, level: str, outer: OpenCall | None, root_call: int
    ) -> OpenCall:
        """Return a call of a graph, whose nodes run after each other: none is open in the thread.

        ``path``: of the module; an operator runs in it. ``outer``: the call of a module around it.
        """
        place = path if level == "module" else bounded(f"{path}/{op}")
        call = OpenCall(place, op, level, path, self.count(place), root_call)
        home = outer.module_id if outer is not None else ""
        call.id = self.next_id(place, level, home)
        call.module_id = call.id if level == "module" else home
        return call

    def next_id(self, path: str, level: str, parent: str) -> str:
        """Return the execution id of a call that begins in the module call ``parent``.

        ``3_1`` for a module, ``3_1.4`` for an operator, "" for the root. Children count within
        their parent, separately for modules and each level of operators. Further calls of the root
        continue the count.
        """
        if not parent and level == "module" and not self.open_calls and path == self.root:
            return ""
        number = self._numbers.child(parent, level)
        if level != "module":
            return f"{parent}.{number}"
        return f"{parent}_{number}" if parent else str(number)

    def module_id(self) -> str:
        """Return the id of the module call that the thread is in."""
        return self.open_calls[-1].module_id if self.open_calls else ""

    def leave(self, path: str) -> OpenCall | None:
        """Close and return the innermost open call of a path; calls left open in it had raised."""
        open_calls = self.open_calls
        for at in range(len(open_calls) - 1, -1, -1):
            if open_calls[at].path == path:
                call = open_calls[at]
                del open_calls[at:]
                return call
        return None


class SharedCounts:
    """Counts by key, thread-safe: backward passes run in threads of their own."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Hashable, ...], int] = {}
        self._lock = threading.Lock()

    def next(self, *key: Hashable) -> int:
        """Return the count of a key so far, and count one more."""
        with self._lock:
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
            return number
