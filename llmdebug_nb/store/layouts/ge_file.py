"""GE's dump files: one call of an operator, read and written.

A file is a length (uint64, little-endian), a message of that length, and the bytes of the inputs,
outputs, buffers and spaces in that order. The message is ``toolkit.dumpdata.DumpData``:

    DumpData   version 1, dump_time 2, output 3, input 4, buffer 5, op_name 6, attr 7, space 8
    OpOutput   data_type 1, format 2, shape 3, original_op 4, data 5, size 6, original_shape 7
    OpInput    data_type 1, format 2, shape 3, data 4, size 5, original_shape 6
    OpBuffer   type 1, data 2, size 3;    Space  type 1, data 2, size 3
    Shape      dim 1;                     OriginalOp  name 1, output_index 2

The message is read and written here by hand: that takes two functions, and nothing in a file is
believed before it was held against the file's size. protobuf would check the message alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import dtype_name, from_bytes, to_bytes
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store.checked import shape_of_sizes
from llmdebug_nb.store.layouts import narrow
from llmdebug_nb.store.layouts.files import Folder, Unreadable, head, reading

# toolkit.dumpdata.OutputDataType, which is not ACL's
DTYPE_CODES = {
    "float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int16": 5, "uint16": 6, "int32": 7,
    "int64": 8, "uint32": 9, "uint64": 10, "bool": 11, "float64": 12, "complex64": 16,
    "complex128": 17, "bfloat16": 27, "hifloat8": 33, "float8_e5m2": 34, "float8_e4m3fn": 35,
}  # fmt: skip
_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_ND = 2  # the format of row-major tensors
_OUTPUT, _INPUT, _BUFFER, _OP_NAME, _SPACE = 3, 4, 5, 6, 8
_HEAD = 8  # bytes of the length
_LONGEST_MESSAGE = 64 << 20  # bytes; a description of a call with 100,000 tensors has about 10 MB
_LONGEST_NUMBER = 10  # bytes of a varint of 64 bits
_MOST_PARTS = 100_000  # tensors of one call, and sizes of one shape; more are no operator's
Value: TypeAlias = "int | bytes"
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a call: ``length`` bytes from ``start`` in the file, ``role`` input or output.

    ``source``: the name of the operator of the graph that made it, as an output says. ``lost``: why
    its values can't be read.
    """

    role: str
    index: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int
    format: int = _ND
    source: str = ""
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class GeCall:
    """A GE file. ``name``: of the operator, as the message says; it may be empty."""

    name: str
    time: int
    parts: tuple[Part, ...]


# -- reading --------------------------------------------------------------------------------------


def parse(folder: Folder, name: str) -> GeCall:
    """Read the message of a GE file; a tensor that contradicts the file gets a reason (``lost``).

    Raises:
        CorruptDumpError: it is no GE file; the message names the file and the byte.
    """
    with reading(name):
        message, size = _message(folder, name)
        return _call(name, message, _HEAD + len(message), size)


def slots(folder: Folder, name: str) -> list[tuple[str, int]]:
    """Return role and number of each tensor of a call, and read no more than that takes.

    Raises:
        CorruptDumpError: as `parse`.
    """
    with reading(name):
        message, _ = _message(folder, name)
        tags = [field for field, _, _ in fields(name, message, _HEAD)]
    roles = (("input", tags.count(_INPUT)), ("output", tags.count(_OUTPUT)))
    return [(role, index) for role, count in roles for index in range(count)]


def _message(folder: Folder, name: str) -> tuple[bytes, int]:
    """Return the message of a file, and the size of the file."""
    start, size = head(folder, name)
    length = struct.unpack_from("<Q", start)[0] if len(start) >= _HEAD else 0
    if not 0 < length <= size - _HEAD:
        said = f"its message of {length:,} bytes at byte 0" if length else "a message"
        raise CorruptDumpError(f"{name} is no GE dump file: {said} can't lie in {size:,} bytes")
    if length > _LONGEST_MESSAGE:
        raise CorruptDumpError(
            f"{name} has a message of {length:,} bytes at byte 0: more than"
            f" {_LONGEST_MESSAGE:,} are not read"
        )
    message = start[_HEAD : _HEAD + length]
    if len(message) < length:
        with folder.file(name).open("rb") as stream:
            stream.seek(_HEAD)
            message = stream.read(length)
    if len(message) != length:
        raise CorruptDumpError(f"{name} was cut short while it was read")
    return message, size


