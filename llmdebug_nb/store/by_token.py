"""A run by its tokens: one step for each sequence, whose tensors have a row for each position.

An engine computes tokens of several requests in a step, and a prompt in several steps; `generate`
computes a prompt, then token by token. So two such runs have no steps in common. Here the rows of
all steps are put together, as if the model had been given each whole text at once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, Row, Table
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, RootCall, TokenRow
from llmdebug_nb.store import catalog, token_rows
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.copying import Copy, Rows
from llmdebug_nb.store.process import OF_PROCESS, Process, processes
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.sequences import Place, TokenSequence
from llmdebug_nb.store.writer import Writer, create_run

_Step = tuple[int, int]
_Key = tuple[object, ...]  # path, call, phase, role and slot
_KEY = ("path", "call", "phase", "role", "slot")
_FIGURES = ("min", "max", "mean", "l2norm", "nan", "inf", "zero", "fingerprint")
_EMPTY = ("timings", "launches", "token_rows")  # of steps as they ran


class Sizes(NamedTuple):
    """How many rows the tensors of a step have. ``items``: of the batch; None of an engine's."""

    tokens: int
    items: int | None
    requests: int


def is_engine(run: Run) -> bool:
    """Tell whether an engine was recorded."""
    return bool(run.index.query(tuple[int], "SELECT 1 FROM all_token_rows LIMIT 1"))


# -- which tokens a run has -----------------------------------------------------------------------


def sequences(run: Run) -> tuple[list[TokenSequence], dict[_Step, Sizes]]:
    """Return the sequences of a run and the sizes of its steps."""
    return _of_engine(run) if is_engine(run) else _of_batches(run)


def _of_engine(run: Run) -> tuple[list[TokenSequence], dict[_Step, Sizes]]:
    steps = {call.index: (call.generation, call.step) for call in run.root_calls()}
    rows = token_rows.of(run.index)
    requests: dict[_Step, dict[str, int]] = defaultdict(dict)  # each with its last row
    for row in rows:
        if row.row is not None:
            requests[steps[row.root_call]][row.request] = row.row
    tokens: dict[tuple[str, int], dict[int, int | None]] = defaultdict(dict)
    places: dict[tuple[str, int], dict[int, Place]] = defaultdict(dict)
    given: dict[tuple[str, int], int | None] = {}
    for row in rows:
        key, step = (row.request, row.attempt), steps[row.root_call]
        tokens[key][row.position] = row.token
        given[key] = _given(row, given.get(key))
        if row.row is not None:
            lasts = list(requests[step].values())
            last = lasts.index(row.row) if row.row in lasts else None
            places[key][row.position] = Place(step, None, row.row, last)
    found = [TokenSequence(_label(*key), tokens[key], places[key], given[key]) for key in places]
    sizes = {
        step: Sizes(max(lasts.values()) + 1, None, len(lasts)) for step, lasts in requests.items()
    }
    return found, sizes


def _given(row: TokenRow, known: int | None) -> int | None:
    """Return how many tokens of a prompt are seen by now; None if that is not known."""
    return known if row.sampled != 0 else max(known or 0, row.position + 1)


def _label(request: str, attempt: int) -> str:
    return f"{request} attempt {attempt}" if attempt else request


def _of_batches(run: Run) -> tuple[list[TokenSequence], dict[_Step, Sizes]]:
    """Return the items of batches: of each `generate`, and of each call outside of it."""
    found: dict[tuple[int, int, int], TokenSequence] = {}
    sizes: dict[_Step, Sizes] = {}
    begun: dict[int, int] = {}  # the step in which a generation's last text began
    for call in run.root_calls():
        step = call.generation, call.step
        ids = _input(run, step, "input_ids")
        if ids is None or ids.dim() != 2 or step in sizes:
            continue
        batch, tokens = ids.shape
        sizes[step] = Sizes(tokens, batch, batch)
        mask = _input(run, step, "attention_mask")
        if call.kind == "forward":
            begun[call.generation] = call.step
        text = begun.get(call.generation, -1)
        for item in range(batch):
            whole = mask is not None and mask.dim() == 2 and mask.shape[1] >= tokens
            real = mask[item].bool() if whole and mask is not None else None
            key = (call.generation, text, item)
            known = found.setdefault(key, TokenSequence(f"text {len(found)}", {}, {}))
            begins = len(known.tokens)
            again = begins if call.kind == "full" else 0  # without a cache, all is fed once more
            for row in range(again, tokens):
                if real is None or real[real.numel() - tokens + row]:
                    known.tokens[begins] = int(ids[item, row])  # type: ignore[index]
                    known.places[begins] = Place(step, item, row)  # type: ignore[index]
                    begins += 1
    return list(found.values()), sizes


