"""What is read off the protobufs of ONNX: attributes, small constants, and what an exporter noted of a node."""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from llmdebug_nb.core.paths import ancestors, within

_META = "pkg.torch.onnx."
_FEW = 8  # elements of a constant that is written out, such as a shape or axes
Scalar = tuple[str, Any]  # slot, value


def meta(node: Any) -> dict[str, str]:
    """Return what torch's exporter noted of a node, by its key without the prefix."""
    return {
        one.key.removeprefix(_META): one.value
        for one in node.metadata_props
        if one.key.startswith(_META)
    }


def strings(text: str | None) -> list[str]:
    """Read a list of names as Python writes it; empty where it is none."""
    try:
        found = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(one) for one in found] if isinstance(found, list) else []


def taken(node: Any) -> Iterator[str]:
    """Yield the values that a node takes, also inside of its branches and loops."""
    yield from (value for value in node.input if value)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from taken(inner)


def common(paths: Iterable[str]) -> str | None:
    """Return the innermost module that holds all of these; None for none."""
    found = list(paths)
    if not found:
        return None
    first = found[0]
    return next(
        path for path in (first, *ancestors(first), "") if all(within(one, path) for one in found)
    )


def small(tensor: Any) -> Any:
    """Return a constant of few numbers: a number, or a list; None for any other."""
    if (
        math.prod(tensor.dims) > _FEW
        or len(tensor.dims) > 1
        or tensor.data_location
        or "." in tensor.name
    ):
        return None
    import onnx

    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OSError):
        return None
    if array.dtype.kind not in "fiub":
        return None
    numbers = [shortest(one) if array.dtype.kind == "f" else one.item() for one in array.ravel()]
    return numbers[0] if array.size == 1 else str(numbers)


def shortest(value: Any) -> float:
    """Return a float32 as it was written: 1e-05, not 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value))) if math.isfinite(float(value)) else float(value)


def attributes(node: Any) -> Iterator[Scalar]:
    """Yield the attributes of a node that are numbers, texts or lists of those."""
    kinds = {
        1: "f",
        2: "i",
        3: "s",
        6: "floats",
        7: "ints",
        8: "strings",
    }  # onnx.AttributeProto.AttributeType
    for attribute in node.attribute:
        where = kinds.get(attribute.type)
        if where is None:
            continue
        value = getattr(attribute, where)
        if where == "f":
            value = shortest(value)
        elif where == "s":
            value = value.decode(errors="replace")
        elif where != "i":
            value = str(
                [
                    shortest(one)
                    if where == "floats"
                    else one.decode(errors="replace")
                    if where == "strings"
                    else one
                    for one in value
                ]
            )
        yield attribute.name, value


def base_of(path: str | None) -> str | None:
    """Return the folder that the external data of a model lies in."""
    return None if path is None else os.path.dirname(os.path.abspath(path))
