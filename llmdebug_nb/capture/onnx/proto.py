"""Reads what recording needs from ONNX protobufs: attributes, small constants and metadata."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmdebug_nb.capture.graphs.graph import Scalar, shortest

if TYPE_CHECKING:
    import onnx

_METADATA = "pkg.torch.onnx."
_FEW = 8  # elements of a constant that is recorded as text, such as a shape or axes


def exporter_metadata(node: onnx.NodeProto) -> dict[str, str]:
    """Return what torch's exporter noted about a node, by key without the prefix."""
    return {
        one.key.removeprefix(_METADATA): one.value
        for one in node.metadata_props
        if one.key.startswith(_METADATA)
    }


def names_in(text: str | None) -> list[str]:
    """Parse a Python list of names; return an empty list for anything else."""
    try:
        names = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the input values of a node, including those of its branches and loops."""
    yield from (value for value in node.input if value)
    yield from inner_inputs(node)


def inner_inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the input values of the nodes in a node's branches and loops."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inputs_of(inner)


def small_constant(tensor: onnx.TensorProto) -> object:
    """Return a constant of few elements as a number or text; None for any other tensor."""
    is_large = math.prod(tensor.dims) > _FEW or len(tensor.dims) > 1
    if is_large or tensor.data_location or "." in tensor.name:
        return None
    import onnx

    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OSError):
        return None
    if array.dtype.kind not in "fiub":
        return None
    is_float = array.dtype.kind == "f"
    numbers = [shortest(number) if is_float else number.item() for number in array.ravel()]
    return numbers[0] if array.size == 1 else str(numbers)


def attributes(node: onnx.NodeProto) -> Iterator[Scalar]:
    """Yield the attributes of a node that are numbers, texts or lists of these."""
    import onnx

    kinds = onnx.AttributeProto
    single = (kinds.FLOAT, kinds.INT, kinds.STRING)
    lists = (kinds.FLOATS, kinds.INTS, kinds.STRINGS)
    for attribute in node.attribute:
        if attribute.ref_attr_name or attribute.type not in (*single, *lists):
            continue
        value = onnx.helper.get_attribute_value(attribute)
        many = attribute.type in lists
        yield attribute.name, str([_plain(one) for one in value]) if many else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return shortest(value) if isinstance(value, float) else value