def _input(run: Run, step: _Step, name: str) -> torch.Tensor | None:
    """Return an input of a model that is called with it first; None if there is none."""
    for record in run.records(generation=step[0], step=step[1], role="input", phase="forward"):
        site = record.site
        if name in (record.argument, site.slot.rpartition(".")[2]) and record.payload is not None:
            return run.load(record)
    return None


# -- putting rows together ------------------------------------------------------------------------


class Texts(NamedTuple):
    """What of a run is to be put together: each text's places, by position, and where they are."""

    places: Sequence[Mapping[int, Place]]
    positions: Sequence[tuple[int, ...]]
    sizes: Mapping[_Step, Sizes]


def rows_of(shape: tuple[int, ...], sizes: Sizes, place: Place) -> tuple[int, int, int] | None:
    """Return item, axis and index of a token's row in a tensor; None if it has no such row.

    An item of -1 is all of the tensor. Tensors with a row for each request have one for its last
    token: ``[requests, ...]`` of an engine, ``[batch, 1, ...]`` of `generate`.
    """
    tokens, items, requests = sizes
    if items is None:
        if shape[:1] and shape[0] >= tokens:
            return -1, 0, place.row
        is_last = bool(shape) and shape[0] == requests and place.last is not None
        return (-1, 0, place.last or 0) if is_last else None
    item = place.item or 0
    for axis in (1, 2):
        if len(shape) > axis and shape[0] == items and shape[axis] == tokens:
            return item, axis, place.row
    if len(shape) == 3 and shape[:2] == (items, 1) and place.row == tokens - 1:
        return item, 1, 0
    return (-1, 0, place.row) if items == 1 and shape[:1] == (tokens,) else None


class _Part(NamedTuple):
    """A record of one step."""

    row: Row
    shape: tuple[int, ...]


def _is_weight(part: _Part) -> bool:
    return bool(part.row[AT["role"]] == "weight")


