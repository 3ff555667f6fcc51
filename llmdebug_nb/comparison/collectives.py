"""Whether a collective gave what its ranks put into it, and what it gave instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.kernels.joining import held_together
from llmdebug_nb.core.kernels.raw import dtype_name
from llmdebug_nb.core.placement import REDUCTIONS
from llmdebug_nb.store.rank_checks import COLLECTIVE, Collective, RankFault

_Tensors = Mapping[int, Sequence[torch.Tensor]]
_How: TypeAlias = tuple[tuple[str, str], ...]  # facts of a collective
_SENT = "sent as"  # the dtype in which parts go from rank to rank
# A mean, as by DDP, comes first, and so does what loses nothing: of few gradients, all may fit.
_HOWS: tuple[_How, ...] = tuple(
    (("op", op), *sent)
    for sent in ((), ((_SENT, "float16"),), ((_SENT, "bfloat16"),))
    for op in ("avg", "sum")
)
_WORDS = {"sum": "sum", "avg": "mean", "max": "maximum", "min": "minimum", "product": "product"}


def fault(call: Collective) -> RankFault | None:
    """Return what is wrong with a collective; None if it is right.

    Raises ValueError: what it should give is not known; the text says why.
    """
    ops = {rank: facts.get("op", "") for rank, facts in call.facts.items()}
    if len(set(ops.values())) > 1:
        says = ", ".join(f"rank {rank}: {_word(op)}" for rank, op in ops.items())
        return RankFault(COLLECTIVE, call.site, tuple(ops), f"its ranks reduce otherwise ({says})")
    op = next(iter(ops.values()))
    wanted = _expected(call, op)
    bad = [rank for rank, there in wanted.items() if not _agrees(call, rank, there, op)]
    if not bad:
        return None
    share = [_error(call.gives[rank], wanted[rank]) for rank in bad]
    alone = len(bad) < len(wanted) or len(wanted) == 1
    where = f"rank {_texts(bad)} has" if alone else "every rank has"
    what = f"the {_word(op)} of its inputs" if op else "what its ranks put in"
    instead = next(_instead(call, op, bad[0]), "")
    says = f"{where} another result than {what} (error {max(share):.2g}){instead}"
    return RankFault(COLLECTIVE, call.site, tuple(bad), says, bool(instead))


class Reductions:
    """How a program reduces its gradients, as most of them say, and those that are not so.

    A program may send them in fewer bits (`bf16_compress_hook`), or as anything else.
    """

    def __init__(self) -> None:
        self.count = 0
        self._faults: dict[_How, list[RankFault]] = {how: [] for how in _HOWS}

    def add(self, ways: Sequence[Collective]) -> None:
        """Add a gradient, in all the ways in which it may have been made: one has to be right."""
        self.count += 1
        for how in _HOWS:
            found = [
                fault(replace(call, facts={rank: dict(how) for rank in call.facts}))
                for call in ways
            ]
            wrong = [each for each in found if each is not None]
            if len(wrong) == len(found):
                self._faults[how].append(wrong[0])

    def faults(self) -> tuple[list[RankFault], int]:
        """Return what is wrong, and how many gradients nothing is known about."""
        for faults in self._faults.values():
            if self.count - len(faults) > constants.MAJORITY * self.count:
                return faults, 0
        for faults in self._faults.values():
            explained = [each for each in faults if each.explained]
            if len(explained) > constants.MAJORITY * self.count:
                return faults, 0
        return [], self.count


def _expected(call: Collective, op: str) -> dict[int, list[torch.Tensor]]:
    """Return what each rank should have. Raises ValueError."""
    name, takes, ranks = call.op, call.takes, list(call.gives)
    first = call.facts[ranks[0]]
    if name == "all_reduce":
        whole = _reduced(takes, op)
        return {rank: [whole] for rank in ranks}
    if name == "recv":
        (sent,) = takes.values()
        return {rank: list(sent) for rank in ranks}
    if name == "broadcast":
        source = int(first.get("src", "-1"))
        if source not in takes:
            raise ValueError("broadcasts of an unknown rank")
        return {rank: list(takes[source]) for rank in ranks}
    if name.startswith("all_gather"):
        whole = torch.cat([takes[rank][0] for rank in ranks], int(first.get("gather_dim", 0)))
        return {rank: [whole] for rank in ranks}
    if name.startswith("reduce_scatter"):
        axis = int(first.get("scatter_dim", 0))
        lists = {rank: [torch.cat(list(each), axis)] for rank, each in takes.items()}
        parts = _reduced(lists, op).chunk(len(ranks), axis)
        return {rank: [part] for rank, part in zip(ranks, parts, strict=True)}
    if name == "all_to_all_single":
        return _exchanged(call, ranks)
    raise ValueError(f"calls of {name}")


def _exchanged(call: Collective, ranks: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    sent: dict[int, Sequence[torch.Tensor]] = {}
    for rank in ranks:
        text = call.facts[rank].get("input_split_sizes", "").strip("[]() ")
        sizes = [int(each) for each in text.split(",") if each.strip()]
        given = call.takes[rank][0]
        sent[rank] = torch.split(given, sizes) if sizes else given.chunk(len(ranks))
    return {rank: [torch.cat([sent[of][at] for of in ranks])] for at, rank in enumerate(ranks)}


def _reduced(takes: _Tensors, op: str) -> torch.Tensor:
    if op not in REDUCTIONS:
        raise ValueError(f"reductions by {op or 'an unknown operation'}")
    return held_together({(rank,): each[0] for rank, each in takes.items()}, (op,))


def _agrees(call: Collective, rank: int, wanted: Sequence[torch.Tensor], op: str) -> bool:
    """Tell whether a rank has a result, up to the rounding of a sum in any order."""
    given = _flat(call.gives[rank])
    there = _flat(wanted)
    if given.shape != there.shape:
        return False
    if op not in ("sum", "avg", "product") or not given.is_floating_point():
        return bool(torch.equal(given.nan_to_num(), there.nan_to_num()))
    if not _same_places(given, there):
        return False
    size = sum(float(_finite(_flat(each)).norm()) for each in call.takes.values())
    error = float((_finite(given) - _finite(there)).norm())
    limit = constants.OPERATOR_EPSILONS * epsilon(dtype_name(given))
    if _SENT in call.facts[rank]:  # each part is rounded, and each sum of two of them
        limit += len(call.takes) * epsilon(call.facts[rank][_SENT])
    return error <= limit * size


def _same_places(given: torch.Tensor, there: torch.Tensor) -> bool:
    """Tell whether NaN and infinities stand at the same places."""
    unusual = ~given.isfinite()
    if not torch.equal(unusual, ~there.isfinite()):
        return False
    kinds = [each[unusual].nan_to_num(0.0) for each in (given, there)]  # NaN, and both infinities
    return bool(torch.equal(*kinds))


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.double().nan_to_num(0.0, 0.0, 0.0)


def _error(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    a, b = _flat(wanted).double(), _flat(given).double()
    return float((a - b).norm() / a.norm()) if a.shape == b.shape else float("inf")


def _instead(call: Collective, op: str, rank: int) -> Iterator[str]:
    """Yield what a rank has in place of the result."""

    def gives(op: str, takes: _Tensors) -> bool:
        other = Collective(call.site, call.op, call.facts, takes, call.gives)
        try:
            return _agrees(call, rank, _expected(other, op)[rank], op)
        except (ValueError, RuntimeError, IndexError):
            return False

    if not op:
        return
    for name, word in _WORDS.items():
        if name != op and gives(name, call.takes):
            yield f": it is their {word}"
    for other in call.takes:
        left = {of: each for of, each in call.takes.items() if of != other}
        none = {**call.takes, other: [torch.zeros_like(each) for each in call.takes[other]]}
        if left and (gives(op, left) or gives(op, none)):
            yield f": the part of rank {other} is not in it"
        twice = {**call.takes, -1: call.takes[other]}
        if gives(op, twice):
            yield f": the part of rank {other} is in it twice"


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _word(op: str) -> str:
    return _WORDS.get(op, op)


def _texts(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
