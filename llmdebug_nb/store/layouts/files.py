"""The parts that readers of foreign layouts share.

They are: a folder that opens no file outside itself, and decoders that trust neither a pickle nor a
length field.
"""

from __future__ import annotations

import contextlib
import csv
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
_SCAN_LIMIT = 20_000  # names that are looked at to detect a layout, which has to stay cheap
# What the tensors of a file may take: saved views repeat their storage, and archives are packed.
# Real ones repeat it a few times, a mask over the heads of a layer 16 to 128 times, but that one is
# small. A tensor of 128 MiB takes 0.1 s to read, and twice its size while it is copied.
_TIMES = 16
_EXPANSION = 128 << 20  # bytes of all files of a dump together, beyond that


def natural(text: str) -> list[str | int]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``."""
    parts = enumerate(re.split(r"([0-9]{1,18})", text))  # Python reads no number of 5,000 digits
    return [int(part) if place % 2 else part for place, part in parts]


class Folder:
    """A folder that opens no file outside itself. Names are relative to it, with ``/``.

    ``context``: the last parts of its own path, ``above`` of them, which may name the step or the
    process.
    """

    def __init__(self, path: Path, above: int = 2) -> None:
        self.path = path.resolve()
        self.context = "".join(f"{name}/" for name in self.path.parts[1:][-above:])
        self._free = _EXPANSION
        self._folders: dict[str, Path] = {}  # by name: without links
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
            real = self._real(name)
        except (OSError, RuntimeError, ValueError):  # absent, a loop of links, a zero byte
            raise CorruptDumpError(f"{name} is missing") from None
        if not real.is_relative_to(self.path):
            raise CorruptDumpError(
                f"{name} is a link that leads out of the folder, and is not followed"
            )
        if not real.is_file():
            raise CorruptDumpError(f"{name} is not a regular file")
        return real

    def _real(self, name: str) -> Path:
        """Return the path of a file without links; that of its folder is found once."""
        above, _, last = name.rpartition("/")
        if last in ("", ".", ".."):
            return (self.path / name).resolve(strict=True)
        if above not in self._folders:
            self._folders[above] = (self.path / above).resolve(strict=True)
        real = self._folders[above] / last
        return real.resolve(strict=True) if stat.S_ISLNK(os.lstat(real).st_mode) else real

    def walk(self) -> tuple[list[str], dict[str, str]]:
        """Return the names of all files, naturally sorted, and skipped folders with the reason.

        A linked folder is not entered: its target is walked at its own place, or lies outside.
        """
        names: list[str] = []
        left_out: dict[str, str] = {}

        def unreadable(error: OSError) -> None:
            name = os.path.relpath(error.filename, self.path)
            left_out[name] = f"{name} can't be listed ({error.strerror})"

        for at, folders, files in os.walk(self.path, onerror=unreadable):
            base = self._base(at)
            names += [base + file for file in files]
            for folder in folders:
                if os.path.islink(os.path.join(at, folder)) and not self._holds(Path(at, folder)):
                    name = base + folder
                    left_out[name] = (
                        f"{name} is a link that leads out of the folder, and is not followed"
                    )
        return sorted(names, key=natural), left_out

    def _base(self, at: str) -> str:
        """Return what stands before the names of a folder's files."""
        base = Path(at).relative_to(self.path).as_posix()
        return "" if base == "." else f"{base}/"

    def _holds(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.path)
        except (OSError, RuntimeError):
            return False

    def scan(self) -> Iterator[str]:
        """Yield the names of some files, enough to detect a layout."""
        seen = 0
        for at, folders, files in os.walk(self.path):
            folders.sort()
            base = self._base(at)
            for file in files:
                yield base + file
            seen += len(files) + len(folders)
            if seen > _SCAN_LIMIT:
                return


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
