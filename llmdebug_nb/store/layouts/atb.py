"""ATB dumps: the operations of Ascend Transformer Boost, one ``.bin`` per tensor, of two writers.

    {out}/msit_dump_{time}/tensors/{device}_{pid}/          msit 8.2 ``llm dump --exec``
    {out}/atb_dump_data/data/{device}_{pid}/                msprobe 26.2 ATB probe
        {round}/{id}_{Op}[/{id}_{Child}]*/{before|after}/{in|out}tensor{n}.bin
        {round}/statistic.csv                               (msprobe)

A ``.bin`` is lines of ``key=value`` up to ``$End=1``, then row-major little-endian bytes:

    $Version=1.0, $Object.Count=1, $Object.Length=24, format=2, dtype=0, dims=2,3,
    $Object.data=0,24, $End=1

Without ``$Object.data`` the file only describes a tensor, names the file of an equal tensor
(``data=0_1_outtensor0.bin``), or has figures (``max``, ``min``, ``mean``, ``l2norm``). The writer
appends to files: several tensors in one file come from several calls.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.records import Site, Summary
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.files import (
    Draft,
    Folder,
    Place,
    contents,
    dtype_named,
    missing,
    moment,
    natural,
    number,
    one_dump,
    read_csv,
    reading,
    sizes,
)

NAME = "atb"

# ACL data types; the values of those that torch has no name for can't be read
ACL_DTYPES = {
    0: "float32",
    1: "float16",
    2: "int8",
    3: "int32",
    4: "uint8",
    6: "int16",
    7: "uint16",
    8: "uint32",
    9: "int64",
    10: "uint64",
    11: "float64",
    12: "bool",
    13: "string",
    16: "complex64",
    17: "complex128",
    27: "bfloat16",
    29: "int4",
    30: "uint1",
    33: "complex32",
    34: "hifloat8",
    35: "float8_e5m2",
    36: "float8_e4m3fn",
    37: "float8_e8m0fnu",
    38: "float6_e3m2",
    39: "float6_e2m3",
    40: "float4_e2m1",
    41: "float4_e1m2",
}
_FORMATS = {
    "0": "nchw",
    "1": "nhwc",
    "2": "nd",
    "3": "nc1hwc0",
    "4": "fractal_z",
    "16": "hwcn",
    "27": "ndhwc",
    "29": "fractal_nz",
    "30": "ncdhw",
    "32": "ndc1hwc0",
    "33": "fractal_z_3d",
}
_HEADER = 4096  # bytes; upstream's values have at most 50 characters each
_START = b"$Version="
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


# -- one .bin -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Object:
    """A tensor of a ``.bin``: ``length`` bytes from ``start``, or ``alias`` names another file."""

    offset: int
    summary: Summary
    start: int
    length: int
    end: int
    alias: str | None = None
    lost: str | None = None
    format: str = ""

    @property
    def kept(self) -> bool:
        return self.length >= 0 and self.lost is None


def parse(name: str, stream: BinaryIO, size: int, offset: int = 0) -> Object:
    """Read the header at ``offset`` of a ``.bin`` of ``size`` bytes and check it against the file.

    Raises:
        CorruptDumpError: not a header. If only its data can't be used, ``lost`` has the reason.
    """
    stream.seek(offset)
    head = stream.read(_HEADER)
    found = re.search(rb"(?:\A|\n)\$End=1(?:\n|\Z)", head)
    if found is None:
        raise CorruptDumpError(f"{name} has no $End=1 line within {_HEADER} bytes of byte {offset}")
    fields: dict[str, str] = {}
    for line in head[: found.start()].decode("ascii", "replace").splitlines():
        key, equals, value = line.partition("=")
        if not equals or "=" in value:
            raise CorruptDumpError(f"{name} has a header line without key=value: {line[:80]!r}")
        fields[key.lower()] = value
    dtype = _dtype(fields.get("dtype", fields.get("type", "")))
    try:
        shape = sizes(fields["dims"])
        total = int(fields.get("$object.length", "0"))
    except (KeyError, ValueError, CorruptDumpError) as error:
        raise CorruptDumpError(f"{name} has no valid dims or length ({error})") from None
    start = offset + found.end()
    low, high, mean, norm = (number(fields.get(key)) for key in ("min", "max", "mean", "l2norm"))
    made = Object(
        offset,
        Summary(dtype, shape, low, high, mean, norm),
        start,
        -1,
        start + max(total, 0),
        format=_FORMATS.get(fields.get("format", ""), fields.get("format", "").lower()),
    )
    alias = fields.get("data") or None
    if alias or "$object.data" not in fields:
        return replace(
            made, alias=alias, lost=None if total == 0 else f"{name} has {total} bytes of no object"
        )
    return _with_data(name, made, fields["$object.data"], total, size)


def _dtype(code: str) -> str:
    if not re.fullmatch("[0-9]{1,9}", code):
        return dtype_named(code)
    return ACL_DTYPES.get(int(code), f"acl_{int(code)}")


def _with_data(name: str, made: Object, span: str, total: int, size: int) -> Object:
    """Add the place of the bytes, or the reason why they can't be used."""
    found = re.fullmatch(r"([0-9]{1,18}),([0-9]{1,18})", span)
    dtype, shape = made.summary.dtype, list(made.summary.shape)
    if found is None:
        return replace(made, lost=f"{name} has no offset and length in $Object.data={span[:40]!r}")
    begin, length = int(found[1]), int(found[2])
    there = size - made.start
    lost = None
    if not 0 <= begin + length <= total:
        lost = f"{name} places {length} bytes at {begin} of an object of {total}"
    elif total > there:
        lost = f"{name} is cut short: {max(there, 0)} of {total} bytes are there"
    elif dtype not in DTYPES:
        lost = f"{name} has dtype {dtype}, which can't be read"
    elif made.summary.numel * DTYPES[dtype].itemsize != length:
        lost = f"{name} has {length} bytes, which make no {dtype} tensor of shape {shape}"
    return replace(made, start=made.start + begin, length=length, lost=lost)


