"""ATB dumps: the operations of Ascend Transformer Boost, one ``.bin`` per tensor, of two writers.

    {out}/msit_dump_{time}/tensors/{device}_{pid}/          msit 8.2 ``llm dump --exec``
    {out}/atb_dump_data/data/{device}_{pid}/                msprobe 26.2 ATB probe
        {round}/{id}_{Op}[/{id}_{Child}]*/{before|after}/{in|out}tensor{n}.bin
        {round}/statistic.csv                               (msprobe)

A single ``.bin`` opens, too. What is in one: `atb_bin`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.records import Site, Summary
from llmdebug_nb.store.layouts.atb_bin import Object, is_bin, objects, tensor_at
from llmdebug_nb.store.layouts.atb_rounds import as_tokens
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.drafts import (
    Draft,
    Place,
    beside,
    contents,
    missing,
    moment,
    one_dump,
)
from llmdebug_nb.store.layouts.files import Folder, dtype_named, natural, number, read_csv, sizes

NAME = "atb"

_ABOVE = 12  # folders of a dump above one file: operations nest eight deep at most
_ALIAS_DEPTH = 16  # an alias may name another alias

_ROUND = r"(?P<base>(?:[^/]+/)*?)(?:(?P<process>[0-9]+_[0-9]+)/)?(?:(?P<round>[0-9]{1,9})/)?"
_OPS = r"(?P<ops>(?:[0-9]+_(?![0-9]+/)[^/]+/)+)(?P<when>before|after)/"
_TENSOR = re.compile(
    _ROUND + _OPS + r"(?P<io>in|out)tensor(?P<index>[0-9]{1,9})\.bin", re.IGNORECASE
)
_PARAMETERS = re.compile(_ROUND + r"(?P<ops>(?:[0-9]+_(?![0-9]+/)[^/]+/)+)op_param\.json")
_LONGEST = 1 << 16  # characters of an op_param.json; upstream's have hundreds
_TABLE = re.compile(_ROUND + r"statistic\.csv")
_ALIAS = re.compile(
    r"(?P<ids>[0-9]+(?:_[0-9]+)*)_(?P<tensor>(?:in|out)tensor[0-9]+)\.bin", re.IGNORECASE
)
_COLUMNS = (
    "Op Name",
    "Op Id",
    "Input/Output",
    "Index",
    "Dtype",
    "Shape",
    "Max",
    "Min",
    "Mean",
    "Norm",
)


# -- the folder ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the dump and the parts of its name."""

    name: str
    parts: dict[str, str]

    @property
    def ops(self) -> list[str]:
        return self.parts.get("ops", "").strip("/").split("/")

    @property
    def group(self) -> tuple[str, str]:
        return self.parts["process"], self.parts["round"]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key by which an alias in the same round names this file."""
        tensor = f"{self.parts['io']}tensor{self.parts['index']}".lower()
        return *self.group, "_".join(op.partition("_")[0] for op in self.ops), tensor

    @property
    def leaving(self) -> bool:
        return self.parts["when"].lower() == "after"

    @property
    def usual(self) -> bool:
        """Tell whether it is an input before or an output after the operation."""
        return (self.parts["io"].lower() == "out") == self.leaving

    def site(self, rank: int) -> Site:
        """Return its site; an input seen after the operation has a slot of its own."""
        role, index = f"{self.parts['io'].lower()}put", self.parts["index"]
        slot = index if self.usual else f"{self.parts['when'].lower()}.{index}"
        return Site(
            ".".join(self.ops), int(self.parts["round"] or 0), role=role, slot=slot, rank=rank
        )


def _named(folder: Folder, name: str, kind: re.Pattern[str]) -> _File | None:
    match = kind.fullmatch(folder.context + name)
    if match is None:
        return None
    return _File(name, {key: value or "" for key, value in match.groupdict().items()})


def _unnamed(name: str) -> _File:
    """Return a file that was taken out of its dump, as an output of an operation of its name."""
    parts = {"ops": name.rpartition(".")[0], "io": "out", "when": "after", "index": "0"}
    return _File(name, {"base": "", "process": "", "round": "", **parts})


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is an ATB dump, a process, a round, an operation or a file of one."""
    if not path.is_dir():
        return path.suffix.lower() == ".bin" and path.is_file() and is_bin(path)
    folder = Folder(path)
    return any(_named(folder, name, kind) for name in names for kind in (_TENSOR, _TABLE))


def read(path: Path) -> Contents:
    """Read an ATB dump of msit 8.2 or msprobe 26.2, or one file of it.

    A step is a token where the rounds tell them (`atb_rounds`), else a round: one execution of the
    outermost operations. ``meta["formats"]``: the tensor formats; the fractal ones have another
    order of bytes.

    Raises:
        CorruptDumpError: no file can be read. Otherwise such files become records with the reason.
        NotADumpError: it holds several dumps.
    """
    alone = path.is_file()
    folder = Folder(path.resolve().parent, _ABOVE) if alone else Folder(path)
    names, left_out = ([path.resolve().name], {}) if alone else folder.walk()
    files = [file for name in names if (file := _named(folder, name, _TENSOR))]
    if alone and not files:
        files = [_unnamed(names[0])]
    tables = [file for name in names if (file := _named(folder, name, _TABLE))]
    one_dump(folder, (file.parts["base"] for file in (*files, *tables)))
    processes = sorted({file.parts["process"] for file in (*files, *tables)}, key=natural)
    ranks = {process: rank for rank, process in enumerate(processes)}
    by_key = {file.key: file for file in sorted(files, key=lambda file: file.usual)}
    formats: set[str] = set()
    shapes: dict[Site, tuple[int, ...]] = {}
    drafts: list[Draft] = []
    for file in files:
        for draft, made in _drafts(folder, file, ranks[file.parts["process"]], by_key):
            drafts.append(draft)
            if made is not None:
                formats.add(made.format)
                shapes[draft.site] = made.summary.shape
    kept = {draft.site for draft in drafts}
    for table in tables:
        rows = _table(folder, table, ranks[table.parts["process"]])
        drafts += (row for row in rows if row.site not in kept)
    drafts, tokens = as_tokens(drafts, shapes)
    drafts.sort(key=_moment)
    types = {d.site.path: d.op for d in drafts if d.op}
    left_out |= beside(NAME, names, (file.name for file in files))
    unread = [missing(name, why) for name, why in left_out.items()]
    meta = {"formats": sorted(formats), "op_params": _parameters(folder, names)}
    read = contents(
        folder,
        [*unread, *drafts],
        lambda place: tensor_at(folder, place.file, int(place.key or 0)),
        types=types,
        tokens=tokens,
        meta=meta,
    )
    return replace(
        read,
        ids={record.site.path: id_of(record.site.path) for record in read.records if record.op},
    )


