"""The topology of one step of a run: its nested calls and the tensors between them.

Edges follow storages: an input comes from the recorded output whose storage it has
(`Record.producer`). A tensor without such an output comes from outside: it is an argument of the
root, a parameter (identified by its bytes, or by its shape among those of the module) or a result
of an earlier step. Two tensors from outside are one if dtype and bytes are equal.

If only modules were recorded, the operators between them are unknown. An operation ``Unrecorded``
stands for them; its inputs are the tensors that no recorded call uses.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.layers import repeated_layers
from llmdebug_nb.core.part_ids import part_ids
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import Node, Record
from llmdebug_nb.store.checked import check_tree
from llmdebug_nb.store.topology.document import Operation, Topology
from llmdebug_nb.store.topology.weights import Weights

if TYPE_CHECKING:
    from llmdebug_nb.store.run import Run

UNRECORDED = "Unrecorded"
OF_OPERATORS = "by storage, between recorded operators"
OF_MODULES = (
    "by storage, between modules; operators between them were not recorded:"
    f" {UNRECORDED} stands for them, and takes the tensors that no recorded call takes"
    " (record with mode='module+aten' for every edge)"
)
Key = tuple[str, int]  # path and call


@dataclass(slots=True)
class _Call:
    """A call with its input and output values and the calls inside it."""

    key: Key
    op: Operation
    parent: _Call | None = None
    inside: list[_Call] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)

    def is_in(self, other: _Call) -> bool:
        at: _Call | None = self
        while at is not None and at is not other:
            at = at.parent
        return at is other


def topology(
    run: Run, step: int | None = None, generation: int = 0, rank: int | None = None
) -> Topology:
    """Return the topology of a step of a run.

    ``step`` None: the first recorded one, from that generation on. ``rank`` None: the lowest.

    Raises:
        TensorLookupError: there is no such step.
    """
    at = _place(run, step, generation, rank)
    return _Step(run, *at).topology()


def _place(run: Run, step: int | None, generation: int, rank: int | None) -> tuple[int, int, int]:
    there = sorted(run.index.forward_steps(), key=lambda row: (row[0] < generation, *row))
    fitting = [
        p for p in there if (step is None or p[:2] == (generation, step)) and rank in (None, p[2])
    ]
    if not fitting:
        known = ", ".join(
            dict.fromkeys(f"{s}" if g == 0 else f"{s} of generation {g}" for g, s, _ in there[:40])
        )
        raise TensorLookupError(
            f"run {run.name!r} has no step {step} with tensors; there is {known or 'none'}"
        )
    return fitting[0]


class _Step:
    """Builds the topology of one step."""

    def __init__(self, run: Run, generation: int, step: int, rank: int) -> None:
        self._run, self._where = run, (generation, step, rank)
        self._nodes: dict[str, Node] = {node.path: node for node in run.nodes}
        self._rows = list(
            run.records(
                phase="forward",
                role=("input", "output"),
                generation=generation,
                step=step,
                rank=rank,
            )
        )
        self._operators = run.index.enclosing_calls(generation, step, rank)
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._weights = Weights(run, self._nodes)
        self._calls = self._tree()
        self._values: dict[int, str] = {}  # id of an output's record -> its value
        self._makers: dict[str, _Call] = {}  # value -> the call that made it
        self._outside: dict[tuple[str, str, int], str] = {}  # content -> value from outside
        # the call that a value is made in, the value, and the child that takes it
        self._unmade: list[tuple[_Call, str, _Call | None]] = []
        self._taken: set[str] = set()

    def _tree(self) -> dict[Key, _Call]:
        generation, step, rank = self._where
        ids: dict[Key, str] = self._run.ids(step, generation, rank)
        numbers = part_ids(ids, self._run.nodes)
        keys = dict.fromkeys([*ids, *(_key(row) for row in self._rows)])
        calls = {
            key: _Call(key, self._operation(key, ids.get(key, ""), numbers.get(key, "")))
            for key in keys
            if not key[0].startswith("save/")
        }
        # root and id -> the last call so far: every call of a root has the id ""
        latest: dict[tuple[str, str], _Call] = {}
        for key, call in calls.items():
            _, around = self._operators.get(key, ("", None))
            root = _root_of(key[0])
            if around in calls:
                call.parent = calls[around]  # type: ignore[index]
            elif ids.get(key):
                above = ids[key].rpartition("." if "." in ids[key] else "_")[0]
                call.parent = latest.get((root, above))
            if key in ids and "/" not in key[0]:
                latest[root, ids[key]] = call
            if call.parent is None and key not in ids:
                call.parent = next(
                    (
                        calls[up, n]
                        for up in ancestors(key[0])
                        for n in (key[1], 0)
                        if (up, n) in calls
                    ),
                    None,
                )
            if call.parent is not None:
                call.parent.inside.append(call)
        try:
            check_tree({key: c.parent.key if c.parent else None for key, c in calls.items()})
        except ValueError as error:
            raise CorruptDumpError(f"{self._run.path}: the calls are no tree: {error}") from None
        params = self._params()
        for key, call in calls.items():
            call.op.param = {**params.get((key[0], None), {}), **params.get(key, {})}
        return calls

    def _operation(self, key: Key, id_: str, part_id: str) -> Operation:
        path, call = key
        node = self._nodes.get(path)
        if "/" in path:
            kind = path.rpartition("/")[2].partition(".")[2] or path.rpartition("/")[2]
            domain = self._operators.get(key, ("api", None))[0]
        else:
            kind, domain = (node.type if node else path.rpartition(".")[2] or "model"), "module"
        name = (
            path
            if path and path[0] != "/"
            else f"{self._nodes[''].type if '' in self._nodes else 'model'}{path}"
        )
        shown = f"{name}#{call}" if call else name
        return Operation(shown, kind, domain=domain, id=id_, part_id=part_id)

    def _params(self) -> dict[tuple[str, int | None], dict[str, Any]]:
        """Return arguments that are not tensors, by call, and modules' attributes (call None)."""
        found: dict[tuple[str, int | None], dict[str, Any]] = defaultdict(dict)
        generation, step, _ = self._where
        for row in self._run.index.scalars(role="attribute"):
            if row.value is not None:
                found[row.path, None][row.slot] = _value(row.type, row.value)
        for row in self._run.index.scalars(role="input", generation=generation, step=step):
            if row.value is not None:
                argument = _argument(row.path, row.slot)
                found[row.path, row.call][argument] = _value(row.type, row.value)
        return found

    # -- values -------------------------------------------------------------------------------

    def topology(self) -> Topology:
        for row in self._rows:
            call = self._calls.get(_key(row))
            if call is None:
                continue
            if row.site.role == "input":
                call.takes.append(self._input(call, row))
            else:
                call.gives.append(self._output(call, row))
        for call in self._calls.values():
            if not call.inside:
                self._own_weights(call)
                self._taken.update(call.takes)
        if not self._operators:
            self._stand_ins()
        tops = [call for call in self._calls.values() if call.parent is None]
        root = self._root(tops)
        self._close(root)
        return Topology(root.op, self._tensors, OF_OPERATORS if self._operators else OF_MODULES)

    def _name(self, call: _Call, row: Record) -> str:
        name = f"{call.op.name}_{row.site.role}_{row.site.slot.removeprefix('kwargs.')}"
        self._tensors.setdefault(name, (row.summary.dtype, row.summary.shape))
        return name

    def _input(self, call: _Call, row: Record) -> str:
        if row.producer in self._values:
            return self._values[row.producer]
        weight = self._weights.find(
            call.key[0], row.summary.dtype, row.summary.shape, row.summary.fingerprint
        )
        if weight is not None:
            self._tensors.setdefault(weight, (row.summary.dtype, self._weights.shapes[weight]))
            return weight
        content = _content(row)
        if content not in self._outside:
            self._outside[content] = self._name(call, row)
            if call.parent is not None:
                self._unmade.append((call.parent, self._outside[content], call))
        return self._outside[content]

    def _output(self, call: _Call, row: Record) -> str:
        made = self._values.get(row.producer) if row.producer is not None else None
        if call.inside and made is not None:
            maker = self._makers.get(made)
            if (maker is not None and maker.is_in(call)) or made in call.takes:
                self._values[row.id] = made
                return made
        passed = self._outside.get(_content(row)) if call.inside and made is None else None
        if passed in call.takes:
            self._values[row.id] = passed
            return passed
        name = self._values[row.id] = self._name(call, row)
        self._makers[name] = call
        if call.inside:
            self._unmade.append((call, name, None))
        return name

    def _own_weights(self, call: _Call) -> None:
        """Add a module's parameters to its inputs if nothing was recorded inside it."""
        for name, dtype, shape in self._weights.of(call.key[0]):
            self._tensors.setdefault(name, (dtype, shape))
            call.takes.append(name)

    def _stand_ins(self) -> None:
        """Add operations for the unrecorded operators between modules."""
        number: dict[int, int] = defaultdict(int)
        for call, value, before in self._unmade:
            at = call.inside.index(before) if before is not None else len(call.inside)
            known = [*call.takes, *(v for one in call.inside[:at] for v in one.gives)]
            loose = [v for v in dict.fromkeys(known) if v not in self._taken and v != value] or [
                v for v in dict.fromkeys(call.takes) if v != value
            ]
            if not loose:
                continue
            name = f"{call.op.name}/unrecorded{number[id(call)]}"
            number[id(call)] += 1
            made = _Call((name, 0), Operation(name, UNRECORDED), call, takes=loose, gives=[value])
            self._makers[value] = made
            self._taken.update(loose)
            call.inside.insert(at, made)

    # -- the whole ----------------------------------------------------------------------------

    def _root(self, tops: list[_Call]) -> _Call:
        """Return the root's call, or one call in place of several."""
        if len(tops) == 1:
            root = tops[0]
        else:
            kind = next((node.type for node in self._run.nodes), "model")
            root = _Call(("", 0), Operation(kind, kind))
            for top in tops:
                self._adopt(root, top)
        layers = repeated_layers(self._run.nodes)
        root.inside = [one for call in root.inside for one in _flat(call, layers)]
        return root

    @staticmethod
    def _adopt(root: _Call, top: _Call) -> None:
        whole = not top.key[0] and top.inside  # a further call of the root: what runs in it
        root.takes += top.takes if whole else []
        root.gives += top.gives if whole else []
        for call in top.inside if whole else [top]:
            call.parent = root
            root.inside.append(call)

    def _close(self, root: _Call) -> None:
        """Fill in the inputs, outputs and internal tensors of each operation."""
        if not root.gives:  # not recorded: take those of the last call
            last = next((call for call in reversed(_walk(root)) if call.gives), root)
            root.gives = list(last.gives)
        users: dict[str, list[_Call]] = defaultdict(list)
        for value in root.gives:
            users[value].append(root)
        for call in _walk(root):
            if not call.inside:
                for value in call.takes:
                    users[value].append(call)
        self._fill(root, users)
        made = set(root.op.internal) | set(root.op.outputs)
        known = self._weights.shapes.keys()
        root.op.inputs.sort(key=known.__contains__)  # weights last
        for call in _walk(root):
            call.op.weights = [v for v in call.op.inputs if v in known and v not in made]

    def _fill(self, call: _Call, users: dict[str, list[_Call]]) -> tuple[set[str], list[str]]:
        """Return the values made inside a call, and its inputs in order."""
        takes, gives = list(dict.fromkeys(call.takes)), list(dict.fromkeys(call.gives))
        if not call.inside:
            call.op.inputs, call.op.outputs = takes, gives
            return set(gives), takes
        below = [self._fill(one, users) for one in call.inside]
        made = {v: None for values, _ in below for v in sorted(values)}
        taken = [v for _, values in below for v in values]
        inner = {id(one) for one in _walk(call)}
        leaving = [v for v in made if any(id(user) not in inner for user in users[v])]
        call.op.nodes = [one.op for one in call.inside]
        call.op.inputs = list(dict.fromkeys(v for v in [*takes, *taken] if v not in made))
        call.op.outputs = list(dict.fromkeys([*gives, *leaving]))
        call.op.internal = [v for v in made if v not in set(call.op.outputs)]
        return set(made), call.op.inputs