def _call(name: str, message: bytes, start: int, size: int) -> GeCall:
    groups: dict[int, list[bytes]] = {_INPUT: [], _OUTPUT: [], _BUFFER: [], _SPACE: []}
    op_name, time = "", 0
    for field, value, at in fields(name, message, _HEAD):
        if field in groups:
            groups[field].append(_bytes(name, value, at))
        elif field == _OP_NAME:
            op_name = _bytes(name, value, at).decode("utf-8", "replace")
        elif field == 2 and isinstance(value, int):
            time = value
    parts: list[Part] = []
    for group, role in ((_INPUT, "input"), (_OUTPUT, "output")):
        for index, content in enumerate(groups[group]):
            part = _part(name, content, role, index, start)
            parts.append(_checked(name, part, size))
            start += part.length
    rest = sum(_size_of(name, content) for group in (_BUFFER, _SPACE) for content in groups[group])
    if parts and not any(part.lost for part in parts) and start + rest < size:
        extra = size - start - rest
        parts[-1] = replace(parts[-1], lost=f"{name} has {extra:,} bytes at {start + rest:,} of no"
                            " tensor, so the places of all are uncertain")  # fmt: skip
    return GeCall(op_name, time, tuple(parts))


def _part(name: str, content: bytes, role: str, index: int, start: int) -> Part:
    """Read a description of an input or output whose bytes begin at ``start``."""
    size_field, said = (6, 5)[role == "input"], dict[str, Any]()
    for field, value, at in fields(name, content, 0):
        if field == 1 and isinstance(value, int):
            said["dtype"] = _NAMES.get(value, f"ge_{value}")
        elif field == 2 and isinstance(value, int):
            said["format"] = value
        elif field == 3:
            said["shape"] = _shape(name, _bytes(name, value, at))
        elif field == 4 and role == "output":
            said["source"] = _source(name, _bytes(name, value, at))
        elif field == size_field and isinstance(value, int):
            said["length"] = value
    return replace(Part(role, index, "unknown", (), start, 0), **said)


def _checked(name: str, part: Part, size: int) -> Part:
    """Return a part with the reason why its values can't be read, if they can't."""
    what = f"{name}, {part.role} {part.index}:"
    lost = None
    if part.start + part.length > size:
        there = max(size - part.start, 0)
        lost = f"{what} only {there:,} of {part.length:,} bytes at byte {part.start:,} are there"
    elif part.dtype not in DTYPES and part.dtype not in narrow.NAMES:
        lost = f"{what} dtype {part.dtype} can't be read"
    else:
        expected = DTYPES[part.dtype].itemsize if part.dtype in DTYPES else 1  # hifloat8
        for one in part.shape:
            expected *= one
        if expected != part.length:
            lost = (
                f"{what} {part.length:,} bytes at byte {part.start:,} make no {part.dtype} tensor"
                f" of shape {list(part.shape)}"
            )
    return replace(part, lost=lost)


def _shape(name: str, content: bytes) -> tuple[int, ...]:
    sizes: list[int] = []
    for field, value, _ in fields(name, content, 0):
        if field == 1 and isinstance(value, int):
            sizes.append(value)
        elif field == 1 and isinstance(value, bytes):  # packed
            at = 0
            while at < len(value):
                number, at = _number(name, value, at)
                sizes.append(number)
        if len(sizes) > _MOST_PARTS:
            break
    try:
        return shape_of_sizes(tuple(sizes))
    except ValueError:
        raise CorruptDumpError(f"{name} has no valid shape: {str(sizes)[:80]}") from None


def _source(name: str, content: bytes) -> str:
    found = [value for field, value, _ in fields(name, content, 0) if field == 1]
    return found[0].decode("utf-8", "replace") if found and isinstance(found[0], bytes) else ""


def _size_of(name: str, content: bytes) -> int:
    sizes = [value for field, value, _ in fields(name, content, 0) if field == 3]
    return sum(size for size in sizes if isinstance(size, int))


def _bytes(name: str, value: Value, at: int) -> bytes:
    if not isinstance(value, bytes):
        raise CorruptDumpError(f"{name} has a number at byte {at:,}, where a message belongs")
    return value


