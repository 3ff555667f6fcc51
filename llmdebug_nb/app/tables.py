"""Tables of a run: csv files in msit's columns, timelines, profiles of ONNX Runtime."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.app.runs import open_run
from llmdebug_nb.capture.onnx import ort_profile
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.show import timeline as timelines
from llmdebug_nb.show.timeline import Timeline
from llmdebug_nb.store import profile, tables
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas


def write_tables(where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the operators, kernels and host times of a run as csv files; return their paths.

    Folders and columns are those of msit's dumps.

    Raises:
        StoreError: the run has no such tables or can't be opened, or the folder can't be written.
    """
    return tables.write_tables(open_run(where), on_this_machine(folder))


@dataclass(frozen=True)
class TableFiles:
    """The csv files of a run's tables. As the value of a cell they are their first rows."""

    paths: list[Path]

    def frames(self) -> dict[str, pandas.DataFrame]:
        """Return the tables as DataFrames, by folder and name: ``4711/operation_tensors_0``.

        The columns are msit's; `Run.ops`, `Run.kernels` and `Run.host` have our own, with types.
        """
        import pandas

        frames = {}
        for path in self.paths:
            with open(path, encoding="utf-8") as file:
                bars = "|" in file.readline()
            how = {"sep": "|", "quoting": csv.QUOTE_NONE} if bars else {}
            name = f"{path.parent.name}/{path.stem}"
            frames[name] = pandas.read_csv(path, keep_default_na=False, **how)  # type: ignore[arg-type]
        return frames

    def __str__(self) -> str:
        return "\n".join(f"written: {path}" for path in self.paths)

    __repr__ = __str__


def timeline(
    where: str | os.PathLike[str] | Run, step: int | None = None, generation: int = 0
) -> Timeline:
    """Return the timeline of one step of a run recorded with ``profile`` (default: its first step).

    As the value of a cell it is a picture and two tables; ``save(path)`` writes the picture;
    ``print`` gives text.

    Raises:
        TensorLookupError: the run has no times of that step.
        UnknownRunError, CorruptDumpError: as `open_run`.
    """
    return timelines.timeline(open_run(where), step, generation)


def ort_kernels(path: str | os.PathLike[str]) -> pandas.DataFrame:
    """Read a profile of ONNX Runtime (``SessionOptions.enable_profiling``): one row per node run.

    The columns are those of `Run.kernels`; ``step`` is the number of the `run` call.

    Raises:
        CorruptDumpError: the file is not such a profile.
    """
    return profile.kernel_frame(ort_profile.launches(path))
