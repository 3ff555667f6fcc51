"""ATB's tensor files: one ``.bin`` of the probes of msit and msprobe, read and written.

A ``.bin`` is lines of ``key=value`` up to ``$End=1``, then row-major little-endian bytes:

    $Version=1.0, $Object.Count=1, $Object.Length=24, format=2, dtype=0, dims=2,3,
    $Object.data=0,24, $End=1

Without ``$Object.data`` the file only describes a tensor, names the file of an equal tensor
(``data=0_1_outtensor0.bin``), or has figures (``max``, ``min``, ``mean``, ``l2norm``). The writer
appends to files: several tensors in one file come from several calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import dtype_name, from_bytes, to_bytes
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store.layouts import narrow
from llmdebug_nb.store.layouts.files import Folder, dtype_named, head, number, reading, sizes

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
_CODES = {name: code for code, name in ACL_DTYPES.items()}
_ND = 2  # the format of row-major tensors
_HEADER = 4096  # bytes; upstream's values have at most 50 characters each
_START = b"$Version="
_END = re.compile(rb"(?:\A|\n)\$End=1(?:\n|\Z)")


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
    return _object(name, stream.read(_HEADER), size, offset)


def _object(name: str, content: bytes, size: int, offset: int = 0) -> Object:
    """Return the object whose header begins ``content``."""
    found = _END.search(content)
    if found is None:
        raise CorruptDumpError(f"{name} has no $End=1 line within {_HEADER} bytes of byte {offset}")
    said = _said(content[: found.start()])
    if isinstance(said, str):
        raise CorruptDumpError(f"{name} {said}")
    start, total = offset + found.end(), said.total
    end = start + max(total, 0)
    if said.alias or said.span is None:
        lost = f"{name} has {total} bytes of no object" if total else None
        return Object(offset, said.summary, start, -1, end, said.alias, lost, said.format)
    begin, length, lost = _data(name, said.summary, said.span, total, size - start)
    return Object(offset, said.summary, start + begin, length, end, None, lost, said.format)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a header says. ``total``: the bytes behind it; ``span``: where in them the tensor is."""

    summary: Summary
    total: int
    span: str | None
    alias: str | None
    format: str


@functools.lru_cache(1024)  # tensors of one dtype and shape have one header
def _said(header: bytes) -> _Said | str:
    """Return what a header says, or what is wrong with it."""
    fields: dict[str, str] = {}
    for line in header.decode("ascii", "replace").splitlines():
        key, equals, value = line.partition("=")
        if not equals or "=" in value:
            return f"has a header line without key=value: {line[:80]!r}"
        fields[key.lower()] = value
    dtype = _dtype(fields.get("dtype", fields.get("type", "")))
    try:
        shape = sizes(fields["dims"])
        total = int(fields.get("$object.length", "0"))
    except (KeyError, ValueError, CorruptDumpError) as error:
        return f"has no valid dims or length ({error})"
    low, high, mean, norm = (number(fields.get(key)) for key in ("min", "max", "mean", "l2norm"))
    layout = fields.get("format", "")
    return _Said(
        Summary(dtype, shape, low, high, mean, norm), total, fields.get("$object.data"),
        fields.get("data") or None, _FORMATS.get(layout, layout.lower()),
    )  # fmt: skip


def _dtype(code: str) -> str:
    if not re.fullmatch("[0-9]{1,9}", code):
        return dtype_named(code)
    return ACL_DTYPES.get(int(code), f"acl_{int(code)}")


def _data(
    name: str, summary: Summary, span: str, total: int, there: int
) -> tuple[int, int, str | None]:
    """Return begin and length of the bytes in an object, and why they can't be used, or None.

    ``total``: the bytes that the header claims for it; ``there``: those that are there.
    """
    found = re.fullmatch(r"([0-9]{1,18}),([0-9]{1,18})", span)
    dtype, shape = summary.dtype, list(summary.shape)
    if found is None:
        return 0, -1, f"{name} has no offset and length in $Object.data={span[:40]!r}"
    begin, length = int(found[1]), int(found[2])
    lost = None
    if not 0 <= begin + length <= total:
        lost = f"{name} places {length} bytes at {begin} of an object of {total}"
    elif total > there:
        lost = f"{name} is cut short: {max(there, 0)} of {total} bytes are there"
    elif dtype not in DTYPES and dtype not in narrow.NAMES:
        lost = f"{name} has dtype {dtype}, which can't be read"
    elif not _fits(dtype, summary.numel, length):
        lost = f"{name} has {length} bytes, which make no {dtype} tensor of shape {shape}"
    return begin, length, lost


