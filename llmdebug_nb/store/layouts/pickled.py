"""Objects of `torch.save`, read without running their code or more work than their bytes allow.

torch's own reader runs no code of a file, but it believes what the file says: a tuple in a tuple
in a tuple takes years to hash, and a list may hold itself. So the pickle's instructions are counted
before torch sees them, and what torch made of them is walked with a limit.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.store.checked import MOST_NESTED
from llmdebug_nb.store.layouts.files import Folder, check_size, read_npy, reading

_ITEMS_LIMIT = 1_000_000  # entries of one object, scalars too: a second of work
# Bytes that a tensor takes in a file at least: torch aligns each storage to so many. Some more may
# share a storage, such as tied weights.
_OF_A_TENSOR, _SHARED = 64, 1000
# Steps of 20 to 50 ns: hashing one entry of a tuple, handing one argument over.
_STEPS, _STEPS_OF_A_BYTE = 10_000_000, 20
_PICKLES_OF_OLD_FILES = 5  # magic number, version, system, object, names of the storages
_ZIP = b"PK\x03\x04"
# What torch calls for a dense tensor looks at its sizes alone. Any other call (set, Counter) may
# look at all that it is given, which is at most the whole pickle.
_CHEAP = frozenset(
    [f"torch._utils _rebuild_{name}" for name in (
        "tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "qtensor",
        "meta_tensor_no_storage",
    )] + ["torch Size", "torch device", "torch.serialization _get_layout"]
)  # fmt: skip
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # before 1.6: torch's magic number, pickled
_OF_A_SUBCLASS = "torch._tensor _rebuild_from_type_v2"  # calls its first argument


def is_saved(file: Path) -> bool:
    """Return whether a file begins as `torch.save` begins one, whatever its name is."""
    try:
        with file.open("rb") as stream:
            head = stream.read(len(_OLD))
    except OSError:
        return False
    return head.startswith(_ZIP) or head == _OLD


def read_object(folder: Folder, name: str, mapped: bool = False) -> Any:
    """Return the object of a file of `torch.save`, without running pickled code.

    Tensors are on the CPU. ``mapped``: read values when they are used, if the format allows it.

    Raises:
        CorruptDumpError: it is no such file, or asks for more than its bytes can hold.
    """
    file = folder.file(name)
    with reading(name):
        with file.open("rb") as stream:
            zipped = stream.read(len(_ZIP)) == _ZIP
        if zipped:
            _check_archive(name, file)
        else:
            _check_old(name, file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and zipped)


def read_tensor(folder: Folder, name: str) -> torch.Tensor:
    """Return the one tensor of a ``.pt``, ``.pth`` or ``.npy`` file."""
    if name.endswith(".npy"):
        return read_npy(folder, name)
    found = read_object(folder, name)
    if not isinstance(found, torch.Tensor):
        raise CorruptDumpError(f"{name} holds a {type(found).__name__}, not a tensor")
    return granted(folder, name, None, plain(folder, name, found))


def granted(folder: Folder, name: str, key: object, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements fit its file, see `Folder.grant`. Raises CorruptDumpError."""
    if unreadable(tensor) is None:
        folder.grant(name, key, tensor.numel() * tensor.itemsize)
    return tensor


