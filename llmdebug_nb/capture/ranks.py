"""What a recording notes of the ranks beside its own: groups, collectives, reduced gradients.

Nothing here communicates. A collective that the program calls is a row like an operator's, at every
level. Behind a backward pass, the gradients of parameters are those that all ranks share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.compat import pytorch, torch_distributed
from llmdebug_nb.capture.context import Context
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.operators import collectives
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.kernels.raw import captures_graph
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.placement import ACCUMULATED, COLLECTIVE, REDUCED

NOT_WAITED = "nobody waited for the result of an asynchronous collective while it was recorded"

Begin = Callable[[str], OpenCall | None]  # of the slot of a gradient


class CallRecorder(Protocol):
    """Records calls and gradients: the observer of a session."""

    @property
    def guarded(self) -> Guarded: ...
    @property
    def player(self) -> Player | None: ...
    def stack_here(self) -> int | None: ...
    def record_operator(self, call: OpenCall, stack: int | None) -> None: ...
    def begin_call(self, call: OpenCall, inputs: Iterable[Leaf]) -> None: ...
    def end_module(self, call: OpenCall, output: object) -> None: ...
    def record_gradient(
        self, call: OpenCall, role: str, slot: str, gradient: torch.Tensor
    ) -> None: ...


class Ranks:
    """Follows what concerns other ranks, for one recording. ``guarded``: see `Guard`."""

    def __init__(
        self, context: Context, calls: CallRecorder, recorder: Recorder, options: DumpOptions,
        operators: bool,
    ) -> None:  # fmt: skip
        """``operators``: operators of PyTorch may be observed.

        What only checks looks at collectives as functions of level api, and at nothing else here.
        """
        self.guarded = calls.guarded
        self._context, self._calls, self._recorder = context, calls, recorder
        self._keeps = isinstance(recorder, Recorder)
        self._follows = operators and (self._keeps or "api" in options.operator_levels)
        self._wanted = OperatorFilter(options.apis)
        self._groups = 0  # how many were noted
        self._several = False  # ranks run together
        # by id of a parameter: how to begin the record of its gradient, its name, and itself
        self._parameters: dict[int, tuple[Begin, str, torch.Tensor]] = {}
        # the gradients before the backward pass, by the id of their parameter; those that are zero
        self._had: dict[int, tuple[int, int | None]] = {}
        self._zero: set[int] = set()
        self._held = False  # the last pass left none: FSDP2 may hold them back for the next one
        # by the Work of an asynchronous collective that nobody waited for yet; and their number
        self._running: WeakKeyDictionary[object, tuple[OpenCall, object]] = WeakKeyDictionary()
        self._unwaited = 0
        self._messages: Counter[tuple[object, ...]] = Counter()  # by both ends, tag and direction

    def start(self) -> None:
        if self._follows:
            collectives.listeners.add(self)

    def stop(self) -> None:
        collectives.listeners.remove(self)
        self._parameters.clear()
        self._running.clear()
        if self._keeps and self._unwaited:
            self._recorder.values.lost[NOT_WAITED] += self._unwaited
        self._unwaited = 0

    def look(self) -> None:
        """Note the groups of ranks, if there are more by now."""
        count = torch_distributed.group_count()
        if count == self._groups or not self._keeps:
            return
        self._groups = count
        world = torch_distributed.world()
        if world is not None:
            self._several = world.size > 1
            self._recorder.sink.note({"world": world._asdict()})

    # -- collectives ----------------------------------------------------------------------------

    def begin_collective(
        self, name: str, function: Callable[..., object], args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> OpenCall | None:  # fmt: skip
        """Open the call of a collective; return None if it is not recorded.

        Behind a recorded root call, what a backward pass or the program itself sends counts as
        part of the backward phase.
        """
        op, context, thread = f"Distributed.{name}", self._context, self._context.thread
        number = self._number(name, args, kwargs)
        latest = context.latest
        if context.paused or latest is None or op not in self._wanted:
            return None
        within = thread.recording and not pytorch.in_backward()
        parent = thread.open_calls[-1] if within and thread.open_calls else None
        if not context.selects_inside(parent):
            return None
        seen = torch_distributed.collective(name, function, args, kwargs)
        if parent is not None:
            path = f"{parent.module or ''}/{op}"
            call = thread.enter(path, op, "api", parent.module, False)
        else:
            path = f"/{op}"
            call = OpenCall(path, op, "api", None, context.counts.next(path, latest), latest)
            call.phase = "backward"
        call.selected, call.gives = True, seen.gives
        call.recorded = context.names.selects(call)
        if call.recorded:
            if not self._keeps:
                call.arguments = args, kwargs
            elif context.wants_phase(call):
                stack = self._calls.stack_here() if call.phase == "forward" else None
                self._calls.record_operator(call, stack)
                self._recorder.record_texts(call, COLLECTIVE, [*seen.facts, *number])
            self._calls.begin_call(call, leaves(seen.takes))
        return call

    def _number(
        self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> list[tuple[str, str]]:
        """Number a message among those between two ranks, whether they are recorded or not."""
        channel = torch_distributed.channel(name, args, kwargs)
        if channel is None:
            return []
        self._messages[channel] += 1
        return [("number", str(self._messages[channel]))]

    def end_collective(self, call: OpenCall, result: object) -> None:
        """End the call of a collective; that of an asynchronous one, when it is waited for."""
        self.leave_collective(call)
        gives, call.gives = call.gives, None
        if gives is None or not leaves(gives):
            self._calls.end_module(call, result if gives is None else gives)
        elif result is None and call.op in torch_distributed.RECEIVES:
            self._unwaited += 1  # one of a batch of NCCL, whose Work is that of the batch
        elif result is None:
            self._calls.end_module(call, gives)
        elif call.recorded:
            self._running[result] = call, gives
            self._unwaited += 1

    def end_wait(self, work: object) -> None:
        """Record what an asynchronous collective gave: the program waited for it just now."""
        self.forget_versions()
        found = self._running.pop(work, None)
        if found is not None:
            self._unwaited -= 1
            self._calls.end_module(*found)

    def leave_collective(self, call: OpenCall) -> None:
        """Close the call of a collective, also after an error."""
        if call.phase == "forward":
            self._context.thread.leave(call.path)

    def forget_versions(self) -> None:
        """Recognise no tensor of a device any more: torch counts no change by a collective."""
        if self._calls.player is not None:
            self._calls.player.tape.forget()
        if self._keeps:
            self._recorder.devices.forget()

    # -- gradients --------------------------------------------------------------------------------

    def watch(self, begin: Begin, name: str, parameter: torch.Tensor) -> None:
        """Record the gradient of a parameter behind the backward passes, as all ranks share it."""
        if self._several and parameter.requires_grad and parameter.is_leaf:
            self._parameters.setdefault(id(parameter), (begin, name, parameter))

    def begin_backward(self) -> None:
        """Note which gradients are there already: to those, a backward pass only adds."""
        if not pytorch.in_backward():
            self._had = {
                key: _state(each[2].grad)
                for key, each in self._parameters.items()
                if each[2].grad is not None
            }
            self._zero = {key for key in self._had if _is_zero(self._parameters[key][2].grad)}

    def end_backward(self) -> None:
        held, self._held = self._held, True
        for key, (begin, name, parameter) in self._parameters.items():
            gradient = parameter.grad
            self._held = self._held and gradient is None
            if gradient is None or self._had.get(key) == _state(gradient):
                continue
            added = held or (key in self._had and key not in self._zero)
            slot = f"{name}{ACCUMULATED if added else REDUCED}"
            call = begin(slot)
            if call is not None:
                self._calls.record_gradient(call, "grad", slot, gradient)


def _is_zero(gradient: torch.Tensor | None) -> bool:
    """Tell whether a program has filled a gradient with zeros, in place of taking it away."""
    if gradient is None or captures_graph():  # whose values are not there yet
        return False
    part, _ = torch_distributed.local(gradient)
    if part.layout is not torch.strided or part.is_meta or not part.numel():
        return False
    first = part[(0,) * part.dim()]  # most gradients are known by it
    return not bool(first) and not bool(part.any())


def _state(gradient: torch.Tensor) -> tuple[int, int | None]:
    """Return what changes with each write to a gradient: where it lies, and its version."""
    part, _ = torch_distributed.local(gradient)
    where = part.data_ptr() if part.layout is torch.strided else id(part)
    return where, pytorch.version_of(part)