class Joined(Copy):
    """Copies what one process recorded, as one step for each text.

    ``left_out``: how many tensors, by the reason. ``written``: how many are there.
    """

    def __init__(
        self, process: Process, writer: Writer, run: Run, texts: Texts, logits: Collection[_Key]
    ) -> None:
        """``logits``: the tensors that are known to be logits."""
        super().__init__(process, writer)
        self._logits, self.label, self.written = logits, run.label, 0
        self._closed = False
        self._narrow: list[set[_Key]] = []  # by text: tensors with the rows of logits only
        self._texts, self._shapes = texts, _Shapes()
        self._steps = {call.index: (call.generation, call.step) for call in run.root_calls()}
        self._roots = {call.index: call.root for call in run.root_calls()}
        self.left_out: Counter[str] = Counter()
        by_step: dict[_Step, dict[_Key, _Part]] = defaultdict(dict)
        for rows in self._pages():
            for row in rows:
                key: _Key = tuple(row[AT[name]] for name in _KEY)
                step = self._steps.get(row[AT["root_call"]])
                if step is not None:
                    by_step[step][key] = _Part(row, self._shapes.of(row))
        self._by_step = by_step

    def last_rows(self, text: int) -> set[int]:
        """Return the positions of a text of which logits were computed.

        Engines and `generate` compute those of some positions only. All tensors that lack a
        position are then taken to have these.
        """
        everywhere = set(self._texts.positions[text])
        rows: dict[_Key, set[int]] = defaultdict(set)
        for position in everywhere:
            place = self._texts.places[text][position]
            for key, part in self._by_step[place.step].items():
                if rows_of(part.shape, self._texts.sizes[place.step], place) is not None:
                    rows[key].add(position)
        narrow = {key for key in rows if key in self._logits or rows[key] != everywhere}
        self._narrow.append(narrow)
        return everywhere.intersection(*(rows[key] for key in narrow))

    def write(self, last_rows: Sequence[set[int]]) -> None:
        """Write all texts. ``last_rows``: by text, the positions of its logits."""
        try:
            bases = [self._base(text) for text in range(len(self._texts.places))]
            self._tables_of(bases)
            for text, base in enumerate(bases):
                rows: list[Row] = []
                ids: dict[int, int] = {}
                for key, first in self._parts(text, base):
                    row = self._joined(text, key, first, last_rows[text])
                    if row is not None:
                        ids[first.row[0]] = self.written
                        row[0], row[AT["root_call"]] = self.written, text
                        row[AT["producer"]] = ids.get(row[AT["producer"]])
                        rows.append(row)
                        self.written += 1
                self.writer.commit(Batch(records=rows))
        finally:
            self.abandon()

    def _parts(self, text: int, base: _Step) -> Iterator[tuple[_Key, _Part]]:
        """Yield what a text begins with. Weights belong to no text: the first one has them."""
        if text == 0:
            weights: dict[_Key, _Part] = {}
            for parts in self._by_step.values():
                weights |= {k: p for k, p in parts.items() if _is_weight(p) and k not in weights}
            yield from weights.items()
        yield from (part for part in self._by_step[base].items() if not _is_weight(part[1]))

    def abandon(self) -> None:
        """Close the files; nothing happens if they are closed."""
        if not self._closed:
            self._closed = True
            self.writer.close({k: v for k, v in self.process.meta.items() if k not in OF_PROCESS})

    def _base(self, text: int) -> _Step:
        """Return the first step of a text: its calls stand for those of all steps."""
        return self._texts.places[text][self._texts.positions[text][0]].step

    def _tables_of(self, bases: Sequence[_Step]) -> None:
        texts: dict[_Step, list[int]] = defaultdict(list)
        for text, base in enumerate(bases):
            texts[base].append(text)
        roots = {step: self._roots[index] for index, step in self._steps.items()}
        self._new = {index: texts[step] for index, step in self._steps.items()}
        calls = (
            RootCall(
                text, text, 0, "forward", len(self._texts.positions[text]), None, 1, roots[base]
            )
            for text, base in enumerate(bases)
        )
        self._tables(calls)

    def rows(self, table: Table, rows: Rows) -> Rows:
        if table.name in _EMPTY:
            return []
        at = table.at.get("root_call")
        if at is None:
            return rows
        return [
            [*row[:at], text, *row[at + 1 :]] for row in rows for text in self._new.get(row[at], ())
        ]

    def _joined(self, text: int, key: _Key, first: _Part, last_rows: set[int]) -> Row | None:
        """Return the row of a tensor with the rows of all positions; its values are written."""
        row = list(first.row)
        whole = _is_weight(first)
        values = self._values(first) if whole else self._gathered(text, key, last_rows)
        if values is None:
            return None
        figures = summarize(values)
        row[AT["shape"]] = json.dumps(list(values.shape))
        for name in _FIGURES:
            row[AT[name]] = getattr(figures, name)
        self.writer.payload(row, to_bytes(values))
        return row

    def _values(self, part: _Part) -> torch.Tensor | None:
        row = part.row
        if row[AT["offset"]] is None or row[AT["kept"]] is not None:
            self.left_out["without values"] += 1
            return None
        return self.process.read(
            row[AT["offset"]], row[AT["length"]], row[AT["dtype"]], row[AT["shape"]]
        )

    def _gathered(self, text: int, key: _Key, last_rows: set[int]) -> torch.Tensor | None:
        """Return ``[positions, ...]``, or ``[1, positions, ...]`` of a batch; None if some lack."""
        places = self._texts.places[text]
        pieces: list[torch.Tensor] = []
        read: dict[_Step, torch.Tensor] = {}
        axis_of_all = 0
        narrow = key in self._narrow[text]
        for position in self._texts.positions[text]:
            if narrow and position not in last_rows:
                continue
            place = places[position]
            part = self._by_step[place.step].get(key)
            if part is None:
                self.left_out["not in every step"] += 1
                return None
            found = rows_of(part.shape, self._texts.sizes[place.step], place)
            if found is None:
                self.left_out["without a row for each token"] += 1
                return None
            if place.step not in read:
                values = self._values(part)
                if values is None:
                    return None
                read[place.step] = values
            item, axis, index = found
            whole = read[place.step] if item < 0 else read[place.step][item : item + 1]
            pieces.append(whole.narrow(axis, index, 1))
            axis_of_all = axis
        if (
            not pieces
            or len({(p.dim(), *p.shape[:axis_of_all], *p.shape[axis_of_all + 1 :]) for p in pieces})
            > 1
        ):
            self.left_out["of another shape in each step"] += 1
            return None
        return torch.cat(pieces, axis_of_all)


class _Shapes:
    """Reads shapes, each text once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, row: Row) -> tuple[int, ...]:
        text = row[AT["shape"]]
        if text not in self._known:
            self._known[text] = tuple(shape_of(text))
        return self._known[text]


def begin(
    run: Run, parent: Path, texts: Texts, is_logits: Callable[[Record], bool]
) -> tuple[Path, Joined]:
    """Begin a run by tokens in ``parent``; return its folder and what writes it.

    Raises:
        CompareError: the run is no folder, or several processes of a rank recorded it.
    """
    if run.path is None:
        raise CompareError(f"{run.label} is no folder: its tokens can't be put together")
    first, *others = processes(run.path)
    if any(other.rank == first.rank for other in others):
        raise CompareError(
            f"{run.label} has {1 + len(others)} processes, several of rank {first.rank}; the tokens"
            " of one process of each rank can be put together: record the engine's own alone"
        )
    marker = catalog.read_marker(run.path)
    details = {key: marker[key] for key in ("options", "environment", "created") if key in marker}
    folder = create_run(parent, run.path.name, details | {"name": run.name})
    sites = (record.site for record in run.records() if is_logits(record))
    logits = {(at.path, at.call, at.phase, at.role, at.slot) for at in sites}
    return folder, Joined(first, Writer(folder, first.rank), run, texts, logits)