def _parameters(folder: Folder, names: list[str]) -> dict[str, str]:
    """Return the text of each operation's ``op_param.json``, by path; of the first round."""
    found: dict[str, str] = {}
    for name in names:
        file = _named(folder, name, _PARAMETERS)
        path = "" if file is None else ".".join(file.ops)
        if file is None or path in found:
            continue
        with contextlib.suppress(OSError, CorruptDumpError), folder.file(name).open("rb") as stream:
            found[path] = stream.read(_LONGEST).decode("utf-8", "replace")
    return found


def id_of(path: str) -> str:
    """Return the execution id in a path of operations: ``3_1`` of ``3_Layer.1_Linear``."""
    return "_".join(re.findall(r"(?:\A|\.)([0-9]{1,9})_", path))


def _moment(draft: Draft) -> tuple[object, ...]:
    site = draft.site
    leaving = (site.role == "output") != site.slot.startswith(("before.", "after."))
    place = moment(site.path, leaving)
    return site.rank, site.generation, site.step, place, site.role, natural(site.slot), site.call


def _drafts(
    folder: Folder,
    file: _File,
    rank: int,
    by_key: Mapping[tuple[str, str, str, str], _File],
) -> Iterator[tuple[Draft, Object | None]]:
    """Yield the tensors of one ``.bin``, each with what its header says."""
    site, op = file.site(rank), file.ops[-1].partition("_")[2]
    device = f"npu:{file.parts['process'].partition('_')[0]}"
    call = 0
    try:
        for made in objects(folder, file.name):
            place, lost = (Place(file.name, made.offset) if made.kept else None), made.lost
            try:
                place = _follow(folder, file, made, by_key) if made.alias and not lost else place
            except CorruptDumpError as error:
                lost = str(error)
            summary = None if place else made.summary
            at = replace(site, call=call) if call else site
            yield Draft(at, op, place, summary, lost, device), made
            call += 1
    except CorruptDumpError as error:
        yield Draft(replace(site, call=call), op, lost=str(error), device=device), None


def _follow(
    folder: Folder, file: _File, made: Object, by_key: Mapping[tuple[str, str, str, str], _File]
) -> Place:
    """Return the place of an alias's tensor: an operation of the same round, never a path."""
    at, wanted = file, made
    for _ in range(_ALIAS_DEPTH):
        named = _ALIAS.fullmatch(at_name := wanted.alias or "")
        target = by_key.get((*file.group, named["ids"], named["tensor"].lower())) if named else None
        if target is None:
            raise CorruptDumpError(
                f"{at.name} stands for {at_name[:80]!r}, which is not a tensor of its round"
            )
        at, wanted = target, _first(folder, target.name)
        if wanted.kept:
            if (wanted.summary.dtype, wanted.summary.shape) != (
                made.summary.dtype,
                made.summary.shape,
            ):
                raise CorruptDumpError(
                    f"{file.name} stands for {at.name}, which has another dtype or shape"
                )
            return Place(at.name, wanted.offset)
        if not wanted.alias:
            break
    raise CorruptDumpError(f"{file.name} stands for {at.name}, which has no data")


@functools.lru_cache(1024)  # the parts of a fused tensor name the same file
def _first(folder: Folder, name: str) -> Object:
    return next(objects(folder, name))


def _table(folder: Folder, table: _File, rank: int) -> Iterator[Draft]:
    """Yield the rows of a statistics table of the msprobe probe (six decimals)."""
    step, device = int(table.parts["round"] or 0), f"npu:{table.parts['process'].partition('_')[0]}"
    try:
        rows = read_csv(folder, table.name, _COLUMNS)
    except CorruptDumpError as error:
        yield missing(table.name, error, step, rank)
        return
    for row in rows:
        ids, names = row["Op Id"].split("_"), row["Op Name"].split("/")
        path = ".".join(f"{i}_{name}" for i, name in zip(ids, names, strict=False))
        site = Site(path, step, role=row["Input/Output"].lower(), slot=row["Index"], rank=rank)
        try:
            if site.role not in ("input", "output") or len(ids) != len(names) or not row["Norm"]:
                raise CorruptDumpError("a row is cut short")
            low, high, mean, norm = (
                number(row[column]) for column in ("Min", "Max", "Mean", "Norm")
            )
            summary = Summary(dtype_named(row["Dtype"]), sizes(row["Shape"]), low, high, mean, norm)
            yield Draft(site, names[-1], summary=summary, device=device)
        except CorruptDumpError as error:
            yield Draft(site, names[-1], lost=f"{table.name}: {error}", device=device)
