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
from llmdebug_nb.core.torch_internals import decompositions
from llmdebug_nb.explain.operators import CannotReplay, Operator, replayed

Results = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """An operator to run.

    ``op``: its recorded name. ``args``, ``kwargs``: with tensors, which it may overwrite. ``most``:
    elements that its results may have together. ``shapes``: those that they must have, by slot;
    None: any. ``seed``: of random numbers. ``steps``: give what it computes on the way, too.
    """

    op: str
    args: list[object]
    kwargs: dict[str, object]
    most: int
    shapes: Mapping[str, tuple[int, ...]] | None = None
    seed: int = 0
    steps: bool = False


def run(task: Task) -> Results:
    """Return the results by slot; of ``steps``, every tensor in the order in which it is computed.

    Raises:
        CannotReplay: the operator is not one that is replayed, fails, or would give results of
            another size.
    """
    name, function = replayed(task.op)
    try:
        _check(name, function, task)
        if task.steps:
            return _steps(function, task)
        with quiet(task.seed):
            result = function(*task.args, **task.kwargs)
    except CannotReplay:
        raise
    except Exception as error:  # an operator may raise anything for unsuitable arguments
        line = str(error).partition("\n")[0]
        raise CannotReplay(f"{name} fails in the replay: {line}") from None
    return list(results(task.args[0] if result is None and task.args else result))


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
    torch.manual_seed(seed)
    yield


def _check(name: str, function: Operator, task: Task) -> None:
    """Check kinds of arguments and sizes of results on the meta device, which allocates nothing.

    So a hostile dump can't make this process allocate far more memory than the dump's size.
    """
    try:
        args = [_on_meta(value) for value in task.args]
        kwargs = {key: _on_meta(value) for key, value in task.kwargs.items()}
        schema = getattr(function, "_schema", None)
        if schema is not None and any(each.name == "device" for each in schema.arguments):
            kwargs["device"] = torch.device("meta")  # it makes a tensor of sizes alone
        result = function(*args, **kwargs)
    except Exception:
        if task.steps:  # the size depends on the values; a step on the way may tell it
            return
        raise
    tensors = results(args[0] if result is None and args else result)
    shapes = {slot: tuple(tensor.shape) for slot, tensor in tensors}
    if task.shapes is not None and any(shapes.get(slot) != s for slot, s in task.shapes.items()):
        wanted = dict(task.shapes)
        raise CannotReplay(f"{name} would give shapes {shapes}, but {wanted} were recorded")
    if sum(map(math.prod, shapes.values())) > task.most:
        raise CannotReplay(f"{name} would give a far larger result than recorded")


def _on_meta(value: object) -> object:
    """Return a value without memory: tensors and devices become those of the meta device."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(part) for part in value)
    if isinstance(value, dict):
        return {name: _on_meta(part) for name, part in value.items()}
    return value


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
