"""Copying runs between this machine and remote stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from llmdebug_nb.app import uploading
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import DumpWriteError, OptionError, RemoteError
from llmdebug_nb.core.options import runs_folder
from llmdebug_nb.core.urls import is_url
from llmdebug_nb.store import catalog, payload, reader
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.connection import log_of
from llmdebug_nb.store.own_file import PRIVATE_FILE, PRIVATE_FOLDER
from llmdebug_nb.store.payload import elsewhere
from llmdebug_nb.store.payload_files import name_of
from llmdebug_nb.store.remote import stores, upload
from llmdebug_nb.store.remote.upload import Upload
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.writer import FLOOR, create_run, free_space

_CHUNK = 16 << 20  # bytes that are copied at once


def copy_run(where: str | os.PathLike[str] | Run, to: str | os.PathLike[str] | None = None) -> Run:
    """Copy a run to a remote store, or from one to this machine; return the copy.

        ld.copy_run("golden", "s3://bucket/runs")       # s3://bucket/runs/golden
        ld.copy_run("s3://bucket/runs/golden")          # llmdebug_runs/golden

    What is in the store already is not uploaded again, so this also ends an upload that failed or
    was interrupted. The run itself stays where it is.

    Args:
        where: the run, its name, its path, or its URL.
        to: the folder or URL that will hold the copy. Default: of a run that was recorded to a
            store, that store; of a run in a store, the folder of runs.

    Raises:
        OptionError: the run is of another tool, or neither or both are in a store.
        UnknownRunError, CorruptDumpError, RemoteError: the run can't be read, or the store fails.
        DumpWriteError: not enough room.
    """
    run = open_run(where)
    if run.path is None or not run.is_native:
        raise OptionError(f"{run.label} was not recorded by llmdebug_nb: only its runs are copied")
    target = os.fspath(to) if to is not None else ""
    remote = elsewhere(run.path) is not None
    if remote:
        if is_url(target):
            raise OptionError("a run is copied to a store from this machine: name a folder")
        return _downloaded(run, run.path, Path(target) if target else runs_folder())
    target = target or uploading.destination(run.path)[0]
    if not is_url(target):
        raise OptionError(
            f"{run.label} is on this machine: name the place in a store that will hold its copy,"
            " such as s3://bucket/runs"
        )
    return _uploaded(run.path, target)


def _uploaded(path: Path, url: str) -> Run:
    parent, there = stores.place(url), ""
    processes = catalog.process_folders(path)
    total = sum(end - start for each in processes for start, end, *_ in payload.pieces(each))
    with progress_bar(total=total, desc="upload", unit="B") as bar:
        for process in processes:
            one, complete, error = Upload(process, parent, bar.update), False, ""
            try:
                one.round(ended=True)
                complete = True
            except (RemoteError, OSError) as failed:
                error = " ".join(str(failed).split())
                raise
            finally:
                refused = error and not one.url  # nothing of it is there
                if upload.state_of(process) is not None or not (complete or refused):
                    upload.note(process, one.state(complete, error))
            there = one.url
    return open_run(stores.inside(url, there.rpartition("/")[2]))


def _downloaded(run: Run, mirror: Path, parent: Path) -> Run:
    nbytes, free = run.info()["bytes"], free_space(parent)
    if nbytes + FLOOR > free:
        raise DumpWriteError(
            f"{run.where} has {nbytes:,} bytes, and {parent} has room for"
            f" {max(free - FLOOR, 0):,}; name another folder"
        )
    folder = create_run(parent, run.name, catalog.read_marker(mirror))
    try:
        with progress_bar(total=nbytes, desc="download", unit="B") as bar:
            for process in catalog.process_folders(mirror):
                _download(process, folder / process.name, bar.update)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return reader.native(folder)


def _download(process: Path, to: Path, progress: Callable[[int], object]) -> None:
    """Copy the files of a process. Raises RemoteError."""
    to.mkdir(PRIVATE_FOLDER)
    for piece in payload.pieces(process):
        with open(to / name_of(piece.start), "wb") as copy:
            for at in range(piece.start, piece.end, _CHUNK):
                copy.write(payload.read([piece], at, min(_CHUNK, piece.end - at)))
                progress(min(_CHUNK, piece.end - at))
    for file in (process / fmt.INDEX, log_of(process / fmt.INDEX)):
        if file.exists():
            shutil.copyfile(file, to / file.name)
    for file in to.iterdir():
        file.chmod(PRIVATE_FILE)
