"""Operator level: what the program calls (api) and what the dispatcher runs (aten).

Each level is a mode on the thread's stack while a recorded step runs. Operators that only query a
tensor (its size, say) or only rearrange it (a view) compute nothing and are not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.operators.kinds import READS, Operator, OperatorFilter, OperatorKinds
from llmdebug_nb.capture.passing import Passing
from llmdebug_nb.capture.perturbing.unrounded import Unrounded
from llmdebug_nb.capture.tape import native
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.torch_internals import is_fake

Args = tuple[object, ...]
Kwargs = Mapping[str, object]
Viewed = tuple[torch.Tensor, torch.Tensor]  # a tensor and a view of it


class OperatorListener(Protocol):
    """Receives operator calls: the observer of a session."""

    @property
    def thread(self) -> ThreadState: ...
    @property
    def guarded(self) -> Guarded: ...
    @property
    def substitution(self) -> Intervention | None: ...
    @property
    def passing(self) -> Passing | None: ...
    @property
    def player(self) -> Player | None: ...
    def note_operator(
        self, operator: Operator, args: Args, kwargs: Kwargs, result: object
    ) -> None: ...
    def listening(self) -> bool: ...
    def begin_operator(
        self, operator: Operator, level: str, args: Args, kwargs: Kwargs
    ) -> OpenCall | None: ...
    def end_operator(self, call: OpenCall, outputs: object) -> None: ...
    def note_views(
        self, operator: Operator, args: Args, kwargs: Kwargs, views: Sequence[Viewed]
    ) -> None: ...
    def note_unrecorded(self, function: Callable[..., object]) -> None: ...
    def note_read(self, tensor: object) -> None: ...


class _ThreadModes(threading.local):
    """The modes of one thread: a mode remembers what it was put on.

    ``pushed``, ``popped``: those put on the stack, or taken off it, for the current root call.
    """

    def __init__(self, make: Callable[[], list[torch_modes.Mode]]) -> None:
        self.modes = make()
        self.pushed: list[torch_modes.Mode] = []
        self.popped: list[torch_modes.Mode] = []


class OperatorModes:
    """The modes that report operator calls to one listener."""

    def __init__(
        self, listener: OperatorListener, levels: tuple[str, ...], apis: tuple[str, ...]
    ) -> None:
        """Raises EmptyDumpError for an operator that does not exist."""
        self.wanted = wanted = OperatorFilter(apis)
        wanted.refuse_unknown(levels)
        self.kinds = OperatorKinds(wanted)
        self._listener = listener
        classes = [cls for level, cls in _MODES.items() if level in levels]
        if listener.passing is not None:
            classes = [CheckMode if cls is AtenMode else cls for cls in classes]
        self._here = _ThreadModes(lambda: [self._mode(cls) for cls in classes])
        self._functions = "api" in levels

    def _mode(self, cls: type[ApiMode] | type[AtenMode]) -> torch_modes.Mode:
        player = self._listener.player
        if player is not None and player.operators is not None:
            noting = NotingMode if cls is AtenMode else NotingApiMode
            return noting(self._listener, self.kinds, player)
        return cls(self._listener, self.kinds)

    def open(self) -> None:
        if self._functions:
            _fast_paths.add(self)

    def close(self) -> None:
        if self._functions:
            _fast_paths.remove(self)

    def begin_root_call(self, recording: bool) -> None:
        here = self._here
        here.pushed = self.push() if recording else []
        here.popped = [] if recording else self.pop()

    def end_root_call(self, resting: bool) -> None:
        """Put the thread's stack back as it was, but leave the modes off if ``resting``."""
        here = self._here
        if resting:  # the recording may have been stopped from another thread
            self.pop()
        elif here.pushed:
            self.pop(here.pushed)
        elif here.popped:
            self.push()

    def push(self) -> list[torch_modes.Mode]:
        """Put the modes on this thread's stack; return those that were not on it before."""
        return [mode for mode in self._here.modes if torch_modes.push_mode(mode)]

    def pop(self, modes: list[torch_modes.Mode] | None = None) -> list[torch_modes.Mode]:
        """Take modes (default: all) off this thread's stack; return those that were on it."""
        return [
            mode
            for mode in (self._here.modes if modes is None else modes)
            if torch_modes.pop_mode(mode)
        ]


