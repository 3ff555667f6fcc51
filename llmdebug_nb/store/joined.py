"""A run of several ranks as one of a single rank: a view, whose tensors are put together on demand.

Its index is in memory and names, for each tensor, the parts and how they go together; nothing is
written. Rows of collectives stay with their ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.joining import Recipe, joined
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.placement import Mirrored, Only, Shard
from llmdebug_nb.core.records import Record, RootCall, Summary
from llmdebug_nb.core.updates import UPDATED
from llmdebug_nb.store import connection
from llmdebug_nb.store.rows import row_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.source import About, Source
from llmdebug_nb.store.spread import Shape, Spread
from llmdebug_nb.store.views import VIEWS, create_tables, insert_rows, quoted

_OF_STEPS = "all_timings", "all_launches", "all_token_rows"  # of steps as they ran
# what tells rows of a view apart, with rank and step of the whole
_APART = {
    "scalar_rows": ("generation", "step", "path", "call", "role", "slot", "phase"),
    "operator_rows": ("generation", "step", "path", "call", "phase"),
    "call_rows": ("generation", "step", "path", "call"),
}


class Whole(NamedTuple):
    """A tensor of the joined run."""

    spread: Spread
    recipe: Recipe


class JoinedRun(Run):
    """A run put together of several ranks.

    ``wholes``: by the id of a record, what it is made of. ``ranks``: the run of these ranks.
    """

    wholes: Mapping[int, Whole]
    ranks: Run

    def parts_of(self, record: Record) -> Whole | None:
        """Return what a tensor is made of; None of a record that is not of this run."""
        return self.wholes.get(record.id)


def join(run: Run, shape: Shape, wholes: Sequence[Whole]) -> JoinedRun:
    """Return the run in which each of some tensors is one. ``wholes``: in their order."""
    by_id = dict(enumerate(wholes))
    new = JoinedRun(run.name, run.path, lambda: _source(run, shape, by_id))
    new.wholes, new.ranks = by_id, run
    return new


def values_of(run: Run, whole: Whole) -> torch.Tensor:
    """Return a whole tensor. Raises CorruptDumpError: its parts do not go together."""
    return put_together(run.load, whole, run.label)


def put_together(load: Callable[[Record], torch.Tensor], whole: Whole, label: str) -> torch.Tensor:
    """Return a whole tensor. ``load``: reads a part; ``label``: of the run, for the message.

    Raises CorruptDumpError: its parts do not go together.
    """
    try:
        return joined(
            {place: load(part) for place, part in whole.spread.parts.items()}, whole.recipe
        )
    except (RuntimeError, KeyError, IndexError) as error:
        raise CorruptDumpError(
            f"{label}: the parts of {whole.spread.site} do not go together: {error}"
        ) from None


def _source(run: Run, shape: Shape, wholes: Mapping[int, Whole]) -> Source:
    db = connection.in_memory()
    create_tables(db)
    records = list(_records(run, wholes))
    calls: dict[tuple[int, int], RootCall] = {}
    for call in run.root_calls():
        step = shape.steps.get((call.generation, call.step))
        if step is not None:
            calls.setdefault(step, replace(call, generation=step[0], step=step[1]))
    insert_rows(db, "rows", (row_of(record, calls) for record in records))
    columns = tuple(VIEWS["all_calls"].columns)
    insert_rows(
        db,
        "all_calls",
        ([getattr(call, _FIELDS.get(c, c)) for c in columns] for call in calls.values()),
    )
    shapes = {
        (r.site.path, r.site.slot): list(r.summary.shape)
        for r in records
        if r.site.role == "weight"
    }
    insert_rows(db, "all_nodes", _nodes(run, shape, shapes))
    for name in VIEWS:
        if name not in ("rows", "all_calls", "all_nodes", *_OF_STEPS):
            insert_rows(db, name, _rows(run, shape, name))
    db.execute("CREATE INDEX by_id ON rows(id)")
    source = run.source
    return Source(
        db,
        lambda record: values_of(run, wholes[record.id]),
        About(source.layout, source.nbytes, source.complete, [{"rank": 0}], source.meta),
        outdated=source.outdated,
    )


_FIELDS = {"idx": "index"}


def _records(run: Run, wholes: Mapping[int, Whole]) -> Iterator[Record]:
    """Yield the records of whole tensors, numbered anew. One tensor is in memory at a time."""
    ids: dict[int, int] = {}
    for number, whole in wholes.items():
        parts = list(whole.spread.parts.values())
        first = parts[0]
        alone = whole.spread.parts.get(
            tuple(each.at for each in whole.recipe.held if isinstance(each, Only))
        )
        if (
            alone is not None
            and whole.recipe.divisor == 1
            and alone.summary.shape == whole.recipe.shape
        ):
            first, summary = alone, alone.summary
        elif all(part.payload is not None and part.kept is None for part in parts):
            summary = summarize(values_of(run, whole))
        else:
            summary = _without_values(whole)
            first = replace(first, payload=None, kept=None, kept_shape=None)
        producer = ids.get(first.producer) if first.producer is not None else None
        ids.update((part.id, number) for part in parts)
        yield replace(
            first, id=number, seq=number, site=whole.spread.site, summary=summary,
            producer=producer, placed=None,
        )  # fmt: skip


def _without_values(whole: Whole) -> Summary:
    """Return the statistics of a whole tensor as far as those of its parts tell them."""
    parts = [part.summary for part in whole.spread.parts.values()]
    shape, first = whole.recipe.shape, parts[0]
    unknown = Summary(first.dtype, shape)
    divided = all(isinstance(each, (Shard, Mirrored)) for each in whole.recipe.held)
    sizes = [part.numel for part in parts]
    if not divided or whole.recipe.divisor != 1 or sum(sizes) != unknown.numel:
        return unknown
    lows, highs, means, norms = (
        [figure for part in parts if (figure := getattr(part, name)) is not None]
        for name in ("min", "max", "mean", "l2norm")
    )
    if not len(lows) == len(highs) == len(means) == len(norms) == len(parts):
        return unknown
    mean = sum(size * own for size, own in zip(sizes, means, strict=True)) / max(sum(sizes), 1)
    nan, inf, zero = (
        sum(getattr(part, name) or 0 for part in parts) for name in ("nan", "inf", "zero")
    )
    return Summary(
        first.dtype, shape, min(lows), max(highs), mean, math.hypot(*norms), nan, inf, zero
    )


def _rows(run: Run, shape: Shape, name: str) -> Iterator[Sequence[object]]:
    """Yield the rows of a view, each call once, in the steps of the whole."""
    columns = tuple(VIEWS[name].columns)
    at = {column: place for place, column in enumerate(columns)}
    apart = [at[column] for column in _APART.get(name, columns)]
    seen: set[tuple[object, ...]] = set()
    for row in run.index.query(VIEWS[name].row(), f"SELECT {quoted(columns)} FROM {name}"):
        new = list(row)
        if "step" in at:
            step = shape.steps.get((row[at["generation"]], row[at["step"]]))
            if step is None:
                continue
            new[at["generation"]], new[at["step"]] = step
        if "rank" in at:
            moved = shape.moved[row[at["rank"]]]
            new[at["rank"]] = 0
            for column in ("path", "within", "forward_path"):
                if column in at and new[at[column]] is not None:
                    new[at[column]] = moved(new[at[column]])
        key = tuple(new[place] for place in apart)
        if "value" in at and new[at["role"]] == UPDATED:  # of ranks that differ, each counts
            key += (new[at["value"]],)
        if key not in seen:
            seen.add(key)
            yield new


def _nodes(
    run: Run, shape: Shape, shapes: Mapping[tuple[str, str], list[int]]
) -> Iterator[Sequence[object]]:
    """Yield the modules of all ranks, with the shapes of whole weights."""
    columns = tuple(VIEWS["all_nodes"].columns)
    at = {column: place for place, column in enumerate(columns)}
    sql = f"SELECT {quoted(columns)} FROM all_nodes ORDER BY idx"
    rows = [list(row) for row in run.index.query(VIEWS["all_nodes"].row(), sql)]
    places: dict[str, int] = {}
    for moved in (
        {path: path for path in (row[at["path"]] for row in rows)},
        *_moved(rows, at, shape),
    ):
        for row in rows:
            path = moved.get(row[at["path"]])
            if path is None or path in places:
                continue
            parent = row[at["parent"]]
            above = None if parent < 0 else rows[parent][at["path"]]
            new: list[Any] = list(row)
            new[at["idx"]] = places[path] = len(places)
            new[at["path"]], new[at["name"]] = path, path.rpartition(".")[2]
            home = None if above is None else moved.get(above, above)
            new[at["parent"]] = -1 if home is None else places[home]
            own = {name: size for (of, name), size in shapes.items() if of == path}
            if own:
                new[at["params"]] = json.dumps(json.loads(new[at["params"]]) | own)
            yield new


def _moved(
    rows: Sequence[Sequence[Any]], at: Mapping[str, int], shape: Shape
) -> Iterator[dict[str, str]]:
    """Yield the new paths of the modules that a rank numbers anew."""
    paths = [row[at["path"]] for row in rows]
    for rename in shape.moved.values():
        yield {path: new for path in paths if (new := rename(path)) != path}
