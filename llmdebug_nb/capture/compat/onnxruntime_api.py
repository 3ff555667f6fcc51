"""ONNX Runtime's internals: how a session was made, how it is run, and how another one is made of the same model.

Private are ``_sess``, ``_sess_options_initial``, ``_model_path``, ``_model_bytes`` of a session and ``_bound_inputs``, ``_numpy_obj_references`` of a binding
(onnxruntime 1.20 to 1.31); where one is missing, `Remake` or `bound_inputs` says so by an error or an empty answer, and only what goes in and out is recorded.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.kernels.raw import memory_at

PACKAGE = "onnxruntime"
_OPTIMISED = "session.optimized_model_external_initializers_file_name"
_FROM = "session.optimized_model_external_initializers_min_size_in_bytes"
_FOLDER = "session.model_external_initializers_file_folder_path"
_ASSIGNED = "session.record_ep_graph_assignment_info"
_ERRORS_ONLY = 3
_LARGE = 1024  # bytes of an initializer from which on it lies in a file of its own
# https://onnx.ai/onnx/api/classes.html#tensorproto
ELEMENTS = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
_NUMPY = frozenset(
    [
        "float",
        "double",
        "float16",
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
    ]
)


class Listener(Protocol):
    """Who is told of runs. ``own()`` runs the session as the program wants it; what is returned goes to the program."""

    def ran(
        self,
        session: Any,
        names: Sequence[str],
        feed: Mapping[str, Any],
        options: Any,
        own: Callable[[], Any],
    ) -> Any: ...
    def ran_unseen(
        self, session: Any, feed: Mapping[str, Any] | None, own: Callable[[], Any]
    ) -> Any: ...


def _wrap(module: Any) -> Callable[[], None]:
    """Have all runs of sessions told to the listeners; return how to undo it."""
    kind = module.InferenceSession
    run, run_async, with_values, with_binding = (
        kind.run, kind.run_async, kind.run_with_ort_values, kind.run_with_iobinding
    )  # fmt: skip
    names = ("run", "run_async", "run_with_ort_values", "run_with_iobinding")
    before = {name: vars(kind).get(name) for name in names}

    @functools.wraps(run)
    def run_told(session: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        own = functools.partial(run, session, output_names, input_feed, run_options)
        for listener in () if _busy(session) else listeners:
            own = functools.partial(
                listener.ran, session, output_names, input_feed, run_options, own
            )
        return own()

    def unseen(original: Any, feed: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def told(session: Any, *args: Any, **kwargs: Any) -> Any:
            own = functools.partial(original, session, *args, **kwargs)
            for listener in () if _busy(session) else listeners:
                own = functools.partial(listener.ran_unseen, session, feed(*args, **kwargs), own)
            return own()

        return told

    kind.run = run_told
    kind.run_async = unseen(run_async, lambda output_names, input_feed, *_, **__: input_feed)
    kind.run_with_ort_values = unseen(
        with_values, lambda output_names, input_dict_ort_values, *_, **__: input_dict_ort_values
    )
    kind.run_with_iobinding = unseen(
        with_binding, lambda iobinding, *_, **__: bound_inputs(iobinding)
    )

    def undo() -> None:
        for name, function in before.items():
            if function is None:
                delattr(kind, name)
            else:
                setattr(kind, name, function)

    return undo


_OURS = "_llmdebug_tap"


def _busy(session: Any) -> bool:
    """Tell whether a session is one of ours, made to see what another one computes."""
    return getattr(session, _OURS, False)


# also if onnxruntime is only imported later
listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_module(PACKAGE, _wrap))


def is_session(value: Any) -> bool:
    """Tell whether a value is a session of ONNX Runtime; it is not imported for that."""
    module = sys.modules.get(PACKAGE)
    kind = getattr(module, "InferenceSession", None)
    return kind is not None and isinstance(value, kind)


def model_of(session: Any) -> tuple[str | None, bytes | None]:
    """Return the file, or else the bytes, that a session was made of.

    Raises:
        CaptureError: the file is gone, or this onnxruntime does not say.
    """
    path, data = getattr(session, "_model_path", None), getattr(session, "_model_bytes", None)
    if path is None and data is None:
        raise CaptureError("this onnxruntime does not say what a session was made of")
    if path is not None and not os.path.isfile(path):
        raise CaptureError(
            f"the model {os.path.basename(path)!r} that the session was made of is no longer there; put it back, or make the session anew"
        )
    return (None if path is None else os.path.abspath(path)), data


class Remake:
    """Makes further sessions as one was made: the same providers, options, custom operators and threads."""

    def __init__(self, session: Any) -> None:
        """Raises CaptureError where it can't be told how the session was made."""
        self.path, self.data = model_of(session)
        self._session = session

    @property
    def optimises(self) -> bool:
        """Tell whether the session optimises its graph."""
        import onnxruntime

        level = self._session.get_session_options().graph_optimization_level
        return bool(level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)

    def optimised(self, file: str) -> None:
        """Write the graph that the session runs after optimisation; large initializers lie beside it. Raises what onnxruntime raises."""
        entries = {_OPTIMISED: os.path.basename(file) + ".data", _FROM: str(_LARGE)}
        self._make(
            self.data if self.path is None else self.path, entries, optimized_model_filepath=file
        )

    def as_it_is(self, model: bytes, folder: str | None, times: str | None = None) -> Any:
        """Return a session that runs a model node by node as it is. ``folder``: of its external data. ``times``: how the file begins that its profile
        goes to. Raises what onnxruntime raises."""
        import onnxruntime

        entries = {_ASSIGNED: "1", **({_FOLDER: folder} if folder else {})}
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        profiled = (
            {"enable_profiling": True, "profile_file_prefix": times} if times is not None else {}
        )
        made = self._make(model, entries, graph_optimization_level=level, **profiled)
        setattr(made, _OURS, True)
        return made

    def _make(self, model: Any, entries: Mapping[str, str], **changes: Any) -> Any:
        import onnxruntime

        session, changes = (
            self._session,
            {"log_severity_level": _ERRORS_ONLY, "enable_profiling": False, **changes},
        )
        options: Any = session._sess.session_options  # a copy of its own, each time
        given: Any = getattr(session, "_sess_options_initial", None)
        for chosen in filter(
            None, (options, given)
        ):  # the copy knows nothing of libraries of custom operators
            before = {name: getattr(chosen, name) for name in changes}
            try:
                for name, value in changes.items():
                    setattr(chosen, name, value)
                for name, text in entries.items():
                    chosen.add_session_config_entry(name, text)
                return onnxruntime.InferenceSession(
                    model,
                    chosen,
                    list(session.get_providers()),
                    self._provider_options(),
                    enable_fallback=False,
                )
            except Exception:
                if chosen is given or given is None:
                    raise
            finally:
                if chosen is given:
                    for name, value in before.items():
                        setattr(chosen, name, value)
                    for name in entries:
                        chosen.add_session_config_entry(name, "0" if name == _ASSIGNED else "")
        raise CaptureError("the session has no options to make another one by")

    def _provider_options(self) -> list[dict[str, str]]:
        given = self._session.get_provider_options()
        return [given.get(name, {}) for name in self._session.get_providers()]