def fields(name: str, message: bytes, base: int) -> Iterator[tuple[int, Value, int]]:
    """Yield number, value and place of each field of a protobuf message; ``base``: its own place.

    Raises:
        CorruptDumpError: a length leads out of the message, or a field is of no known kind.
    """
    at = count = 0
    while at < len(message):
        place = at
        key, at = _number(name, message, at)
        value: Value
        if key & 7 == 0:
            value, at = _number(name, message, at)
        elif key & 7 in (1, 5):
            length = 8 if key & 7 == 1 else 4
            value, at = message[at : at + length], at + length
        elif key & 7 == 2:
            length, at = _number(name, message, at)
            value, at = message[at : at + length], at + length
        else:
            raise CorruptDumpError(f"{name} has no valid field at byte {base + place:,}")
        count += 1
        if at > len(message) or count > _MOST_PARTS:
            raise CorruptDumpError(
                f"{name} has a field at byte {base + place:,} that leads out of its message"
            )
        yield key >> 3, value, base + place


def _number(name: str, message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a place of a message, and the place behind it."""
    value = 0
    for place, byte in enumerate(message[at : at + _LONGEST_NUMBER]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & (1 << 64) - 1, at + place + 1
    raise CorruptDumpError(f"{name} has an endless number at byte {at:,} of a message")


def summary_of(part: Part) -> Summary:
    """Return what is known of a tensor without its values."""
    return Summary(part.dtype, part.shape)


def load(folder: Folder, name: str, role: str, index: int) -> torch.Tensor:
    """Return a tensor of a GE file. Raises CorruptDumpError."""
    found = [part for part in parse(folder, name).parts if (part.role, part.index) == (role, index)]
    if not found:
        raise CorruptDumpError(f"{name} no longer holds {role} {index}")
    part = found[0]
    if part.lost:
        raise Unreadable(part.lost, summary_of(part))
    with reading(name), folder.file(name).open("rb") as stream:
        stream.seek(part.start)
        content = stream.read(part.length)
    read = narrow.decoded if part.dtype in narrow.NAMES else from_bytes
    return read(content, part.dtype, part.shape)


def content_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor as a GE file holds them."""
    return bytes(to_bytes(tensor))


# -- writing --------------------------------------------------------------------------------------


def encode(
    name: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[tuple[torch.Tensor, str]],
    time: int = 0,
) -> bytes:
    """Return the file of a call; each output with the name of the operator that made it.

    Raises:
        CorruptDumpError: GE has no code for the dtype of a tensor.
    """
    described = number_field(2, time)
    contents: dict[bool, list[bytes]] = {True: [], False: []}
    for place, (tensor, source) in enumerate(outputs):
        one, content = _described(tensor)
        original = bytes_field(1, source.encode()) + number_field(2, place)
        shape = bytes_field(7, _dims(tensor))
        described += bytes_field(
            _OUTPUT, one + bytes_field(4, original) + number_field(6, len(content)) + shape
        )
        contents[False].append(content)
    for tensor in inputs:
        one, content = _described(tensor)
        described += bytes_field(
            _INPUT, one + number_field(5, len(content)) + bytes_field(6, _dims(tensor))
        )
        contents[True].append(content)
    message = bytes_field(1, b"1.0") + described + bytes_field(_OP_NAME, name.encode())
    return struct.pack("<Q", len(message)) + b"".join((message, *contents[True], *contents[False]))


def _described(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """Return the first fields of a tensor's description, and its bytes."""
    code = DTYPE_CODES.get(dtype := dtype_name(tensor))
    if code is None:
        raise CorruptDumpError(f"of dtype {dtype}, which GE dumps do not have")
    head = number_field(1, code) + number_field(2, _ND) + bytes_field(3, _dims(tensor))
    return head, content_of(tensor)


def _dims(tensor: torch.Tensor) -> bytes:
    return bytes_field(1, b"".join(map(varint, tensor.shape)))


def varint(number: int) -> bytes:
    """Return a whole number from 0 on in protobuf's encoding."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def number_field(tag: int, value: int) -> bytes:
    """Return a field that holds a number."""
    return varint(tag << 3) + varint(value)


def bytes_field(tag: int, value: bytes) -> bytes:
    """Return a field that holds a message or a text."""
    return varint(tag << 3 | 2) + varint(len(value)) + value
