"""The only home of the profiler's internals: ranges that cost next to nothing, and its events as they were taken.

`torch.autograd.profiler.profile` is public; the events of its result, ranges without arguments and what the dispatcher knows of a name are not. Where
one of them is missing in a version of PyTorch, `trouble` says so, and no times are taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

_MARK = "llmdebug "
_NODE_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_USER_SCOPE = 7
_SILENT = "99"  # above all levels: Kineto prints two lines to stderr for each profile otherwise
_DTYPES = {
    "float": "float32", "double": "float64", "long int": "int64", "long": "int64", "int": "int32", "short": "int16", "short int": "int16",
    "signed char": "int8", "unsigned char": "uint8", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_ALLOCATES = ("aten::empty", "aten::resize", "aten::new_empty", "aten::set_")


@dataclass(frozen=True, slots=True)
class Event:
    """What the profiler saw. ``start``, ``end``: nanoseconds. ``kind``: op, node (of autograd), frame (a range of the program or of the engine),
    mark (one of ours, ``mark`` its number) or device. ``id``: of an op; ``launched_by``: the id of the op that a device event belongs to.
    ``inputs``: dtype and shape of the tensors that an op was given, where these are asked for. ``sequence``: of the autograd node that an op makes, or that a node is; ``forward_thread``: where that was made.
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
    """Say why times can't be taken in this version of PyTorch; None where all that is needed is there."""
    if not torch._C._autograd.kineto_available():  # type: ignore[attr-defined]
        return f"PyTorch {torch.__version__} was built without its profiler"
    kind = getattr(torch._C._autograd, "_KinetoEvent", None)
    needed = (
        "start_ns",
        "duration_ns",
        "start_thread_id",
        "device_type",
        "scope",
        "sequence_nr",
        "correlation_id",
    )
    missing = next((name for name in needed if not hasattr(kind, name)), None)
    if missing is None and not hasattr(torch._C._profiler, "_RecordFunctionFast"):
        missing = "_RecordFunctionFast"
    return missing and f"the profiler of PyTorch {torch.__version__} has no {missing}"


def enabled() -> bool:
    """Tell whether somebody profiles this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def range_(number: int) -> AbstractContextManager[Any]:
    """Return a range that is a mark in what is profiled."""
    return torch._C._profiler._RecordFunctionFast(f"{_MARK}{number}")  # type: ignore[no-any-return]


class Profiler:
    """PyTorch's profiler on this thread, and on those that its backward passes run in, from `start` to `stop`."""

    def __init__(self, shapes: bool) -> None:
        """``shapes``: note also what each operator is given, for some time of its own."""
        self._shapes = shapes

    def start(self, gives_way: Callable[[], None]) -> None:
        """Start it. There can be one only: when the program starts its own, this one ends, and ``gives_way`` is called."""
        device = next((name for name in ("cuda", "npu", "xpu") if _available(name)), None)
        self._profile = profiler.profile(
            use_kineto=True, use_cpu=True, use_device=device, record_shapes=self._shapes
        )
        with _quiet():
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        before: Any = getattr(profiler.profile, "_prepare_trace", None)

        self._spoiled, thread = False, threading.get_ident()

        def prepare(theirs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                self._end()
                gives_way()
            else:
                self._spoiled = True  # it takes the events of both
            return before(theirs, *args, **kwargs)

        self._prepare = before
        if before is not None:
            profiler.profile._prepare_trace = prepare  # type: ignore[method-assign, assignment]

    def _end(self) -> None:
        if self._prepare is not None:
            profiler.profile._prepare_trace = self._prepare  # type: ignore[method-assign]
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> list[Event]:
        """Return what was seen, by start; nothing where another thread started a profiler meanwhile."""
        self._end()
        if self._spoiled:
            return []
        results: Any = self._profile.kineto_results
        return sorted(
            (_event(one) for one in results.events()), key=lambda event: (event.start, -event.end)
        )


def _available(name: str) -> bool:
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Kineto reads how much to print when it is first used."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or _SILENT
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _event(seen: Any) -> Event:
    name, start = str(seen.name()), int(seen.start_ns())
    end = start + max(0, int(seen.duration_ns()))
    if seen.device_type() != torch._C._autograd.DeviceType.CPU:
        kind = str(seen.device_type()).rpartition(".")[2].lower()
        device = f"{kind}:{seen.device_index()}"
        return Event(
            name, "device", 0, start, end,
            launched_by=int(seen.linked_correlation_id()), device=device, stream=int(seen.device_resource_id()),
        )  # fmt: skip
    mark = name.removeprefix(_MARK)
    sequence = int(seen.sequence_nr())
    return Event(
        name, _kind(seen, name), int(seen.start_thread_id()), start, end,
        mark=int(mark) if mark != name and mark.isdigit() else -1, id=int(seen.correlation_id()), sequence=sequence,
        forward_thread=int(seen.fwd_thread_id()), inputs=_inputs(seen),
    )  # fmt: skip


def _inputs(seen: Any) -> tuple[tuple[str, list[int]], ...]:
    """Return dtype (of torch's, "" in a list of tensors) and shape of each tensor."""
    found: list[tuple[str, list[int]]] = []
    for place, dtype in enumerate(seen.dtypes()):
        if dtype == "TensorList" and hasattr(seen, "structured_input_shapes"):
            found += [("", list(shape)) for shape in seen.structured_input_shapes()[place]]
        elif dtype and not dtype.startswith(("Scalar", "TensorList", "GenericList")):
            found.append(
                (
                    _DTYPES.get(dtype, dtype.removeprefix("c10::").lower()),
                    list(seen.shapes()[place]),
                )
            )
    return tuple(found)


def _kind(seen: Any, name: str) -> str:
    if name.startswith(_MARK):
        return "mark"
    if seen.scope() == _NODE_SCOPE:
        return "node"
    activity = seen.activity_type() if hasattr(seen, "activity_type") else "cpu_op"
    if seen.scope() == _USER_SCOPE or name.startswith("autograd::") or activity != "cpu_op":
        return "frame"
    return "op"


@functools.cache
def computes(name: str) -> bool:
    """Tell whether an operator (``aten::addmm``) computes on the CPU itself: not by calling others, and more than a view or memory."""
    if name.startswith(_ALLOCATES):
        return False
    overloads = _overloads().get(name, ())
    return any(
        _has_kernel(one) and not _is_view(one) for one in overloads if not one.endswith("out")
    )


@functools.cache
def _overloads() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        found.setdefault(name.partition(".")[0], []).append(name)
    return found


def _has_kernel(name: str) -> bool:
    """Composite operators are computed by others, unless they say how without a gradient."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, "CPU") or has(name, "CompositeExplicitAutograd"))


def _is_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(base, overload)
    except RuntimeError:
        return False
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
