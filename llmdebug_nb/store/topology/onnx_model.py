"""A topology as an ONNX model, to be looked at: one node an operation, in domains of our own, with names, dtypes, shapes and attributes.

It is no program that a runtime could run: weights are inputs without values, and no runtime knows the operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError, OptionError
from llmdebug_nb.store.topology.document import Operation, Topology

OPSET = 21  # of ONNX itself, of which no operator is used
_INT64 = range(-(2**63), 2**63)
_DTYPES = {
    "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float64": "DOUBLE", "bool": "BOOL", "complex64": "COMPLEX64",
    "complex128": "COMPLEX128", "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2", "string": "STRING",
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


def chosen(topology: Topology, level: int) -> list[Operation]:
    """Return the operations that become nodes: those ``level`` deep stay whole (1: layers), -1 takes the innermost. 0 is the model as one.

    Raises:
        OptionError: ``level`` is no whole number from -1.
    """
    if not isinstance(level, int) or isinstance(level, bool) or level < -1:
        raise OptionError(
            f"level {level!r}: expected 1 for layers, 2, 3, … for what runs in them, -1 for the innermost operations, 0 for one"
        )

    def cut(op: Operation, depth: int) -> Iterator[Operation]:
        if not op.nodes or depth == level:
            yield op
            return
        for node in op.nodes:
            yield from cut(node, depth + 1)

    return list(cut(topology.root, 0))


def model(topology: Topology, level: int = -1) -> Any:
    """Return the `onnx.ModelProto` of a topology, checked.

    Raises:
        OptionError: ``level`` makes no sense. CorruptDumpError: the operations can't be put in an order, or have an attribute that ONNX can't hold.
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
    inner = [
        name
        for name in dict.fromkeys(n for _, _, gives in wired for n in gives)
        if name not in set(outputs)
    ]
    body = onnx.helper.make_graph(
        nodes, topology.root.name, [graph.tensor(n) for n in inputs], [graph.tensor(n) for n in outputs],
        value_info=[graph.tensor(n) for n in inner if n in topology.tensors], doc_string=topology.edges,
    )  # fmt: skip
    opsets = [
        onnx.helper.make_opsetid("", OPSET),
        *(onnx.helper.make_opsetid(d, 1) for d in sorted({n.domain for n in nodes})),
    ]
    made_model = onnx.helper.make_model(
        body, opset_imports=opsets, producer_name="llmdebug_nb", ir_version=10
    )
    try:
        onnx.checker.check_model(made_model)
    except onnx.checker.ValidationError as error:
        raise CorruptDumpError(
            f"{topology.root.name}: no ONNX model can be made of it: {str(error).partition(chr(10))[0]}"
        ) from None
    return made_model


def save(topology: Topology, path: Path, level: int = -1) -> Path:
    """Write the model and return where. Raises what `model` raises, and OptionError where the file can't be written."""
    data = model(topology, level).SerializeToString()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise OptionError(f"can't write {path}: {error.strerror or error}") from None
    return path


Wired = tuple[
    Operation, list[str], list[str]
]  # an operation, and the tensors that it takes and gives


def _wired(operations: list[Operation]) -> list[Wired]:
    """Return the operations in an order in which each takes what was made before it, every tensor made once.

    Where an operation writes to a tensor that another one made, the new one is called ``NAME:1``, and so on.

    Raises:
        CorruptDumpError: they take each other's results in a circle.
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
    """Yield the tensors that are taken before anything made them."""
    made: set[str] = set()
    for op in operations:
        yield from (name for name in op.inputs if name not in made)
        made.update(op.outputs)


def _last(wired: list[Wired]) -> dict[str, str]:
    """Return what each tensor is called once all has run."""
    return {
        name: made
        for op, _, gives in wired
        for name, made in zip(dict.fromkeys(op.outputs), gives, strict=True)
    }


def _sorted(operations: list[Operation]) -> list[Operation]:
    """Return them so that makers come before takers, else as they are. Raises CorruptDumpError for a circle."""
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
        """Return the declaration of a tensor; of one that nothing is known of, the name."""
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
    """Yield names and values; those of an object in it as ``a.b``. Once each: of equal names the first."""
    seen: set[str] = set()
    open_: list[tuple[str, Any]] = [(str(key), value) for key, value in reversed(param.items())]
    while open_:
        key, value = open_.pop()
        if isinstance(value, dict):
            open_ += [(f"{key}.{inner}", one) for inner, one in reversed(value.items())]
        elif key not in seen:
            seen.add(key)
            yield key, value


def _kept(value: Any) -> Any:
    """Return what an attribute can hold: a number, a text, or numbers or texts of one kind; None for nothing."""
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
