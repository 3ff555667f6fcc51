"""Modes that let the tape in C note operators, and fall back to the Python modes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.operators.kinds import READS, Operator, OperatorKinds
from llmdebug_nb.capture.operators.modes import (
    ApiMode,
    Args,
    AtenMode,
    Kwargs,
    OperatorListener,
    written,
)
from llmdebug_nb.capture.tape import native, torch_observer
from llmdebug_nb.capture.tape.player import Player


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
        self._end(func, args, kwargs, result)
        return result

    def _end(self, func: Callable[..., object], args: Args, kwargs: Kwargs, result: object) -> None:
        """Note what a function left whose beginning was noted."""
        if result is None or not self._tape.end_function((result,)):
            outputs = written(func, args, kwargs) if result is None else result
            self._listener.guarded(self._player.end_function, outputs, False)

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
        tape = self._tape
        noted = tape.note_views(operator, args, kwargs, result)
        if noted:
            return result
        copied = noted is None and operator.wanted
        if copied and tape.begin_function(operator, args, kwargs):  # its input is as it was
            self._end(func, args, kwargs, result)
        else:
            listener.guarded(self._note, operator, args, kwargs, result)
        return result


_Gate: Any = native.gate_class()


class NotingMode(_Gate, AtenMode):  # type: ignore[misc, no-untyped-call]
    """An AtenMode in C: it notes operators on the tape, and asks the other one where it can't.

    Where torch's own observer can tell of a thread's operators, it need not be on the stack: it
    sees the same ones, and torch takes its usual way. So it is with gradients off, but not in
    inference mode, where Python decomposes composite operators, by others than torch runs.
    """

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
        self._learn(func)
        return AtenMode.__torch_dispatch__(self, func, types, args, kwargs)

    def _learn(self, func: Callable[..., object]) -> None:
        """Let an operator be noted from now on, if it may be."""
        known = self._known
        if known is not None and id(func) not in known and self._may_be_noted(func):
            operator = self._kinds.aten(func)
            assert operator is not None
            known[id(func)] = func, torch_modes.kernel_of(func), operator, operator.rearranges

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

    # -- without being on the stack ---------------------------------------------------------------

    def observe(self) -> bool:
        """Let torch tell of this thread's operators from now on; return whether it does."""
        observer = torch_observer.observer()
        if observer is None or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        if torch_modes.may_compile():
            return False
        if not observer.start(self.tape, self):
            return False  # it tells another recording, say
        torch_modes.observed.here = True
        return True

    def unobserve(self) -> None:
        observer = torch_observer.observer()
        if observer is not None and observer.stop(self):
            torch_modes.observed.here = False

    def find(self, name: str, overload: str) -> Callable[..., object] | None:
        """Return an operator by the dispatcher's name of it, ``aten::add`` and ``Tensor``."""
        return torch_modes.operator(name, overload)

    def begin(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> OpenCall | None:
        """Record what an operator is given that could not be noted; None: it is not recorded."""
        listener, operator = self._listener, self._kinds.aten(func)
        if operator is None or not listener.listening():
            return None
        self._learn(func)
        if operator.rearranges:
            return None
        return listener.guarded(listener.begin_operator, operator, "aten", args, kwargs)

    def end(
        self,
        call: OpenCall | None,
        func: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        result: object,
        raised: bool,
    ) -> None:
        """Record what an operator left, as `begin` was told of it."""
        listener, operator = self._listener, self._kinds.aten(func)
        if call is not None and raised:
            listener.guarded(listener.thread.leave, call.path)
        elif call is not None:
            outputs = written(func, args, kwargs) if result is None else result
            listener.guarded(listener.end_operator, call, outputs)
        elif not (raised or (operator is not None and operator.wanted)) and listener.listening():
            self.note_passed(func, operator, args, kwargs, result)

    def end_noted(
        self,
        makes_views: bool,
        func: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        result: object,
    ) -> None:
        """Record what an operator left that was noted, where that could not be."""
        operator = self._kinds.aten(func)
        if operator is not None:
            (self._note_slowly if makes_views else self._end_slowly)(operator, args, kwargs, result)

    def lost(self, why: str) -> None:
        """Count an operator that could not be recorded as a problem of the dump."""
        self._listener.guarded(_fail, why)


def _fail(why: str) -> None:
    raise RuntimeError(why)
