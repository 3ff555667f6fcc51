"""Compiled models of OpenVINO: how one was compiled, another one like it, and its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compat.openvino_api import property_of
from llmdebug_nb.core.dtypes import DTYPES, epsilon
from llmdebug_nb.core.errors import CaptureError

if TYPE_CHECKING:
    from openvino import CompiledModel, Core, InferRequest, Model, Node, Tensor

# OpenVINO's name of an element type -> torch's
ELEMENTS = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "boolean": "bool",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u64": "uint64", "u32": "uint32",
    "u16": "uint16", "u8": "uint8", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "f8e8m0": "float8_e8m0fnu",
}  # fmt: skip
_BITS = {"i8": 8, "u8": 8, "i4": 4, "u4": 4, "nf4": 4, "u3": 3, "i2": 2, "u2": 2}
_FUSED = "originalLayersNames"  # of a node that runs: those of the model that it stands for
_KIND, _HOW, _PRECISION = "layerType", "primitiveType", "runtimePrecision"
_CACHES = "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION", "KV_CACHE_PRECISION"


# -- how a model was compiled ---------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """How a compiled model runs.

    ``device``, ``properties``: by which another one is compiled like it. ``nodes``: name of a node
    of the model, whose result a node that runs computes -> what is known of that. ``precisions``:
    the types below float32 that nodes compute in. ``cache``: that of the key-value cache, None
    without one.
    """

    device: str
    properties: dict[str, object]
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    precisions: frozenset[str] = frozenset()
    cache: str | None = None


def runs_of(compiled: CompiledModel, core: Core) -> Runs:
    """Return how a model runs. Raises CaptureError: its device can't be told."""
    devices = property_of(compiled, "EXECUTION_DEVICES")
    if not isinstance(devices, (list, tuple)) or not devices:
        raise CaptureError("openvino does not say on which device the model runs")
    device = str(devices[0]).strip("()")
    known = _known_properties(compiled, device)
    nodes, kinds, precisions = _nodes_that_run(compiled)
    # a weight that is stored in f16 is read by a node of that type, whatever is computed in
    precisions &= {_type_name(known.get("INFERENCE_PRECISION_HINT", ""))}
    has_cache = "MemoryInput" in kinds and any("Attention" in kind for kind in kinds)
    cache = next((_type_name(known[name]) for name in _CACHES if name in known), None)
    return Runs(
        device, _settable(core, device, known), nodes, frozenset(precisions),
        cache if has_cache else None,
    )  # fmt: skip


def _nodes_that_run(
    compiled: CompiledModel,
) -> tuple[dict[str, dict[str, str]], set[str], set[str]]:
    """Return the nodes that run, by the last one of the model that each stands for.

    Also their kinds, and the types below float32 that they compute in.
    """
    nodes, kinds, precisions = {}, set(), set()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        facts = {
            key: info[key].astype(str) for key in (_KIND, _HOW, _PRECISION, _FUSED) if key in info
        }
        kind, names = facts.get(_KIND, ""), facts.pop(_FUSED, "")
        kinds.add(kind)
        if kind in ("Const", "Input", "Output") or not names:
            continue
        precisions.add(facts.get(_PRECISION, ""))
        nodes[names.rpartition(",")[2]] = facts
    return nodes, kinds, precisions & {"bf16", "f16"}


def _known_properties(compiled: CompiledModel, device: str) -> dict[str, object]:
    """Return the properties of a compiled model, on the device that it runs on."""
    supported = property_of(compiled, "SUPPORTED_PROPERTIES")
    names = list(supported) if isinstance(supported, Mapping) else []
    if "DEVICE_PROPERTIES" in names:  # of AUTO, which hands on to a device
        inner = property_of(compiled, "DEVICE_PROPERTIES")
        if isinstance(inner, Mapping) and isinstance(inner.get(device), Mapping):
            return dict(inner[device])
    known = {name: property_of(compiled, name) for name in names}
    return {name: value for name, value in known.items() if value is not None}


def _settable(core: Core, device: str, known: Mapping[str, object]) -> dict[str, object]:
    """Return the properties that have to be set, for another model to be compiled with the same."""
    modes = core.get_property(device, "SUPPORTED_PROPERTIES")
    settable = [name for name in known if modes.get(name) == "RW"]
    return {
        name: known[name]
        for name in settable
        if str(core.get_property(device, name)) != str(known[name])
    }


def _type_name(value: object) -> str:
    """Return the name of an element type: u8."""
    name = getattr(value, "to_string", None)
    return str(name() if name is not None else value)


def epsilon_of(kind: str) -> float:
    """Return the epsilon of an element type, 0 if it is not known.

    Integers of b bits stand for values up to the largest of their group in magnitude, whose sign
    takes one bit: they are 2^(1 - b) of it apart.
    """
    if kind in _BITS:
        return 2.0 ** (1 - _BITS[kind])
    return epsilon(ELEMENTS[kind]) if ELEMENTS.get(kind, "").startswith(("float", "bf")) else 0.0


# -- our own models -------------------------------------------------------------------------------


def compile_with_outputs(
    core: Core, model: Model, runs: Runs, ports: Sequence[tuple[str, int]]
) -> CompiledModel:
    """Compile a copy of a model that also returns the outputs of nodes.

    ``ports``: friendly name of a node and number of its output. They follow the model's own
    outputs. Raises RuntimeError.
    """
    copy = model.clone()
    by_name = {node.get_friendly_name(): node for node in copy.get_ordered_ops()}
    copy.add_outputs([by_name[name].output(at) for name, at in ports])
    return core.compile_model(copy, runs.device, dict(runs.properties))


def infer_like(ours: InferRequest, theirs: InferRequest) -> list[Tensor]:
    """Run our request with the inputs of theirs; return its outputs."""
    for at, tensor in enumerate(theirs.input_tensors):
        ours.set_input_tensor(at, tensor)
    ours.infer()
    return list(ours.output_tensors)


def take_states(ours: InferRequest, theirs: InferRequest) -> bool:
    """Give our request the states of theirs, where they differ. Return whether any did."""
    own = {state.name: state for state in ours.query_state()}
    changed = False
    for state in theirs.query_state():
        mine, there = own[state.name], state.state
        if not same(mine.state, there):
            mine.state = there
            changed = True
    return changed


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal in every bit."""
    if tuple(a.shape) != tuple(b.shape) or a.element_type != b.element_type:
        return False
    return a.byte_size == 0 or bool(a.data.tobytes() == b.data.tobytes())


def tensor_of(value: Tensor | Node) -> torch.Tensor | None:
    """Return a tensor or a constant as a CPU tensor, without a copy; None without such a dtype."""
    kind = _type_name(value.get_element_type())
    dtype = DTYPES.get(ELEMENTS.get(kind, ""))
    if dtype is None:
        return None
    shape, array = list(value.get_shape() if hasattr(value, "get_shape") else ()), value.data
    if not array.size:
        return torch.empty(shape, dtype=dtype)
    import numpy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only arrays: we only read
        raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(shape)
