"""The parts that readers of foreign layouts share.

They are: a folder that opens no file outside itself, and decoders that trust neither a pickle nor a
length field.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import pickle
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmdebug_nb.core.errors import CorruptDumpError, LLMDebugError
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store.checked import shape_of_sizes

UNKNOWN = Summary("unknown", ())
TENSOR_FILES = (".npy", ".npz", ".pt", ".pth", ".safetensors", ".bin")
_DIGITS = re.compile(r"([0-9]{1,18})")  # Python reads no number of 5,000 digits
_HEAD = 4096  # bytes; of a file, read at once
# opens no link, and waits for no pipe; 0 where there is no such way
_UNLINKED = getattr(os, "O_NOFOLLOW", 0) and os.O_NOFOLLOW | os.O_NONBLOCK
_SCAN_LIMIT = 20_000  # names that are looked at to detect a layout, which has to stay cheap
# What the tensors of a file may take: saved views repeat their storage, and archives are packed.
# Real ones repeat it a few times, a mask over the heads of a layer 16 to 128 times, but that one is
# small. A tensor of 128 MiB takes 0.1 s to read, and twice its size while it is copied.
_TIMES = 16
_EXPANSION = 128 << 20  # bytes of all files of a dump together, beyond that


@functools.lru_cache(1 << 15)  # folders and files of one name come again in every token
def natural(text: str) -> tuple[str | int, ...]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``."""
    parts = enumerate(_DIGITS.split(text))
    return tuple(int(part) if place % 2 else part for place, part in parts)


