"""The only home of the profiler's internals: cheap ranges, and its events as they were taken.

`torch.autograd.profiler.profile` is public. The events of its result, ranges without arguments and
the dispatcher's knowledge of operators are not. If one is missing in a version of PyTorch,
`trouble` says so and no times are taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.autograd import profiler

_MARK = "llmdebug "
_NODE_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_USER_SCOPE = 7
_SILENT = "99"  # above all log levels: Kineto prints two lines to stderr for each profile otherwise
_DTYPES = {
    "float": "float32", "double": "float64", "long int": "int64", "long": "int64", "int": "int32",
    "short": "int16", "short int": "int16", "signed char": "int8", "unsigned char": "uint8",
    "c10::Half": "float16", "c10::BFloat16": "bfloat16", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}  # fmt: skip
_NEEDED = (
    "start_ns", "duration_ns", "start_thread_id", "device_type", "scope", "sequence_nr",
    "correlation_id",
)  # fmt: skip
_ALLOCATES = ("aten::empty", "aten::resize", "aten::new_empty", "aten::set_")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the profiler. ``start``, ``end``: nanoseconds.

    ``kind``: op, node (of autograd), frame (a range of the program or the engine), mark (one of
    our ranges, with the number ``mark``) or device. ``id``: of an op. ``launched_by``: the id of
    the op that a device event belongs to. ``inputs``: dtype and shape of an op's input tensors, if
    requested. ``sequence``: that of the autograd node that an op creates, or of the node itself.
    ``forward_thread``: the thread that created the node.
    """

    name: str
    kind: str
    thread: int
    start: int
    end: int
    mark: int = -1
    id: int = 0
    launched_by: int = 0
    sequence: int = -1
    forward_thread: int = 0
    device: str = "cpu"
    stream: int = 0
    inputs: tuple[tuple[str, list[int]], ...] = ()


def trouble() -> str | None:
    """Return why times can't be taken in this version of PyTorch, or None if they can."""
    if not torch._C._autograd.kineto_available():  # type: ignore[attr-defined]  # not in the stubs
        return f"PyTorch {torch.__version__} was built without its profiler"
    kind = getattr(torch._C._autograd, "_KinetoEvent", None)
    missing = next((name for name in _NEEDED if not hasattr(kind, name)), None)
    if missing is None and not hasattr(torch._C._profiler, "_RecordFunctionFast"):
        missing = "_RecordFunctionFast"
    return missing and f"the profiler of PyTorch {torch.__version__} has no {missing}"


def enabled() -> bool:
    """Tell whether a profiler runs in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def range_(number: int) -> AbstractContextManager[object]:
    """Return a range that becomes a mark with this number in the profile."""
    mark = torch._C._profiler._RecordFunctionFast(f"{_MARK}{number}")
    return cast(AbstractContextManager[object], mark)  # the stubs lack its methods


class Profiler:
    """PyTorch's profiler, from `start` to `stop`, on this thread and its backward threads."""

    def __init__(self, shapes: bool) -> None:
        """``shapes``: also note the input shapes of each operator, which takes some time."""
        self._shapes = shapes

    def start(self, give_way: Callable[[], None]) -> None:
        """Start profiling.

        There is only one profiler: when the program starts its own, this one ends and
        ``give_way`` is called.
        """
        device = next((name for name in ("cuda", "npu", "xpu") if _is_available(name)), None)
        self._profile = profiler.profile(
            use_kineto=True, use_cpu=True, use_device=device, record_shapes=self._shapes
        )
        with _quiet():
            self._profile.__enter__()  # type: ignore[no-untyped-call]  # of torch
        original: Callable[..., object] | None
        original = self._original = getattr(profiler.profile, "_prepare_trace", None)
        self._spoiled, thread = False, threading.get_ident()
        if original is None:
            return

        def prepare(other: profiler.profile, *args: object, **kwargs: object) -> object:
            if threading.get_ident() == thread:
                self._end()
                give_way()
            else:
                self._spoiled = True  # the other profiler takes the events of both
            return original(other, *args, **kwargs)

        profiler.profile._prepare_trace = prepare  # type: ignore[method-assign, assignment]

    def _end(self) -> None:
        if self._original is not None:
            profiler.profile._prepare_trace = self._original  # type: ignore[method-assign]
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch

    def stop(self) -> list[Event]:
        """Return the events by start; none if another thread started a profiler meanwhile."""
        self._end()
        results = self._profile.kineto_results
        if self._spoiled or results is None:
            return []
        events = [_event(seen) for seen in results.events()]
        return sorted(events, key=lambda event: (event.start, -event.end))


