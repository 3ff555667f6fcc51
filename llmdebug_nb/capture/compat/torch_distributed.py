"""Internals of `torch.distributed`. Docstrings name the effect of a lack.

Nothing here communicates: meshes, groups and placements are read from objects of this process.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import ModuleType
from typing import Any, NamedTuple

import torch

from llmdebug_nb.capture.compat.pytorch import Function, Undo, with_module
from llmdebug_nb.capture.listeners import with_methods
from llmdebug_nb.core.placement import REDUCTIONS, REPLICATE, Placement, Shard

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_OP = ("op", "reduceOp")  # the names of the parameter for the reduction

# -- tensors --------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> tuple[torch.Tensor, Placement | None]:
    """Return what this rank holds of a tensor, and its placement if the tensor is a DTensor.

    The result of a collective that still runs is waited for, as its reader would do. A placement
    that is not known is None: then the part is a tensor of its own.
    """
    placement = None
    if type(tensor) in _PLAIN:
        return tensor, None
    if is_divided(tensor):
        placement, tensor = _placement_of(tensor), tensor._local_tensor  # type: ignore[attr-defined]
    if _is(tensor, _FUNCTIONAL, "AsyncCollectiveTensor"):
        tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    return tensor, placement


def is_divided(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a DTensor."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def _is(tensor: torch.Tensor, module: str, name: str) -> bool:
    """Tell whether a tensor is of a class, without importing its module."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(tensor, cls)


def _placement_of(tensor: torch.Tensor) -> Placement | None:
    spec = tensor._spec  # type: ignore[attr-defined]
    parts = [_part(each) for each in spec.placements]
    if any(part is None for part in parts):
        return None
    mesh = spec.mesh.mesh
    names = spec.mesh.mesh_dim_names or [""] * mesh.dim()
    return Placement(
        tuple(mesh.shape),
        tuple(mesh.flatten().tolist()),
        tuple(names),
        tuple(map(str, parts)),
        tuple(map(int, spec.shape)),
    )


def _part(placement: object) -> Shard | str | None:
    """Return what a dimension's ranks hold; None for what only its own kind can put together."""
    name, axis = type(placement).__name__, getattr(placement, "dim", None)
    if name == "Replicate":
        return REPLICATE
    if name == "Shard" and axis is not None:
        return Shard(axis)
    if name == "_StridedShard" and axis is not None:
        turns = getattr(placement, "split_factor", None)
        return None if turns is None else Shard(axis, turns)
    reduction = getattr(placement, "reduce_op", None)
    return str(reduction) if name == "Partial" and reduction in REDUCTIONS else None


# -- groups ---------------------------------------------------------------------------------------


class World(NamedTuple):
    """The ranks that run together, as this process knows them.

    ``size``: their number. ``groups``: the process groups that it is in: their ranks. ``job``: a
    text that the processes of one launch share, and no others; "" if that is not known.
    """

    size: int
    groups: tuple[tuple[int, ...], ...]
    job: str


def world() -> World | None:
    """Return the ranks that run together; None as long as there is no process group."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return None
    groups = {tuple(dist.get_process_group_ranks(group)) for group in list(_groups())}
    return World(dist.get_world_size(), tuple(sorted(groups)), _job())


def group_count() -> int:
    """Return how many process groups there are: `world` changes with their number."""
    return len(_groups())


def shared(key: str, make: Callable[[], str]) -> str:
    """Return what the first rank that asks for a key makes; where ranks run alone, what we make.

    The store at which the ranks met tells who is first. The others wait until that one has made it.
    Raises what ``make`` raises; if it does so on the first rank, each makes its own.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return make()
    own = str(dist.get_rank())
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        first = bytes(store.compare_set(f"{key}/first", "", own)).decode() == own
        made = "" if first else bytes(store.get(f"{key}/made")).decode()
    except (RuntimeError, NotImplementedError, AttributeError, UnicodeDecodeError):
        return make()  # a store of another kind, or one that is gone
    if not first:
        return made or make()
    try:
        made = make()
    finally:
        store.set(f"{key}/made", made)
    return made


def _groups() -> Mapping[Any, object]:
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return {}
    groups: Mapping[Any, object] = dist.distributed_c10d._world.pg_map
    return groups


