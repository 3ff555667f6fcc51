"""Finding runs: by name in the runs folder, or by path."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError, UnknownRunError
from llmdebug_nb.core.options import runs_folder
from llmdebug_nb.core.places import expanded
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import own_file
from llmdebug_nb.store.checked import MOMENT, json_of

_MAX_MARKER = 1 << 22


class Marker(TypedDict, total=False):
    """The part of a marker that is used; `docs/format.md` describes it."""

    name: str
    created: MOMENT
    options: dict[str, object]
    environment: dict[str, str]


def read_marker(folder: Path) -> dict[str, Any]:
    """Return a run's marker, ``llmdebug.json``.

    Raises:
        CorruptDumpError: it is not such a marker, or of a later version of the format.
    """
    file = folder / fmt.MARKER
    try:
        with own_file.open_file(file) as stream:
            text = stream.read(_MAX_MARKER + 1)
        if len(text) > _MAX_MARKER:
            raise ValueError("it is too large")
        marker = json_of(dict[str, Any], text.decode())
        if marker.get("format") != fmt.FORMAT:
            raise ValueError(f"it does not say format {fmt.FORMAT!r}")
        version = marker.get("version")
        if version != fmt.VERSION:
            seen = f"{version!r:.40}"
            raise ValueError(f"format version {seen}; this release reads {fmt.VERSION}")
        known: dict[str, Any] = {**msgspec.convert(marker, Marker)}
        name = known.get("name", "run")
        if not name or "\0" in name or name in (".", "..") or Path(name).name != name:
            raise ValueError(f"{name[:60]!r} is no name of a run")
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDumpError(f"{file} is damaged: {error}") from None
    return marker | known


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a native run, be its marker sound or not."""
    try:
        return os.path.lexists(folder / fmt.MARKER)
    except ValueError:  # a zero byte
        return False


def recorded_at(folder: Path) -> float:
    """Return the time when a native run began, in seconds since 1970. Raises CorruptDumpError."""
    return float(read_marker(folder).get("created", 0.0))


def not_of_run(folder: Path) -> str:
    """Return why a folder is not a native run and nothing else, "" if it is.

    A run has a marker, a folder for each process, and files beside them.
    """
    if folder.is_symlink():
        return "it is a link"
    if not folder.is_dir() or not is_run(folder):
        return f"it has no {fmt.MARKER}"
    ours = re.compile(r"rank\d+_\d+")
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink() and not ours.fullmatch(child.name):
            return f"it holds the folder {child.name}"
    return ""


def process_folders(run: Path) -> list[Path]:
    """Return the folder of each process of a run; a link out of the run is left out."""
    home = run.resolve()
    return [
        child
        for child in sorted(run.iterdir())
        if child.is_dir() and os.path.lexists(child / fmt.INDEX) and home in child.resolve().parents
    ]


def runs_in(folder: Path) -> list[Path]:
    """Return the native runs directly in ``folder``, oldest first."""
    try:
        found = [child for child in folder.iterdir() if child.is_dir() and is_run(child)]
    except (OSError, ValueError):  # not there, a name too long, a zero byte
        return []
    return sorted(found, key=lambda child: (os.lstat(child / fmt.MARKER).st_mtime_ns, child.name))


def find(name: str | os.PathLike[str]) -> Path:
    """Return the folder (or file) of a run, by path, by folder, or the newest one of a name.

    Raises:
        UnknownRunError: no run has that name; the message lists which names exist.
        NotADumpError: the path holds several runs with different names.
    """
    text = os.fspath(name)
    path = Path(expanded(text))
    home = runs_folder()
    if os.sep not in text and not path.is_absolute():
        named = _by_name(home, text)
        if named is not None:
            return named
    try:
        if text and path.exists():
            return _one_run(path)
    except OSError as error:  # a name too long for the file system, say
        raise UnknownRunError(f"no run {text[:60]!r}: {error.strerror}") from None
    raise UnknownRunError(f"no run {text!r}; {_there(home, text)}")


def _there(home: Path, wanted: str) -> str:
    """List the names of runs that resemble ``wanted``, or else all of them."""
    names = sorted({_name_that_opens(child, home) for child in runs_in(home)})
    close = difflib.get_close_matches(wanted, names, cutoff=0.6)
    if close:
        return f"nearest: {', '.join(close)}"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"in {home} there {verb} {', '.join(names[:12])}{more}" if names else f"{home} holds none"
    )


def _name_that_opens(run: Path, home: Path) -> str:
    """Return the name that a run was recorded under, or its folder's if that was renamed."""
    name = _name(run)
    return name if name is not None and _by_name(home, name) is not None else run.name


def _name(run: Path) -> str | None:
    """Return the name that a run was recorded under; None if its marker is damaged."""
    try:
        return str(read_marker(run).get("name", run.name))
    except CorruptDumpError:
        return None


def _by_name(home: Path, name: str) -> Path | None:
    named = [
        child
        for child in runs_in(home)
        if child.name.rpartition(".")[0] == name or child.name == name
    ]
    exact = [child for child in named if child.name == name or _name(child) == name]
    return exact[-1] if exact else None


def _one_run(path: Path) -> Path:
    """Return ``path`` itself if it is a run, else the newest run in it if all have one name."""
    if path.is_file() or is_run(path):
        return path
    inside = runs_in(path)
    names = {_name(child) for child in inside}
    if len(names) > 1:
        raise NotADumpError(
            f"{path} holds several runs; name one of {', '.join(child.name for child in inside)}"
        )
    return inside[-1] if inside else path
