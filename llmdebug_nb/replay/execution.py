"""Run a recorded operator on given tensors, once the size of its result is known to be bounded.

`Side.execute` is `run` for runs that this process recorded. For others it is `Replays.run` of
`worker.py`, which does the same in a process of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.core.nested import mapped
from llmdebug_nb.core.torch_internals import decompositions
from llmdebug_nb.replay.checks import DTYPE, FAILS, RANDOM, UNSET
from llmdebug_nb.replay.formulas import WIDE
from llmdebug_nb.replay.operators import (
    SIZED_BY_VALUES,
    UNSET_MEMORY,
    CannotReplay,
    Operator,
    bare_name,
    replayed,
)

Results = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """An operator to run.

    ``op``: its recorded name. ``args``, ``kwargs``: with tensors, which it may overwrite. ``most``:
    elements that its results may have together. ``shapes``: those that they must have, by slot;
    None: any. ``seed``: of random numbers. ``steps``: give what it computes on the way, too.
    ``device``: where it runs; the results come back. ``settled``: refuse it if it draws random
    numbers or gives memory that nothing has written. ``gradients``: of its outputs, by slot; the
    results are then the gradients of its inputs, at the slots ``wanted``. ``wide``: its floating
    tensors are float64.
    """

    op: str
    args: list[object]
    kwargs: dict[str, object]
    most: int
    shapes: Mapping[str, tuple[int, ...]] | None = None
    seed: int = 0
    steps: bool = False
    device: str = "cpu"
    settled: bool = False
    gradients: dict[str, torch.Tensor] | None = None
    wide: bool = False
    wanted: tuple[str, ...] = ()


def run(task: Task) -> Results:
    """Return the results by slot; of ``steps``, every tensor in the order in which it is computed.

    Raises:
        CannotReplay: the operator is not one that is replayed, fails, or would give results of
            another size.
    """
    name, function = replayed(task.op)
    if task.wide:
        function = WIDE.get(bare_name(task.op), function)
    try:
        _check(name, function, task)
        if task.steps:
            return _steps(function, task)
        if task.settled and bare_name(task.op) in UNSET_MEMORY:
            raise CannotReplay(f"{name} gives memory that nothing has written", UNSET)
        compute = _gradients if task.gradients is not None else _compute
        with quiet(task.seed):
            state = torch.get_rng_state()
            found = compute(function, task)
            if task.settled and not torch.equal(state, torch.get_rng_state()):
                raise CannotReplay(f"{name} draws random numbers", RANDOM)
    except CannotReplay:
        raise
    except Exception as error:  # an operator may raise anything for unsuitable arguments
        line = str(error).partition("\n")[0]
        kind = DTYPE if "not implemented for" in line else FAILS
        raise CannotReplay(f"{name} fails in the replay: {line}", kind) from None
    return [(slot, tensor.cpu().resolve_conj().resolve_neg()) for slot, tensor in found]


def _compute(function: Operator, task: Task) -> Results:
    args, kwargs = _inputs(task, task.device)
    result = function(*args, **kwargs)
    return list(results(args[0] if result is None and args else result))


def _gradients(function: Operator, task: Task) -> Results:
    """Return the gradients of the inputs that are asked for, for the given ones of the outputs."""
    leaves: dict[str, torch.Tensor] = {}

    def leaf(value: object, slot: str) -> object:
        if isinstance(value, torch.Tensor):
            if slot in task.wanted and (value.is_floating_point() or value.is_complex()):
                leaves[slot] = value = value.detach().requires_grad_()
            return value.clone()  # the operator may overwrite it
        if isinstance(value, (list, tuple)):
            return type(value)(leaf(each, f"{slot}.{i}") for i, each in enumerate(value))
        return value

    args, kwargs = _inputs(task, task.device)
    arriving = {slot: g.to(task.device) for slot, g in (task.gradients or {}).items()}
    with torch.enable_grad():
        args = [leaf(each, str(i)) for i, each in enumerate(args)]
        kwargs = {name: leaf(each, f"kwargs.{name}") for name, each in kwargs.items()}
        result = function(*args, **kwargs)
        made = dict(results(args[0] if result is None and args else result))
        roots = [(made[slot], g) for slot, g in arriving.items() if slot in made]
        roots = [(x, g.to(x.dtype)) for x, g in roots if x.requires_grad and x.shape == g.shape]
        if len(roots) < len(arriving):
            raise CannotReplay("its outputs are not those whose gradients were recorded")
        outputs, given = zip(*roots, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    return [(s, g) for s, g in zip(leaves, found, strict=True) if g is not None]


def _inputs(task: Task, device: str) -> tuple[list[object], dict[str, object]]:
    """Return the arguments of a task on a device; on "meta" they take no memory."""

    def placed(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        other = isinstance(value, torch.device) and device != "cpu"
        return torch.device(device) if other else value

    return mapped(task.args, placed), mapped(task.kwargs, placed)


def results(value: object, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result, each with the slot that a recording would use."""
    if isinstance(value, torch.Tensor):
        yield slot or "0", value
    elif isinstance(value, (list, tuple, Mapping)):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            escaped = str(name).replace(".", "\\.")
            yield from results(part, f"{slot}.{escaped}" if slot else escaped)


def quiet(seed: int = 0) -> Unbroken:
    """Run without gradients and with seeded random numbers; restore the random state after."""
    return Unbroken(torch.no_grad(), torch.random.fork_rng(), _seeded(seed))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a call stack as well
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    yield


def _check(name: str, function: Operator, task: Task) -> None:
    """Check kinds of arguments and sizes of results on the meta device, which allocates nothing.

    So a hostile dump can't make this process allocate far more memory than the dump's size.
    """
    try:
        args, kwargs = _inputs(task, "meta")
        schema = getattr(function, "_schema", None)
        if schema is not None and any(each.name == "device" for each in schema.arguments):
            kwargs["device"] = torch.device("meta")  # it makes a tensor of sizes alone
        result = function(*args, **kwargs)
    except Exception:
        # The size depends on the values. Of steps, one on the way may tell it; the results of the
        # others are no larger than what they take.
        if task.steps or bare_name(task.op) in SIZED_BY_VALUES:
            return
        raise
    tensors = results(args[0] if result is None and args else result)
    shapes = {slot: tuple(tensor.shape) for slot, tensor in tensors}
    if task.shapes is not None and any(shapes.get(slot) != s for slot, s in task.shapes.items()):
        wanted = dict(task.shapes)
        raise CannotReplay(f"{name} would give shapes {shapes}, but {wanted} were recorded")
    if sum(map(math.prod, shapes.values())) > task.most:
        raise CannotReplay(f"{name} would give a far larger result than recorded")


def _steps(function: Operator, task: Task) -> Results:
    """Return every tensor that an operator computes by torch's own formula for it."""
    kept = _Steps()
    with Unbroken(quiet(task.seed), kept):
        function(*task.args, **task.kwargs)
    return [("", tensor) for tensor in kept.values if tensor.numel() > 1]


class _Steps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators by their formulas and keeps every tensor that they compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[torch.Tensor] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        formula = decompositions().get(func)
        if formula is not None:
            with self:
                result = formula(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if result is not NotImplemented:
            self.values += [tensor for _, tensor in results(result)]
            return result
        return func(*args, **(kwargs or {}))
