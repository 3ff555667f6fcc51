"""Where logits come from: the steps of a run or dump, with the tokens that each was given."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from llmdebug_nb.align.program_results import Results
from llmdebug_nb.comparison.epsilons import told
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.errors import CompareError, LLMDebugError, TensorLookupError, nearest
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.run import Run

Key = tuple[int, int]  # generation and step
_CACHED = ("prefill", "decode")  # a call knows the tokens of the calls before it
_GENERATING = (*_CACHED, "full")  # only the last row makes a token
_LOGITSDUMP = re.compile(r"(?:.*/)?logits_(?P<task>.+)_(?P<key>\d{1,9})_(?P<token>\d{1,9})")
_AT = re.compile(r"(?P<path>.*?)(?:\[(?P<slot>[^\[\]]*)\])?")


@dataclass(frozen=True)
class Step:
    """The logits of one step.

    ``shape``: sequences, rows and vocabulary. The rows are the last ones of the input. ``ids``:
    int64[sequences, tokens], what the model was given; None if that was not recorded. ``load()``
    returns the logits. ``problem``: why there are none. ``following``: the token that came next,
    where the next step doesn't tell it. ``sampled``: False if that is known to be of a prompt.
    """

    kind: str
    shape: tuple[int, int, int]
    ids: torch.Tensor | None
    load: Callable[[], torch.Tensor]
    problem: str = ""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    following: int | None = None
    sampled: bool = True

    @property
    def cached(self) -> bool:
        return self.kind in _CACHED

    @property
    def generating(self) -> bool:
        return self.kind in _GENERATING


@dataclass(frozen=True)
class Source:
    """The logits of a program. ``place``: the tensor that was taken."""

    name: str
    place: str
    steps: dict[Key, Step]
    notes: tuple[str, ...] = ()


def of_run(run: Run, at: str | None = None) -> Source:
    """Return the logits of a run. ``at``: the tensor to take, as ``path`` or ``path[slot]``.

    Raises:
        CompareError: the run has none.
        TensorLookupError: it has no output at that place.
    """
    found = dict(chosen(run, at))
    if not found:
        raise CompareError(
            f"{run.label} has no logits: record the model with its head (or with logits=True), or"
            " name the tensor with at= (--at)"
        )
    places = Counter((r.site.path, r.site.slot) for r in found.values())
    ((path, slot), count), *others = places.most_common()
    place = f"{path or '(root)'} output[{slot}]"
    if others and any(_LOGITSDUMP.fullmatch(path) is None for path, _ in places):
        place += f" in {count:,} of {len(found):,} steps"
    ranks = {record.site.rank for record in found.values()}
    recorded = run.info()["ranks"]
    notes = [f"{run.label}: the logits of rank {min(ranks)}, of {len(recorded)} ranks"]
    kinds = {(c.generation, c.step): c.kind for c in reversed(run.root_calls())}
    ids, more = _token_ids(run), _further(run)
    steps = {
        key: _step(run, record, kinds.get(key, "forward"), ids.get(key), more.get(key, {}))
        for key, record in sorted(found.items())
    }
    return Source(run.label, place, steps, (*(notes if len(recorded) > 1 else ()), *coarse(run)))


def coarse(run: Run) -> Iterator[str]:
    """Yield what is to be said of the coarse values that a run states."""
    if run.coarse:
        knows = "allows for that" if told(run.rounding) else "does not allow for steps so coarse"
        yield f"{run.label} computes with {'; '.join(run.coarse)}: the rule rounding {knows}"


def chosen(run: Run, at: str | None) -> Iterator[tuple[Key, Record]]:
    """Yield the logits of each step, the last call of a step last. Raises TensorLookupError."""
    if at is not None:
        yield from _at(run, at)
        return
    modules = Modules(run.nodes)
    outputs = [r for r in run.records(role="output", phase="forward") if _may_be(r)]
    if named := list(_logitsdump(outputs)):
        yield from named
        return
    logits = [r for r in outputs if modules.are_logits(r)]
    if not logits:
        every = (r for r in run.records() if r.site.role != "weight")
        results = Results(every)
        logits = [r for r in outputs if r in results]
        if modules.vocabularies:
            # ranks may share the rows of an embedding
            shares = 1, len(run.info()["ranks"])
            widths = {rows * n for rows in modules.vocabularies for n in shares}
            logits = [r for r in logits if r.summary.shape[-1] in widths]
    first = min((r.site.rank for r in logits), default=0)
    yield from ((_key(r), r) for r in logits if r.site.rank == first)


def _may_be(record: Record) -> bool:
    """Tell whether a record can be logits: floats, more than one."""
    shape = record.summary.shape
    return is_floating(record.summary.dtype) and bool(shape) and shape[-1] > 1


def _key(record: Record) -> Key:
    return record.site.generation, record.site.step


def _logitsdump(outputs: Iterable[Record]) -> Iterator[tuple[Key, Record]]:
    """Yield the tensors of msit's ``logitsdump``: logits_{task}_{key}_{token}.pth."""
    tasks: dict[str, int] = {}
    for record in outputs:
        parts = _LOGITSDUMP.fullmatch(record.site.path)
        if parts:
            task = tasks.setdefault(f"{parts['task']} {parts['key']}", len(tasks))
            yield (task, int(parts["token"])), record