def _is_available(name: str) -> bool:
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Kineto, which reads its log level when it is first used."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or _SILENT
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


# -- events ---------------------------------------------------------------------------------------


class _KinetoEvent(Protocol):
    """An event of the profiler's result."""

    def name(self) -> str: ...
    def start_ns(self) -> int: ...
    def duration_ns(self) -> int: ...
    def start_thread_id(self) -> int: ...
    def fwd_thread_id(self) -> int: ...
    def sequence_nr(self) -> int: ...
    def correlation_id(self) -> int: ...
    def linked_correlation_id(self) -> int: ...
    def scope(self) -> int: ...
    def device_type(self) -> object: ...
    def device_index(self) -> int: ...
    def device_resource_id(self) -> int: ...
    def dtypes(self) -> Sequence[str]: ...
    def shapes(self) -> Sequence[Sequence[int]]: ...


def _event(seen: _KinetoEvent) -> Event:
    name, start = str(seen.name()), int(seen.start_ns())
    end = start + max(0, int(seen.duration_ns()))
    if seen.device_type() != torch._C._autograd.DeviceType.CPU:
        kind = str(seen.device_type()).rpartition(".")[2].lower()
        return Event(
            name, "device", 0, start, end, launched_by=int(seen.linked_correlation_id()),
            device=f"{kind}:{seen.device_index()}", stream=int(seen.device_resource_id()),
        )  # fmt: skip
    number = name.removeprefix(_MARK)
    return Event(
        name, _kind(seen, name), int(seen.start_thread_id()), start, end,
        mark=int(number) if number != name and number.isdigit() else -1,
        id=int(seen.correlation_id()), sequence=int(seen.sequence_nr()),
        forward_thread=int(seen.fwd_thread_id()), inputs=_inputs(seen),
    )  # fmt: skip


def _inputs(seen: _KinetoEvent) -> tuple[tuple[str, list[int]], ...]:
    """Return dtype (torch's name; "" in a list of tensors) and shape of each tensor."""
    inputs: list[tuple[str, list[int]]] = []
    shapes_of = getattr(seen, "structured_input_shapes", None)
    for place, kind in enumerate(seen.dtypes()):
        if kind == "TensorList" and shapes_of is not None:
            inputs += [("", list(shape)) for shape in shapes_of()[place]]
        elif kind and not kind.startswith(("Scalar", "TensorList", "GenericList")):
            dtype = _DTYPES.get(kind, kind.removeprefix("c10::").lower())
            inputs.append((dtype, list(seen.shapes()[place])))
    return tuple(inputs)


def _kind(seen: _KinetoEvent, name: str) -> str:
    if name.startswith(_MARK):
        return "mark"
    if seen.scope() == _NODE_SCOPE:
        return "node"
    activity_type = getattr(seen, "activity_type", None)
    is_op = activity_type is None or activity_type() == "cpu_op"
    if seen.scope() == _USER_SCOPE or name.startswith("autograd::") or not is_op:
        return "frame"
    return "op"


# -- operators ------------------------------------------------------------------------------------


@functools.cache
def computes(name: str) -> bool:
    """Tell whether an operator (``aten::addmm``) computes something on the CPU itself.

    It does not if it only calls other operators, returns a view or allocates memory.
    """
    if name.startswith(_ALLOCATES):
        return False
    overloads = (one for one in _overloads().get(name, ()) if not one.endswith("out"))
    return any(_has_kernel(one) and not _is_view(one) for one in overloads)


@functools.cache
def _overloads() -> dict[str, list[str]]:
    overloads: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        overloads.setdefault(name.partition(".")[0], []).append(name)
    return overloads


def _has_kernel(name: str) -> bool:
    """Composite operators call others, unless they are explicit, without a gradient formula."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, "CPU") or has(name, "CompositeExplicitAutograd"))


def _is_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(base, overload)
    except RuntimeError:
        return False
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
