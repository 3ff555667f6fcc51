"""The file of expected deviations: ``NAME.expected.json`` beside the runs of that name.

NAME is that of mine. The file holds for every comparison with a golden of the same name, whenever
either of them was recorded.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from llmdebug_nb.core.errors import CorruptDumpError, OptionError, saving
from llmdebug_nb.store.expectation import Expectation
from llmdebug_nb.store.run import Run

FORMAT, VERSION = "llmdebug-expected", 1
# limits: expectations of a file, characters of a text, bytes of a file
_MOST, _LONGEST, _LARGEST = 10_000, 2_000, 1 << 22
_TEXTS = {"role": ("input", "output", "weight", "grad"), "phase": ("forward", "backward")}
_PLAIN = re.compile(r"[\w.-]{1,100}")
_NAMES = tuple(field.name for field in fields(Expectation))


def file_of(mine: Run) -> Path | None:
    """Return the file of runs named as ``mine``; None for a run without a folder."""
    if mine.path is None:
        return None
    # a dump may call itself anything
    name = mine.name if _PLAIN.fullmatch(mine.name) else mine.path.name
    return mine.path.absolute().parent / f"{name}.expected.json"


def checked(mark: Expectation) -> Expectation:
    """Return an expectation. Raises OptionError if a field is invalid or too long."""
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
    """Return the expectations for ``mine`` against ``golden``.

    Raises CorruptDumpError if the file is damaged.
    """
    file = file_of(mine)
    return [] if file is None else [mark for name, mark in _entries(file) if name == golden.name]


def write(golden: Run, mine: Run, marks: Sequence[Expectation]) -> Path | None:
    """Write the expectations for two runs in place of those before; return the file.

    It is None for a run without a folder. The file is replaced in one step.

    Raises:
        CorruptDumpError: the existing file is damaged; it stays unchanged.
        DumpWriteError: the file can't be written.
    """
    file = file_of(mine)
    if file is None:
        return None
    kept = [(name, mark) for name, mark in _entries(file) if name != golden.name]
    kept += [(golden.name, mark) for mark in marks]
    entries = [{"golden": name, **_as_json(mark)} for name, mark in kept]
    document = {"format": FORMAT, "version": VERSION, "expected": entries}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    with saving(file):
        if entries:
            _replace(file, text)
        else:
            file.unlink(missing_ok=True)
    return file


def _as_json(mark: Expectation) -> dict[str, object]:
    fields = asdict(mark).items()
    return {key: value for key, value in fields if value not in (None, "") or key == "path"}


def _replace(file: Path, text: str) -> None:
    handle, fresh = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        if file.exists():  # who shares the file with others goes on sharing it
            Path(fresh).chmod(stat.S_IMODE(file.stat().st_mode))
        os.replace(fresh, file)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def _entries(file: Path) -> list[tuple[str, Expectation]]:
    """Return the expectations of a file, each with golden's name; none if there is no file."""
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


def _checked_entries(data: object) -> list[tuple[str, Expectation]]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it does not say format {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r:.60}, and this release reads {VERSION}")
    entries = data.get("expected")
    if not isinstance(entries, list) or len(entries) > _MOST:
        raise ValueError(f"'expected' must be a list of at most {_MOST:,} marks")
    return [_checked_entry(at, entry) for at, entry in enumerate(entries)]


def _checked_entry(at: int, entry: object) -> tuple[str, Expectation]:
    named = isinstance(entry, dict) and isinstance(entry.get("golden"), str)
    if not isinstance(entry, dict) or not named or "path" not in entry:
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
