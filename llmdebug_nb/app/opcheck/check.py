"""The use case: check the operators of a run, go on after an interrupt, and write the result."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.cluster.cluster import Cluster, ClusterLike, connected
from llmdebug_nb.app.differences import ResultTable
from llmdebug_nb.app.live_models import is_recorded_here
from llmdebug_nb.app.opcheck import cases as case_files
from llmdebug_nb.app.opcheck.algorithms import load, name_of
from llmdebug_nb.app.opcheck.checking import How, check_all
from llmdebug_nb.app.opcheck.choosing import Call, Choice, calls_of
from llmdebug_nb.app.opcheck.journal import Journal
from llmdebug_nb.app.opcheck.on_cluster import check_on_cluster
from llmdebug_nb.app.opcheck.processes import check_in_processes
from llmdebug_nb.app.opcheck.weights import FileWeights
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import (
    DumpWriteError,
    OptionError,
    TensorLookupError,
    first_line,
    nearest,
    saving,
)
from llmdebug_nb.core.ggml import PREFIX
from llmdebug_nb.core.option_parsing import some_of
from llmdebug_nb.core.options import runs_folder
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.replay.checks import METRICS, MODES, REFERENCES, CallCheck, OpCheckResult
from llmdebug_nb.show import opcheck as shown
from llmdebug_nb.show.spreadsheet import workbook
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas

_MOST_JOBS = 64  # processes
_SHOWN = 8  # operators that an error lists
_MOST_THREADS = 1024  # a machine with more cores is not known


class OpCheck(ResultTable):
    """The result of `opcheck`. ``result``: all checks. ``paths``: the files that were written."""

    def __init__(self, run: Run, result: OpCheckResult) -> None:
        self.run, self.result = run, result
        self.paths: tuple[Path, ...] = ()

    @property
    def verdict(self) -> str:
        """``wrong`` if an operator is, ``right``, or ``not checked`` if none was checked."""
        return self.result.verdict

    @property
    def wrong(self) -> list[CallCheck]:
        """The wrong calls, in execution order."""
        return self.result.wrong

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each output: upstream's columns first, then ours."""
        import pandas

        return pandas.DataFrame(shown.rows(self.result), columns=shown.columns(self.result))

    def to_xlsx(self, path: str | os.PathLike[str]) -> Path:
        """Write upstream's workbook: all outputs, and those that failed. Raises DumpWriteError."""
        where, columns = on_this_machine(path), shown.columns(self.result)
        rows = [list(row.values()) for row in shown.rows(self.result)]
        failed = [list(row.values()) for row in shown.rows(self.result, failed=True)]
        sheets = {"opcheck_results": rows, "addition_failed_cases": failed}
        with saving(where):
            where.write_bytes(workbook({n: [columns, *each] for n, each in sheets.items()}))
        return where

    def repro(self, which: CallCheck | int = 0) -> str:
        """Return a script that computes a call again, in its own dtype and in float64.

        ``which``: a check, or the number of a wrong call, the first is 0.

        Raises:
            TensorLookupError: there is no such call, or it can't be computed again.
        """
        from llmdebug_nb.app.opcheck.scripts import script

        if isinstance(which, int):
            if not 0 <= which < len(self.wrong):
                raise TensorLookupError(f"there are {len(self.wrong)} wrong calls, from 0")
            which = self.wrong[which]
        return script(self.run, which)

    def __str__(self) -> str:
        return shown.text(self.result, self.paths)

    def _repr_html_(self) -> str:
        return shown.page(self.result, self.paths)