class Folder:
    """A folder that opens no file outside itself. Names are relative to it, with ``/``.

    ``context``: the last parts of its own path, ``above`` of them, which may name the step or the
    process.
    """

    def __init__(self, path: Path, above: int = 2) -> None:
        self.path = path.resolve()
        self.context = "".join(f"{name}/" for name in self.path.parts[1:][-above:])
        self._free = _EXPANSION
        self._inside = os.path.join(self.path, "")
        self._folders = {"": str(self.path)}  # by name: without links
        self._rest: dict[str, int] = {}  # by file: the bytes that its tensors may still take
        self._granted: dict[tuple[str, object], int] = {}

    def grant(self, name: str, key: object, nbytes: int) -> None:
        """Let the tensor ``key`` of a file take so many bytes; one that was granted stays so.

        Raises:
            CorruptDumpError: the tensors of the dump take far more than its files hold.
        """
        before = self._granted.get((name, key), 0)
        if nbytes <= before:
            return
        rest = self._rest.setdefault(name, _TIMES * self.file(name).stat().st_size)
        beyond = max(nbytes - before - rest, 0)
        if beyond > self._free:
            room = rest + self._free
            raise CorruptDumpError(
                f"{name} claims {nbytes:,} bytes for a tensor where at most {room:,} can be"
            )
        self._free -= beyond
        self._rest[name] = max(rest - (nbytes - before), 0)
        self._granted[name, key] = nbytes

    def file(self, name: str) -> Path:
        """Return the real path of a file.

        Raises:
            CorruptDumpError: it does not exist, leads out of the folder, or is not a regular file.
        """
        try:
            real, mode = self._real(name)
        except (OSError, ValueError):  # absent, a loop of links, a zero byte
            raise CorruptDumpError(f"{name} is missing") from None
        if not f"{real}{os.sep}".startswith(self._inside):
            raise CorruptDumpError(
                f"{name} is a link that leads out of the folder, and is not followed"
            )
        if not stat.S_ISREG(mode):
            raise CorruptDumpError(f"{name} is not a regular file")
        return Path(real)

    def open(self, name: str) -> int:
        """Return a descriptor of a file for reading.

        One that is no link, as nearly all, is asked nothing before it is opened.

        Raises:
            CorruptDumpError: as `file`.
        """
        above, _, last = name.rpartition("/")
        if _UNLINKED and last not in ("", ".", ".."):
            with contextlib.suppress(OSError, ValueError):
                home = self._real_folder(above)
                if f"{home}{os.sep}".startswith(self._inside):
                    handle = os.open(f"{home}{os.sep}{last}", os.O_RDONLY | _UNLINKED)
                    if stat.S_ISREG(os.fstat(handle).st_mode):
                        return handle
                    os.close(handle)
        return os.open(self.file(name), os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def _real(self, name: str) -> tuple[str, int]:
        """Return the path of a file without links, and its mode."""
        above, _, last = name.rpartition("/")
        if last in ("", ".", ".."):
            real = os.path.realpath(self.path / name, strict=True)
            return real, os.stat(real).st_mode
        real = os.path.join(self._real_folder(above), last)
        mode = os.lstat(real).st_mode
        if stat.S_ISLNK(mode):
            real = os.path.realpath(real, strict=True)
            mode = os.stat(real).st_mode
        return real, mode

    def _real_folder(self, name: str) -> str:
        """Return the path of a folder without links: each folder on the way is asked once."""
        steps = []
        while name not in self._folders:
            steps.append(name)
            name = name.rpartition("/")[0]
        for step in reversed(steps):
            self._folders[step] = self._real(step)[0]
        return self._folders[steps[0] if steps else name]

    def walk(self) -> tuple[list[str], dict[str, str]]:
        """Return the names of all files, naturally sorted, and skipped folders with the reason.

        A linked folder is not entered: its target is walked at its own place, or lies outside.
        """
        names: list[tuple[tuple[str | int, ...], str]] = []
        left_out: dict[str, str] = {}
        for base, files, links in self._listed(left_out):
            if base:  # no folder that is listed is a link
                self._folders[base[:-1]] = f"{self._inside}{base}"[:-1]
            *above, last = natural(base)
            for file in files:
                first, *rest = natural(file)
                names.append(((*above, f"{last}{first}", *rest), base + file))
            for name in (base + link for link in links):
                if not self._holds(self.path / name):
                    left_out[name] = (
                        f"{name} is a link that leads out of the folder, and is not followed"
                    )
        return [name for _, name in sorted(names)], left_out

    def _listed(self, left_out: dict[str, str]) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield what stands before the names of each folder, its files, and links to folders.

        ``left_out`` gets the folders that can't be listed, with the reason. No file is asked for
        what it is: the list of its folder says that.
        """
        stack = [""]
        while stack:
            base = stack.pop()
            files: list[str] = []
            links: list[str] = []
            folders: list[str] = []
            try:
                with os.scandir(f"{self._inside}{base}") as entries:
                    for entry in entries:
                        kind = folders if _is_folder(entry) else files
                        (links if kind is folders and entry.is_symlink() else kind).append(
                            entry.name
                        )
            except OSError as error:
                name = base.rstrip("/") or "."
                left_out[name] = f"{name} can't be listed ({error.strerror})"
                continue
            yield base, files, links
            stack += [f"{base}{name}/" for name in sorted(folders, reverse=True)]

    def _holds(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.path)
        except (OSError, RuntimeError):
            return False

    def scan(self) -> Iterator[str]:
        """Yield the names of some files, enough to detect a layout."""
        seen = 0
        for base, files, links in self._listed({}):
            for file in files:
                yield base + file
            seen += 1 + len(files) + len(links)
            if seen > _SCAN_LIMIT:
                return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


class GivenFile(Folder):
    """The folder of one file that the user named, which may be a link to anywhere.

    In the cache of Hugging Face, ``snapshots/REVISION/model.safetensors`` is a link to ``blobs``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self.name, self._target = path.name, path.resolve()

    def file(self, name: str) -> Path:
        if name == self.name and self._target.is_file():
            real = (self.path / name).resolve()
            if real == self._target:  # and no other one by now
                return real
        return super().file(name)


def head(folder: Folder, name: str) -> tuple[bytes, int]:
    """Return the first bytes of a file, as many as a description has at most, and its size.

    Raises:
        CorruptDumpError: as `Folder.file`.
    """
    handle = folder.open(name)
    try:
        return os.read(handle, _HEAD), os.fstat(handle).st_size
    finally:
        os.close(handle)


class Unreadable(CorruptDumpError):
    """A tensor whose values can't be read, but of which something is known: ``summary``."""

    def __init__(self, message: str, summary: Summary) -> None:
        super().__init__(message)
        self.summary = summary


# -- decoders: each raises CorruptDumpError, naming the file ------------------------------------


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any error of a decoder into a CorruptDumpError that names the file."""
    try:
        yield
    except LLMDebugError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own message advises loading the file with code execution
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it needs {needed[1]}" if needed else str(error).splitlines()[0][:120]
        raise CorruptDumpError(
            f"{name} holds more than tensors, and no pickled code is run ({why})"
        ) from None
    except Exception as error:  # decoders of hostile bytes raise nearly anything
        why = next(iter(str(error).splitlines()), "")[:200]
        raise CorruptDumpError(f"{name} can't be read ({type(error).__name__}: {why})") from None


def read_json(folder: Folder, name: str) -> Any:
    """Return a JSON document; bare NaN and Infinity are numbers."""
    with reading(name):
        return json.loads(folder.file(name).read_text("utf-8"))


def read_csv(folder: Folder, name: str, columns: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of a table that has at least these columns; missing cells are empty."""
    with (
        reading(name),
        folder.file(name).open(encoding="utf-8", errors="replace", newline="") as stream,
    ):
        reader = csv.DictReader(stream)
        absent = set(columns) - set(reader.fieldnames or ())
        if absent:
            raise CorruptDumpError(f"{name} has no column {', '.join(sorted(absent))}")
        return [{column: row[column] or "" for column in columns} for row in reader]


def read_npy(folder: Folder, name: str) -> torch.Tensor:
    """Return the array of a ``.npy`` file; mapping it checks its header against the file size."""
    with reading(name):
        array = np.load(folder.file(name), mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise CorruptDumpError(f"{name} is an archive, not a .npy file")
        return from_array(array)


def from_array(array: np.ndarray) -> torch.Tensor:
    """Return a copy of a NumPy array as a tensor, in the machine's byte order.

    Raises:
        TypeError: its elements are no numbers. Some of those take no room, however many.
    """
    if array.dtype.kind not in "biufc":
        raise TypeError(f"its elements are {array.dtype.name[:40]}, and no numbers")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def check_size(name: str, claimed: int, limit: int) -> None:
    """Raise CorruptDumpError if a file claims more bytes than there can be."""
    if claimed > limit:
        raise CorruptDumpError(f"{name} claims {claimed:,} bytes where at most {limit:,} can be")


def number(value: object) -> float | None:
    """Return a figure as a float, or None if the dump has none (null, empty, N/A)."""
    try:
        return float(value)  # type: ignore[arg-type]  # anything else raises
    except (TypeError, ValueError, OverflowError):
        return None


_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bf16": "bfloat16",
    "float8_e8m0": "float8_e8m0fnu",
}
_SIZES = re.compile(r"(?:[0-9]{1,19}(?:[,x] ?[0-9]{1,19})*,?)?")


def dtype_named(value: object) -> str:
    """Return torch's name of a dtype that other tools write as ``torch.float32`` or ``bf16``."""
    name = str(value).strip().rpartition(".")[2].lower()
    return _DTYPES.get(name, name) if re.fullmatch(r"[a-z0-9_]{1,40}", name) else UNKNOWN.dtype


def sizes(value: object) -> tuple[int, ...]:
    """Return a shape from ``[2, 3]``, ``"(2, 3)"``, ``"torch.Size([2, 3])"``, ``"2,3"``, ``"2x3"``.

    Raises:
        CorruptDumpError: it is not a list of sizes.
    """
    shape = value
    if isinstance(value, str):
        inner = value.strip().removeprefix("torch.Size")
        for brackets in ("()", "[]"):
            inner = inner[1:-1] if inner[:1] + inner[-1:] == brackets else inner
        valid = _SIZES.fullmatch(inner) is not None
        shape = [int(size) for size in re.findall("[0-9]+", inner)] if valid else None
    if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape):
        with contextlib.suppress(ValueError):
            return shape_of_sizes(tuple(shape))
    raise CorruptDumpError(f"{str(value)[:80]!r} is not a shape")