def _at(run: Run, at: str) -> Iterator[tuple[Key, Record]]:
    parts = _AT.fullmatch(at)
    path, slot = (at, None) if parts is None else (parts["path"], parts["slot"])
    found = [
        record
        for record in run.records(path=path, role="output", phase="forward")
        if _may_be(record) and slot in (None, record.site.slot)
    ]
    if not found:
        near = nearest(path, (node.path for node in run.nodes))
        raise TensorLookupError(f"at {at!r}: {run.label} has no output of floats there{near}")
    for record in reversed(found) if slot is None else found:
        yield _key(record), record


def _token_ids(run: Run) -> dict[Key, torch.Tensor]:
    """Return the token ids that each step was given, int64[sequences, tokens]."""
    found: dict[Key, torch.Tensor] = {}
    for key, number in run.index.token_ids().items():
        site = run.record(number).site
        calls = run.records(
            path=site.path, role="input", phase="forward", slot=site.slot, rank=site.rank,
            generation=site.generation, step=site.step,
        )  # fmt: skip
        try:
            parts = [_two_dimensional(run.load(record)) for record in calls]
            found[key] = torch.cat(parts, -1).long()
        except (LLMDebugError, RuntimeError):
            continue  # not known; then it counts as not recorded
    return found


def _further(run: Run) -> dict[Key, dict[str, torch.Tensor]]:
    """Return masks and positions that the outermost module was given beside the tokens."""
    found: dict[Key, dict[str, torch.Tensor]] = defaultdict(dict)
    roots = {node.path for node in run.nodes if node.parent < 0}
    for path in roots:
        for record in run.records(path=path, role="input", phase="forward", call=0):
            name = record.argument or record.site.slot.rpartition(".")[2]
            if name in ("attention_mask", "position_ids") and len(record.summary.shape) == 2:
                try:
                    found[_key(record)][name] = run.load(record)
                except LLMDebugError:
                    continue
    return found


def _two_dimensional(ids: torch.Tensor) -> torch.Tensor:
    return ids.reshape(-1, ids.shape[-1]) if ids.dim() > 1 else ids.reshape(1, -1)


def _step(
    run: Run, record: Record, kind: str, ids: torch.Tensor | None, inputs: dict[str, torch.Tensor]
) -> Step:
    shape = _shape(record.summary.shape, ids, kind)
    why = problem(record)
    return Step(kind, shape, ids, lambda: run.load(record).reshape(shape), why, inputs)


def problem(record: Record) -> str:
    """Return why a record has not all of its values; "" if it has."""
    if record.kept is not None:
        return f"only {record.kept} of each tensor was kept"
    if record.payload is None:
        return record.lost or "the run was recorded with statistics only"
    return ""


def _shape(sizes: tuple[int, ...], ids: torch.Tensor | None, kind: str) -> tuple[int, int, int]:
    """Return sequences, rows and vocabulary of logits.

    Of two axes, the first one is the sequences of a generation, or those of the tokens' shape; else
    the tokens of one sequence.
    """
    *front, width = sizes
    if len(front) > 1:
        return math.prod(front[:-1]), front[-1], width
    count = front[0] if front else 1
    if ids is not None and ids.shape[0] * ids.shape[1] == count:
        return ids.shape[0], ids.shape[1], width
    if kind in _GENERATING or (ids is not None and ids.shape[0] == count):
        return count, 1, width
    return 1, count, width
