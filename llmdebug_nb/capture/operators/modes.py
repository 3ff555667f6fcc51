"""Operator level: what the program calls (api) and what the dispatcher runs (aten).

Each level is a mode on the thread's stack while a recorded step runs. Operators that only query a
tensor (its size, say) or only rearrange it (a view) compute nothing and are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.overrides import TorchFunctionMode

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.fast_check import Passing
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.operators.kinds import READS, Operator, OperatorKinds
from llmdebug_nb.capture.perturbing.unrounded import Unrounded
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
            self.note_passed(func, operator, args, kwargs, result)
            return result
        return _run_recorded(listener, operator, "aten", func, args, kwargs)

    def note_passed(
        self,
        func: Callable[..., object],
        operator: Operator | None,
        args: Args,
        kwargs: Kwargs,
        result: object,
    ) -> None:
        """Note an operator that has run and isn't recorded."""
        listener = self._listener
        if torch.is_grad_enabled():  # otherwise it made no node
            listener.guarded(listener.note_unrecorded, func)
        if operator is not None and operator.rearranges and listener.passing is None:
            listener.guarded(self._note, operator, args, kwargs, result)
        if operator is not None and operator.name == READS:
            listener.guarded(listener.note_read, args[0])

    def _note(self, operator: Operator, args: Args, kwargs: Kwargs, result: object) -> None:
        self._listener.note_views(operator, args, kwargs, _views(args, kwargs, result) or ())


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
    outputs = written(func, args, kwargs) if result is None else result
    listener.guarded(listener.end_operator, call, outputs)
    return result


def written(func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
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