def _root_of(path: str) -> str:
    """Return the label of a further root, with which its paths begin; "" for the first root."""
    label = re.match(r"[^.~/]*~\d+", path)
    return label[0] if label else ""


def _key(row: Record) -> Key:
    return row.site.path, row.site.call


def _content(row: Record) -> tuple[str, str, int]:
    """Return a key that tensors of equal bytes share, whatever their shapes."""
    return row.summary.fingerprint or f"#{row.id}", row.summary.dtype, math.prod(row.summary.shape)


def _walk(call: _Call) -> list[_Call]:
    found, open_ = [], [call]
    while open_:
        at = open_.pop()
        found.append(at)
        open_ += reversed(at.inside)
    return found


def _flat(call: _Call, layers: set[str]) -> list[_Call]:
    """Return a call, or of a wrapper around the layers the calls inside it."""
    around = any(path.startswith(f"{call.key[0]}.") for path in layers)
    if not around or call.key[0] in layers or not call.inside:
        return [call]
    return [one for inner in call.inside for one in _flat(inner, layers)]


def _value(kind: str, text: str) -> Any:
    """Return a recorded text as a number or flag, or unchanged if it is neither."""
    try:
        if kind == "bool":
            return text == "True"
        return int(text) if kind == "int" else float(text) if kind == "float" else text
    except ValueError:
        return text


def _argument(path: str, slot: str) -> str:
    """Return an argument's name: by the schema of a dispatcher operator, else by its position."""
    if slot.startswith("kwargs."):
        return slot[len("kwargs.") :]
    names = _schema(path.rpartition("/")[2]) if "/Aten." in path else []
    return names[int(slot)] if slot.isdecimal() and int(slot) < len(names) else f"arg{slot}"


def _schema(name: str) -> list[str]:
    """Return the argument names of an operator such as ``Aten.add.Tensor``."""
    import torch

    _, op, overload = (*name.split("."), "default")[:3]
    found = getattr(getattr(torch.ops.aten, op, None), overload, None)
    return [argument.name for argument in found._schema.arguments] if found is not None else []
