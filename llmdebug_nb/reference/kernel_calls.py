"""References of the buffers of compiled code: the nodes of the graph, in float64.

A kernel computes several nodes. Their formula is in the recording (`capture/compiled/formulas.py`);
it is evaluated node by node, each by an operator that may be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES, coarsest
from llmdebug_nb.core.records import IN_KERNEL, CallKey, summed
from llmdebug_nb.reference.computed import Change, Computed, Tensors, Where, changed, longest
from llmdebug_nb.reference.operator_calls import kept
from llmdebug_nb.replay.arguments import Arguments, widened, widened_dtype
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side

_ROLES = {"forward": "graph", "backward": "graph.backward"}
_PRIMS = "prims."


class Formula(msgspec.Struct):
    """How a buffer is computed, see `capture/compiled/formulas.py`."""

    node: str
    reads: dict[str, tuple[str, str, list[int], list[int]]]
    steps: list[tuple[str, str, list[object], dict[str, object]]]


class KernelFacts:
    """What a recording of compiled code tells of its kernels."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def has(self, key: CallKey) -> bool:
        """Tell whether a kernel computed the outputs of a call."""
        return "kernel" in self._texts(key)

    def formula(self, key: CallKey) -> Formula:
        """Raises CannotReplay."""
        own = self._texts(key)
        text = self._formulas.get((own.get("kernel", ""), own.get("buffer", "")))
        if text is None:
            raise CannotReplay("the recording has no nodes of the graph for its kernel", GAP)
        try:
            return msgspec.json.decode(text, type=Formula)
        except (msgspec.DecodeError, RecursionError):
            raise CannotReplay("the nodes of its kernel can't be read", GAP) from None

    def _texts(self, key: CallKey) -> dict[str, str]:
        role = _ROLES.get(key.phase, "")
        step = key.generation, key.step
        return self._calls.get((role, *step, key.path, key.call), {})

    @cached_property
    def _calls(self) -> dict[tuple[object, ...], dict[str, str]]:
        calls: dict[tuple[object, ...], dict[str, str]] = {}
        for row in self._side.run.index.scalars(role=tuple(_ROLES.values())):
            key = row.role, row.generation, row.step, row.path, row.call
            calls.setdefault(key, {})[row.slot] = row.value or ""
        return calls

    @cached_property
    def _formulas(self) -> dict[tuple[str, str], str]:
        """A formula is written once, with the first recorded run of its kernel."""
        return {
            (texts.get("kernel", ""), texts.get("buffer", "")): texts["formula"]
            for texts in self._calls.values()
            if "formula" in texts
        }


class KernelCall(Computed):
    """A buffer that a kernel wrote, of its recorded inputs. Raises CannotReplay."""

    def __init__(self, facts: KernelFacts, side: Side, key: CallKey, where: Where) -> None:
        self._side, self._where = side, where
        self._formula = facts.formula(key)
        records = side.records(key, "input")
        self._inputs = {r.site.slot.removeprefix(IN_KERNEL): side.load(r) for r in records}
        self.recorded = kept(side, key)
        self.length = longest(*self.operands, *self.recorded.values())
        dtypes = [str(x.dtype)[6:] for x in (*self.operands, *self.recorded.values())]
        self.rounds_to = DTYPES.get(coarsest(dtypes) or "")
        sizes = sum(x.numel() for x in (*self.operands, *self.recorded.values()))
        self._most = constants.REPLAY_GROWTH * (sizes + 1)

    def exact(self, change: Change | None = None) -> Tensors:
        return self._computed(self._where, change)

    def again(self, device: str = "cpu") -> Tensors:
        return self._computed(Where(device, None))

    def _computed(self, where: Where, change: Change | None = None) -> Tensors:
        values = {
            node: {"0": self._read(*read, where, change)}
            for node, read in self._formula.reads.items()
        }
        for name, op, args, kwargs in self._formula.steps:
            values[name] = self._step(op, args, kwargs, values, where)
        made = values.get(self._formula.node, {})
        found = {}
        for slot, recorded in self.recorded.items():
            output, count = summed(slot) or (slot, 1)
            one = made.get(output if len(made) > 1 else "0")
            if one is None:
                continue
            if _sizes(one.shape) != _sizes(recorded.shape):
                raise CannotReplay("its buffer lies in memory in another way than its node", GAP)
            found[slot] = (one * count if count > 1 else one).reshape(recorded.shape)
        return found

    def _read(
        self, name: str, slot: str, shape: list[int], axes: list[int], where: Where,
        change: Change | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return an input as the value of its node. ``axes``: of the input, the outermost first."""
        if name not in self._inputs:
            raise CannotReplay(f"its input {name} was not recorded", GAP)
        x = widened(changed(self._inputs.__getitem__, change)(name), where.dtype)
        if (sums := summed(slot)) is not None:
            x = x / sums[1]
        if len(shape) == x.dim():  # -1: a size that changes from run to run
            shape = [own if size < 0 else size for own, size in zip(x.shape, shape, strict=True)]
        try:
            same = _sizes(x.shape) == _sizes(shape)
            return x.reshape(shape) if same else x.permute(axes).reshape(shape)
        except RuntimeError:
            raise CannotReplay(f"its input {name} has another shape than its node", GAP) from None

    def _step(
        self, op: str, args: list[object], kwargs: dict[str, object], values: dict[str, Tensors],
        where: Where,
    ) -> Tensors:  # fmt: skip
        def filled(value: object) -> object:
            if isinstance(value, list):
                return [filled(each) for each in value]
            if not isinstance(value, dict):
                return value
            kind, content = next(((k, str(v)) for k, v in value.items()), ("", ""))
            if kind == "node" and "0" in values.get(content, {}):
                return values[content]["0"].clone()
            if kind == "dtype" and content in DTYPES:
                return widened_dtype(DTYPES[content], where.dtype)
            if kind == "float":
                return float(content)
            raise CannotReplay("the nodes of its kernel do not fit together", GAP)

        if op == "getitem" and len(args) == 2 and isinstance(args[0], dict):
            found = values.get(args[0].get("node", ""), {}).get(str(args[1]))
            if found is None:
                raise CannotReplay("the nodes of its kernel do not fit together", GAP)
            return {"0": found}
        given: Arguments = (
            [filled(each) for each in args],
            {name: filled(each) for name, each in kwargs.items()},
        )
        if op.startswith(_PRIMS):
            op, given = _public(op.removeprefix(_PRIMS), *given)
        task = Task(op, *given, self._most, device=where.device, settled=True, wide=where.wide)
        return dict(self._side.execute(task))


def _sizes(shape: Sequence[int]) -> list[int]:
    """Return the sizes of a shape that tell how its elements lie."""
    return [size for size in shape if size != 1]


def _public(name: str, args: list[object], kwargs: dict[str, object]) -> tuple[str, Arguments]:
    """Return a primitive of Inductor's graphs as an operator that is replayed."""
    name = name.partition(".")[0]
    if name == "convert_element_type":
        return "Tensor.to", (args, kwargs)
    if name == "iota" and len(args) == 1:
        length, start, step = args[0], kwargs.get("start"), kwargs.get("step")
        if isinstance(length, int) and isinstance(start, int) and isinstance(step, int):
            whole: list[object] = [start, start + length * step, step]
            return "Torch.arange", (whole, {"dtype": kwargs.get("dtype")})
    return f"Prims.{name}", (args, kwargs)