def _fits(dtype: str, count: int, length: int) -> bool:
    known = DTYPES.get(dtype)
    return narrow.fits(dtype, count, length) if known is None else count * known.itemsize == length


def objects(folder: Folder, name: str) -> Iterator[Object]:
    """Yield the tensors of a ``.bin`` in the order they were appended. Raises CorruptDumpError."""
    with reading(name):
        content, size = head(folder, name)
        made = _object(name, content, size)
    yield made
    if made.end >= size:
        return
    with reading(name), folder.file(name).open("rb") as stream:
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


def tensor_at(folder: Folder, name: str, offset: int = 0) -> torch.Tensor:
    """Return the tensor whose header is at ``offset``; a narrow dtype as `narrow` decodes it.

    Raises:
        CorruptDumpError: it has no values, or they contradict the header.
    """
    file = folder.file(name)
    with reading(name), file.open("rb") as stream:
        made = parse(name, stream, file.stat().st_size, offset)
        return values_of(name, stream, made)


def values_of(name: str, stream: BinaryIO, made: Object) -> torch.Tensor:
    """Return the tensor of an object that `parse` found in a stream. Raises CorruptDumpError."""
    if not made.kept:
        raise CorruptDumpError(made.lost or f"{name} has no data")
    stream.seek(made.start)
    content, shape = stream.read(made.length), made.summary.shape
    if made.summary.dtype in narrow.NAMES:
        return narrow.decoded(content, made.summary.dtype, shape)
    return from_bytes(content, made.summary.dtype, shape)


def is_bin(file: Path) -> bool:
    """Tell whether a file begins with a header of ATB's tensor files."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEADER)
    except OSError:
        return False
    return _END.search(head) is not None


def encode(tensor: torch.Tensor) -> bytes:
    """Return the ``.bin`` of a tensor. Raises CorruptDumpError: ATB has no code for its dtype."""
    content = bytes(to_bytes(tensor))
    return header(dtype_name(tensor), tuple(tensor.shape), len(content)) + content


def header(dtype: str, shape: tuple[int, ...], length: int | None) -> bytes:
    """Return a header; ``length``: of the bytes behind it, None for a description alone.

    Raises:
        CorruptDumpError: ATB has no code for the dtype.
    """
    if dtype not in _CODES:
        raise CorruptDumpError(f"of dtype {dtype}, which ATB has no code for")
    lines = [
        "$Version=1.0",
        f"$Object.Count={int(length is not None)}",
        f"$Object.Length={length or 0}",
        f"format={_ND}",
        f"dtype={_CODES[dtype]}",
        f"dims={','.join(map(str, shape))}",
        *([] if length is None else [f"$Object.data=0,{length}"]),
        "$End=1",
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def alias(dtype: str, shape: tuple[int, ...], name: str) -> bytes:
    """Return a file that stands for another one of its round, ``0_1_outtensor0.bin``.

    Raises:
        CorruptDumpError: ATB has no code for the dtype.
    """
    head = header(dtype, shape, None).removesuffix(b"$End=1\n")
    return head + f"data={name}\n$End=1\n".encode()


def described(summary: Summary) -> bytes:
    """Return a file of a tensor's figures, or of its dtype and shape if there are no figures.

    Raises:
        CorruptDumpError: ATB has no code for the dtype.
    """
    figures = {
        "max": summary.max,
        "min": summary.min,
        "mean": summary.mean,
        "l2norm": summary.l2norm,
    }
    head = header(summary.dtype, summary.shape, None)
    known = "".join(f"{key}={value}\n" for key, value in figures.items() if value is not None)
    return head.removesuffix(b"$End=1\n") + known.encode() + b"$End=1\n"
