"""What is expected to differ, kept beside the runs of one name: ``NAME.expected.json`` in the folder that holds the run of mine.

It counts for every comparison of mine with a golden of the same name, of recordings made earlier or later.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, OptionError
from llmdebug_nb.core.findings import Expectation
from llmdebug_nb.store.run import Run

FORMAT, VERSION = "llmdebug-expected", 1
_MOST, _LONGEST, _LARGEST = 10_000, 2_000, 1 << 22  # marks of a file, characters of a text, bytes
_TEXTS = {"role": ("input", "output", "weight", "grad"), "phase": ("forward", "backward")}
_PLAIN = re.compile(r"[\w.-]{1,100}")
_NAMES = tuple(field.name for field in fields(Expectation))


def file_of(mine: Run) -> Path | None:
    """Return where it is kept for runs named as ``mine`` is; None for a run that is in no folder."""
    if mine.path is None:
        return None
    name = (
        mine.name if _PLAIN.fullmatch(mine.name) else mine.path.name
    )  # a dump may call itself anything
    return mine.path.absolute().parent / f"{name}.expected.json"


def checked(mark: Expectation) -> Expectation:
    """Return it. Raises OptionError where a field makes no sense, or is too long."""
    for name in ("path", "comment", "role", "slot", "phase"):
        value = getattr(mark, name)
        if value is None and name not in ("path", "comment"):
            continue
        if not isinstance(value, str) or len(value) > _LONGEST or not _is_text(value):
            raise OptionError(
                f"{name} {value!r:.60}: expected a text of at most {_LONGEST:,} characters"
            )
        if name in _TEXTS and value not in _TEXTS[name]:
            raise OptionError(
                f"{name} {value!r:.60} is not known; known: {', '.join(_TEXTS[name])}"
            )
    if mark.step is not None and (type(mark.step) is not int or mark.step < 0):
        raise OptionError(f"step {mark.step!r:.60}: expected a number of a step, or None for all")
    if mark.path == "" and mark.role is None and mark.slot is None:
        raise OptionError("path '': expected a glob over module paths; '*' is the whole model")
    return mark


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def read(golden: Run, mine: Run) -> list[Expectation]:
    """Return what is expected of ``mine`` against ``golden``. Raises CorruptDumpError for a file that is damaged."""
    file = file_of(mine)
    return [] if file is None else [mark for name, mark in _entries(file) if name == golden.name]


def write(golden: Run, mine: Run, marks: Sequence[Expectation]) -> Path | None:
    """Keep ``marks`` in place of what was expected of these two, whole or not at all; return the file, None for a run in no folder.

    Raises:
        CorruptDumpError: the file that is there is damaged; it is left as it is.
        DumpWriteError: it can't be written.
    """
    file = file_of(mine)
    if file is None:
        return None
    kept = [(name, mark) for name, mark in _entries(file) if name != golden.name]
    entries = [
        {
            "golden": name,
            **{
                key: value
                for key, value in asdict(mark).items()
                if value not in (None, "") or key == "path"
            },
        }
        for name, mark in [*kept, *((golden.name, mark) for mark in marks)]
    ]
    text = (
        json.dumps(
            {"format": FORMAT, "version": VERSION, "expected": entries},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )
    try:
        if entries:
            _replace(file, text)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise DumpWriteError(f"can't write {file}: {error.strerror or error}") from None
    return file


def _replace(file: Path, text: str) -> None:
    handle, fresh = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(fresh).chmod(0o644)
        os.replace(fresh, file)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def _entries(file: Path) -> list[tuple[str, Expectation]]:
    """Return the marks of a file with golden's name each; none where there is no file."""
    try:
        if file.stat().st_size > _LARGEST:
            raise ValueError("it is too large")
        data = json.loads(file.read_text(encoding="utf-8"))
        return _checked_entries(data)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise CorruptDumpError(
            f"{file} is damaged, so nothing counts as expected: {why}; mend it or delete it"
        ) from None


def _checked_entries(data: Any) -> list[tuple[str, Expectation]]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it does not say format {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r:.60}, and this release reads {VERSION}")
    entries = data.get("expected")
    if not isinstance(entries, list) or len(entries) > _MOST:
        raise ValueError(f"'expected' must be a list of at most {_MOST:,} marks")
    return [_checked_entry(at, entry) for at, entry in enumerate(entries)]


def _checked_entry(at: int, entry: Any) -> tuple[str, Expectation]:
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("golden"), str)
        or "path" not in entry
    ):
        raise ValueError(f"mark {at} must be an object with 'golden' and 'path'")
    unknown = next((name for name in entry if name not in (*_NAMES, "golden")), None)
    if unknown is not None:
        raise ValueError(f"mark {at} has an unknown key {unknown!r:.60}")
    try:
        return entry["golden"], checked(
            Expectation(**{name: entry[name] for name in _NAMES if name in entry})
        )
    except OptionError as error:
        raise ValueError(f"mark {at}: {error}") from None
