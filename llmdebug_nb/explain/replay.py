"""Replay an operator on its recorded inputs: in the same dtype, and in float64.

Its own error is the relative L2 error between the two results. It is counted in units of
rounding: half the machine epsilon of the coarsest dtype among inputs and outputs. A correct
operator stays below about ten units, whatever its inputs are. An inherited error does not count.

An operator is looked up by its recorded name in torch's own namespaces, and only if torch itself
lists it as an operator. Nothing in a dump is evaluated. The meta device gives the size of the
result before any memory is allocated.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import coarsest, epsilon
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.core.torch_internals import (
    VF,
    dispatched_operators,
    is_tensor_method,
    overridable_functions,
)
from llmdebug_nb.explain import arguments
from llmdebug_nb.explain.arguments import Arguments
from llmdebug_nb.explain.runs import CannotReplay, Runs, Side

Operator = Callable[..., object]
_NAMESPACES: dict[str, tuple[str, object]] = {
    "Functional": ("torch.nn.functional", torch.nn.functional),
    "Tensor": ("torch.Tensor", torch.Tensor),
    "Torch": ("torch", torch),
    "VF": ("torch._VF", VF),
}
# the errors that an operator may raise for unsuitable arguments
FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AttributeError,
    AssertionError,
)
_DOUBLE = epsilon("float64")
# operators with effects beyond their result
_NEVER = frozenset(
    {
        "from_file",
        "apply_",
        "map_",
        "map2_",
        "set_",
        "resize_",
        "resize_as_",
        "data_ptr",
        "backward",
        "share_memory_",
    }
)


@functools.cache
def operator(name: str) -> tuple[str, Operator]:
    """Return the qualified name and the function of a recorded operator.

    ``name``: such as ``Functional.linear`` or ``Aten.add.Tensor``.

    Raises:
        CannotReplay: torch has no such operator.
    """
    prefix, _, bare = name.partition(".")
    if bare.partition(".")[0] not in _NEVER:
        if prefix == "Aten":
            return _aten(bare)
        where, home = _NAMESPACES.get(prefix, ("", None))
        for each in (bare, f"__{bare}__"):  # x / y is recorded as Tensor.truediv
            function = _member(home, each) if each.isidentifier() else None
            if function is not None:
                return f"{where}.{each}", function
    raise CannotReplay(f"torch has no operator {name} that can be replayed")


def _member(home: object, name: str) -> Operator | None:
    """Return an operator of a namespace, None if torch does not list it as one."""
    if home is None:
        return None
    function: object = vars(home).get(name, getattr(home, name, None))
    listed = id(function) in overridable_functions() or is_tensor_method(function, name)
    return function if callable(function) and listed else None


def _aten(bare: str) -> tuple[str, Operator]:
    name, _, overload = bare.partition(".")
    if name.isidentifier() and f"aten::{bare if overload else name}" in dispatched_operators():
        which = overload or "default"
        return f"torch.ops.aten.{name}.{which}", getattr(getattr(torch.ops.aten, name), which)
    raise CannotReplay(f"this version of torch has no operator Aten.{bare}")


def quiet(seed: int = 0) -> Unbroken:
    """Run without gradients and with seeded random numbers; restore the random state after."""
    return Unbroken(torch.no_grad(), torch.random.fork_rng(), _seeded(seed))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    yield


class Replayed:
    """A recorded operator call of one side, to be replayed on its own tensors or on others.

    Raises:
        CannotReplay: the call can't be replayed.
    """

    def __init__(self, side: Side, key: CallKey) -> None:
        self.side, self.key = side, key
        self.records: list[Record] = side.records(key, "input")
        outputs = side.records(key, "output")
        if not outputs:
            raise CannotReplay("its output was not recorded")
        if key.phase != "forward":
            raise CannotReplay("calls of backward passes are not replayed")
        self.op = outputs[0].op
        self.name, self.function = operator(self.op)
        self.arguments = arguments.arguments_of(self.records, side.scalars(key))
        self._shapes = {record.site.slot: record.summary.shape for record in outputs}

    def run(
        self, tensors: Replayed | None = None, wide: bool = False, seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the result by slot.

        ``tensors``: another call, whose tensors are used; default: its own. ``wide``: compute in
        float64.

        Raises:
            CannotReplay: the operator fails, or would give a result of another size than recorded.
        """
        source = tensors or self
        load = arguments.loader(source.side, source.records)
        return self.run_on(load, wide, seed, strict=tensors is None)

    def run_on(
        self,
        load: Callable[[str], torch.Tensor],
        wide: bool = False,
        seed: int = 0,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Return the result by slot on the tensors that ``load`` returns for the input slots.

        ``strict``: the result must have the recorded shapes.

        Raises:
            CannotReplay: the operator fails, or would give a result of another size than recorded.
        """
        args, kwargs = arguments.filled(self.arguments, load, torch.float64 if wide else None)
        try:
            self._check((args, kwargs), strict)
            with quiet(seed):
                result = self.function(*args, **kwargs)
        except FAILURES as error:
            line = str(error).partition("\n")[0]
            raise CannotReplay(f"{self.name} fails in the replay: {line}") from None
        return dict(arguments.results(args[0] if result is None and args else result))

    def _check(self, call_arguments: Arguments, strict: bool) -> None:
        """Check the size of the result on the meta device.

        So a hostile dump can't make this process allocate far more memory than the dump's size.
        """
        args = [on_meta(value) for value in call_arguments[0]]
        kwargs = {name: on_meta(value) for name, value in call_arguments[1].items()}
        result = self.function(*args, **kwargs)
        tensors = arguments.results(args[0] if result is None and args else result)
        shapes = {slot: tuple(tensor.shape) for slot, tensor in tensors}
        recorded = sum(math.prod(record.summary.shape) for record in self.records)
        most = constants.REPLAY_GROWTH * (recorded + sum(map(math.prod, self._shapes.values())) + 1)
        if not strict and sum(map(math.prod, shapes.values())) > most:
            raise CannotReplay(f"{self.name} would give a far larger result than recorded")
        if strict and any(shapes.get(slot) != shape for slot, shape in self._shapes.items()):
            raise CannotReplay(
                f"{self.name} would give shapes {shapes}, but {self._shapes} were recorded"
            )

    def units(self, runs: Runs) -> float:
        """Return its own error in units of rounding: the recorded result against float64.

        Raises:
            CannotReplay: the operator fails, or its result does not round.
        """
        recorded = arguments.outputs(self.side, self.key)
        reference = self.run(wide=True)
        dtypes = [r.summary.dtype for r in self.records]
        units = [
            runs.error(reference[slot], tensor) / unit([*dtypes, str(tensor.dtype)])
            for slot, tensor in recorded.items()
            if slot in reference
            and tensor.is_floating_point()
            and reference[slot].shape == tensor.shape
        ]
        if not units:
            raise CannotReplay("it gives no floating-point values")
        return max(units)


def on_meta(value: object) -> object:
    """Return a value without memory: tensors and devices become those of the meta device."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(part) for part in value)
    if isinstance(value, dict):
        return {name: on_meta(part) for name, part in value.items()}
    return value


def unit(dtypes: list[str]) -> float:
    """Return a unit of rounding: half the machine epsilon of the coarsest floating dtype."""
    name = coarsest(dtype.removeprefix("torch.") for dtype in dtypes)
    return (epsilon(name) if name is not None else _DOUBLE) / 2


def largest_error(
    golden: dict[str, torch.Tensor], mine: dict[str, torch.Tensor], runs: Runs
) -> float:
    """Return the largest error over the results of both. Raises CannotReplay if there are none."""
    errors = [
        runs.error(tensor, mine[slot])
        for slot, tensor in golden.items()
        if slot in mine and mine[slot].shape == tensor.shape
    ]
    if not errors:
        raise CannotReplay("the two calls have no results to compare")
    return max(errors)


def is_random(call: Replayed) -> bool:
    """Tell whether the result depends on random numbers. Raises CannotReplay."""
    one, other = call.run(seed=0), call.run(seed=1)
    return any(not same(tensor, other[slot]) for slot, tensor in one.items())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, NaN counting as equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