def _job() -> str:
    """Return a text of the address at which the ranks meet, which does not tell the address."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    text = " ".join(os.environ.get(name, "") for name in names).strip()
    return blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


# -- collectives ----------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single",
)  # fmt: skip
# the parameter that a function writes to, where its name does not begin with "output"
_WRITES = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor_list",
    "gather": "gather_list", "scatter": "tensor",
}  # fmt: skip
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # what they write to, they read, too
_MESSAGES = ("send", "recv", "recv_anysource")  # of ProcessGroup: isend and irecv end there, too
RECEIVES = tuple(f"Distributed.{name}" for name in _MESSAGES if name != "send")
_WAITS = ("wait", "synchronize")  # of Work
_FUNCTIONAL = "torch.distributed._functional_collectives"
_NAMES = (
    "all_reduce", "broadcast", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single", "permute_tensor",
)  # fmt: skip


def with_collectives(
    wrap: Callable[[str, Function], Function], waited: Callable[[object], None]
) -> Undo:
    """Put ``wrap(name, function)`` in place of functions of `torch.distributed`.

    Return how to undo it. The functional ones, which DTensor calls, are among them. ``waited`` gets
    the `Work` of an asynchronous one whenever a program has waited for it.
    """
    if not torch.distributed.is_available():
        return lambda: None
    undo = _wrapped(torch.distributed, COLLECTIVES, wrap)
    # not isend and irecv themselves: torch asks for their identity
    undo_messages = _wrapped(
        torch.distributed.ProcessGroup, _MESSAGES, lambda name, call: wrap(name, _own(name, call))
    )
    undo_waits = _wrapped(torch.distributed.Work, _WAITS, functools.partial(_watched_wait, waited))
    undo_functional = with_module(_FUNCTIONAL, lambda home: _wrapped(home, _NAMES, wrap))

    def undo_all() -> None:
        undo_functional()
        undo_waits()
        undo_messages()
        undo()

    return undo_all


def _own(name: str, method: Function) -> Function:
    """Return a function that calls a method of C++ as that of the class itself.

    Of a subclass in Python, C++ would call the subclass' method, and so us again, unless a function
    of the method's name calls it with the same ``self``.
    """

    def call(self: object, *args: object, **kwargs: object) -> object:
        return method(self, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return call


def _watched_wait(waited: Callable[[object], None], name: str, wait: Function) -> Function:
    @functools.wraps(wait)
    def watched(work: object, *args: object, **kwargs: object) -> object:
        result = wait(work, *args, **kwargs)
        waited(work)
        return result

    return watched


def _wrapped(
    home: ModuleType | type, names: tuple[str, ...], wrap: Callable[[str, Function], Function]
) -> Undo:
    found = [(name, getattr(home, name)) for name in names if hasattr(home, name)]
    return with_methods((home, name, wrap(name, function)) for name, function in found)


class Collective(NamedTuple):
    """A call of a collective. ``takes``, ``gives``: what it reads, and what it writes to.

    ``gives``: None of a function that returns its result. ``facts``: its ``ranks``, ``op``, and
    other plain arguments, as texts by name.
    """

    takes: object
    gives: object
    facts: list[tuple[str, str]]


def collective(
    name: str, function: Function, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Collective:
    """Describe a call of a collective. Raises TypeError: these are not its arguments."""
    if name in _MESSAGES:
        return _message(name, args, [*args[2:], *kwargs.values()])
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    values = dict(given.arguments)
    facts = [("ranks", ",".join(map(str, _ranks_of(values.pop("group", None)))))]
    writes = _WRITES.get(name, "output")
    takes, gives = [], None
    for parameter, value in values.items():
        if parameter in _OP:
            facts.append(("op", _op_text(value)))
        elif isinstance(value, (int, bool)) or _are_numbers(value):
            facts.append((parameter, str(value)))
        elif value is None or isinstance(value, str):
            continue
        elif parameter.startswith(writes):
            gives = value
            if name in _IN_PLACE:
                takes.append(value)
        else:
            takes.append(value)
    return Collective(takes[0] if len(takes) == 1 else takes, gives, facts)


def _message(name: str, args: tuple[object, ...], numbers: list[object]) -> Collective:
    """Describe a message. ``args``: group and tensors; ``numbers``: the other rank, and a tag."""
    ranks, content, sends = _ranks_of(args[0]), args[1], name == "send"
    facts = [("ranks", ",".join(map(str, ranks))), ("tag", str(numbers[-1]))]
    for peer in numbers[:-1]:
        if isinstance(peer, int) and peer < len(ranks):
            facts.append(("to" if sends else "from", str(ranks[peer])))
    if isinstance(content, list) and len(content) == 1:
        (content,) = content
    return Collective(content, [], facts) if sends else Collective([], content, facts)


def channel(
    name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    """Return what messages have in common that arrive in the order in which they were sent."""
    if name not in _MESSAGES:
        return None
    return name, *_ranks_of(args[0]), *map(str, (*args[2:], *kwargs.values()))


def _are_numbers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value)


@functools.lru_cache(64)
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _op_text(op: object) -> str:
    """Return the name of a reduction, as placements have it: ``sum``, ``avg``."""
    found = getattr(op, "op", op)
    text = found if isinstance(found, str) else getattr(found, "name", str(found))
    return text.rpartition(".")[2].lower()


def _ranks_of(group: object) -> list[int]:
    """Return the ranks of what a collective takes as its group; none if that is not known."""
    dist = torch.distributed
    try:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            from torch.distributed import _functional_collectives as functional

            home: Any = dist.distributed_c10d
            name = functional._resolve_group_name(group)  # type: ignore[arg-type]
            group = home._resolve_process_group(name)
        return dist.get_process_group_ranks(group)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return []
