"""A topology as a JSON document: nested operations with their input and output tensors.

The JSON is that of ATB's topologies (msit and msprobe, ``model/*.json`` and ``layer/*.json``), with
a few more keys:

    layer  {opName, opType, param{}, inTensors[], outTensors[], internalTensors[], nodes[the same]}
    model  {modelName, inTensors[], outTensors[], internalTensors[], weightTensors[], nodes[layers]}
    more   of an operation: id, msitId, domain; of a model: modelType, param;
           of the document: tensors {name: {dtype, shape}}, edges
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.part_ids import MARK
from llmdebug_nb.core.printable import printable, printable_lines

OPERATORS = ("api", "aten")  # domains
DEPTH = 100  # of operations in operations
MOST = 500_000  # operations, or names of tensors, of one document
LARGEST = 256 << 20  # bytes
_LISTS = ("inTensors", "outTensors", "internalTensors")


@dataclass(slots=True)
class Operation:
    """A call of a module or operator.

    ``nodes``: the calls inside it, in execution order. ``internal``: tensors made and used up
    inside it. ``weights``: those of ``inputs`` that are parameters or buffers. ``domain``: module |
    api | aten | atb. ``part_id``: its id as msit counts; "" if it has none.
    """

    name: str
    type: str
    param: dict[str, Any] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    internal: list[str] = field(default_factory=list)
    nodes: list[Operation] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    domain: str = "module"
    id: str = ""
    part_id: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the keys of a layer; see the module's docstring."""
        return {
            "opName": self.name,
            "opType": self.type,
            "param": self.param,
            "inTensors": self.inputs,
            "outTensors": self.outputs,
            "internalTensors": self.internal,
            "nodes": [node.to_json() for node in self.nodes],
            "id": self.id,
            "msitId": self.part_id,
            "domain": self.domain,
        }

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Operation]]:
        """Yield the operations with their depth, this one (0) first, in execution order."""
        yield depth, self
        for node in self.nodes:
            yield from node.walk(depth + 1)


