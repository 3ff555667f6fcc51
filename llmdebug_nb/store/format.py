"""The native dump format, byte by byte, as `docs/format.md` specifies it.

    RUN/llmdebug.json                 the marker: format, name, options, environment
    RUN/rank{R}_{pid}/tensors.bin     payload frames, append-only; more in tensors.{offset}.bin
    RUN/rank{R}_{pid}/index.sqlite    one row for each record

A frame is a complete safetensors document: u64 header length, JSON header, data. Frames start on
8-byte boundaries. Each one carries its record in ``__metadata__``, so that everything a process
wrote before it died can be read without the index.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from llmdebug_nb.core.columns import AT, COLUMNS, RECORDS, TABLES, Row
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store.checked import DAMAGE, rows_of

FORMAT = "llmdebug-run"
VERSION = 1
MARKER = "llmdebug.json"
INDEX = "index.sqlite"
PAYLOAD = "tensors.bin"
ALIGN = 8
MAX_HEADER = 1 << 20

SCHEMA = ";\n".join(table.create for table in TABLES)
INDEXES = """
CREATE INDEX by_step ON records(root_call);
CREATE INDEX by_path ON records(path);
CREATE INDEX by_producer ON records(producer);
CREATE INDEX calls_by_path ON calls(path);
"""

# safetensors has no name for other dtypes: they are stored as U8, named in the metadata
SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


_FIRST_COLUMNS = len(RECORDS.first_names)  # a frame of an older dump has no more
_FIGURES = RECORDS.span("min", "l2norm")
_NO_FIGURES = [None] * len(COLUMNS[_FIGURES])
_DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]
_SOME = re.compile(r"slice\[[^\[\]]+\]|minmax|quantile\[\d+\]")


def payload_dtype(kept: str | None, dtype: str) -> str:
    """Return the dtype of the payload of a ``dtype`` tensor: its own, or that of figures.

    Raises:
        ValueError: ``kept`` names no known part or figures.
    """
    if kept is None:
        return dtype
    if not _SOME.fullmatch(kept):
        raise ValueError(f"the kept part is unknown ({kept[:80]!r})")
    return dtype if kept.startswith("slice") else "float64"


def metadata(row: Row) -> bytes:
    """Return a record as the text of ``__metadata__``, quoted.

    The figures are left out beside a whole tensor, from which they can be computed again.
    """
    columns = row.copy()
    if row[_KEPT] is None:
        columns[_FIGURES] = _NO_FIGURES
        text = msgspec.json.encode(columns)
    else:
        # msgspec, which is faster, makes null of nan
        text = json.dumps(columns, separators=(",", ":")).encode()
    # a text in JSON has no control characters left, so two replacements escape it once more
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def encode_header(row: Row, nbytes: int | None) -> bytes:
    """Return length field and header of a frame; ``nbytes`` None: a duplicate, without values."""
    tensor = ""
    if nbytes is not None:
        name = SAFETENSORS.get(payload_dtype(row[_KEPT], row[_DTYPE]))
        shape = row[_SHAPE] if row[_KEPT] is None else row[_KEPT_SHAPE]
        kind, sizes = (name, shape) if name else ("U8", f"[{nbytes}]")
        tensor = f',"tensor":{{"dtype":"{kind}","shape":{sizes},"data_offsets":[0,{nbytes}]}}'
    header = b'{"__metadata__":{"record":%b}%b}' % (metadata(row), tensor.encode())
    header += b" " * (-len(header) % ALIGN)
    return struct.pack("<Q", len(header)) + header


def scan_frames(file: BinaryIO, start: int, end: int, base: int = 0) -> Iterator[Row]:
    """Yield the rows of the frames from ``start``, with ``offset`` and ``length``.

    It stops at the first incomplete frame. ``base``: the offset of the file's first frame.

    Raises:
        CorruptDumpError: a complete frame is not one of this format.
    """
    at = start
    while at + 8 <= end:
        file.seek(at)
        (size,) = struct.unpack("<Q", file.read(8))
        if size == 0 or size > MAX_HEADER or at + 8 + size > end:
            return
        row, nbytes = _decode(file.read(size), file.name)
        if nbytes is not None:
            if at + 8 + size + nbytes > end:
                return
            row[AT["offset"]], row[AT["length"]] = base + at + 8 + size, nbytes
        yield row
        at += 8 + size + (nbytes or 0)
        at += -at % ALIGN


def _decode(header: bytes, name: str) -> tuple[Row, int | None]:
    try:
        fields = json.loads(header)
        row = json.loads(fields["__metadata__"]["record"])
        tensor = fields.get("tensor")
        nbytes = None if tensor is None else tensor["data_offsets"][1]
        row += [None] * (len(COLUMNS) - len(row)) if len(row) >= _FIRST_COLUMNS else []
        if nbytes is not None and not (isinstance(nbytes, int) and nbytes >= 0):
            raise ValueError("its length is no number")
        (row,) = rows_of(RECORDS.row, [row])
    except (*DAMAGE, KeyError, TypeError, IndexError) as error:
        raise CorruptDumpError(f"{name}: a payload frame is damaged ({error})") from None
    return list(row), nbytes
