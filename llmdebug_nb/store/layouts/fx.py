"""FX dumps of torchair: every node of the graph, one ``.npy`` per tensor, of two generations.

    worldsize{N}_global_rank{R}/{model}/{token}/{NODE}-{aten.OP.OVERLOAD}.{INPUT|OUTPUT}.{i}.{time}.npy
    data_dump/{token + 1}/gm_{time}_dump/                           PTA up to 7.1

A file reduced to its figures ends in ``_min_max.npy`` and holds minimum and maximum. A node becomes
an operator in a module of the node's name (``mm_1/Aten.mm``); what ran several times in a token
becomes calls, by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.raw import array_of
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import Site, Summary
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.drafts import Draft, Place, contents, holds, listing
from llmdebug_nb.store.layouts.files import Folder, read_npy
from llmdebug_nb.store.layouts.graph_calls import (
    DIRECTIONS,
    GraphCall,
    calls_of,
    figures,
    place_of,
    placed,
    whole,
)  # fmt: skip
from llmdebug_nb.store.layouts.writing import Dump, Written, loaded

NAME = "fx"
_FILE = re.compile(
    r"(?P<node>.+?)-(?P<target>[^/]+?)\.(?P<io>INPUT|OUTPUT)\.(?P<index>[0-9]{1,9})"
    r"(?:\.(?P<time>[0-9]{1,20}))?(?P<reduced>(?:\.npy)?_min_max)?\.npy"
)
_OLD = re.compile(r"gm_[^/]*_dump")


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the dump, and what its name and folders say."""

    name: str
    node: str
    target: str
    role: str
    index: int
    time: int
    reduced: bool
    home: tuple[str, ...]

    @property
    def step(self) -> int:
        if _OLD.fullmatch(self.home[-1] if self.home else ""):
            return max(place_of(self.home[:-1]).token - 1, 0)
        return place_of(self.home).token

    @property
    def model(self) -> str:
        """The graph; the older generation has one for each run of it."""
        at = place_of(self.home, depth=2)
        return "" if _OLD.fullmatch(self.home[-1] if self.home else "") else at.model

    @property
    def op(self) -> str:
        space, _, rest = self.target.partition(".")
        return f"{space.capitalize()}.{rest.removesuffix('.default')}" if rest else space


def _named(folder: Folder, name: str) -> _File | None:
    *home, last = (folder.context + name).split("/")
    found = _FILE.fullmatch(last)
    if found is None:
        return None
    role = "input" if found["io"] == "INPUT" else "output"
    return _File(
        name, found["node"], found["target"], role, int(found["index"]), int(found["time"] or 0),
        found["reduced"] is not None, tuple(home),
    )  # fmt: skip


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is an FX dump, or a part of one."""
    return holds(path, names, _named)


def read(path: Path) -> Contents:
    """Read an FX dump. Steps are tokens, also in the older generation, which counts from 1.

    Raises:
        CorruptDumpError: no file can be read. Otherwise such files become records with the reason.
        NotADumpError: it holds several dumps.
    """
    folder = Folder(path)
    found = listing(NAME, folder, _named, lambda file: place_of(file.home).base)
    drafts = placed(_drafts(folder, found.files))
    types = {draft.site.path.partition("/")[0]: draft.op for draft in drafts}
    return contents(
        folder, [*found.unread, *drafts], lambda place: read_npy(folder, place.file),
        types=types, tokens=True,
    )  # fmt: skip


def _drafts(folder: Folder, files: Iterable[_File]) -> Iterator[tuple[int, Draft]]:
    """Yield the drafts with their times."""
    files = list(files)
    several = len({file.model for file in files}) > 1
    for file in files:
        path = f"{file.node}/{file.op}"
        path = f"{file.model}.{path}" if several and file.model else path
        rank = place_of(file.home, depth=2).rank or 0
        site = Site(path, file.step, role=file.role, slot=str(file.index), rank=rank)
        draft = Draft(site, file.op, Place(file.name))
        if file.reduced:
            try:
                figures = figures_of(file.name, read_npy(folder, file.name).double().tolist())
                draft = replace(draft, place=None, summary=figures)
            except CorruptDumpError as error:
                draft = replace(draft, place=None, lost=str(error))
        yield file.time, draft


def figures_of(name: str, pair: object) -> Summary:
    """Return minimum and maximum as the summary of a tensor of which nothing else is known.

    Raises:
        CorruptDumpError: it is no pair of numbers.
    """
    if not isinstance(pair, list) or [type(one) for one in pair] not in ([float] * 2, [int] * 2):
        raise CorruptDumpError(f"{name} does not hold minimum and maximum: {str(pair)[:80]}")
    return Summary("unknown", (), float(pair[0]), float(pair[1]))


# -- writing --------------------------------------------------------------------------------------


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write the operators of a run of compiled code; dtypes that ``.npy`` lacks as float32.

    Statistics without values become reduced files.
    """
    _write(dump, folder, written, old=False)


def write_old(dump: Dump, folder: Path, written: Written) -> None:
    """Write them in the folders of PTA up to 7.1."""
    _write(dump, folder, written, old=True)


def _write(dump: Dump, folder: Path, written: Written, old: bool) -> None:
    calls = list(calls_of(dump, written))
    ranks = 1 + max((call.rank for call in calls), default=0)
    for call in calls:
        if old:
            home = folder / "data_dump" / str(call.step + 1) / f"gm_{int(dump.begun)}_dump"
        else:
            rank = f"worldsize{ranks}_global_rank{call.rank}"
            home = folder / rank / file_part(dump.model) / str(call.step)
        home.mkdir(parents=True, exist_ok=True)
        _write_call(call, dump, home, written)


def _write_call(call: GraphCall, dump: Dump, home: Path, written: Written) -> None:
    for (role, number), record in call.numbered():
        stem = f"{call.fx}.{DIRECTIONS[role]}.{number}.{call.time}"
        if not whole(record):
            if (pair := figures(record, written)) is not None:
                np.save(home / f"{stem}_min_max.npy", np.array(pair), allow_pickle=False)
            continue
        values = loaded(record, dump.load, written)
        if values is None:
            continue
        if not hasattr(np, str(values.dtype).partition(".")[2].replace("bool", "bool_")):
            values = values.float()  # .npy has no bfloat16 and float8
        try:
            np.save(home / f"{stem}.npy", array_of(values), allow_pickle=False)
        except TensorLookupError as error:
            written.left_out[str(error)] += 1
            continue
        written.tensors += 1
