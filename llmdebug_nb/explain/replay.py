"""An operator alone on its recorded inputs: in the same dtype, and in float64.

An error is counted in units of rounding: relative L2 over half the machine epsilon, that of the coarsest dtype among
inputs and outputs. Operators that compute right stay below ten or so, whatever they were given; what they inherited does not count.

Operators are found by their recorded names in torch's own namespaces, and only such as torch itself lists as operators; nothing that a dump says is
evaluated. What a call would make is known from the meta device before any memory is taken.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain import arguments
from llmdebug_nb.explain.calls import Key
from llmdebug_nb.explain.runs import NotAgain, Runs, Side

_NAMESPACES: dict[str, tuple[str, Any]] = {
    "Functional": ("torch.nn.functional", torch.nn.functional),
    "Tensor": ("torch.Tensor", torch.Tensor),
    "Torch": ("torch", torch),
    "VF": ("torch._VF", torch._VF),
}
# what an operator may raise for arguments that do not suit it
FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AttributeError,
    AssertionError,
)
_ROOM = 64  # times the elements that a call took and gave, for one on other tensors
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
def _overridable() -> frozenset[int]:
    found = torch.overrides.get_overridable_functions()
    return frozenset(id(function) for functions in found.values() for function in functions)


@functools.cache
def operator(name: str) -> tuple[str, Callable[..., Any]]:
    """Return the qualified name and the function of a recorded operator (``Functional.linear``, ``Aten.add.Tensor``).

    Raises:
        NotAgain: it is none of torch's operators.
    """
    prefix, _, bare = name.partition(".")
    if bare.partition(".")[0] not in _NEVER:
        if prefix == "Aten":
            return _aten(bare)
        where, home = _NAMESPACES.get(prefix, ("", None))
        for each in (bare, f"__{bare}__"):  # x / y is recorded as Tensor.truediv
            function = (
                home.__dict__.get(each, getattr(home, each, None))
                if home is not None and each.isidentifier()
                else None
            )
            if callable(function) and (
                id(function) in _overridable() or _is_method(function, each)
            ):
                return f"{where}.{each}", function
    raise NotAgain(f"{name} is no operator of torch that can be called again")


def _is_method(function: Any, name: str) -> bool:
    """Tell whether it is a method that tensors get from C: those are not always the very object that torch lists."""
    return type(function).__name__ in ("method_descriptor", "wrapper_descriptor") and hasattr(
        torch.Tensor, name
    )


def _aten(bare: str) -> tuple[str, Callable[..., Any]]:
    name, _, overload = bare.partition(".")
    if name.isidentifier() and f"aten::{bare if overload else name}" in _dispatched():
        packet = getattr(torch.ops.aten, name)
        return f"torch.ops.aten.{name}.{overload or 'default'}", getattr(
            packet, overload or "default"
        )
    raise NotAgain(f"Aten.{bare} is no operator of this torch")


@functools.cache
def _dispatched() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


@contextlib.contextmanager
def quiet(seed: int = 0) -> Iterator[None]:
    """No gradients, and random numbers that are the same each time and taken back afterwards."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Replayed:
    """A recorded operator call of one side, to be made again, on its own or on the other side's tensors."""

    def __init__(self, side: Side, key: Key) -> None:
        """Raises NotAgain where the call can't be made again."""
        self.side, self.key = side, key
        self.records: list[Record] = side.records(key, "input")
        made = side.records(key, "output")
        if key.phase != "forward" or not made:
            raise NotAgain(
                "calls of backward passes are not made again"
                if made
                else "its output was not recorded"
            )
        self.op = made[0].op
        self.name, self.function = operator(self.op)
        self.given = arguments.given(self.records, side.scalars(key))
        self._shapes = {record.site.slot: record.summary.shape for record in made}

    def run(
        self, tensors: Replayed | None = None, wide: bool = False, seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return what the call gives, by slot, on its own tensors or those of another call; ``wide``: in float64.

        Raises NotAgain.
        """
        source = tensors or self
        return self.run_on(
            arguments.loader(source.side, source.records), wide, seed, strict=tensors is None
        )

    def run_on(
        self,
        load: Callable[[str], torch.Tensor],
        wide: bool = False,
        seed: int = 0,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Return what the call gives on the tensors that ``load`` gives for its slots. ``strict``: of the recorded shapes.

        Raises NotAgain.
        """
        args, kwargs = arguments.filled(self.given, load, torch.float64 if wide else None)
        try:
            self._check(args, kwargs, strict)
            with quiet(seed):
                result = self.function(*args, **kwargs)
        except FAILURES as error:
            raise NotAgain(
                f"{self.name} fails when it is called again: {str(error).partition(chr(10))[0]}"
            ) from None
        return dict(arguments.results(args[0] if result is None and args else result))

    def _check(self, args: list[Any], kwargs: dict[str, Any], strict: bool) -> None:
        """See from shapes alone that the call gives what was recorded: a dump can't make us take memory beyond its size."""

        def meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to("meta")
            if isinstance(value, torch.device):
                return torch.device("meta")
            if isinstance(value, tuple):
                return tuple(meta(part) for part in value)
            return value

        result = self.function(
            *map(meta, args), **{name: meta(value) for name, value in kwargs.items()}
        )
        shapes = {
            slot: tuple(tensor.shape)
            for slot, tensor in arguments.results(
                meta(args[0]) if result is None and args else result
            )
        }
        taken = sum(math.prod(record.summary.shape) for record in self.records)
        most = _ROOM * (taken + sum(map(math.prod, self._shapes.values())) + 1)
        if not strict and sum(map(math.prod, shapes.values())) > most:
            raise NotAgain(f"{self.name} would give far more than was recorded")
        if strict and any(shapes.get(slot) != shape for slot, shape in self._shapes.items()):
            raise NotAgain(f"{self.name} would give {shapes}, where {self._shapes} was recorded")

    def units(self, runs: Runs) -> float:
        """Return the call's own error: what it recorded against float64, in units of rounding. Raises NotAgain."""
        made = arguments.outputs(self.side, self.key)
        reference = self.run(wide=True)
        given = [r.summary.dtype for r in self.records]
        worst = [
            runs.error(reference[slot], tensor) / (rounding([*given, str(tensor.dtype)]) / 2)
            for slot, tensor in made.items()
            if slot in reference
            and tensor.is_floating_point()
            and reference[slot].shape == tensor.shape
        ]
        if not worst:
            raise NotAgain("it gives no floating-point values")
        return max(worst)


def rounding(dtypes: list[str]) -> float:
    """Return the machine epsilon of the coarsest floating dtype."""
    kinds = [DTYPES.get(name.removeprefix("torch.")) for name in dtypes]
    return max(
        (torch.finfo(kind).eps for kind in kinds if kind is not None and kind.is_floating_point),
        default=2.0**-52,
    )


def apart(golden: dict[str, torch.Tensor], mine: dict[str, torch.Tensor], runs: Runs) -> float:
    """Return the largest error over the results that both have. Raises NotAgain where there are none."""
    errors = [
        runs.error(tensor, mine[slot])
        for slot, tensor in golden.items()
        if slot in mine and mine[slot].shape == tensor.shape
    ]
    if not errors:
        raise NotAgain("the two calls give nothing that could be held against each other")
    return max(errors)


def is_random(call: Replayed) -> bool:
    """Tell whether a call gives something else with other random numbers. Raises NotAgain."""
    one, other = call.run(seed=0), call.run(seed=1)
    return any(not same(tensor, other[slot]) for slot, tensor in one.items())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, NaN counting as equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