def providers_of(session: Any) -> dict[str, str]:
    """Return node -> execution provider, as far as this onnxruntime says."""
    try:
        return {
            node.name: part.ep_name
            for part in session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        }
    except (AttributeError, RuntimeError):
        return {}


def is_plain(kind: str) -> bool:
    """Tell whether NumPy has an equal of an output's type, as onnxruntime words it (``tensor(float)``)."""
    return kind.removeprefix("tensor(").removesuffix(")") in _NUMPY


def is_tensor(kind: str) -> bool:
    return kind.startswith("tensor(")


def values_of(session: Any, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
    """Run a session and return the values of these names, of any type that it has: tensors, or what is none."""
    import onnxruntime

    given = {name: _as_value(onnxruntime, value)._ortvalue for name, value in feed.items()}
    return [
        tensor_of(value) for value in session._sess.run_with_ort_values(given, list(names), None)
    ]


def _as_value(onnxruntime: Any, value: Any) -> Any:
    import numpy

    if isinstance(value, onnxruntime.OrtValue):
        return value
    return onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ascontiguousarray(value))


def tensor_of(value: Any) -> Any:
    """Return a value that a session takes or gives as a CPU tensor, where it is one that torch has; else as it is. No copy where it can be."""
    import numpy

    value = getattr(value, "_ortvalue", value)
    if isinstance(value, numpy.ndarray):
        return _of_array(value)
    if isinstance(value, (list, tuple, int, float, bool)):
        return _of_array(numpy.asarray(value))
    if not hasattr(value, "data_ptr") or isinstance(value, torch.Tensor):
        return value
    if not value.is_tensor():
        return value
    kind = ELEMENTS.get(value.element_type())
    if kind not in DTYPES or not value.device_name().lower().startswith("cpu"):
        return _of_array(value.numpy())
    shape, size = list(value.shape()), value.tensor_size_in_bytes()
    if not size:
        return torch.empty(shape, dtype=DTYPES[kind])
    buffer = memory_at(value.data_ptr())
    buffer.owner = value
    return torch.frombuffer(memoryview(buffer)[:size], dtype=DTYPES[kind]).reshape(shape)


def _of_array(array: Any) -> Any:
    import warnings

    if array.dtype.kind not in "fiubc":
        return array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an array that can't be written to is only read
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):  # negative strides, another byte order
            native = array.astype(array.dtype.newbyteorder("="))
            return torch.from_numpy(native)


def bound_inputs(binding: Any) -> dict[str, Any] | None:
    """Return what is bound to the inputs of a binding; None where one lies at an address that only the program knows."""
    arrays = getattr(binding, "_numpy_obj_references", {})
    bound = getattr(binding, "_bound_inputs", None)
    if bound is None:
        return dict(arrays) or None
    found = {name: arrays.get(name) if value is None else value for name, value in bound.items()}
    return None if not found or any(value is None for value in found.values()) else found