@dataclass(slots=True)
class Topology:
    """The calls in one step of a run and the tensors between them.

    ``root``: the model, or one layer of it. ``tensors``: dtype and shape by name, if known.
    ``edges``: how the edges were found, in words. ``is_model``: the nodes are layers; otherwise the
    root is a layer itself.
    """

    root: Operation
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    edges: str = ""
    is_model: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the document; see the module's docstring for its keys."""
        keys = self.root.to_json()
        if self.is_model:
            op = self.root
            keys = {
                "modelType": op.type,
                "param": op.param,
                "domain": op.domain,
                "modelName": op.name,
                "inTensors": [name for name in op.inputs if name not in set(op.weights)],
                "outTensors": op.outputs,
                "internalTensors": op.internal,
                "weightTensors": op.weights,
                "nodes": keys["nodes"],
            }
        named = {
            n
            for _, op in self.root.walk()
            for names in (op.inputs, op.outputs, op.internal)
            for n in names
        }
        tensors = {
            n: {"dtype": d, "shape": list(s)} for n, (d, s) in self.tensors.items() if n in named
        }
        return {**keys, "edges": self.edges, "tensors": tensors}

    def layers(self) -> list[Topology]:
        """Return each module of a model as a topology of its own; its operators are left out."""
        layers = [node for node in self.root.nodes if node.domain not in OPERATORS]
        return [Topology(node, self.tensors, self.edges, False) for node in layers]

    def __str__(self) -> str:
        """The tree of calls: id (of a module also as msit counts), path, type, shapes."""
        rows = [
            (
                printable(op.id if op.domain in OPERATORS else _ids(op)),
                "  " * depth + printable(op.name.rpartition("/")[2]),
                printable(op.type),
                f"{self._shapes(op.inputs, op.weights)} -> {self._shapes(op.outputs)}",
            )
            for depth, op in self.root.walk()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        return printable_lines([*lines, f"edges: {self.edges}"] if self.edges else lines)

    __repr__ = __str__

    def _shapes(self, names: list[str], but: list[str] | None = None) -> str:
        known = [self.tensors[n] for n in names if n in self.tensors and n not in (but or ())]
        return ", ".join(f"{dtype}[{'x'.join(map(str, shape))}]" for dtype, shape in known[:4]) + (
            ", …" if len(known) > 4 else ""
        )


def read(text: str, name: str) -> Topology:
    """Read a document of this tool or of ATB's tools. ``name``: its name in errors.

    Raises:
        CorruptDumpError: it is not such a document, too large or too deeply nested.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else str(error)
        raise CorruptDumpError(f"{name} is not a topology: not valid JSON ({why})") from None
    if not isinstance(found, dict) or not ("modelName" in found or "opName" in found):
        raise CorruptDumpError(
            f"{name} is not a topology: expected an object with modelName, or opName and opType"
        )
    is_model = "modelName" in found
    if is_model:
        found = {
            **found,
            "opName": found["modelName"],
            "opType": found.get("modelType", found["modelName"]),
        }
    reader = _Reader(name)
    root = reader.operation(found, str(found["opName"])[:80], 0)
    if is_model:
        root.weights = reader.names(found, "weightTensors", root.name)
        root.inputs = list(dict.fromkeys([*root.inputs, *root.weights]))
        weights = set(root.weights)
        for node in root.nodes:
            for _, op in node.walk():
                op.weights = [each for each in op.inputs if each in weights]
    return Topology(root, reader.tensors(found.get("tensors")), _text(found.get("edges")), is_model)


def _ids(op: Operation) -> str:
    """Return the execution id of an operation, and the one that msit counts where it differs."""
    return op.id if op.part_id in ("", op.id) else f"{op.id}  {MARK}{op.part_id}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Reader:
    """Reads operations, and counts them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def operation(self, value: object, where: str, depth: int) -> Operation:
        if not isinstance(value, dict):
            raise self._refused(where, f"expected an object, not {type(value).__name__}")
        self._more(1)
        if depth > DEPTH:
            raise self._refused(where, f"operations lie more than {DEPTH} deep in each other")
        name, kind, param = value.get("opName"), value.get("opType"), value.get("param")
        if not isinstance(name, str) or not isinstance(kind, str) or not name or not kind:
            raise self._refused(where, "opName and opType must be texts, and not empty")
        if param is not None and not isinstance(param, dict):
            raise self._refused(name, f"param must be an object, not {type(param).__name__}")
        nodes = value.get("nodes") or []
        if not isinstance(nodes, list):
            raise self._refused(name, f"nodes must be a list, not {type(nodes).__name__}")
        ins, outs, internal = (self.names(value, key, name) for key in _LISTS)
        inner = [
            self.operation(node, f"{name}, node {i}", depth + 1) for i, node in enumerate(nodes)
        ]
        domain = _text(value.get("domain")) or "atb"
        return Operation(
            name,
            kind,
            param or {},
            ins,
            outs,
            internal,
            inner,
            [],
            domain,
            _text(value.get("id")),
            _text(value.get("msitId")),
        )

    def names(self, value: dict[str, Any], key: str, where: str) -> list[str]:
        names = value.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused(where, f"{key} must be a list of names")
        self._more(len(names))
        return names

    def tensors(self, value: object) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Read dtypes and shapes; invalid ones are left out, as nothing depends on them."""
        found = {}
        for name, tensor in value.items() if isinstance(value, dict) else ():
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            if isinstance(shape, list) and all(type(size) is int for size in shape):
                found[name] = (_text(tensor.get("dtype")), tuple(shape))
        return found

    def _more(self, count: int) -> None:
        self._count += count
        if self._count > MOST:
            raise CorruptDumpError(
                f"{self._name} is not a topology: more than {MOST:,} operations and tensors in it"
            )

    def _refused(self, where: str, why: str) -> CorruptDumpError:
        return CorruptDumpError(f"{self._name} is not a topology: {where[:120]!r}: {why}")