def opcheck(
    run: Run | str | os.PathLike[str],
    *,
    ids: str | Iterable[str] | None = None,
    names: str | Iterable[str] | None = None,
    paths: str | Iterable[str] | None = None,
    cases: str | os.PathLike[str] | None = None,
    metrics: str | Iterable[str] = ("rel",),
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    rerun: bool = False,
    jobs: int = 1,
    mode: str = "keep_origin_dtype",
    algorithms: str | Iterable[str] = (),
    weights: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool = True,
    cluster: ClusterLike | None = None,
) -> OpCheck:
    """Compute each recorded operator again in float64, and judge its recorded output by that.

        check = ld.opcheck("golden", rerun=True)
        check.verdict               # right, wrong or not checked
        check.to_pandas()

    An interrupted check goes on where it stopped, if it is called again in the same way.

    Args:
        run: a run, or its name or path, or a dump of another tool.
        ids: execution ids of calls; what runs inside them too.
        names: parts of operators' names, such as ``linear``.
        paths: globs of paths; what is inside such a module too.
        cases: a csv; only the calls that its rows name are checked: msit's
            ``operation_tensors_N.csv``, or the csv of a check. It gives the parameters that an ATB
            dump lacks.
        metrics: upstream's metrics to report: ``rel``, ``abs``, ``cos_sim``, ``kl``.
        device: where the reference is computed, and wrong operators again.
        dtype: of the reference: ``float64``, ``float32``, or ``own`` for that of the recorded
            tensors. Default: float64, with ``threads`` own.
        threads: that compute the reference: does the result depend on their number?
        rerun: run wrong operators again in their own dtype: is the recorded output wrong, or the
            operator itself?
        jobs: processes.
        mode: ``force_fp16`` or ``force_fp32`` rounds recorded floating tensors to that dtype first,
            as upstream does; they are judged by its standard then. Calls with a coarser dtype stay.
        algorithms: comparisons of your own, each ``FILE.py:FUNCTION``, a function
            ``(golden, mine) -> (number, message)``. The file is run. They decide nothing.
        weights: the GGUF file that ran, for a run of llama.cpp that was recorded without
            ``weights=True``.
        output: folder of the csv and xlsx files (default: that of the runs).
        progress: show a progress bar.
        cluster: a Dask cluster that checks, in place of ``jobs``: see `compare`. The result is the
            same; what its workers can't do is done here and said.

    Raises:
        OptionError: an option is wrong. DumpWriteError: a file can't be written.
        UnknownRunError, CorruptDumpError: the run, or the file of weights, can't be opened.
        MissingPackageError: ``weights`` needs the package gguf, ``cluster`` needs Dask.
        ClusterError: no scheduler answers, or no worker has the versions of this machine.
    """
    run, choice = open_run(run), Choice.of(ids, names, paths)
    how = _how(run, metrics, device, rerun)
    how = dataclasses.replace(how, mode=_mode(mode), algorithms=_algorithms(algorithms))
    how = dataclasses.replace(how, **_reference(dtype, threads))
    if not 1 <= jobs <= _MOST_JOBS:
        raise OptionError(f"jobs: {jobs} processes; expected 1 to {_MOST_JOBS}")
    calls, absent = _chosen(run, choice, cases)
    how = dataclasses.replace(how, weights=_weights(run, calls, weights))
    folder = runs_folder() if output is None else on_this_machine(output)
    if cluster is not None and jobs > 1:
        raise OptionError(f"jobs: {jobs} processes of this machine, or cluster; not both")
    with connected(cluster, progress) as workers, Journal(folder, run, how, calls) as journal:
        left = [call for call in calls if call.record not in journal.done]
        with progress_bar(total=len(calls), desc="opcheck", unit="call", shown=progress) as bar:
            bar.update(len(calls) - len(left))
            for check in _checks(run, left, how, jobs, workers):
                journal.add(check)
                bar.update(1)
        done = tuple(journal.done[call.record] for call in calls if call.record in journal.done)
        options: dict[str, object] = {
            "metrics": how.metrics, "own": tuple(map(name_of, how.algorithms)),
            "dtype": how.dtype, "threads": how.threads,
        }  # fmt: skip
        notes = () if workers is None else tuple(workers.notes())
        result = OpCheck(run, OpCheckResult(run.label, len(calls), done, options, absent, notes))
        result.paths = _write(result, folder)
        journal.remove()
    return result