def _check_archive(name: str, file: Path) -> None:
    """Check that Python and torch see the same archive, that it does not expand, and its pickle."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = [entry.filename.lower() for entry in entries]
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(set(names)) != len(names) or len(pickles) != 1:
            raise CorruptDumpError(f"{name} holds two files of one name, or no data.pkl")
        if min(entry.header_offset for entry in entries):
            raise CorruptDumpError(f"{name} has {entries[0].header_offset} bytes before its files")
        check_size(name, sum(entry.file_size for entry in entries), file.stat().st_size)
        _check_pickle(name, io.BytesIO(archive.read(pickles[0])))


def _check_old(name: str, file: Path) -> None:
    """Check a file of `torch.save` before 1.6: pickles in a row."""
    if tarfile.is_tarfile(file):  # the format before that one, whose files torch 2.5 unpacks
        raise CorruptDumpError(f"{name} is a tar file: load it with torch, and save it again")
    with file.open("rb") as stream:
        for _ in range(_PICKLES_OF_OLD_FILES):
            _check_pickle(name, stream)


@dataclass(slots=True)
class _Value:
    """What a pickle has on its stack.

    ``size``: entries of a tuple, those in its tuples too. ``name``: of a function, or of the one
    that a tuple begins with.
    """

    size: int = 1
    name: str = ""


@dataclass(slots=True)
class _Count:
    """The work that a pickle asks for. It follows the sizes of tuples, and computes nothing."""

    stack: list[_Value] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[object, _Value] = field(default_factory=dict)
    calls: int = 0
    steps: int = 0

    def follow(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """Follow one instruction. Raises IndexError, KeyError if the pickle is broken."""
        name = opcode.name
        if name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[argument])
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name == "GLOBAL":
            self.stack.append(_Value(1, str(argument)))
        else:
            taken = self._taken(opcode)
            if "TUPLE" in name:
                first = taken[0].name if taken else ""
                self.stack.append(_Value(1 + sum(value.size for value in taken), first))
                return
            self.steps += sum(value.size for value in taken)
            self.stack += [_Value() for _ in opcode.stack_after]
            if name in ("REDUCE", "NEWOBJ"):
                called, given = taken[0].name, taken[-1]
                called = given.name if called == _OF_A_SUBCLASS else called
                self.calls += given.size > 1 and called not in _CHEAP

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[_Value]:
        """Take off the stack what an instruction needs: some values, or all behind the mark."""
        before = opcode.stack_before
        if pickletools.markobject in before:
            start = self.marks.pop() - before.index(pickletools.markobject)
        else:
            start = len(self.stack) - len(before)
        if start < 0:
            raise IndexError("it takes more values than there are")
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


def _check_pickle(name: str, stream: IO[bytes]) -> None:
    """Check how much work the next pickle of a stream is. Raises CorruptDumpError."""
    count, start = _Count(), stream.tell()
    for opcode, argument, _ in pickletools.genops(stream):
        count.follow(opcode, argument)
    length = stream.tell() - start
    if count.steps + count.calls * length > _STEPS + _STEPS_OF_A_BYTE * length:
        raise CorruptDumpError(f"{name} asks for far more work than its {length:,} bytes can need")


def tensors_in(
    name: str, value: object, size: int
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the tensors of nested dicts and sequences with the keys that lead there, in order.

    ``size``: of the file, in bytes.

    Raises:
        CorruptDumpError: they nest too deeply, or are more than such a file can hold.
    """
    most = _SHARED + size // _OF_A_TENSOR
    stack: list[tuple[tuple[str, ...], object]] = [((), value)]
    seen = 0
    while stack:
        keys, item = stack.pop()
        if isinstance(item, torch.Tensor):
            if not (most := most - 1):
                raise CorruptDumpError(f"{name} repeats its tensors more often than it has room")
            yield keys, item
            continue
        children = _children(item)
        seen += len(children)
        if seen > _ITEMS_LIMIT:
            raise CorruptDumpError(f"{name} nests more than {_ITEMS_LIMIT:,} entries")
        if children and len(keys) >= MOST_NESTED:
            raise CorruptDumpError(f"{name} nests more than {MOST_NESTED} objects in one another")
        stack += [((*keys, key), child) for key, child in reversed(children)]


def _children(item: object) -> list[tuple[str, object]]:
    """Return the entries of a dict or sequence. A key that is no name counts as its place."""
    if isinstance(item, dict):  # not its own `items`: a pickle may put anything in its place
        return [
            (key if isinstance(key, str) else _number(key, place), child)
            for place, (key, child) in enumerate(dict.items(item))
        ]
    if isinstance(item, (list, tuple)):
        return [(str(place), child) for place, child in enumerate(item)]
    return []


def _number(key: object, place: int) -> str:
    return str(key) if isinstance(key, int) and abs(key) < 1 << 63 else str(place)


def plain(folder: Folder, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a file without what else was saved with it.

    Raises:
        CorruptDumpError: it is of a kind that no dump has, or its storage larger than its file.
    """
    with reading(name):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
            raise CorruptDumpError(f"{name} holds a {type(tensor).__name__} that wraps its values")
        # not the object's own `detach`: a pickle may put anything in its place
        tensor = torch.Tensor.detach(tensor)
        if tensor.dim() > constants.MOST_DIMENSIONS:
            raise CorruptDumpError(f"{name} holds a tensor of {tensor.dim():,} dimensions")
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            size = folder.file(name).stat().st_size
            check_size(name, tensor.untyped_storage().nbytes(), size)
            if tensor.numel() and not tensor.data_ptr():
                raise CorruptDumpError(f"{name} holds a tensor without memory")
        return tensor