class ApiMode(TorchFunctionMode):
    """Sees each outermost call of a function or tensor method, by whatever name it was imported."""

    def __init__(self, listener: OperatorListener, kinds: OperatorKinds) -> None:
        super().__init__()
        self._listener, self._kinds = listener, kinds

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        listener = self._listener
        operator = None if pytorch.tracing() else self._kinds.api(func)
        if operator is None or not listener.listening():
            return func(*args, **kwargs)
        if operator.rearranges:
            result = func(*args, **kwargs)
            if listener.substitution is None or _views(args, kwargs, result) is not None:
                listener.guarded(self._note, operator, args, kwargs, result)
                return result
        return _run_recorded(listener, operator, "api", func, args, kwargs)

    def _note(self, operator: Operator, args: Args, kwargs: Kwargs, result: object) -> None:
        """Note views, or record an operator that copied instead: it left its inputs alone."""
        views = _views(args, kwargs, result)
        if views is not None:
            self._listener.note_views(operator, args, kwargs, views)
            return
        call = self._listener.begin_operator(operator, "api", args, kwargs)
        if call is not None:
            self._listener.end_operator(call, result)


class NotingApiMode(ApiMode):
    """An ApiMode that notes functions on the tape, and goes the long way where it can't."""

    def __init__(self, listener: OperatorListener, kinds: OperatorKinds, player: Player) -> None:
        super().__init__(listener, kinds)
        self._tape, self._player = player.tape, player

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        operator = None if pytorch.tracing() else self._kinds.api(func)
        if operator is None:
            return func(*args, **kwargs)
        tape = self._tape
        if operator.rearranges or self._listener.substitution is not None:
            return self._rearranged(operator, func, types, args, kwargs)
        if not operator.wanted or not tape.begin_function(operator, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if not tape.end_function(None):
                self._listener.guarded(self._player.end_function, None, True)
            raise
        if result is None or not tape.end_function((result,)):
            outputs = _written(func, args, kwargs) if result is None else result
            self._listener.guarded(self._player.end_function, outputs, False)
        return result

    def _rearranged(
        self,
        operator: Operator,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        listener = self._listener
        if listener.substitution is not None or not listener.listening():
            return super().__torch_function__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        if not self._tape.note_views(operator, args, kwargs, result):
            listener.guarded(self._note, operator, args, kwargs, result)
        return result


class AtenMode(torch_modes.TorchDispatchMode):
    """Sees each operator that the dispatcher runs, in forward and backward."""

    supports_higher_order_operators = True

    def __init__(self, listener: OperatorListener, kinds: OperatorKinds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener, self._kinds = listener, kinds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: torch would silently run it eagerly under this mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        listener = self._listener
        if not isinstance(func, torch_modes.OpOverload) or any(map(is_fake, types)):
            return func(*args, **kwargs)
        if any(map(_is_wrapper, types)):
            return NotImplemented  # a wrapper tensor: its own operators follow
        if not listener.listening():
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and torch_modes.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        operator = self._kinds.aten(func)
        if operator is None or not operator.wanted:
            if operator is not None and not operator.rearranges:
                listener.guarded(listener.begin_operator, operator, "aten", args, kwargs)
            result = func(*args, **kwargs)
            if torch.is_grad_enabled():  # otherwise it made no node
                listener.guarded(listener.note_unrecorded, func)
            if operator is not None and operator.rearranges and listener.passing is None:
                listener.guarded(self._note, operator, args, kwargs, result)
            if operator is not None and operator.name == READS:
                listener.guarded(listener.note_read, args[0])
            return result
        return _run_recorded(listener, operator, "aten", func, args, kwargs)

    def _note(self, operator: Operator, args: Args, kwargs: Kwargs, result: object) -> None:
        self._listener.note_views(operator, args, kwargs, _views(args, kwargs, result) or ())


_Gate: Any = native.gate_class()


class NotingMode(_Gate, AtenMode):  # type: ignore[misc, no-untyped-call]
    """An AtenMode in C: it notes operators on the tape, and asks the other one where it can't."""

    def __init__(self, listener: OperatorListener, kinds: OperatorKinds, player: Player) -> None:
        super().__init__(listener, kinds)
        self.tape, self._known, self._player = player.tape, player.operators, player

    def _slowly(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        known = self._known
        if known is not None and id(func) not in known and self._may_be_noted(func):
            operator = self._kinds.aten(func)
            assert operator is not None
            known[id(func)] = func, torch_modes.kernel_of(func), operator, operator.rearranges
        return AtenMode.__torch_dispatch__(self, func, types, args, kwargs)

    def _may_be_noted(self, func: Callable[..., object]) -> bool:
        """Tell whether an operator runs no code of Python, and has a result or makes views."""
        if not isinstance(func, torch_modes.OpOverload) or func.namespace != "aten":
            return False
        operator = self._kinds.aten(func)
        return (
            operator is not None
            and operator.name != READS
            and (operator.rearranges or (operator.wanted and bool(func._schema.returns)))
            and not torch_modes.is_composite(func)
        )

    def _note_slowly(
        self, operator: Operator, args: Args, kwargs: Kwargs | None, result: object
    ) -> None:
        self._listener.guarded(self._note, operator, args, kwargs or {}, result)

    def _end_slowly(
        self, operator: Operator, args: Args, kwargs: Kwargs | None, result: object
    ) -> None:
        self._listener.guarded(self._player.end_operator, result)

    # Dynamo does not look into C, so what C calls is hidden from it here
    slowly = torch_modes.hidden_from_dynamo(_slowly)
    note_slowly = torch_modes.hidden_from_dynamo(_note_slowly)
    end_slowly = torch_modes.hidden_from_dynamo(_end_slowly)


class CheckMode(torch_modes.Untraced, AtenMode):  # type: ignore[no-untyped-call]
    """An AtenMode that looks for errors: a call that passes costs a few microseconds."""

    def __init__(self, listener: OperatorListener, kinds: OperatorKinds) -> None:
        super().__init__(listener, kinds)
        assert listener.passing is not None
        self._passing = listener.passing
        self._keep: list[object] = []
        # by id, as operators are hashed by Python: how to call it, and its kind if it may pass
        self._known: dict[int, tuple[Callable[..., object], Operator | None]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        call, operator = self._known.get(id(func)) or self._learn(func)
        if operator is None or types:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if operator.rearranges and not torch.is_grad_enabled():
            return call(*args, **kwargs) if kwargs else call(*args)
        if operator.rearranges or not self._passing.follows():
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = call(*args, **kwargs) if kwargs else call(*args)
        if not self._passing.operator(operator.name, result):
            note = self._listener.note_operator
            self._listener.guarded(note, operator, args, kwargs or {}, result)
        return result

    def _learn(self, func: Callable[..., object]) -> tuple[Callable[..., object], Operator | None]:
        operator = self._kinds.aten(func)
        passes = (
            isinstance(func, torch_modes.OpOverload)
            and operator is not None
            and operator.name != READS
            and (operator.rearranges or (operator.wanted and bool(func._schema.returns)))
            and not torch_modes.is_composite(func)
            and self._passing.may_wait(operator.name)
        )
        self._keep.append(func)  # an id is that of one object while this exists
        known = self._known[id(func)] = torch_modes.kernel_of(func), operator if passes else None
        return known


_MODES: dict[str, type[ApiMode] | type[AtenMode]] = {"api": ApiMode, "aten": AtenMode}
_fast_paths: Listeners[OperatorModes] = Listeners(lambda: torch_modes.with_fast_paths(ApiMode))
_PLAIN = torch.Tensor.__torch_dispatch__


def _is_wrapper(cls: type) -> bool:
    """Tell whether tensors of a class run operators of their own; ours stand for plain ones."""
    own = cls.__torch_dispatch__  # type: ignore[attr-defined]
    return own is not _PLAIN and not issubclass(cls, Unrounded)


def _run_recorded(
    listener: OperatorListener,
    operator: Operator,
    level: str,
    func: Callable[..., object],
    args: Args,
    kwargs: Kwargs,
) -> object:
    """Run an operator and record it. Inputs are recorded first, since it may write to them."""
    put = listener.substitution
    if put is not None:
        args, kwargs = put.operator_inputs(listener.thread, operator.name, args, kwargs)
    call = listener.guarded(listener.begin_operator, operator, level, args, kwargs)
    if call is None:
        return func(*args, **kwargs)
    try:
        result = func(*args, **kwargs) if put is None else put.run(call, func, args, kwargs)
    except BaseException:
        listener.guarded(listener.thread.leave, call.path)
        raise
    outputs = _written(func, args, kwargs) if result is None else result
    listener.guarded(listener.end_operator, call, outputs)
    return result


def _written(func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    """Return what an operator without a result wrote to: by its schema, or its first argument."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return args[:1]
    named = torch_modes.given_by_name(schema, args, kwargs)
    return {
        a.name: named.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }


def _views(args: Args, kwargs: Kwargs, result: object) -> list[Viewed] | None:
    """Return what each result is a view of; None if one of them is none."""
    first = args[0] if args else None
    if (
        type(result) is torch.Tensor
        and type(first) is torch.Tensor
        and pytorch.shares_storage(result, first)
    ):
        return [(first, result)]  # as nearly always
    inputs = {pytorch.storage_of(tensor): tensor for tensor in _tensors((args, kwargs))[::-1]}
    views = []
    for tensor in _tensors(result):
        storage = pytorch.storage_of(tensor)
        if storage not in inputs:
            return None
        views.append((inputs[storage], tensor))
    return views


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
