"""Where one thread stands: the root call it is in, the calls open in it, and their numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.core.records import RootCall


class OpenCall:
    """A call under way, of a module or of an operator.

    ``module``: path of the module that it is, or runs in; None outside of all modules.
    ``id``: its execution id, None in a backward pass that computes nothing again. ``home``: that of the module call that it is, or runs in.
    ``inherited``: the filters ask for it or for a module around it. ``kept``: it is recorded.
    ``again``: a checkpoint computes it once more. ``since``/``edges``: while gradients are on, the autograd
    clock when it began, and for each input that needs a gradient its slot and place in the graph.
    ``given``: its inputs by slot, where somebody halts the program, or looks at them when the call is over. ``around``: what `CallStacks` remembers of the stack outside of it. ``held``: what was seen of it so far, where that is only recorded once it is known to overflow.
    """

    __slots__ = (
        "again", "around", "edges", "given", "held", "home", "id", "inherited", "kept", "level", "module", "name", "number", "op", "path", "phase",
        "root_call", "since",
    )  # fmt: skip

    given: list[tuple[str, Any]]

    def __init__(
        self, path: str, op: str, level: str, module: str | None, number: int, root_call: int
    ) -> None:
        self.path, self.op, self.level, self.module = path, op, level, module
        self.number, self.root_call = number, root_call
        self.name, self.phase = "", "forward"
        self.id: str | None = None
        self.home = ""
        self.inherited = self.kept = self.again = False
        self.since: int | None = None
        self.edges: Sequence[tuple[str, Any]] = ()
        self.around: dict[Any, Any] | None = None
        self.held: Sequence[tuple[str, str, Any]] = ()

    def outside(self) -> dict[Any, Any]:
        """Return ``around``, to be filled."""
        if self.around is None:
            self.around = {}
        return self.around


class ThreadState(threading.local):
    """The state of the running thread.

    ``inside``: the entry modules it is in, outermost first, each with the frame of its call.
    ``on``: it runs a root call that is recorded. ``after``: the last root call was, and is over.
    ``root_call``, ``step``: of the current or last root call. ``root``: path of its root. ``open``: calls under way, outermost first.
    ``pushed``/``popped``: modes were put on, or taken off, its stack for the root call.
    ``last``: the last output seen of a module inside the root, where only logits are asked for.
    """

    def __init__(self) -> None:
        self.inside: list[tuple[Any, Any]] = []
        self.on = self.after = False
        self.pushed: list[Any] = []
        self.popped: list[Any] = []
        self.root_call = self.step = 0
        self.root = ""
        self.open: list[OpenCall] = []
        self.last: tuple[OpenCall, Any] | None = None
        self.scoped = False  # between the first and the last call of the scope that was asked for
        self._within: Any = None  # root, generation and step: what numbers count within
        self._next: dict[str, int] = {}
        self._again: dict[str, int] = {}
        self._below: dict[
            tuple[str, str], int
        ] = {}  # id of a module call, level -> how many calls there were in it
        self._ids: dict[tuple[str, int], str] = {}  # path and number of a call -> its id

    @property
    def within(self) -> tuple[Any, ...]:
        """What calls are numbered within: root, generation and step."""
        return self._within or ()

    def outermost(self) -> bool:
        """Tell whether no root call is running. An interrupt may have left one without an end."""
        while self.inside and not pytorch.is_running(self.inside[-1][1]):
            self.inside.pop()
        return not self.inside

    def begin(self, call: RootCall, on: bool, root: str = "") -> None:
        """A root call begins: of ``root``, or of a part of it."""
        self.on, self.after, self.root_call, self.step, self.root = (
            on,
            False,
            call.index,
            call.step,
            root,
        )
        within = (call.root, call.generation, call.step)
        if within != self._within:
            self._within = within
            self._next.clear()
            self._below.clear()
            self._ids.clear()
        self._again.clear()
        self.open.clear()
        self.last = None
        self.scoped = False

    def end(self) -> None:
        self.after, self.on = self.on, False
        self.open.clear()

    def count(self, path: str) -> int:
        """Return which call of a path begins now, and count it."""
        number = self._next.get(path, 0)
        self._next[path] = number + 1
        return number

    def number_again(self, name: str) -> int:
        """Return which call of ``name`` a checkpoint recomputes now: it goes back from the last one."""
        again = self._again.get(name, 0)
        self._again[name] = again + 1
        return max(self._next.get(name, 0) - 1 - again, 0)

    def enter(self, path: str, op: str, level: str, module: str | None, again: bool) -> OpenCall:
        number = self.number_again(path) if again else self.count(path)
        call = OpenCall(path, op, level, module, number, self.root_call)
        call.again = again
        home = self.open[-1].home if self.open else ""
        call.id = self._ids.get((path, number)) if again else self.next_id(path, level, home)
        if call.id is not None:
            self._ids[path, number] = call.id
        call.home = call.id or "" if level == "module" else home
        self.open.append(call)
        return call

    def next_id(self, path: str, level: str, home: str) -> str:
        """Return the execution id of a call that begins in the module call ``home``: ``3_1``, of an operator ``3_1.4``; "" of the root.

        Calls count within the one around them, operators of each level for themselves. Further calls of the root go on counting.
        """
        if level == "module" and not self.open and path == self.root:
            return ""
        number = self._below.get((home, level), 0)
        self._below[home, level] = number + 1
        if level != "module":
            return f"{home}.{number}"
        return f"{home}_{number}" if home else str(number)

    def home(self) -> str:
        """Return the id of the module call that the thread is in."""
        return self.open[-1].home if self.open else ""

    def leave(self, path: str) -> OpenCall | None:
        """Return the innermost open call of ``path``, which ends; calls left open inside it had raised."""
        for at in range(len(self.open) - 1, -1, -1):
            if self.open[at].path == path:
                call = self.open[at]
                del self.open[at:]
                return call
        return None
