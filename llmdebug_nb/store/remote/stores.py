"""A place in a remote store: what fsspec does there, tried again when it fails.

The packages behind fsspec raise errors of many kinds. Here they become `RemoteError`, but for
FileNotFoundError. A place is asked again a few times, and only once after that, until it answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from llmdebug_nb.core.errors import MissingPackageError, OptionError, RemoteError, first_line
from llmdebug_nb.core.urls import without_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
# Seconds before each further try: some 5 in all. What fails for longer is no hiccup of the
# network, and the packages behind fsspec try again themselves.
PAUSES = (0.2, 1.0, 4.0)
# Bytes of one request. At 100 MB/s it takes 0.16 s, some times the 0.03 s until it begins, and
# one that fails costs no more.
REQUEST = 16 << 20


def inside(url: str, name: str) -> str:
    """Return the URL of what has a name in a folder."""
    folder = url if url.endswith("://") else url.rstrip("/")
    return f"{folder}/{name}"


class Entry(NamedTuple):
    """What lies in a folder. ``size``: None if the store does not tell."""

    is_folder: bool
    size: int | None


class _NoBucketError(Exception):
    """The bucket, or the first folder of a path, does not exist."""


@dataclass
class _Health:
    """Whether the last request failed for good; shared by all places of one run.

    ``answered``: whether the store ever did, be it that something is not there.
    """

    failed: bool = False
    answered: bool = False


@dataclass(frozen=True)
class Place:
    """A file or folder in a store. ``url``: as the user named it, without secrets."""

    fs: AbstractFileSystem
    path: str
    url: str
    _health: _Health = field(default_factory=_Health)

    def __truediv__(self, name: str) -> Place:
        return Place(self.fs, f"{self.path}/{name}", inside(self.url, name), self._health)

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    def children(self) -> dict[str, Entry]:
        """Return what lies directly in a folder, by name. Raises FileNotFoundError, RemoteError."""
        found = {}
        for each in self._asked("list", lambda: self.fs.ls(self.path, detail=True)):
            name, size = str(each["name"]).rstrip("/").rpartition("/")[2], each.get("size")
            known = isinstance(size, int) and size >= 0
            found[name] = Entry(each.get("type") == "directory", size if known else None)
        return found

    def state(self) -> tuple[int, str]:
        """Return the size of a file, and a text that another content does not have.

        Raises FileNotFoundError, RemoteError.
        """

        def ask() -> tuple[int, str]:
            size = self.fs.info(self.path).get("size")
            if not isinstance(size, int) or size < 0:
                raise OSError(f"it tells the size {size!r}")
            return size, str(self.fs.ukey(self.path))

        return self._asked("look at", ask)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes ``[start, end)`` of a file. Raises FileNotFoundError, RemoteError."""

        def ask() -> bytes:
            found = self.fs.cat_file(self.path, start=start, end=end)
            if len(found) != end - start:
                raise OSError(f"it gave {len(found):,} of {end - start:,} bytes")
            return bytes(found)

        return self._asked("read", ask) if end > start else b""

    def head(self, limit: int) -> bytes:
        """Return a file of ``limit`` bytes at most. Raises FileNotFoundError, RemoteError."""
        size, _ = self.state()
        if size > limit:
            raise RemoteError(f"{self.url} has {size:,} bytes, and {limit:,} at most are expected")
        return self.read(0, size)

    def write(self, data: bytes) -> None:
        """Write a file, and see that it is there. Raises RemoteError."""
        self._asked("write", lambda: self._written(lambda: self.fs.pipe_file(self.path, data)))
        self._check(len(data))

    def put(self, file: Path) -> None:
        """Write a file of this machine, and see that it is there. Raises RemoteError, OSError."""
        size = file.stat().st_size
        self._asked("write", lambda: self._written(lambda: self.fs.put_file(str(file), self.path)))
        self._check(size)

    def create(self, data: bytes) -> bool:
        """Write a file unless it is there; return whether it was written. Raises RemoteError."""

        def ask() -> bool:
            try:
                self._written(lambda: self.fs.pipe_file(self.path, data, mode="create"))
            except FileExistsError:
                return False
            return True

        return self._asked("write", ask)

    def reach(self) -> None:
        """See that the store answers, be it that nothing is there. Raises RemoteError."""
        with contextlib.suppress(FileNotFoundError):
            self._asked("look at", lambda: self.fs.info(self.path))

    def remove(self) -> None:
        """Remove a file, if it is there. Raises RemoteError."""
        with contextlib.suppress(FileNotFoundError):
            self._asked("remove", lambda: self.fs.rm_file(self.path))

    def _written(self, write: Callable[[], object]) -> None:
        """Write, in a new folder if need be; a bucket is never made: its name may be mistyped."""
        try:
            write()
        except FileNotFoundError:
            folder, start = (
                self.path.rpartition("/")[0],
                len(self.path) - len(self.path.lstrip("/")),
            )
            root = self.path[:start] + self.path[start:].partition("/")[0]
            if not self.fs.exists(root):
                raise _NoBucketError(root) from None
            self.fs.makedirs(folder, exist_ok=True)
            write()

    def _check(self, size: int) -> None:
        try:
            found, _ = self.state()
        except FileNotFoundError:
            found = -1
        if found != size:
            raise RemoteError(f"{self.url}: {size:,} bytes were written, and {found:,} are there")

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        """Return an answer of the store. Raises FileNotFoundError, RemoteError."""
        pauses: tuple[float, ...] = () if self._health.failed else PAUSES
        if not self._health.answered:  # its name may be wrong: packages ask for seconds, too
            pauses = pauses[:1]
        for pause in (*pauses, None):
            try:
                answer = ask()
            except FileNotFoundError:
                self._health.answered = True
                raise
            except Exception as error:  # of whatever package is behind fsspec
                if isinstance(error, (PermissionError, NotImplementedError, _NoBucketError)):
                    pause = None  # asking again changes nothing
                if pause is None:
                    self._health.failed = True
                    raise RemoteError(self._why(what, error)) from error
                time.sleep(pause)
            else:
                self._health.failed, self._health.answered = False, True
                return answer
        raise AssertionError

    def _why(self, what: str, error: Exception) -> str:
        reason = without_secrets(" ".join(first_line(error).split()))
        if isinstance(error, PermissionError):
            refused = f"the store refuses it ({reason}); check the credentials"
            return f"can't {what} {self.url}: {refused}"
        if isinstance(error, _NoBucketError):
            return f"can't {what} {self.url}: {reason} does not exist; make it, or check the name"
        text = f"can't {what} {self.url}: {type(error).__name__}: {reason}"
        if self._health.answered:
            return text
        package = type(self.fs).__module__.partition(".")[0]
        return (
            f"{text}; the store has not answered yet: check credentials and endpoint of {package}"
        )


def check(url: str) -> None:
    """See that the packages for a store are there. No client is made: some start threads.

    Raises:
        MissingPackageError: a package for such a store is not installed.
        OptionError: fsspec knows no such store.
    """
    shown = without_secrets(url)
    try:
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError:
        raise MissingPackageError(
            f"{shown} needs the package fsspec: pip install 'llmdebug-nb[remote]'"
        ) from None
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        try:
            get_filesystem_class(protocol)
        except ImportError as error:
            known = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
            install = f"pip install {known}" if known else first_line(error)
            raise MissingPackageError(
                f"{shown} needs a package that is not installed: {install}"
            ) from None
        except Exception as error:  # of whatever package is behind fsspec
            raise OptionError(f"{shown} names no place in a store: {first_line(error)}") from None


def place(url: str) -> Place:
    """Return the place that a URL names, without asking the store.

    Raises as `check`; also OptionError: the URL makes no sense.
    """
    check(url)
    from fsspec import url_to_fs

    shown = without_secrets(url)
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
    except Exception as error:  # of whatever package is behind fsspec
        raise OptionError(f"{shown} names no place in a store: {first_line(error)}") from None
    return Place(fs, path.rstrip("/"), shown if shown.endswith("://") else shown.rstrip("/"))
