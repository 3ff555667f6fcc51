"""Where bad values began, and which tensors hold them now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from llmdebug_nb.capture.calls import Leaf
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.core.faults import MEDIUM, Fault, FaultyCall

_FOLLOWED = 8  # calls of each level that are described: they tell the way, the rest is counted
Held = list[tuple[str, str, object]]  # role, slot and leaf of a call


@dataclass(eq=False)
class Origin:
    """A call whose bad values may reach a result.

    ``root_call``: during or after which it ran. ``inside``: it ran inside a model.
    ``reached``: the result, "" while there is none.
    ``ended``: count of calls that made clean values of its bad ones. ``examined``: GradScaler has
    looked at them. ``held``: its tensors, if they are to be kept. ``fits_float64``: in float64
    its values are finite.
    """

    kind: str
    call: FaultyCall
    evidence: str
    root_call: int
    inside: bool = True
    reached: str = ""
    ended: int = 0
    passed_on: int = 0
    examined: bool = False
    fits_float64: bool = False
    times: int = 1
    held: Held = field(default_factory=list)
    followed: list[FaultyCall] = field(default_factory=list)
    _levels: Counter[str] = field(default_factory=Counter)

    def wants(self, level: str) -> bool:
        """Count a call that follows; return whether it is to be described."""
        if level == MEDIUM:
            self.ended += 1
        else:
            self.passed_on += 1
        self._levels[level] += 1
        return self._levels[level] <= _FOLLOWED

    @property
    def key(self) -> tuple[str, ...]:
        """The place in the program: the same in each step."""
        return (self.kind, self.call.path, self.call.phase, *self.call.stack_info[:1])

    def fault(self) -> Fault:
        return Fault(
            self.kind, self.call, self.evidence, self.reached, tuple(self.followed),
            self.passed_on, self.times,
        )  # fmt: skip


class BadTensors:
    """The storages that hold bad values, each with the origins of these. It keeps no memory.

    ``origins``: empty if no bad value is about.
    """

    def __init__(self) -> None:
        self.origins: dict[StorageWeakRef, tuple[Origin, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.origins)

    def of(self, tensor: torch.Tensor) -> tuple[Origin, ...]:
        """Return the origins of what a tensor may hold."""
        storage = pytorch.storage_of(tensor) if self.origins else None
        return () if storage is None else self.origins.get(storage, ())

    def of_all(self, leaves: Iterable[Leaf]) -> list[Origin]:
        """Return the origins of several tensors, each once, in order."""
        found: dict[Origin, None] = {}
        for _, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                found.update(dict.fromkeys(self.of(leaf)))
        return list(found)

    def add(self, tensor: torch.Tensor, origins: Iterable[Origin]) -> None:
        """Note that a tensor holds bad values now."""
        storage = pytorch.storage_of(tensor)
        if storage is not None:
            known = self.origins.get(storage, ())
            self.origins[storage] = tuple(dict.fromkeys((*known, *origins)))

    def clear(self, tensor: torch.Tensor) -> None:
        """Note that all of a tensor's storage was written and is clean."""
        storage = pytorch.storage_of(tensor)
        if storage in self.origins and tensor.nbytes == tensor.untyped_storage().nbytes():
            del self.origins[storage]

    def forget_freed(self) -> None:
        """Forget storages that no longer exist."""
        self.origins = {
            storage: origins
            for storage, origins in self.origins.items()
            if not storage.expired()  # type: ignore[no-untyped-call]
        }

    def all(self) -> list[Origin]:
        """Return the origins of everything that still exists."""
        self.forget_freed()
        return list(dict.fromkeys(each for origins in self.origins.values() for each in origins))
