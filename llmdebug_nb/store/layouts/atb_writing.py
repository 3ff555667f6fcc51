"""Writing ATB dumps, in the folders of msit and in those of msprobe's probe."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.paths import parent_of
from llmdebug_nb.core.printable import cell
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.store.layouts import atb_bin
from llmdebug_nb.store.layouts.writing import Dump, Written, kept, later, loaded

_OPERATIONS = re.compile(r"[0-9]{1,9}_[A-Za-z0-9_]+(?:\.[0-9]{1,9}_[A-Za-z0-9_]+)*")
_SLOT = re.compile(r"(?:before\.|after\.)?[0-9]{1,9}")
_LONGEST_NAME = 80  # characters of an operation's name
_COLUMNS = (
    "Device and PID", "Execution Count", "Op Name", "Op Type", "Op Id", "Input/Output", "Index",
    "Dtype", "Format", "Shape", "Max", "Min", "Mean", "Norm", "Tensor Path",
)  # fmt: skip


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write a ``.bin`` per tensor, as msit has them; a step is a round, and a rank the device.

    A path of ATB is kept. Modules and operators of other runs become operations with the ids of
    their order in the operation around them: ``0_LlamaModel/3_DecoderLayer/1_Linear``; their
    arguments and results are numbered in order. Further calls are appended to the file of the
    first, as ATB does it.
    """
    operations = _Operations(dump.records)
    for record in kept(dump, written, _no_place):
        home = folder / "tensors" / f"{record.site.rank}_0" / str(record.site.step)
        if (content := _content(record, dump, written)) is not None:
            _append(home / operations.file(record), content)


def write_msprobe(dump: Dump, folder: Path, written: Written) -> None:
    """Write them as msprobe's probe does: a tensor equal to an earlier one of its round names it.

    ``statistic.csv`` has the figures of all tensors of a round. A tensor without values is in this
    table alone; one without figures, too, is described by its ``.bin``.
    """
    operations = _Operations(dump.records)
    rounds: dict[Path, _Round] = {}
    for record in kept(dump, written, _no_place_in_msprobe):
        process = f"{record.site.rank}_0"
        home = folder / "atb_dump_data" / "data" / process / str(record.site.step)
        if home not in rounds:
            rounds[home] = _Round(home, process)
        rounds[home].add(record, operations, dump, written)
    for each in rounds.values():
        each.finish()


class _Round:
    """The files and the table of one round of a process."""

    def __init__(self, home: Path, process: str) -> None:
        self._home, self._process = home, process
        self._rows: list[list[object]] = []
        self._names: dict[bytes, str] = {}  # content -> the name of the first file that has it

    def add(self, record: Record, operations: _Operations, dump: Dump, written: Written) -> None:
        """Write a tensor, or the name of an equal one, and its row."""
        file, s = operations.file(record), record.summary
        figured = s.max is not None and s.l2norm is not None
        if figured and record.payload is None:
            written.described += 1
        elif (content := _content(record, dump, written)) is None:
            return
        else:
            _append(self._home / file, self._named(file, content, record))
        if figured:
            self._rows.append(self._row(record, file))

    def _named(self, file: Path, content: bytes, record: Record) -> bytes:
        """Return the content, or that of a file which stands for an equal one."""
        s, digest = record.summary, hashlib.blake2b(content).digest()
        known = self._names.get(digest)
        if known is not None:
            return atb_bin.alias(s.dtype, s.shape, known)
        if record.payload is not None and not (self._home / file).exists():  # the first in its file
            ids = "_".join(part.partition("_")[0] for part in file.parts[:-2])
            self._names[digest] = f"{ids}_{file.name}"
        return content

    def _row(self, record: Record, file: Path) -> list[object]:
        s, operations = record.summary, [part.partition("_") for part in file.parts[:-2]]
        names, ids = [name for _, _, name in operations], [number for number, _, _ in operations]
        row = (
            self._process, record.site.step, "/".join(names), names[-1], "_".join(ids),
            record.site.role, re.sub("[^0-9]", "", file.stem), s.dtype, "nd",
            "x".join(map(str, s.shape)), s.max, s.min, s.mean, s.l2norm,
            "" if record.payload is None else str(self._home / file),
        )  # fmt: skip
        return list(map(cell, row))

    def finish(self) -> None:
        """Write the table."""
        if self._rows:
            self._home.mkdir(parents=True, exist_ok=True)
            with open(self._home / "statistic.csv", "w", newline="", encoding="utf-8") as stream:
                table = csv.writer(stream)
                table.writerow(_COLUMNS)
                table.writerows(self._rows)


def _append(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as stream:
        stream.write(content)


def _content(record: Record, dump: Dump, written: Written) -> bytes | None:
    """Return the bytes of a tensor, of its figures, or of its description; None if left out."""
    try:
        if record.payload is None:
            content = atb_bin.described(record.summary)
            written.described += 1
            return content
        values = loaded(record, dump.load, written)
        if values is None:
            return None
        content = atb_bin.encode(values)
        written.tensors += 1
        return content
    except CorruptDumpError as error:
        written.left_out[str(error)] += 1
        return None


def _no_place(record: Record) -> str | None:
    """Return why ATB has no file for a record, or None."""
    if record.site.phase != "forward":
        return "of backward passes, which ATB does not have"
    if record.site.role not in ("input", "output"):
        return "of weights, which are inputs of operations in ATB"
    return later(record.site)


def _no_place_in_msprobe(record: Record) -> str | None:
    """Return why msprobe's probe has no file for a record, or None."""
    if record.site.slot.startswith(("before.", "after.")):
        return "seen when msprobe's probe does not look: inputs after, or outputs before a call"
    if record.site.call and record.payload is None:
        return "of further calls in a round without values: its table has one row for all"
    return _no_place(record)


class _Operations:
    """The folders of operations, and the numbers of their tensors."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._ops = {record.site.path: record.op for record in records}
        self._native = all(map(_OPERATIONS.fullmatch, self._ops))
        self._folders: dict[str, str] = {}
        self._inside: Counter[str] = Counter()
        self._slots: dict[tuple[CallKey, str], list[str]] = defaultdict(list)
        for record in records:
            self._slots[record.site.key, record.site.role].append(record.site.slot)

    def file(self, record: Record) -> Path:
        """Return the file of a tensor below its round."""
        role = record.site.role
        when, _, index = self.slot(record).rpartition(".")
        when = when or ("before" if role == "input" else "after")
        return Path(
            self.folder(record.site.path), when, f"{role.removesuffix('put')}tensor{index}.bin"
        )

    def folder(self, path: str) -> str:
        """Return the folder of an operation, within those that ran around it."""
        if self._native:
            return path.replace(".", "/")
        if path not in self._folders:
            around = self._around(path)
            bare = re.sub("[^A-Za-z0-9_]", "", self._ops[path].rpartition(".")[2])
            number = self._inside[around]
            self._inside[around] += 1
            self._folders[path] = f"{around}{number}_{bare[:_LONGEST_NAME] or 'Operation'}/"
        return self._folders[path]

    def _around(self, path: str) -> str:
        module, slash, _ = path.partition("/")
        at = module if slash else parent_of(module)
        while at and at not in self._ops:
            at = parent_of(at)
        return self.folder(at) if path and at in self._ops else ""

    def slot(self, record: Record) -> str:
        """Return the number of a tensor among those of its call, as a path of ATB has it."""
        slots = self._slots[record.site.key, record.site.role]
        if all(map(_SLOT.fullmatch, slots)):
            return record.site.slot
        return str(slots.index(record.site.slot))