def _chosen(
    run: Run, choice: Choice, cases: str | os.PathLike[str] | None
) -> tuple[list[Call], tuple[str, ...]]:
    """Return the calls to check, and the cases that name none. Raises OptionError."""
    every = calls_of(run, Choice())
    if every and not any(map(choice.has, every)):
        ops = sorted({call.op for call in every})
        raise OptionError(
            f"none of the {len(every):,} calls of {run.label} has {choice}; it has, for example,"
            f" {every[0].op}{f' (id {every[0].id})' if every[0].id else ''} at {every[0].key.path};"
            f" operators: {', '.join(ops[:_SHOWN])}{' …' if len(ops) > _SHOWN else ''}"
        )
    if cases is None:
        return [call for call in every if choice.has(call)], ()
    wanted = case_files.read(cases)
    calls, absent = case_files.choose(wanted, every)
    if not calls:
        has = f"; the run has, for example, {every[0].op} {every[0].id}" if every else ""
        raise OptionError(
            f"cases: none of {len(wanted):,} rows names a call of {run.label},"
            f" such as {wanted[0]}{has}"
        )
    return [call for call in calls if choice.has(call)], tuple(map(str, absent))


def _how(run: Run, metrics: str | Iterable[str], device: str, rerun: bool) -> How:
    """Read options. Raises OptionError."""
    import torch

    wanted = tuple(some_of(metrics, METRICS, "metrics"))
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = first_line(error)
        raise OptionError(f"device {device!r} can't compute in float64: {why}") from None
    return How(wanted, device, rerun, is_recorded_here(run))


def _reference(dtype: str | None, threads: int | None) -> dict[str, Any]:
    """Read how the reference is computed. Raises OptionError."""
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise OptionError(f"threads: {threads} threads; expected 1 to {_MOST_THREADS}")
    chosen = dtype or ("float64" if threads is None else "own")
    if chosen not in REFERENCES:
        raise OptionError(f"dtype: {chosen!r} is not known; expected {', '.join(REFERENCES)}")
    return {"dtype": chosen, "threads": threads or 0}


def _weights(run: Run, calls: list[Call], file: str | os.PathLike[str] | None) -> str:
    """Return the path of a file of weights, "" for none.

    Raises OptionError: no call needs it. CorruptDumpError, MissingPackageError: see `FileWeights`.
    """
    if file is None:
        return ""
    if not any(call.op.startswith(PREFIX) for call in calls):
        raise OptionError(
            f"weights: {run.label} has no nodes of llama.cpp; other runs have their own weights"
        )
    path = Path(file).expanduser().resolve()
    FileWeights(path)
    return str(path)


def _mode(mode: str) -> str:
    """Raises OptionError."""
    if mode not in MODES:
        raise OptionError(f"mode: {mode!r} is not known{nearest(str(mode), MODES)}")
    return mode


def _algorithms(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the user's comparisons, once each has been loaded. Raises OptionError."""
    found = (texts,) if isinstance(texts, str) else tuple(texts)
    absolute = tuple(
        f"{Path(place).expanduser().resolve()}:{name}" if place else text
        for text in found
        for place, _, name in [text.rpartition(":")]
    )
    for text in absolute:
        load(text)
    return absolute


def _checks(
    run: Run, calls: list[Call], how: How, jobs: int, workers: Cluster | None
) -> Iterator[CallCheck]:
    jobs = min(jobs, len(calls))
    if workers is not None:
        yield from check_on_cluster(workers, run, calls, how)
    elif jobs < 2 or run.path is None:
        yield from check_all(run, calls, how)
    else:
        yield from check_in_processes(run.where, calls, how, jobs)


def _write(check: OpCheck, folder: Path) -> tuple[Path, ...]:
    """Write both files, under a name that is free."""
    stamp = time.strftime("%Y%m%d%H%M%S")
    for number in range(1, 10**6):
        name = f"opcheck_result_{stamp}{f'_{number}' if number > 1 else ''}"
        csv, xlsx = folder / f"{name}.csv", folder / f"{name}.xlsx"
        if not csv.exists() and not xlsx.exists():
            return check.to_csv(csv), check.to_xlsx(xlsx)
    raise DumpWriteError(f"{folder} is full of results")
