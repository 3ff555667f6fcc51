"""ONNX Runtime's internals: how a session was made and runs, and how to make another one like it.

Private are ``_sess``, ``_sess_options_initial``, ``_model_path`` and ``_model_bytes`` of a session,
and ``_bound_inputs`` and ``_numpy_obj_references`` of a binding (onnxruntime 1.20 to 1.31). If one
is missing, `SessionMaker` raises an error or `bound_inputs` returns nothing, and only the inputs
and outputs of a run are recorded.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeGuard, TypeVar

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners, with_methods
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.kernels.raw import memory_at

if TYPE_CHECKING:
    import numpy
    from onnxruntime import InferenceSession, IOBinding, RunOptions, SessionOptions

T = TypeVar("T")
PACKAGE = "onnxruntime"
_INITIALIZERS = "session.optimized_model_external_initializers"
_FOLDER = "session.model_external_initializers_file_folder_path"
_ASSIGNED = "session.record_ep_graph_assignment_info"
_ERRORS_ONLY = 3
_LARGE = 1024  # bytes; larger initializers of an optimised graph go into a file of their own
# https://onnx.ai/onnx/api/classes.html#tensorproto
ELEMENTS = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
    16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2",
    20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NUMPY = frozenset({"float", "double", "float16", "bool", *_INTEGERS})
Feed = Mapping[str, object]  # the inputs of a run by name


class Listener(Protocol):
    """Follows runs. ``own()`` runs the program's session; the program gets the returned value."""

    def ran(
        self, session: InferenceSession, names: Sequence[str] | None, feed: Feed,
        options: RunOptions | None, own: Callable[[], list[object]],
    ) -> list[object]: ...  # fmt: skip
    def ran_unseen(
        self, session: InferenceSession, feed: Feed | None, own: Callable[[], object]
    ) -> object: ...


# -- runs of the program's sessions ---------------------------------------------------------------

# ways to run a session other than `run`, each with the function that returns its inputs
_OTHER_RUNS: dict[str, Callable[..., Feed | None]] = {
    "run_async": lambda output_names, input_feed, *_, **__: input_feed,
    "run_with_ort_values": lambda output_names, input_dict_ort_values, *_, **__: (
        input_dict_ort_values
    ),
    "run_with_iobinding": lambda iobinding, *_, **__: bound_inputs(iobinding),
}


def _wrap(module: ModuleType) -> Callable[[], None]:
    """Report all runs of sessions to the listeners; return a function that undoes this."""
    kind = module.InferenceSession
    methods = {"run": _reported_run(kind.run)} | {
        name: _reported_unseen(getattr(kind, name), inputs) for name, inputs in _OTHER_RUNS.items()
    }
    return with_methods((kind, name, method) for name, method in methods.items())


def _reported_run(original: Callable[..., list[object]]) -> Callable[..., list[object]]:
    @functools.wraps(original)
    @interrupts.unbroken  # how a recording begins and ends a run; the program's own run is none
    def run(
        session: InferenceSession, output_names: Sequence[str] | None, input_feed: Feed,
        run_options: RunOptions | None = None,
    ) -> list[object]:  # fmt: skip
        request = (session, output_names, input_feed, run_options)
        own = functools.partial(_programs, original, *request)
        for listener in () if _is_ours(session) else listeners.at_run(session):
            own = functools.partial(listener.ran, *request, own)
        return own()

    return run


def _reported_unseen(
    original: Callable[..., object], inputs: Callable[..., Feed | None]
) -> Callable[..., object]:
    @functools.wraps(original)
    @interrupts.unbroken
    def run(session: InferenceSession, *args: object, **kwargs: object) -> object:
        own = functools.partial(_programs, original, session, *args, **kwargs)
        for listener in () if _is_ours(session) else listeners.at_run(session):
            own = functools.partial(listener.ran_unseen, session, inputs(*args, **kwargs), own)
        return own()

    return run


@interrupts.let_through
def _programs(original: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Run the program's session; an interrupt ends that at once."""
    return original(*args, **kwargs)


_OURS = "_llmdebug_tap"


def _is_ours(session: InferenceSession) -> bool:
    """Tell whether we made the session to observe another one."""
    return getattr(session, _OURS, False)


# also if onnxruntime is only imported later
listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_module(PACKAGE, _wrap))


def bound_inputs(binding: IOBinding) -> dict[str, object] | None:
    """Return the bound inputs; None if one is an address that only the program knows."""
    arrays: dict[str, object] = getattr(binding, "_numpy_obj_references", {})
    bound: dict[str, object] | None = getattr(binding, "_bound_inputs", None)
    if bound is None:
        return dict(arrays) or None
    inputs = {name: arrays.get(name) if value is None else value for name, value in bound.items()}
    return None if not inputs or any(value is None for value in inputs.values()) else inputs


# -- making sessions ------------------------------------------------------------------------------


def model_of(session: InferenceSession) -> tuple[str | None, bytes | None]:
    """Return the file that a session was made of, or else the bytes.

    Raises:
        CaptureError: the file is gone, or this onnxruntime does not say.
    """
    path, data = getattr(session, "_model_path", None), getattr(session, "_model_bytes", None)
    if path is None and data is None:
        raise CaptureError("this onnxruntime does not say what a session was made of")
    if path is not None and not os.path.isfile(path):
        model = f"the model {os.path.basename(path)!r} that the session was made of"
        raise CaptureError(f"{model} is no longer there; put it back, or make the session anew")
    return (None if path is None else os.path.abspath(path)), data


