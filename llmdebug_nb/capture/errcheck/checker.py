"""Watches the values that calls make, and finds the first bad ones that reach a result.

Each output is read once, for its largest magnitude. Only if that is not finite, zero or near the
limit of its dtype, the call is looked at closely: what it was given, and what it would have made in
float64. Bad values are followed from call to call by the storages that hold them. They count once
they reach a *result*: an output of a model, a parameter, a gradient at the end. Those that a later
call masks out reach none, and no rule knows masks by name.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.checking import CheckingRecorder
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.errcheck.calls import CallFacts
from llmdebug_nb.capture.errcheck.causes import UNSET, Cause, cause_of, clipping_of, underflow_of
from llmdebug_nb.capture.errcheck.exact import uses_infinity, writes
from llmdebug_nb.capture.errcheck.gradients import ArrivedGradients, backward_call, outputs_of
from llmdebug_nb.capture.errcheck.headroom import ReachByDtype
from llmdebug_nb.capture.errcheck.inputs import Inputs, is_near
from llmdebug_nb.capture.errcheck.origins import BadTensors, Origin
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.capture.walk import call_inputs, operator_inputs
from llmdebug_nb.core.faults import CRITICAL, HIGH, KINDS, MEDIUM, Fault, ProcessCheck
from llmdebug_nb.core.kernels.overflow import NONE, quick_reach, reach
from llmdebug_nb.core.options import DumpOptions

_MANY = 64  # faults of different places: a program that is wrong everywhere needs no more
# GradScaler looks for infinities with it, and leaves out the step if there are any
_EXAMINES = "Aten._amp_foreach_non_finite_check_and_unscale_"
Outputs = list[tuple[str, torch.Tensor, float]]  # slot, tensor, reach


class Checker(CheckingRecorder):
    """Checks what it is shown.

    ``on_fault(origin)``: called as soon as bad values reach a result.
    """

    def __init__(
        self,
        sink: Sink,
        options: DumpOptions,
        types: tuple[str, ...] = KINDS,
        keeps_inputs: bool = False,
        on_fault: Callable[[Origin], None] = lambda origin: None,
    ) -> None:
        """``types``: kinds of faults that count. ``keeps_inputs``: those of faulty calls."""
        super().__init__(sink, options)
        self._types, self._keeps, self.on_fault = types, keeps_inputs, on_fault
        self._checked = 0
        self._headroom, self._quick_reach = ReachByDtype(), quick_reach()
        self._usual = self._headroom.usual
        self._bad = BadTensors()
        self._arrived = ArrivedGradients()
        self._origins: list[Origin] = []
        self._found: dict[tuple[str, ...], Origin] = {}
        self._meant: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._check_lock = threading.RLock()

    def attach(self, facts: CallFacts) -> None:
        """Take what describes the calls of the session."""
        self._facts = facts

    # -- what may pass unseen ---------------------------------------------------------------------

    def may_wait(self, op: str) -> bool:
        """Return whether a call's inputs need not be kept before it writes to them.

        Memory that nothing has written holds any number: it does not pass either.
        """
        return not (op.startswith(UNSET) or (self._keeps and writes(op)))

    def passes(self, result: object) -> bool:
        """Count a call and return True if all it made is ordinary, and no bad value is about.

        Then its inputs and its name don't matter. Nothing here runs an operator of torch.
        """
        if self._bad.origins:
            return False
        if type(result) is torch.Tensor:
            largest = self._quick_reach(result)
            if not 0 < largest <= self._usual.get(result.dtype, 0.0) and largest != NONE:
                return False
        elif not self._ordinary(result):
            return False
        self._checked += 1  # no other thread comes in between: nothing is called
        return True

    def _ordinary(self, value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(self._ordinary, value))
        if not isinstance(value, torch.Tensor):
            return value is None or type(value) in (int, float, bool)
        largest = self._quick_reach(value)
        return largest == NONE or 0 < largest <= self._usual.get(value.dtype, 0.0)

    # -- what the session shows -------------------------------------------------------------------

    def record(self, call: OpenCall, role: str, leaves: Iterable[Leaf]) -> None:
        """Note the inputs of a call, or check its outputs."""
        if role == "input":
            if call.arguments is None:  # those of an optimizer
                call.inputs = list(leaves)
            elif call.level != "module" and self._keeps and writes(call.op):
                call.pending = [("input", slot, _copy(leaf)) for slot, leaf in leaves]
        elif role == "output":
            with self._check_lock:
                self._check(call, leaves)
            call.inputs, call.pending, call.arguments = [], (), None

    def record_tensor(
        self, call: OpenCall, role: str, slot: str, tensor: torch.Tensor,
        phase: str = "forward",
    ) -> None:  # fmt: skip
        """Check a gradient: one that arrives at a module's call, leaves it, or is a parameter's."""
        tensor = pytorch.plain(tensor)
        largest = reach(tensor)
        if largest is None:
            return
        with self._check_lock:
            back = backward_call(call)
            self._checked += 1
            self._headroom.is_ordinary(largest, tensor.dtype, back)
            origins: tuple[Origin, ...] = ()
            if not math.isfinite(largest):
                origins = self._follow_gradient(back, role, outputs_of(role, slot, tensor, largest))
            if role == "input":
                self._arrived.add(call, largest, origins)

    def record_result(self, outputs: Iterable[Leaf]) -> None:
        """The outermost call of a model has ended: what it returns is a result."""
        with self._check_lock:
            for slot, leaf in outputs if self._bad else ():
                if isinstance(leaf, torch.Tensor):
                    self._reach_result(leaf, f"output {slot} of the model")
            if self._origins:
                self._forget()

    def record_read(self, value: object) -> None:
        """The program reads a number."""
        if self._bad and isinstance(value, torch.Tensor):
            with self._check_lock:
                self._reach_result(value, "a number that the program reads")

    # -- the check of one call --------------------------------------------------------------------

    def _check(self, call: OpenCall, leaves: Iterable[Leaf]) -> None:
        """Read each output once; look closer if one of them is no ordinary number."""
        self._checked += 1
        outputs: Outputs = []
        special, unset = False, call.op.startswith(UNSET)
        for slot, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            tensor = pytorch.plain(leaf)
            largest = reach(tensor)
            if largest is not None:
                outputs.append((slot, tensor, largest))
                if unset:  # any number may lie there, and none was computed
                    special |= not math.isfinite(largest)
                else:
                    special |= not self._headroom.is_ordinary(largest, tensor.dtype, call)
        if special or self._bad:
            self._look_closer(call, outputs)

    def _look_closer(self, call: OpenCall, outputs: Outputs) -> None:
        bad = [each for each in outputs if not math.isfinite(each[2])]
        is_operator = call.level != "module"
        if call.arguments is not None:
            call.inputs = list((operator_inputs if is_operator else call_inputs)(*call.arguments))
        if not bad and not any(
            not largest or is_near(largest, tensor.dtype) for _, tensor, largest in outputs
        ):
            self._end_bad(call, outputs)
            return
        overwrites = is_operator and writes(call.op)
        written = [tensor for _, tensor, _ in outputs] if overwrites else []
        inputs = Inputs.of(call.inputs, written, self._bad)
        if bad:
            self._follow(call, inputs, outputs, bad)
        else:
            self._end_bad(call, outputs)
            self._note_extremes(call, inputs, outputs)

    def _follow(self, call: OpenCall, inputs: Inputs, outputs: Outputs, bad: Outputs) -> None:
        """Find where the bad values of a call come from."""
        origins = inputs.origins or self._from_parts(call)
        if not origins and call.level == "module":
            origins = tuple(self._bad.of_all((slot, tensor) for slot, tensor, _ in bad))
            if not origins and (inputs.nan or inputs.infinite):
                origins = self._of_root_call(call)  # what happens between modules is not seen
        if origins:
            for origin in origins:
                origin.examined |= call.op == _EXAMINES
                if origin.wants(HIGH):
                    origin.followed.append(self._facts.of(call, HIGH, outputs))
        else:
            cause = cause_of(call, inputs, bad, self._facts.parameter)
            if cause is None:
                self._meant[call.op] += 1
                return
            origins = (self._begin(call, cause, outputs),)
        for _, tensor, _ in bad:
            self._bad.add(tensor, origins)
            name = self._facts.parameter(tensor)
            if name is not None:
                for origin in origins:
                    self._reached(origin, f"parameter {name}")

    def _follow_gradient(self, call: OpenCall, role: str, outputs: Outputs) -> tuple[Origin, ...]:
        """Find where a bad gradient comes from: its own call, one inside it, or one before it."""
        (_, tensor, largest), arrives = outputs[0], role == "input"
        origins = self._bad.of(tensor) or self._arrived.origins(call) or self._from_parts(call)
        if not origins and arrives:
            origins = self._of_root_call(call)
        for origin in origins:
            if not arrives and origin.wants(HIGH):
                origin.followed.append(self._facts.of(call, HIGH, outputs))
        if not origins:
            cause = self._arrived.cause(call, role, largest)
            origins = (self._begin(call, cause, outputs),)
        self._bad.add(tensor, origins)
        return origins

    def _of_root_call(self, call: OpenCall) -> tuple[Origin, ...]:
        return tuple(each for each in self._origins if each.root_call == call.root_call)

    def _from_parts(self, call: OpenCall) -> tuple[Origin, ...]:
        """Return the origins inside a module call, if it is one: it inherits from its parts."""
        if call.level != "module":
            return ()
        inside = f"{call.path}." if call.path else ""
        return tuple(
            each
            for each in self._of_root_call(call)
            if each.call.phase == call.phase and each.call.path.startswith(inside)
        )

    def _end_bad(self, call: OpenCall, outputs: Outputs) -> None:
        """A call has made clean values: bad ones that it was given end here.

        Not so if it makes something else of them than of the largest finite numbers.
        """
        if not self._bad:
            return
        origins = self._bad.of_all(call.inputs)
        lost = [each for each in origins if each.fits_float64 and not each.reached]
        if lost and call.arguments is not None and call.level != "module":
            made = [tensor for _, tensor, _ in outputs]
            if uses_infinity(call.op, *call.arguments, made, self._bad.of):
                for origin in lost:
                    self._reached(
                        origin, f"{call.op}, which would give another result of finite numbers"
                    )
        for origin in origins:
            if origin.wants(MEDIUM):
                origin.followed.append(self._facts.of(call, MEDIUM, outputs))
        for _, tensor, _ in outputs:
            self._bad.clear(tensor)

    def _note_extremes(self, call: OpenCall, inputs: Inputs, outputs: Outputs) -> None:
        """Note outputs near the limit of their dtype, and those that are zero by underflow."""
        for _, tensor, largest in outputs:
            if is_near(largest, tensor.dtype) and not inputs.near(tensor.dtype):
                self._headroom.add_near(largest, tensor.dtype, call)
        zero = not any(largest for _, _, largest in outputs)
        cause = (underflow_of if zero else clipping_of)(call, inputs, outputs)
        if cause is not None:
            origin = self._begin(call, cause, outputs, HIGH)
            self._reached(origin, f"its own result, which loses {'all ' if zero else ''}values")

    def _begin(
        self, call: OpenCall, cause: Cause, outputs: Outputs, level: str = CRITICAL
    ) -> Origin:
        facts = self._facts.of(call, level, outputs)
        inside = call.module is not None
        origin = Origin(cause.kind, facts, cause.evidence(facts), call.root_call, inside)
        origin.fits_float64 = cause.fits_float64
        if self._keeps:
            kept = {(role, slot) for role, slot, _ in call.pending}
            origin.held = [
                *call.pending,
                *(("input", slot, _copy(leaf)) for slot, leaf in call.inputs
                  if ("input", slot) not in kept),
                *(("output", slot, _copy(tensor)) for slot, tensor, _ in outputs),
            ]  # fmt: skip
        known = self._found.get(origin.key)
        if known is not None:
            known.times += 1
            return known
        self._origins.append(origin)
        return origin

    # -- results ----------------------------------------------------------------------------------

    def _reach_result(self, tensor: torch.Tensor, result: str) -> None:
        origins = self._bad.of(tensor)
        if origins and not math.isfinite(reach(pytorch.plain(tensor)) or 0.0):
            for origin in origins:
                self._reached(origin, result)

    def _forget(self) -> None:
        """Forget bad values that nothing holds any more, and that reached no result."""
        alive = {*self._bad.all(), *self._found.values()}
        self._masked.update(_operator(each) for each in self._origins if not each.reached
                            and each not in alive)  # fmt: skip
        self._origins = [each for each in self._origins if each in alive]

    def _reached(self, origin: Origin, result: str) -> None:
        """Bad values have reached a result: their origin is a fault."""
        if origin.reached or origin.kind not in self._types:
            return
        origin.reached = result
        if origin.key in self._found:
            self._found[origin.key].times += 1
        elif len(self._found) < _MANY:
            self._found[origin.key] = origin
            self.on_fault(origin)

    def finish(self) -> None:
        """The check is over: what the program still holds is a result."""
        with self._check_lock:
            for name, gradient in self._facts.gradients():
                for origin in self._bad.of(gradient):
                    if not (origin.examined and origin.kind != "nan"):
                        self._reach_result(gradient, f"gradient of {name}")
            for origin in self._bad.all():
                if not origin.inside and not origin.ended and not origin.examined:
                    self._reached(origin, "a tensor that the program holds at the end")

    @property
    def faults(self) -> list[Fault]:
        """The faults so far, in the order in which they began."""
        return [each.fault() for each in self._origins if self._found.get(each.key) is each]

    def result(
        self, rank: int, pid: int, ended_by: str | None, calls: int, problems: Mapping[str, int]
    ) -> ProcessCheck:
        """Return what was found so far, in so many root ``calls``."""
        masked = self._masked + Counter(
            _operator(each) for each in self._origins if not each.reached
        )
        return ProcessCheck(
            rank, pid, self._checked, calls, tuple(self.faults), self._headroom.all(),
            dict(self._meant), dict(masked), dict(problems), ended_by,
        )  # fmt: skip


def _operator(origin: Origin) -> str:
    """Return the operator's name: ``Aten.log`` of ``Aten.log.3.forward``."""
    return origin.call.op_name.rsplit(".", 2)[0]


def _copy(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
