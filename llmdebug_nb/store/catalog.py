"""Finding runs: by name in the runs folder, or by path."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError, UnknownRunError
from llmdebug_nb.core.options import runs_folder
from llmdebug_nb.store import format as fmt

_MAX_MARKER = 1 << 22


def read_marker(folder: Path) -> dict[str, Any]:
    """Return a run's marker, ``llmdebug.json``.

    Raises:
        CorruptDumpError: it is not such a marker, or of a later version of the format.
    """
    file = folder / fmt.MARKER
    try:
        if file.stat().st_size > _MAX_MARKER:
            raise ValueError("it is too large")
        marker = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(marker, dict) or marker.get("format") != fmt.FORMAT:
            raise ValueError(f"it does not say format {fmt.FORMAT!r}")
    except (OSError, ValueError) as error:
        raise CorruptDumpError(f"{file} is damaged: {error}") from None
    if marker.get("version") != fmt.VERSION:
        raise CorruptDumpError(
            f"{file}: format version {marker.get('version')!r}; this release reads {fmt.VERSION}"
        )
    return marker


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a native run."""
    return (folder / fmt.MARKER).is_file()


def recorded_at(folder: Path) -> float:
    """Return the time when a native run began, in seconds since 1970."""
    created = read_marker(folder).get("created", 0.0)
    return float(created) if isinstance(created, (int, float)) else 0.0


def runs_in(folder: Path) -> list[Path]:
    """Return the native runs directly in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [child for child in folder.iterdir() if child.is_dir() and is_run(child)]
    return sorted(found, key=lambda child: ((child / fmt.MARKER).stat().st_mtime_ns, child.name))


def find(name: str | os.PathLike[str]) -> Path:
    """Return the folder (or file) of a run, by path, by folder, or the newest one of a name.

    Raises:
        UnknownRunError: no run has that name; the message lists which names exist.
        NotADumpError: the path holds several runs with different names.
    """
    path = Path(name).expanduser()
    text = os.fspath(name)
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
    name = str(read_marker(run).get("name", run.name))
    return name if _by_name(home, name) is not None else run.name


def _by_name(home: Path, name: str) -> Path | None:
    named = [
        child
        for child in runs_in(home)
        if child.name.rpartition(".")[0] == name or child.name == name
    ]
    exact = [
        child for child in named if child.name == name or read_marker(child).get("name") == name
    ]
    return exact[-1] if exact else None


def _one_run(path: Path) -> Path:
    """Return ``path`` itself if it is a run, else the newest run in it if all have one name."""
    if path.is_file() or is_run(path):
        return path
    inside = runs_in(path)
    names = {read_marker(child).get("name") for child in inside}
    if len(names) > 1:
        raise NotADumpError(
            f"{path} holds several runs; name one of {', '.join(child.name for child in inside)}"
        )
    return inside[-1] if inside else path
