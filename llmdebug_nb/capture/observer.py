"""From an observed call to records: it decides which calls and which of their tensors to record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from llmdebug_nb.capture.calls import Leaf, OpenCall, ThreadState
from llmdebug_nb.capture.checking import CheckingRecorder
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compat.torch_modes import Mode
from llmdebug_nb.capture.context import Context
from llmdebug_nb.capture.fast_check import Passing
from llmdebug_nb.capture.guard import Guard
from llmdebug_nb.capture.hooks.gradients import Gradients
from llmdebug_nb.capture.module_weights import ModuleWeights
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.capture.operators.forward_operators import ForwardOperators
from llmdebug_nb.capture.operators.kinds import Operator, operator_name
from llmdebug_nb.capture.operators.view_chains import arguments_text
from llmdebug_nb.capture.overflow_filter import OverflowFilter, RecordLeaves, record_both
from llmdebug_nb.capture.ranks import Ranks
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.recording_filter import RecordingFilter
from llmdebug_nb.capture.signatures import Signatures
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.capture.walk import call_inputs, leaves, operator_inputs
from llmdebug_nb.core.kernels.overflow import overflows
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall, View

if TYPE_CHECKING:
    from llmdebug_nb.capture.intervention import Intervention
    from llmdebug_nb.capture.operators.mode_stacks import OperatorModes
    from llmdebug_nb.capture.operators.modes import Viewed
    from llmdebug_nb.capture.timing.profiler import Profile

Args = tuple[object, ...]
Kwargs = Mapping[str, object]


class Outlets(NamedTuple):
    """Where records go. ``reference``: also records inputs of modules."""

    recorder: Recorder
    reference: Recorder | None
    profile: Profile | None


class Scope(NamedTuple):
    """What is observed. ``restricted``: only some models. ``operators``: those of PyTorch, too."""

    restricted: bool
    operators: bool


class Observer:
    """Observes the calls of one session.

    ``context``: where the recording stands; ``thread``, ``names``, ``backward`` are its own.
    ``unpaired``: count of backward operators left out because their forward operator was not
    seen. ``weights``: records those of modules. ``player``: plays what hooks only note.
    ``record(call, role, leaves)``: records inputs or outputs of a call.
    ``passing``: what lets calls pass, if calls are only checked for errors.
    ``ranks``: records what concerns the ranks beside this one. ``modes``: observe operators.
    ``on_call_end(call, outputs)``: called when a recorded call ends; the program waits for it.
    ``substitution``: the tensors of operators that are put in place of the program's own.
    """

    def __init__(
        self,
        options: DumpOptions,
        outlets: Outlets,
        thread: ThreadState,
        guard: Guard,
        recording_filter: RecordingFilter,
        scope: Scope,
    ) -> None:
        recorder, reference, profile = outlets
        self._check = recorder if isinstance(recorder, CheckingRecorder) else None
        self.context = Context(options, thread, None if self._check is None else 0)
        self.thread, self.guarded = thread, guard.run
        self.names, self.backward = self.context.names, self.context.backward
        self.substitution: Intervention | None = None
        self.unpaired = 0
        self.on_call_end: Callable[[OpenCall, list[Leaf]], None] | None = None
        self._options, self._recorder, self._profile = options, recorder, profile
        self._filter, self._restricted = recording_filter, scope.restricted
        self._overflow: OverflowFilter | None = None
        self.record: RecordLeaves = recorder.record
        if options.overflow is not None:
            self._overflow = OverflowFilter(options.overflow, recorder.record, self.pause)
            self.record = self._overflow.hold
        if reference is not None:
            self.record = functools.partial(record_both, self.record, reference.record)
        self._roles = options.roles
        self.records_modules = options.records_modules and not options.logits
        self._inputs_before = options.time != 1
        # role of inputs as the call has left them
        self._role_after = {1: "input", 2: "after"}.get(options.time)
        self._forwards = ForwardOperators()
        check, parts = self._check, (thread, self._forwards, self.records_modules, self.backward)
        self.passing = None if check is None else Passing(check, *parts)
        self.ranks = Ranks(self.context, self, recorder, options, scope.operators)
        self._gradients = Gradients(self._roles, self.guarded, self.record_gradient)
        self.weights = ModuleWeights(self.context, recorder, options, self._gradients, self.ranks)
        self._call_stacks = CallStacks.of(recorder) if options.sources else None
        self.signatures = Signatures()
        alone = check is None and reference is None and profile is None
        parts_of_player = self, recorder, guard, options, self._call_stacks
        self.player = Player.of(*parts_of_player) if alone else None
        self.modes: OperatorModes | None = None
        self._resting = False

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.ranks.start()
        if self.modes:
            self.modes.open()
            self.modes.push()

    def stop(self) -> None:
        self._resting = True
        self.ranks.stop()
        self._gradients.off()
        self._forwards.clear()
        if self.modes:
            self.modes.pop()
            self.modes.close()

    def rest(self) -> None:
        """Take off all that observes between root calls: no further step is recorded."""
        self._resting = True
        if self.modes:
            self.modes.pop()

    def pause(self, backward: bool = False) -> None:
        """Record no further root call; with ``backward``, still the gradients of earlier ones."""
        self._filter.paused = True
        self.thread.after_recorded = False
        self.context.paused = not backward

    def resume(self) -> None:
        self._filter.paused = self.context.paused = False

    def begin_root_call(self, recording: bool) -> None:
        self.context.latest = self.thread.root_call if recording else None
        self.ranks.look()
        self._forwards.begin_root_call()
        noting = self.player is not None and self.on_call_end is None and self.substitution is None
        if self.modes:
            self.modes.begin_root_call(recording, noting)
        if self.player is not None:
            self.player.shut()  # a call that was interrupted may have left it open
            if recording and noting:
                self.player.open()

    def end_root_call(self) -> None:
        if self.player is not None:
            self.player.shut()
        thread = self.thread
        if thread.recording and thread.last_output is not None:
            call, output = thread.last_output
            thread.last_output = None
            self.record(call, "output", leaves(output))
        if self.modes:
            self.modes.end_root_call(self._resting)

    def listening(self) -> bool:
        """Return whether operators count now.

        They do in a recorded root call, in its backward pass, and for the loss in between.
        """
        if pytorch.in_backward():
            return self.context.latest is not None
        thread = self.thread
        if self._check is not None:
            return not self.context.paused
        return thread.recording or (thread.after_recorded and torch.is_grad_enabled())

    def recomputes(self) -> bool:
        """Return whether a module call in a backward pass is a recomputation that matters."""
        return self.backward and torch.is_grad_enabled()

    # -- calls ----------------------------------------------------------------------------------

    def begin_module(
        self, path: str, module: nn.Module, selected: bool, args: Args, kwargs: Kwargs,
        recomputed: bool,
    ) -> None:  # fmt: skip
        """Open the call of a module. ``recomputed``: by a checkpoint, for the sake of the graph."""
        call = self.open_module(path, module, selected, recomputed)
        if call.recorded:
            if self._check is not None:
                call.arguments = args, kwargs
            self.begin_call(call, call_inputs(args, kwargs))

    def open_module(
        self, path: str, module: nn.Module, selected: bool, recomputed: bool
    ) -> OpenCall:
        """Open the call of a module, and find out whether it is recorded."""
        thread = self.thread
        parent = thread.open_calls[-1] if thread.open_calls else None
        call = thread.enter(path, type(module).__name__, "module", path, recomputed)
        if not recomputed:
            self._recorder.record_call(call)
        if self._profile is not None:
            self._profile.begins(call)
        call.selected = selected or (parent is not None and parent.selected)
        call.recorded = selected and self.records_modules and self.names.selects(call)
        if call.recorded and self._check is None:
            call.parameters = self.signatures.of(module)
        return call

    def looks_at(self, selected: bool) -> tuple[bool, bool]:
        """Return whether the inputs and outputs of a module are recorded."""
        recorded = selected and self.records_modules
        return recorded and "input" in self._roles, recorded and "output" in self._roles

    def end_module(self, call: OpenCall, output: object) -> None:
        """End a call of a module or operator that `ThreadState.leave` has closed."""
        if self._profile is not None:
            self._profile.ends(call)
        if (
            self._options.logits
            and self.thread.open_calls
            and any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(output))
        ):
            self.thread.last_output = call, output
        if call.recorded and (call.since is not None or self.context.forward):
            self.end_call(call, leaves(output))
        if self._check is not None and call.level == "module" and not self.thread.open_calls:
            self._check.record_result(leaves(output))

    def begin_call(self, call: OpenCall, inputs: Iterable[Leaf]) -> None:
        """Record the inputs of a call that begins."""
        if self.on_call_end is not None or self._role_after:
            inputs = call.inputs = list(inputs)
        if (
            call.phase == "forward"
            and self.backward
            and call.level != "aten"
            and torch.is_grad_enabled()
        ):
            inputs = list(inputs)
            self._gradients.begin(call, inputs)
        if (
            self._inputs_before
            and not call.recomputed
            and self.context.wants_phase(call)
            and "input" in self._roles
        ):
            self.record(call, "input", inputs)

    def end_call(self, call: OpenCall, outputs: list[Leaf]) -> None:
        """Record the outputs of a call that has ended."""
        if not call.recorded:
            return
        if call.since is not None:
            self._gradients.end(call, outputs)
        if not call.recomputed and self.context.wants_phase(call):
            if self._role_after and "input" in self._roles:
                self.record(call, self._role_after, call.inputs)
            if "output" in self._roles:
                self.record(call, "output", outputs)
        if self._role_after and self.on_call_end is None:
            del call.inputs
        self.record_if_overflowing(call)
        self.names.end(call)
        if self.on_call_end is not None and call.phase == "forward" and not call.recomputed:
            self.on_call_end(call, outputs)

    def record_if_overflowing(self, call: OpenCall) -> None:
        """If only overflowing calls are recorded, record or drop the held leaves of a call."""
        if self._overflow is not None:
            self._overflow.decide(call)

    # -- operators --------------------------------------------------------------------------------

    def begin_operator(
        self, operator: Operator, level: str, args: Args, kwargs: Kwargs
    ) -> OpenCall | None:
        """Open the call of an operator; return None if it is not recorded.

        It counts all the same: execution ids do not depend on what is recorded.
        """
        thread = self.thread
        recomputed = pytorch.in_backward()
        if recomputed and not (thread.open_calls and torch.is_grad_enabled()):
            return (
                self._begin_backward_operator(operator, args, kwargs) if level == "aten" else None
            )
        call = self.open_operator(operator, level, recomputed)
        if call is not None and call.recorded:
            if self._check is not None:
                call.arguments = args, kwargs
            elif not recomputed and self.context.forward:
                self.record_operator(call, self.stack_here())
            self.begin_call(call, operator_inputs(args, kwargs))
        return call

    def open_operator(self, operator: Operator, level: str, recomputed: bool) -> OpenCall | None:
        """Open the call of an operator of a forward pass, and find out whether it is recorded.

        Return None if it is only counted, or not even that.
        """
        thread = self.thread
        parent = thread.open_calls[-1] if thread.open_calls else None
        if not self.context.selects_inside(parent):
            return None
        module = parent.module if parent is not None else None
        if not operator.wanted:
            if not recomputed:
                thread.next_id(module or "", level, thread.module_id())
            return None
        path = f"{module or ''}/{operator.name}"
        call = thread.enter(path, operator.name, level, module, recomputed)
        if self._profile is not None:
            self._profile.begins(call)
        call.selected = True
        call.recorded = self.names.selects(call)
        if call.recorded:
            call.parameters = operator.parameters
        return call

    def end_operator(self, call: OpenCall, outputs: object) -> None:
        if call.phase == "forward":
            self.thread.leave(call.path)
            if self.backward and call.level == "aten":
                self._forwards.add(call)
        self.end_module(call, outputs)

    def note_views(
        self, operator: Operator, args: Args, kwargs: Kwargs, views: Sequence[Viewed]
    ) -> None:
        """Note views that an operator of a forward pass returned."""
        if pytorch.in_backward():
            return
        source = self._call_stacks.innermost() if self._call_stacks else ""
        for part, (base, result) in enumerate(views):
            text = arguments_text(args, kwargs, part if len(views) > 1 else None)
            self._recorder.add_view(View(operator.name, source, text), base, result)

    def note_operator(self, operator: Operator, args: Args, kwargs: Kwargs, result: object) -> None:
        """Note a call that has ended already."""
        call = self.begin_operator(operator, "aten", args, kwargs)
        if call is not None:
            self.end_operator(call, result)

    def note_read(self, tensor: object) -> None:
        """Note that the program reads the number in a tensor."""
        if self._check is not None:
            self._check.record_read(tensor)

    def note_unrecorded(self, function: Callable[..., object]) -> None:
        """Note an operator that isn't recorded: its gradient may be computed by some that are."""
        if not self.backward or not self._forwards.has_new_node():
            return
        parent = self.thread.open_calls[-1] if self.thread.open_calls else None
        if self.context.selects_inside(parent):
            module = parent.module if parent is not None else None
            name = operator_name(function)
            path, root_call = f"{module or ''}/{name}", self.thread.root_call
            self._forwards.add(OpenCall(path, name, "aten", module, 0, root_call))

    def _begin_backward_operator(
        self, operator: Operator, args: Args, kwargs: Kwargs
    ) -> OpenCall | None:
        """Begin an operator of a backward pass, in the module of its forward operator."""
        if not self.backward or self.context.latest is None or self.context.paused:
            return None
        forward = self._forwards.of_running_node()
        if forward is None and (self.context.filtered or self._restricted):
            self.unpaired += 1  # of another model, or a sum that the engine makes for itself
            return None
        self._forwards.used = True
        path = f"{(forward.module if forward else None) or ''}/{operator.name}"
        root_call = forward.root_call if forward else self.context.latest
        number = self.context.counts.next(path, root_call)
        call = OpenCall(path, operator.name, "aten", None, number, root_call)
        call.phase = "backward"
        call.id = forward.id if forward else None
        call.recorded = self.names.selects(call)
        if call.recorded:
            call.parameters = operator.parameters
            if self._check is not None:
                call.arguments = args, kwargs
            else:
                self.record_operator(call, None, forward)
            self.begin_call(call, operator_inputs(args, kwargs))
        return call

    def stack_here(self) -> int | None:
        """Return the number of the current call stack; None if none are recorded."""
        return self._call_stacks.current() if self._call_stacks else None

    def record_operator(
        self, call: OpenCall, stack: int | None, forward: OpenCall | None = None
    ) -> None:
        """Record the call itself: its source, the call around it, and its forward operator."""
        open_calls = self.thread.open_calls
        is_open = len(open_calls) > 1 and open_calls[-1] is call
        parent = open_calls[-2] if is_open else None
        self._recorder.record_operator([
            call.root_call, call.path, call.number, call.phase, call.level, call.op, stack,
            *((parent.path, parent.number) if parent is not None else (None, None)),
            *((forward.path, forward.number) if forward is not None else (None, None)),
        ])  # fmt: skip
        if call.phase == "forward":
            self._recorder.record_call(call)

    # -- backward passes --------------------------------------------------------------------------

    def begin_backward(self) -> list[Mode]:
        """Begin a backward pass of this thread; return the modes put on its stack for it."""
        self.ranks.begin_backward()
        return self.modes.push() if self.modes and self.context.latest is not None else []

    def end_backward(self, pushed: list[Mode]) -> None:
        if pushed and self.modes:
            self.modes.pop(pushed)
        if not pytorch.in_backward():
            # what follows is no loss, but an optimizer or the next batch
            self.thread.after_recorded = False
            self._gradients.finish()
            self.ranks.end_backward()
            self._recorder.flush()

    def record_gradient(self, call: OpenCall, role: str, slot: str, gradient: torch.Tensor) -> None:
        if not self.context.paused and (self._overflow is None or overflows(gradient)):
            self._recorder.record_tensor(call, role, slot, gradient, "backward")

    # -- values of the program --------------------------------------------------------------------

    def record_saved(self, path: str, value: object, place: RootCall, gradients: bool) -> None:
        """Record a value that the program itself passes to `save`."""
        number = self.context.counts.next(path, place.generation, place.step)
        call = OpenCall(path, "save", "module", path, number, place.index)
        outputs = leaves(value)
        self.record(call, "output", outputs)
        if gradients and self.backward and torch.is_grad_enabled():
            self._gradients.begin(call, ())
            self._gradients.end(call, outputs)
