"""Where the values of a run lie: what a worker on another machine needs to read its share.

A worker opens no index of a native run. It gets the place of each tensor in the files, and reads
these alone. Before that it makes sure that the folder holds the run that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import catalog, payload, reader
from llmdebug_nb.store.joined import JoinedRun, Whole, put_together
from llmdebug_nb.store.process import read_values
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]


@dataclass(frozen=True)
class Shards:
    """The place of a run.

    ``path``: absolute. ``identity``: tells whether another machine has the same run there.
    ``folders``: of its processes; none of another tool's dump.
    """

    path: str
    identity: str
    folders: tuple[str, ...]

    def opened(self) -> Load:
        """Return what reads a record here.

        Raises StoreError: the run is not there, or another one is.
        """
        path = Path(self.path)
        if not self.folders:
            return self._foreign(reader.open_run(path))
        if _marker(path) != self.identity:
            raise CorruptDumpError(f"{path} is another run here")

        pieces = [payload.pieces(path / folder) for folder in self.folders]

        def load(record: Record) -> torch.Tensor:
            number, offset, length = map(int, record.payload.split(","))
            summary = record.summary
            shape, kept = record.payload_shape, record.kept
            return read_values(pieces[number], offset, length, summary.dtype, shape, kept)

        return load

    def _foreign(self, run: Run) -> Load:
        if _of_layout(run) != self.identity:
            raise CorruptDumpError(f"{self.path} is another dump here")

        def load(record: Record) -> torch.Tensor:
            own = run.record(record.id)
            if (own.site, own.op) != (record.site, record.op):
                raise CorruptDumpError(f"{self.path} has {own.site} in place of {record.site} here")
            return run.load(own)

        return load


@dataclass(frozen=True)
class Portion:
    """Some tensors of a run. ``wholes``: by record, what those of a joined run are made of."""

    shards: Shards
    wholes: dict[int, Whole]

    def loading(self, load: Load) -> Load:
        """Return what reads them. ``load``: reads the records of the run that has the files."""

        def loaded(record: Record) -> torch.Tensor:
            whole = self.wholes.get(record.id)
            return load(record) if whole is None else put_together(load, whole, self.shards.path)

        return loaded


def shards_of(run: Run) -> Shards | None:
    """Return the place of a run; None if its tensors are in this process alone."""
    base = run.ranks if isinstance(run, JoinedRun) else run
    if base.path is None:
        return None
    path = base.path.absolute()
    if not base.is_native:
        return None if reader.lone(base) else Shards(str(path), _of_layout(base), ())
    folders = tuple(str(process["folder"]) for process in base.source.processes)
    return Shards(str(path), _marker(path), folders)


def portion(run: Run, shards: Shards, records: list[Record]) -> Portion:
    """Return some records of a run, for another machine."""
    if not isinstance(run, JoinedRun):
        return Portion(shards, {})
    return Portion(shards, {record.id: run.wholes[record.id] for record in records})


def _marker(path: Path) -> str:
    """Return what a run's marker says: when it was recorded, by which program. Raises StoreError"""
    return json.dumps(catalog.read_marker(path), sort_keys=True, default=str)


def _of_layout(run: Run) -> str:
    return f"{run.source.layout}, {len(run)} tensors"
