"""The runs that can be opened by name: open, list, delete, reduce and describe them."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import warnings
from pathlib import Path

from llmdebug_nb.app import uploading
from llmdebug_nb.app.destination import recorded
from llmdebug_nb.app.scratch import Scratch
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import OptionError, StoreError, UnknownRunError
from llmdebug_nb.core.kernels import partial
from llmdebug_nb.core.options import DumpOptions, runs_folder
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.urls import is_url, on_this_machine
from llmdebug_nb.show.words import count_text, size_text
from llmdebug_nb.store import catalog, reader, redact, reduce
from llmdebug_nb.store.payload import elsewhere
from llmdebug_nb.store.remote import opening as remote
from llmdebug_nb.store.run import Run


def open_run(where: str | os.PathLike[str] | Run) -> Run:
    """Open a run by name (of this process, or in the runs folder) or path, or another tool's dump.

    A URL that fsspec reaches opens a run in a remote store: ``s3://bucket/runs/golden``.

    Raises:
        UnknownRunError, NotADumpError, CorruptDumpError: the message names the cause and a remedy.
        RemoteError: the remote store fails. MissingPackageError: its package is not installed.
    """
    if isinstance(where, str) and is_url(where):
        return remote.opened(where, _mirrors().path)
    here = recorded.get(where) if isinstance(where, str) else None
    if not isinstance(where, str) or here is None or not catalog.is_run(here):
        return reader.open_run(where)
    try:
        elsewhere = catalog.find(where)
    except UnknownRunError:
        return reader.native(here)
    return reader.native(max((here, elsewhere), key=catalog.recorded_at))


@functools.cache
def _mirrors() -> Scratch:
    """The folder for the indexes of runs in remote stores."""
    scratch = Scratch("remote")
    atexit.register(scratch.remove)
    return scratch


def runs() -> list[Run]:
    """Return the runs that can be opened by name, oldest first. A damaged run is a warning."""
    folders = [*catalog.runs_in(runs_folder()), *recorded.values()]
    readable = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()):
        try:
            run = reader.native(folder)
            run.source  # noqa: B018 - opens the files
            readable.append(run)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=2)
    return readable


def delete_run(where: str | os.PathLike[str] | Run) -> Path:
    """Delete a run's folder, be the run damaged or not, and return its path.

    Raises:
        UnknownRunError: there is no such run.
        OptionError: the folder is a link, or not a run's alone; or the run is in a remote store.
    """
    if is_url(where) or (isinstance(where, Run) and elsewhere(where.path) is not None):
        url = where.where if isinstance(where, Run) else where
        raise OptionError(f"{url} is in a remote store: delete it with the tools of that store")
    if isinstance(where, Run):
        path, name = where.path, where.name
    else:
        path, name = recorded.get(str(where)) or catalog.find(where), str(where)
    if path is None or not path.exists():
        raise UnknownRunError(f"run {name!r} is already gone")
    others = catalog.not_of_run(path)
    if others:
        raise OptionError(f"{path} is not a run's alone ({others}); delete it yourself")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise OptionError(f"{path} can't be deleted: {error.strerror or error}") from None
    for name in [name for name, folder in recorded.items() if folder == path]:
        del recorded[name]
    return path


def reduce_run(
    where: str | os.PathLike[str] | Run,
    to: str = "minmax",
    name: str | None = None,
    replace: bool = False,
) -> Run:
    """Write a smaller run with a few figures of each tensor in place of its values; return it.

    Statistics, calls and operators are all kept.

    Args:
        where: the run, or its name or path.
        to: ``minmax``, or ``quantile:N`` for N points.
        name: of the new run, which lies beside the old one. Default: the old name with
            ``.minmax`` or ``.quantile`` appended.
        replace: replace the old run, once the new one is completely on disk.

    Raises:
        OptionError: another ``to``, or a run of another tool.
        UnknownRunError, CorruptDumpError: as `open_run`.
        DumpWriteError: not enough room; the old run is unchanged.
    """
    if name is not None and replace:
        raise OptionError(f"name {name!r}: with replace, the run keeps its name")
    kind, _, points = str(DumpOptions(name=name or "run", reduce=to).reduce).partition(":")
    run, path = _own(where, "reduced")
    figures = functools.partial(partial.quantiles, count=int(points)) if points else partial.minmax
    label = f"quantile[{points}]" if points else kind
    folder, own_name = name or f"{run.name}.{kind}", run.name if replace else None
    with progress_bar(total=len(run), desc="reduce", unit="tensor") as bar:
        new = reduce.reduced(path, folder, label, figures, bar.update, own_name)
    return reader.native(reduce.replace(path, new) if replace else new)


def redact_run(
    where: str | os.PathLike[str] | Run, output: str | os.PathLike[str] | None = None
) -> Run:
    """Write a copy of a run without values, sources and strings, to share it; return the copy.

    Module paths, names of operators and arguments, shapes and the statistics of floating-point
    tensors stay, so two such copies compare. The run itself is unchanged.

    Args:
        where: the run, or its name or path.
        output: the new folder. Default: the run's folder with ``.redacted`` appended.

    Raises:
        OptionError: ``output`` is there already, or the run is of another tool.
        UnknownRunError, CorruptDumpError: as `open_run`.
        DumpWriteError: not enough room.
    """
    run, path = _own(where, "redacted")
    folder = (
        path.with_name(f"{path.name}.redacted")
        if output is None
        else on_this_machine(output).absolute()
    )
    if output is not None and folder.exists():
        raise OptionError(f"{output} is there already: name a new folder")
    with progress_bar(total=len(run), desc="redact", unit="tensor") as bar:
        return reader.native(redact.redacted(path, folder, bar.update))


def _own(where: str | os.PathLike[str] | Run, what: str) -> tuple[Run, Path]:
    """Return a run and its folder. Raises OptionError for one of another tool."""
    run = open_run(where)
    if run.path is None or not catalog.is_run(run.path):
        raise OptionError(
            f"{run.label} was not recorded by llmdebug_nb: only its own runs can be {what}"
        )
    if elsewhere(run.path) is not None:
        raise OptionError(
            f"{run.where} is in a remote store, and only runs of this machine can be {what};"
            f" llmdebug copy {run.where} copies it to this machine"
        )
    return run, run.path


def describe_run(run: Run) -> str:
    """Return one line: the contents of a run, its folder, and the values that are missing."""
    info, meta = run.info(), run.meta
    tensors, steps = count_text(info["records"], "tensor"), count_text(info["steps"], "step")
    first = ", ".join([f"{run.name}: {tensors} of {steps}", _values_text(run)])
    calls = filter(None, [run.calls_text()])
    text = "; ".join([first, *calls, *meta.get("determinism", []), *(meta.get("notes") or [])])
    if not info["complete"]:
        text += f"; incomplete: {info['ended_by'] or 'the recording ended early'}"
    uploaded = upload_text(run)
    text += f"; {uploaded}" if uploaded else ""
    for why, count in (meta.get("lost") or {}).items():
        text += f"; {count:,} not kept: {why}"
    for problem, count in (meta.get("problems") or {}).items():
        text += f"; {problem}" + (f" ({count:,} times)" if count > 1 else "")
    return printable(text)


def upload_text(run: Run) -> str:
    """Return where a run was uploaded to, or what is missing there; "" if it never was."""
    if run.path is None or elsewhere(run.path) is not None or not run.is_native:
        return ""
    url = uploading.destination(run.path)[1]
    return uploading.unfinished(run.path) or (f"uploaded to {url}" if url else "")


def _values_text(run: Run) -> str:
    """Describe how much of the values was kept, and the folder."""
    info, path = run.info(), run.where
    if path and run.path == Path(path) and Path(path).is_relative_to(Path.cwd()):
        path = os.path.relpath(path)
    if not info["payloads"]:
        redacted = ", redacted" if run.meta.get("redacted") else ""
        return f"statistics only{redacted}, in {path}"
    options = run.meta.get("options") or {}
    part = ""
    if options.get("reduce"):
        part = f"{options['reduce']} of each, "
    elif options.get("slice"):
        part = f"slice[{options['slice']}] of each, "
    repeated = info["payloads"] - run.meta.get("distinct", info["payloads"])
    note = f" ({repeated:,} were the same tensor again)" if repeated else ""
    return f"{part}{size_text(info['bytes'])} in {path}{note}"
