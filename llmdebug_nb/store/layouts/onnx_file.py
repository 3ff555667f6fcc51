"""The tensors of an ``.onnx`` file: its initializers and constants, also those kept outside of it.

Data outside lies in files of the model's folder, which the model names. No file elsewhere is read,
and no length is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store.checked import shape_of_sizes
from llmdebug_nb.store.layouts.files import Folder, from_array

if TYPE_CHECKING:
    import numpy as np
    from onnx import GraphProto, TensorProto

SUFFIX = ".onnx"
_NAMES = {
    "float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz", "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz", "float8e8m0": "float8_e8m0fnu",
}  # fmt: skip
_NARROW = {"int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8",
           "float4e2m1": "float32"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the model: its name in the graph, and how it is read."""

    name: str
    get: Callable[[], torch.Tensor]


def tensors(folder: Folder, name: str) -> Iterator[Stored]:
    """Yield the initializers and constants of a model, with those of the graphs inside it.

    Raises:
        CorruptDumpError: the file is missing. Errors of the decoder are raised as they are.
    """
    import onnx

    model = onnx.load(folder.file(name), load_external_data=False)
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        for tensor in graph.initializer:
            yield Stored(tensor.name, partial(_read, folder, name, tensor))
        for sparse in graph.sparse_initializer:
            yield Stored(sparse.values.name, partial(_sparse, name, sparse.values.name))
        yield from _constants(folder, name, graph, graphs)


def _constants(
    folder: Folder, name: str, graph: GraphProto, graphs: list[GraphProto]
) -> Iterator[Stored]:
    """Yield the constants among a graph's nodes; add the graphs in its nodes to ``graphs``."""
    for node in graph.node:
        for attribute in node.attribute:
            graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
            if node.op_type == "Constant" and attribute.name == "value":
                made = node.output[0] if node.output else attribute.t.name
                yield Stored(made, partial(_read, folder, name, attribute.t))


def _sparse(name: str, tensor: str) -> torch.Tensor:
    raise CorruptDumpError(f"{name}: {tensor[:80]} is sparse, which is not read")


def _read(folder: Folder, name: str, tensor: TensorProto) -> torch.Tensor:
    """Return a tensor. Raises CorruptDumpError: its dtype or data can't be read."""
    import onnx
    from onnx import numpy_helper

    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    dtype, shape = _NAMES.get(kind, kind), shape_of_sizes(tuple(tensor.dims))
    if kind not in _NARROW and dtype not in DTYPES:
        raise CorruptDumpError(f"{name}: {tensor.name[:80]} has dtype {kind}, which can't be read")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor = _with_data(tensor, _outside(folder, name, tensor))
    if kind in _NARROW:
        array: np.ndarray = numpy_helper.to_array(tensor)
        return from_array(array.astype(_NARROW[kind]))
    expected = Summary(dtype, shape).numel * DTYPES[dtype].itemsize
    content = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    if len(content) != expected:
        raise CorruptDumpError(
            f"{name}: {tensor.name[:80]} has {len(content):,} bytes, which make no {dtype} tensor"
            f" of shape {list(shape)}"
        )
    return from_bytes(content, dtype, shape)


def _with_data(tensor: TensorProto, content: bytes) -> TensorProto:
    made = type(tensor)()
    made.dims.extend(tensor.dims)
    made.data_type, made.name, made.raw_data = tensor.data_type, tensor.name, content
    return made


def _outside(folder: Folder, name: str, tensor: TensorProto) -> bytes:
    """Return the data of a tensor that lies in another file of the model's folder."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    what = f"{name}: {tensor.name[:80]}"
    place = said.get("location", "")
    file = folder.file(place)
    size = file.stat().st_size
    offset, length = (
        int(text) if (text := said.get(key, usual)).isdecimal() and len(text) < 20 else -1
        for key, usual in (("offset", "0"), ("length", ""))
    )
    length = size - offset if "length" not in said else length
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptDumpError(f"{what} has no valid place in {place[:80]!r} of {size:,} bytes")
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)
