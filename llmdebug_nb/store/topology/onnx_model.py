"""A topology as an ONNX model for viewers: one node for each operation, in domains of our own.

No runtime can run it: weights are inputs without values, and no runtime knows the operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError, OptionError, first_line
from llmdebug_nb.store.topology.document import Operation, Topology

OPSET = 21  # of ONNX itself, of which no operator is used
_INT64 = range(-(2**63), 2**63)
_DTYPES = {
    "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float64": "DOUBLE",
    "bool": "BOOL", "complex64": "COMPLEX64", "complex128": "COMPLEX128", "string": "STRING",
    "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2",
    **{name: name.upper() for bits in (8, 16, 32, 64) for name in (f"int{bits}", f"uint{bits}")},
}  # fmt: skip


def chosen(topology: Topology, level: int) -> list[Operation]:
    """Return the operations that become nodes.

    ``level``: how deeply nested they are: 0 is the model as one node, 1 its layers, -1 takes the
    innermost operations.

    Raises:
        OptionError: ``level`` is not an integer, or less than -1.
    """
    if not isinstance(level, int) or isinstance(level, bool) or level < -1:
        raise OptionError(
            f"level {level!r}: expected 1 for layers, 2, 3, … for the operations inside them,"
            " -1 for the innermost operations, 0 for one"
        )

    def cut(op: Operation, depth: int) -> Iterator[Operation]:
        if not op.nodes or depth == level:
            yield op
            return
        for node in op.nodes:
            yield from cut(node, depth + 1)

    return list(cut(topology.root, 0))


def model(topology: Topology, level: int = -1) -> Any:
    """Return the `onnx.ModelProto` of a topology, validated by ONNX's checker.

    Raises:
        OptionError: ``level`` is invalid. CorruptDumpError: the operations have no valid order, or
            an attribute that ONNX can't hold.
    """
    import onnx

    graph = _Graph(topology)
    wired = _wired(chosen(topology, level))
    nodes = [graph.node(op, takes, gives) for op, takes, gives in wired]
    made = {name for _, _, gives in wired for name in gives}
    taken = dict.fromkeys(name for _, takes, _ in wired for name in takes)
    inputs = [name for name in taken if name not in made]
    last = _last(wired)
    outputs = list(dict.fromkeys(last.get(name, name) for name in topology.root.outputs))
    outputs = [name for name in outputs if name in made] or [n for n in made if n not in taken]
    every = dict.fromkeys(name for _, _, gives in wired for name in gives)
    inner = [name for name in every if name not in set(outputs) and name in topology.tensors]
    body = onnx.helper.make_graph(
        nodes,
        topology.root.name,
        [graph.tensor(name) for name in inputs],
        [graph.tensor(name) for name in outputs],
        value_info=[graph.tensor(name) for name in inner],
        doc_string=topology.edges,
    )
    domains = {"": OPSET} | dict.fromkeys(sorted({node.domain for node in nodes}), 1)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    made_model = onnx.helper.make_model(
        body, opset_imports=opsets, producer_name="llmdebug_nb", ir_version=10
    )
    try:
        onnx.checker.check_model(made_model)
    except onnx.checker.ValidationError as error:
        raise CorruptDumpError(
            f"{topology.root.name}: no ONNX model can be made of it: {first_line(error)}"
        ) from None
    return made_model


def save(topology: Topology, path: Path, level: int = -1) -> Path:
    """Write the model and return its path.

    Raises:
        OptionError, CorruptDumpError: as `model`; OptionError also if the file can't be written.
    """
    data = model(topology, level).SerializeToString()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise OptionError(f"can't write {path}: {error.strerror or error}") from None
    return path


Wired = tuple[Operation, list[str], list[str]]  # an operation, its inputs, its outputs


def _wired(operations: list[Operation]) -> list[Wired]:
    """Return the operations in topological order, with every tensor made by one of them.

    If an operation writes to a tensor that another one made, the result is called ``NAME:1``, and
    so on.

    Raises:
        CorruptDumpError: the operations depend on each other in a circle.
    """
    makers = Counter(name for op in operations for name in set(op.outputs))
    if all(count == 1 for count in makers.values()) and not any(
        set(op.outputs) & set(op.inputs) for op in operations
    ):
        return [
            (op, list(op.inputs), list(dict.fromkeys(op.outputs))) for op in _sorted(operations)
        ]
    versions: dict[str, int] = {}
    now: dict[str, str] = {}
    there = {name for op in operations for name in (*op.inputs, *op.outputs)}
    outside = set(_taken_first(operations))
    wired = []
    for op in operations:
        takes = [now.get(name, name) for name in op.inputs]
        for name in dict.fromkeys(op.outputs):
            number = versions.get(name, 0 if name not in outside else 1)
            while number and f"{name}:{number}" in there:
                number += 1
            now[name] = f"{name}:{number}" if number else name
            versions[name] = number + 1
        wired.append((op, takes, [now[name] for name in dict.fromkeys(op.outputs)]))
    return wired


def _taken_first(operations: Iterable[Operation]) -> Iterator[str]:
    """Yield the tensors that are inputs before any operation made them."""
    made: set[str] = set()
    for op in operations:
        yield from (name for name in op.inputs if name not in made)
        made.update(op.outputs)


def _last(wired: list[Wired]) -> dict[str, str]:
    """Return the last name of each tensor."""
    return {
        name: made
        for op, _, gives in wired
        for name, made in zip(dict.fromkeys(op.outputs), gives, strict=True)
    }


def _sorted(operations: list[Operation]) -> list[Operation]:
    """Return operations in topological order; independent ones stay in their order.

    Raises CorruptDumpError for a circle.
    """
    maker = {name: i for i, op in enumerate(operations) for name in op.outputs}
    waits = [
        {maker[name] for name in op.inputs if name in maker} - {i}
        for i, op in enumerate(operations)
    ]
    if all(max(before, default=-1) < i for i, before in enumerate(waits)):
        return operations
    users = defaultdict(list)
    for i, before in enumerate(waits):
        for other in before:
            users[other].append(i)
    left = [len(before) for before in waits]
    ready = [i for i, count in enumerate(left) if not count]
    order = []
    while ready:
        at = ready.pop(0)
        order.append(at)
        for user in users[at]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)
    if len(order) < len(operations):
        stuck = ", ".join(operations[i].name for i, count in enumerate(left) if count)
        raise CorruptDumpError(
            f"these operations take each other's results in a circle: {stuck[:200]}"
        )
    return [operations[i] for i in order]


class _Graph:
    """Makes nodes and tensors."""

    def __init__(self, topology: Topology) -> None:
        self._tensors = topology.tensors
        self._names: Counter[str] = Counter()

    def node(self, op: Operation, takes: list[str], gives: list[str]) -> Any:
        import onnx

        number = self._names[op.name]
        self._names[op.name] += 1
        name = f"{op.name}#{number}" if number else op.name
        kind, _, overload = op.type.partition(".") if op.domain == "aten" else (op.type, "", "")
        made = onnx.helper.make_node(
            kind,
            takes,
            gives,
            name,
            doc_string=op.id,
            domain=f"llmdebug.{op.domain}",
            overload=overload or None,
        )
        for key, value in _attributes(op.param):
            kept = _kept(value)
            if kept is None:
                continue
            try:
                made.attribute.append(onnx.helper.make_attribute(key, kept))
            except (ValueError, TypeError, OverflowError) as error:
                raise CorruptDumpError(
                    f"{op.name}: param {key!r} is nothing that ONNX can hold ({error})"
                ) from None
        return made

    def tensor(self, name: str) -> Any:
        """Return the declaration of a tensor; of an unknown one, its name alone."""
        import onnx

        if name not in self._tensors and name.rpartition(":")[0] not in self._tensors:
            made = onnx.ValueInfoProto(name=name)  # the one type that needs no shape
            made.type.opaque_type.domain, made.type.opaque_type.name = "llmdebug", "unknown"
            return made
        dtype, shape = self._tensors.get(
            name, self._tensors.get(name.rpartition(":")[0], ("", None))
        )
        kind = onnx.TensorProto.DataType.Value(_DTYPES.get(dtype, "UNDEFINED"))
        sizes = None if shape is None else [size if size >= 0 else None for size in shape]
        return onnx.helper.make_tensor_value_info(
            name, kind, sizes, doc_string="" if dtype in _DTYPES else dtype
        )


def _attributes(param: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, nested ones as ``a.b``; of equal names the first."""
    seen: set[str] = set()
    open_: list[tuple[str, Any]] = [(str(key), value) for key, value in reversed(param.items())]
    while open_:
        key, value = open_.pop()
        if isinstance(value, dict):
            open_ += [(f"{key}.{inner}", one) for inner, one in reversed(value.items())]
        elif key not in seen:
            seen.add(key)
            yield key, value


def _kept(value: object) -> Any:
    """Return a value as an attribute can hold it, or None.

    That is a number, a text, or a list of numbers or texts of one type.
    """
    if isinstance(value, list):
        kept = [_kept(one) for one in value]
        if not kept:
            return None
        for kind in (int, float, str):
            if all(type(one) is kind for one in kept):
                return kept
        if all(type(one) in (int, float) for one in kept):
            return [float(one) for one in kept]
        return str(value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    return value if value is None or isinstance(value, (float, str)) else str(value)
