"""The file config.json of msprobe: reading it, and its switch ``dump_enable``."""

from __future__ import annotations

import json
import reprlib
import warnings
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError

_MAX_FILE = 1 << 20


class DumpSwitch:
    """``dump_enable`` of a config.json. If the file sets it, a changed file is read again."""

    def __init__(self, path: Path | None, values: dict[str, Any]) -> None:
        self._path, self._values = path, values
        self._is_on = flag(values.get("dump_enable"), f"{path}: dump_enable", True)
        self._seen = self._state()

    def is_on(self) -> bool:
        """True if recording is on now. A file that can't be read is a warning."""
        if (
            self._path is None
            or self._values.get("dump_enable") is None
            or self._state() == self._seen
        ):
            return self._is_on
        self._seen = self._state()
        try:
            values = load(self._path)
            self._is_on = flag(values.get("dump_enable"), f"{self._path}: dump_enable", self._is_on)
        except OptionError as error:
            warnings.warn(
                f"{error}; recording stays {'on' if self._is_on else 'off'}", stacklevel=4
            )
            return self._is_on
        changed = [
            name
            for name in values.keys() | self._values.keys()
            if values.get(name) != self._values.get(name)
        ]
        if set(changed) - {"dump_enable"}:
            names = ", ".join(sorted(set(changed) - {"dump_enable"}))
            warnings.warn(
                f"{self._path}: only dump_enable is read again, not {names}", stacklevel=4
            )
        self._values = {**values, "dump_enable": self._is_on}
        return self._is_on

    def _state(self) -> tuple[int, int] | None:
        try:
            stat = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size)


def load(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises OptionError."""
    try:
        if not path.is_file():
            raise OSError("there is no such file")
        if path.stat().st_size > _MAX_FILE:
            raise ValueError("it is larger than 1 MiB")
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        why = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise OptionError(
            f"{path}: {why}; expected a JSON object with fields such as task, level and step"
        ) from None
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} is there twice"
        )
    return values


def flag(value: object, what: str, default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise wrong(what, value, "true or false")
    return default if value is None else value


def wrong(what: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{what} {reprlib.repr(value)}: expected {expected}")
