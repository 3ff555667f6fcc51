"""From a call that was seen to records: which calls are kept, what of them, and what belongs together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.execution_ids import WantedIds
from llmdebug_nb.capture.hooks.gradients import Gradients
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.capture.operators.kinds import Operator, operator_name
from llmdebug_nb.capture.operators.modes import OperatorModes
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.selection import begins
from llmdebug_nb.capture.timing.profiler import Profile
from llmdebug_nb.capture.walk import call_inputs, leaves, operator_inputs
from llmdebug_nb.core.kernels.overflow import overflows
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall

_NAMES = 10_000  # of calls, remembered to explain a filter that matched none


class Host(Protocol):
    """What an observer needs of its session."""

    thread: ThreadState
    recorder: Recorder
    profile: Profile | None

    def guarded(self, work: Any, *args: Any) -> Any: ...
    def pause(self) -> None: ...


class Observer:
    """Observes the calls of one session.

    ``unpaired``: operators of backward passes left out, as they belong to no forward operator that was seen.
    ``weighed``: all modules have been observed once. ``backward``: gradients are asked for. ``deaf``: but not now. ``seen``: full names of calls, where they are filtered by. ``ids``: which calls are asked for by id.
    ``see(call, role, found)``: records what a call was given or gave. ``halt(call, output)``: is told of each call that was recorded, when it has ended, and may keep the program waiting.
    """

    def __init__(
        self, session: Host, options: DumpOptions, given: bool, watches: bool = True
    ) -> None:
        """``given``: only certain models are recorded. ``watches``: operators of PyTorch are. Raises EmptyDumpError for an operator that does not exist."""
        self.backward = "backward" in options.phases
        self.paused = self.weighed = False
        self.seen: set[str] = set()
        self.on_call_end: Callable[[OpenCall, list[tuple[str, Any]]], None] | None = None
        self._session, self._options = session, options
        self.thread, self.guarded, self._profile = session.thread, session.guarded, session.profile
        self._roles = options.roles
        self._forward = "forward" in options.phases
        self._modules = "module" in options.mode and not options.logits
        self._filtered = bool(options.layers or options.types)
        self._opname = options.opname
        self._before = options.time != 1  # inputs are looked at before the call
        self._after = {1: "input", 2: "after"}.get(
            options.time
        )  # role of inputs as the call has left them
        self.select_ids(options.ids, options.children)
        operators = tuple(level for level in options.mode if level != "module")
        self.record = self._hold if options.overflow is not None else session.recorder.record
        self._levels = (
            OperatorModes(self, operators, options.apis) if operators and watches else None
        )
        self._given = given
        self._chosen: set[str] = set()  # paths of calls whose full name is asked for, in this step
        self.unpaired = 0
        self._gradients = Gradients(self._roles, session.guarded, self._gradient)
        self._sources = CallStacks(session.recorder.stack_number) if options.sources else None
        self._latest: int | None = None  # the root call that backward passes belong to
        self._since = 0  # the autograd clock when that began
        self._forwards: dict[
            int, OpenCall
        ] = {}  # sequence number of an autograd node -> the operator that made it
        self._spent = False  # a backward pass has used these
        self._counts: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()
        self._overflowing = 0
        self._resting = False

    # -- life ---------------------------------------------------------------------------------

    def select_ids(self, ids: tuple[str, ...], children: bool) -> None:
        """Only calls with these ids are asked for from now on (none: all), with ``children`` what lies below them too."""
        self.ids = WantedIds(ids, children)
        self._by_name = bool(self._options.contains or self._options.scope or ids)

    def start(self) -> None:
        if self._levels:
            self._levels.open()
            self._levels.push()

    def stop(self) -> None:
        self._resting = True
        self._gradients.off()
        self._forwards.clear()
        if self._levels:
            self._levels.pop()
            self._levels.close()

    def rest(self) -> None:
        """No further step is asked for: what still watches between root calls goes."""
        self._resting = True
        if self._levels:
            self._levels.pop()

    def root_begins(self, on: bool) -> None:
        here = self.thread
        self._latest = here.root_call if on else None
        self._since = pytorch.autograd_clock()
        if self._spent:
            self._forwards.clear()
            self._spent = False
        here.pushed, here.popped = [], []
        if self._levels and on:
            here.pushed = self._levels.push()
        elif self._levels:
            here.popped = self._levels.pop()

    def root_ends(self) -> None:
        here = self.thread
        if here.on and here.last is not None:
            call, output = here.last
            here.last = None
            self.record(call, "output", leaves(output))
        if self._levels and here.pushed:
            self._levels.pop(here.pushed)
        elif self._levels and here.popped and not self._resting:
            self._levels.push()

    def listening(self) -> bool:
        """Tell whether operators count now: in a recorded root call and its backward pass, and for the loss between."""
        if pytorch.in_backward():
            return self._latest is not None
        here = self.thread
        return here.on or (here.after and torch.is_grad_enabled())

    # -- modules ------------------------------------------------------------------------------

    def begin_module(
        self, path: str, op: str, kept: bool, args: Any, kwargs: Any, again: bool
    ) -> None:
        """A module is called. ``again``: by a checkpoint, only for the sake of the graph."""
        here = self.thread
        above = here.open[-1] if here.open else None
        call = here.enter(path, op, "module", path, again)
        if not again:
            self._session.recorder.record_call(call)
        if self._profile is not None:
            self._profile.begins(call)
        call.inherited = kept or (above is not None and above.inherited)
        call.kept = kept and self._modules and self.asks_for(call)
        if call.kept:
            self.begin_call(call, call_inputs(args, kwargs))

    def end_module(self, call: OpenCall, output: Any) -> None:
        """A call has ended that `module_begins` or `operator_begins` gave, and `ThreadState.leave` took."""
        if self._profile is not None:
            self._profile.ends(call)
        if (
            self._options.logits
            and self.thread.open
            and any(isinstance(x, torch.Tensor) for _, x in leaves(output))
        ):
            self.thread.last = call, output
        if not call.kept:
            return
        if call.since is None and not self._forward:
            return
        self.end_call(call, leaves(output))

    def end_call(self, call: OpenCall, found: list[tuple[str, Any]]) -> None:
        """A call that is kept, or was until now, has ended. ``found``: what it gave, by slot."""
        if not call.kept:
            return
        if call.since is not None:
            self._gradients.end(call, found)
        if not call.again and self._looks(call):
            if self._after and "input" in self._roles:
                self.record(call, self._after, call.given)
            if "output" in self._roles:
                self.record(call, "output", found)
        if self._after and self.on_call_end is None:
            del call.given
        self.record_if_overflowing(call)
        if self._options.scope and _is(call.name, self._options.scope[1]):
            self.thread.scoped = False
        if self.on_call_end is not None and call.phase == "forward" and not call.again:
            self.on_call_end(call, found)

    def begin_call(self, call: OpenCall, inputs: Iterable[tuple[str, Any]]) -> None:
        """A call that is kept begins. ``inputs``: what it is given, by slot."""
        if self.on_call_end is not None or self._after:
            inputs = call.given = list(inputs)
        if (
            call.phase == "forward"
            and self.backward
            and call.level != "aten"
            and torch.is_grad_enabled()
        ):
            inputs = list(inputs)
            self._gradients.begin(call, inputs)
        if self._before and not call.again and self._looks(call) and "input" in self._roles:
            self.record(call, "input", inputs)

    def _looks(self, call: OpenCall) -> bool:
        """Tell whether values of the phase of a call are asked for."""
        return self._forward or call.phase == "backward"

    # -- operators ----------------------------------------------------------------------------

    def begin_operator(
        self, operator: Operator, level: str, args: Any, kwargs: Any
    ) -> OpenCall | None:
        """An operator is called; None where it is not asked for. It counts all the same: ids do not depend on what is recorded."""
        here = self.thread
        again = pytorch.in_backward()
        if again and not (here.open and torch.is_grad_enabled()):
            return self._backward_begins(operator, args, kwargs) if level == "aten" else None
        above = here.open[-1] if here.open else None
        if not self._belongs(above):
            return None
        module = above.module if above is not None else None
        if not operator.wanted:
            if not again:
                here.next_id(module or "", level, here.home())
            return None
        call = here.enter(f"{module or ''}/{operator.name}", operator.name, level, module, again)
        if self._profile is not None:
            self._profile.begins(call)
        call.inherited = True
        call.kept = self.asks_for(call)
        if call.kept and not again and self._forward:
            self._note(call, above)
        if call.kept:
            self.begin_call(call, operator_inputs(args, kwargs))
        return call

    def end_operator(self, call: OpenCall, outputs: Any) -> None:
        if call.phase == "forward":
            self.thread.leave(call.path)
            if call.level == "aten":
                self._pair(call)
        self.end_module(call, outputs)

    def note_unrecorded(self, function: Any) -> None:
        """An operator that is not recorded ran: its gradient may be computed by some that are."""
        if not self.backward or not self._is_new(pytorch.autograd_clock() - 1):
            return
        above = self.thread.open[-1] if self.thread.open else None
        if not self._belongs(above):
            return
        module = above.module if above is not None else None
        name = operator_name(function)
        self._pair(
            OpenCall(f"{module or ''}/{name}", name, "aten", module, 0, self.thread.root_call)
        )

    def _belongs(self, above: OpenCall | None) -> bool:
        """Tell whether an operator right below that call is asked for; outside of all calls, none of another model is."""
        if above is None:
            return not self._filtered and not pytorch.in_model()
        return above.inherited or not self._filtered

    def _pair(self, call: OpenCall) -> None:
        """Remember which autograd node an operator has just made, if it made one: the first to run after it did."""
        node = pytorch.autograd_clock() - 1
        if self.backward and self._is_new(node):
            self._forwards.setdefault(node, call)

    def _is_new(self, node: int) -> bool:
        """Tell whether an autograd node of that number was made since the root call began, or is made once more."""
        return node >= self._since and node not in self._forwards

    def _backward_begins(self, operator: Operator, args: Any, kwargs: Any) -> OpenCall | None:
        """An operator of a backward pass: it belongs where the forward operator ran whose gradient it computes."""
        if not self.backward or self._latest is None or self.paused:
            return None
        node = pytorch.running_node()
        forward = self._forwards.get(pytorch.clock_of(node)) if node is not None else None
        if forward is None and (self._filtered or self._given):
            self.unpaired += 1  # of another model, or a sum that the engine makes for itself
            return None
        self._spent = True
        path = f"{(forward.module if forward else None) or ''}/{operator.name}"
        root_call = forward.root_call if forward else self._latest
        call = OpenCall(path, operator.name, "aten", None, self._count(path, root_call), root_call)
        call.phase = "backward"
        call.id = forward.id if forward else None
        call.kept = self.asks_for(call)
        if call.kept:
            self._note(call, None, forward)
            self.begin_call(call, operator_inputs(args, kwargs))
        return call

    def _note(
        self, call: OpenCall, above: OpenCall | None, forward: OpenCall | None = None
    ) -> None:
        """Record the call itself: where in the program it stands, and what it is a part or the gradient of."""
        source = None
        if self._sources and call.phase == "forward":
            source = self._sources.here(
                [one.outside() for one in self.thread.open if one.level == "module"]
            )
        within = (above.path, above.number) if above is not None else (None, None)
        pair = (forward.path, forward.number) if forward is not None else (None, None)
        row = [
            call.root_call,
            call.path,
            call.number,
            call.phase,
            call.level,
            call.op,
            source,
            *within,
            *pair,
        ]
        self._session.recorder.record_operator(row)
        if call.phase == "forward":
            self._session.recorder.record_call(call)

    # -- backward passes ----------------------------------------------------------------------

    def backward_begins(self) -> list[Any]:
        """A backward pass begins in this thread. Return the modes that were put on its stack for it."""
        return self._levels.push() if self._levels and self._latest is not None else []

    def backward_ends(self, pushed: list[Any]) -> None:
        if pushed and self._levels:
            self._levels.pop(pushed)
        if not pytorch.in_backward():
            self.thread.after = False  # what follows is no loss, but an optimizer or the next batch
            self._gradients.finish()
            self._session.recorder.flush()

    def record_module(
        self, path: str, op: str, attributes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Observe what a module is set to (eps, scaling, dropout rates, training or not) and its weights."""
        call, recorder = (
            OpenCall(path, op, "module", path, 0, self.thread.root_call),
            self._session.recorder,
        )
        recorder.record(call, "attribute", attributes.items())
        if self._options.weights:
            recorder.record(call, "weight", tensors.items())
        else:
            for name, tensor in tensors.items():
                recorder.record_weight(call, name, tensor)

    def watch_parameters(self, path: str, op: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Observe the gradients of a module's parameters."""
        for name, tensor in tensors.items():
            if self.backward and torch.is_grad_enabled() and "module" in self._options.mode:
                self._gradients.parameter(
                    functools.partial(self._parameter, path, op, name), name, tensor
                )

    def _parameter(self, path: str, op: str, name: str) -> OpenCall | None:
        if self._latest is None or (self._by_name and path not in self._chosen):
            return None
        return OpenCall(
            path, op, "module", path, self._count(path, self._latest, name), self._latest
        )

    def record_saved(self, path: str, value: Any, place: RootCall, gradients: bool) -> None:
        """Record what the program itself hands over."""
        number = self._count(path, place.generation, place.step)
        call = OpenCall(path, "save", "module", path, number, place.index)
        found = leaves(value)
        self.record(call, "output", found)
        if gradients and self.backward and torch.is_grad_enabled():
            self._gradients.begin(call, ())
            self._gradients.end(call, found)

    def _count(self, *key: Any) -> int:
        """Count one more of what backward passes do: they run in threads of their own."""
        with self._lock:
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
            return number

    # -- records ------------------------------------------------------------------------------

    def _hold(self, call: OpenCall, role: str, found: Iterable[tuple[str, Any]]) -> None:
        """Keep what a call was given, which may change until it is known whether it overflows, and what it gave."""

        def kept(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, torch.Tensor) and role == "input" else leaf

        call.held = [*call.held, *((role, slot, kept(leaf)) for slot, leaf in found)]

    def _gradient(self, call: OpenCall, role: str, slot: str, gradient: torch.Tensor) -> None:
        if self.paused or (self._options.overflow is not None and not overflows(gradient)):
            return
        self._session.recorder.record_tensor(call, role, slot, gradient, "backward")

    def record_if_overflowing(self, call: OpenCall) -> None:
        """Where only what overflows is asked for, record a call that does, and drop one that does not."""
        if self._options.overflow is None:
            return
        held, call.held = call.held, ()
        most = self._options.overflow or 0
        if 0 < most <= self._overflowing or not any(
            role == "output" and isinstance(leaf, torch.Tensor) and overflows(leaf)
            for role, _, leaf in held
        ):
            return
        for role, slot, leaf in held:
            self._session.recorder.record(call, role, [(slot, leaf)])
        self._overflowing += 1
        if 0 < most <= self._overflowing:
            self._session.pause()

    def asks_for(self, call: OpenCall) -> bool:
        """Tell whether the filters by name ask for a call."""
        if self._opname and not begins(call.op, self._opname):
            return False
        return not self._by_name or self._named(call)

    def _named(self, call: OpenCall) -> bool:
        """Tell whether a call's full name is one of those asked for, where any are."""
        if call.level == "module":
            call.name = f"Module.{call.path}.{call.op}.{call.phase}.{call.number}"
        else:
            number = self._count(call.op, call.phase, call.root_call)
            call.name = f"{call.op}.{number}.{call.phase}"
        if len(self.seen) < _NAMES:
            self.seen.add(call.name)
        options, here = self._options, self.thread
        if options.scope and _is(call.name, options.scope[0]):
            here.scoped = True
        inside = not options.scope or here.scoped
        chosen = inside and (
            not options.contains or any(text in call.name for text in options.contains)
        )
        chosen = chosen and self.ids.asks_for(call.id)
        if chosen:
            self._chosen.add(call.path)
        return chosen


def _is(name: str, asked: str) -> bool:
    """Match a full name, also without its end: ``Functional.linear.0`` for ``Functional.linear.0.forward``."""
    return name == asked or name.startswith(asked + ".")