class SessionMaker:
    """Makes sessions like a given one: same providers, options, custom operators and threads."""

    def __init__(self, session: InferenceSession) -> None:
        """Raises CaptureError if onnxruntime does not reveal how the session was made."""
        self.path, self.data = model_of(session)
        self._session = session

    @property
    def optimises(self) -> bool:
        """The session optimises its graph."""
        import onnxruntime

        level = self._session.get_session_options().graph_optimization_level
        return bool(level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)

    def write_optimised(self, file: str) -> None:
        """Write the session's optimised graph; large initializers go into a file beside it.

        Raises what onnxruntime raises.
        """
        entries = {
            f"{_INITIALIZERS}_file_name": os.path.basename(file) + ".data",
            f"{_INITIALIZERS}_min_size_in_bytes": str(_LARGE),
        }
        model = self.data if self.path is None else self.path
        self._make(model, entries, optimized_model_filepath=file)

    def make_unchanged(
        self, model: bytes, folder: str | None, times: str | None = None
    ) -> InferenceSession:
        """Return a session that runs a model node by node, without optimisation.

        ``folder``: that of its external data. ``times``: prefix of the profile's file name, if it
        is profiled. Raises what onnxruntime raises.
        """
        import onnxruntime

        entries = {_ASSIGNED: "1", **({_FOLDER: folder} if folder else {})}
        changes: dict[str, object] = {}
        if times is not None:
            changes = {"enable_profiling": True, "profile_file_prefix": times}
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = self._make(model, entries, graph_optimization_level=level, **changes)
        setattr(session, _OURS, True)
        return session

    def _make(
        self, model: str | bytes | None, entries: Mapping[str, str], **changes: object
    ) -> InferenceSession:
        changes = {"log_severity_level": _ERRORS_ONLY, "enable_profiling": False, **changes}
        copied = self._session._sess.session_options  # a new copy each time
        initial = getattr(self._session, "_sess_options_initial", None)
        if copied is not None:
            try:
                return self._make_with(copied, model, entries, changes)
            except Exception:  # the copy has lost the libraries of custom operators
                if initial is None:
                    raise
        if initial is None:
            raise CaptureError("the session has no options to make another one by")
        before = {name: getattr(initial, name) for name in changes}
        try:
            return self._make_with(initial, model, entries, changes)
        finally:
            for name, value in before.items():
                setattr(initial, name, value)
            for name in entries:
                initial.add_session_config_entry(name, "0" if name == _ASSIGNED else "")

    def _make_with(
        self, options: SessionOptions, model: str | bytes | None, entries: Mapping[str, str],
        changes: Mapping[str, object],
    ) -> InferenceSession:  # fmt: skip
        import onnxruntime

        for name, value in changes.items():
            setattr(options, name, value)
        for name, text in entries.items():
            options.add_session_config_entry(name, text)
        providers = list(self._session.get_providers())
        known = self._session.get_provider_options()
        settings = [known.get(name, {}) for name in providers]
        kind = onnxruntime.InferenceSession
        return kind(model, options, providers, settings, enable_fallback=False)


# -- values ---------------------------------------------------------------------------------------


def providers_of(session: InferenceSession) -> dict[str, str]:
    """Return node -> execution provider, as far as this onnxruntime says."""
    try:
        parts = session.get_provider_graph_assignment_info()
        return {node.name: part.ep_name for part in parts for node in part.get_nodes()}
    except (AttributeError, RuntimeError):
        return {}


def is_plain(kind: str) -> bool:
    """Tell whether NumPy has the type of an output: ``tensor(float)``."""
    return kind.removeprefix("tensor(").removesuffix(")") in _NUMPY


def is_tensor(kind: str) -> bool:
    """Tell whether an output is a tensor, by its type."""
    return kind.startswith("tensor(")


def values_of(session: InferenceSession, names: Sequence[str], feed: Feed) -> list[object]:
    """Run a session and return the values of these names: tensors, or sequences and maps."""
    inputs = {name: _native(value) for name, value in feed.items()}
    outputs = session._sess.run_with_ort_values(inputs, list(names), None)
    return [tensor_of(value) for value in outputs]


class _NativeValue(Protocol):
    """A value of onnxruntime's native layer."""

    def is_tensor(self) -> bool: ...
    def element_type(self) -> int: ...
    def device_name(self) -> str: ...
    def numpy(self) -> numpy.ndarray: ...
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def tensor_size_in_bytes(self) -> int: ...


def _native(value: object) -> object:
    import numpy
    import onnxruntime

    native: object = getattr(value, "_ortvalue", None)
    if native is not None:
        return native
    return onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ascontiguousarray(value))._ortvalue


def _is_native(value: object) -> TypeGuard[_NativeValue]:
    return hasattr(value, "data_ptr") and not isinstance(value, torch.Tensor)


def tensor_of(value: object) -> object:
    """Return an input or output of a session as a CPU tensor, without a copy if possible.

    Values whose type torch lacks are returned unchanged.
    """
    import numpy

    value = getattr(value, "_ortvalue", value)
    if isinstance(value, numpy.ndarray):
        return _from_array(value)
    if isinstance(value, (list, tuple, int, float, bool)):
        return _from_array(numpy.asarray(value))
    if not _is_native(value) or not value.is_tensor():
        return value
    dtype = DTYPES.get(ELEMENTS.get(value.element_type(), ""))
    if dtype is None or not value.device_name().lower().startswith("cpu"):
        return _from_array(value.numpy())
    shape, size = list(value.shape()), value.tensor_size_in_bytes()
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = memory_at(value.data_ptr())
    memory.owner = value
    return torch.frombuffer(memoryview(memory)[:size], dtype=dtype).reshape(shape)


def _from_array(array: numpy.ndarray) -> object:
    if array.dtype.kind not in "fiubc":
        return array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only arrays: we only read
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):  # negative strides, another byte order
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