def objects(folder: Folder, name: str) -> Iterator[Object]:
    """Yield the tensors of a ``.bin`` in the order they were appended. Raises CorruptDumpError."""
    file = folder.file(name)
    with reading(name), file.open("rb") as stream:
        size = file.stat().st_size
        made = parse(name, stream, size)
        yield made
        while made.end < size:
            stream.seek(made.end)
            if stream.read(len(_START)) == _START:
                made = parse(name, stream, size, made.end)
                yield made
            elif made.lost:
                return  # its header is wrong, so its end is unknown
            else:
                raise CorruptDumpError(
                    f"{name} has {size - made.end} bytes after its data, and no header there"
                )


def _open(folder: Folder, place: Place) -> torch.Tensor:
    file = folder.file(place.file)
    with reading(place.file), file.open("rb") as stream:
        made = parse(place.file, stream, file.stat().st_size, int(place.key or 0))
        if not made.kept:
            raise CorruptDumpError(made.lost or f"{place.file} has no data")
        stream.seek(made.start)
        return from_bytes(stream.read(made.length), made.summary.dtype, made.summary.shape)


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


def detect(path: Path) -> bool:
    """Tell whether ``path`` is an ATB dump, a process, a round or an operation of one."""
    if not path.is_dir():
        return False
    folder = Folder(path)
    return any(_named(folder, name, kind) for name in folder.scan() for kind in (_TENSOR, _TABLE))


def read(path: Path) -> Contents:
    """Read an ATB dump of msit 8.2 or msprobe 26.2.

    A step is a round: one execution of the outermost operations. ``meta["formats"]``: the tensor
    formats; the fractal ones have another order of bytes.

    Raises:
        CorruptDumpError: no file can be read. Otherwise such files become records with the reason.
        NotADumpError: it holds several dumps.
    """
    folder = Folder(path)
    names, left_out = folder.walk()
    files = [file for name in names if (file := _named(folder, name, _TENSOR))]
    tables = [file for name in names if (file := _named(folder, name, _TABLE))]
    one_dump(folder, (file.parts["base"] for file in (*files, *tables)))
    processes = sorted({file.parts["process"] for file in (*files, *tables)}, key=natural)
    ranks = {process: rank for rank, process in enumerate(processes)}
    by_key = {file.key: file for file in sorted(files, key=lambda file: file.usual)}
    formats: set[str] = set()
    drafts: list[Draft] = []
    for file in files:
        drafts += _drafts(folder, file, ranks[file.parts["process"]], by_key, formats)
    kept = {draft.site for draft in drafts}
    for table in tables:
        rows = _table(folder, table, ranks[table.parts["process"]])
        drafts += (row for row in rows if row.site not in kept)
    drafts.sort(key=_moment)
    types = {d.site.path: d.op for d in drafts if d.op}
    unread = [missing(name, why) for name, why in left_out.items()]
    meta = {"formats": sorted(formats), "op_params": _parameters(folder, names)}
    read = contents(
        folder, [*unread, *drafts], lambda place: _open(folder, place), types=types, meta=meta
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
    return site.rank, site.step, place, site.role, natural(site.slot), site.call


def _drafts(
    folder: Folder,
    file: _File,
    rank: int,
    by_key: Mapping[tuple[str, str, str, str], _File],
    formats: set[str],
) -> Iterator[Draft]:
    """Yield the tensors of one ``.bin``; add their formats to ``formats``."""
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
            formats.add(made.format)
            yield Draft(
                replace(site, call=call), op, place, None if place else made.summary, lost, device
            )
            call += 1
    except CorruptDumpError as error:
        yield Draft(replace(site, call=call), op, lost=str(error), device=device)


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
