"""Launching a program: run it, wait for it, and report the recording."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.destination import url_of
from llmdebug_nb.app.launching import process, products
from llmdebug_nb.app.launching.children import Unreached, why_unreached
from llmdebug_nb.app.launching.environment import PthFile, environment
from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.app.option_flags import LEVELS
from llmdebug_nb.app.option_signatures import shows_options
from llmdebug_nb.capture.runtimes import PACKAGES, either
from llmdebug_nb.core.errors import DumpWriteError, OptionError, StoreError, UnknownRunError
from llmdebug_nb.core.options import DumpOptions, runs_folder
from llmdebug_nb.store.part import Part

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llmdebug_nb.core.options import DumpKeywords
    from llmdebug_nb.store.run import Run

ROOM = 2 * 10**9  # bytes that must be free on the disk, as in msit
# exit statuses of a program that ended by itself, or as it was told to
_IN_ORDER = (0, 128 + 1, 128 + 2, 128 + 15)  # SIGHUP, SIGINT, SIGTERM
_SHELL = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")


@dataclass
class Launched:
    """A program that has ended.

    ``status``: its exit status; 128 + n if signal n ended it, as in a shell. ``path``: the run's
    folder; None: nothing was recorded. ``messages``: each with its level, one of `LEVELS`.
    """

    status: int
    path: Path | None = None
    messages: list[tuple[str, str]] = field(default_factory=list)

    def lines(self, level: str = "info") -> list[str]:
        """Return the messages of that level and above."""
        return [text for each, text in self.messages if LEVELS[each] >= LEVELS[level]]

    @property
    def run(self) -> Run:
        """The run. Raises UnknownRunError: nothing was recorded."""
        if self.path is None:
            why = "; ".join(self.lines("warning")) or "the program ran no model"
            raise UnknownRunError(f"nothing was recorded: {why}")
        from llmdebug_nb.store import reader

        return reader.native(self.path)


@shows_options()
def launch(
    command: str | Sequence[str],
    *,
    files: Collection[str] = (),
    pth: bool = False,
    output: Callable[[str, str], object] | None = None,
    **options: Unpack[DumpKeywords],
) -> Launched:
    """Run a command, and record the models in all its Python processes into one run.

        done = ld.launch("python generate.py --prompt 'a b'", name="golden", tokens="0-3")
        done.status, done.run

    Interrupts go to the program; the recording so far is kept.

    Args:
        command: a text, which is split as a shell does, or a list of words. No shell runs it.
        files: the files of msit's dumps to write into the run's folder at the end: any of
            ``model``, ``layer``, ``onnx``, ``op``, ``kernel``, ``cpu_profiling``, ``tiling``.
        pth: also reach Pythons that ignore PYTHONPATH, by a file in their site-packages that is
            removed when the program ends.
        output: receives the command's output, as ``output(stream, text)`` with the stream
            ``stdout`` or ``stderr``; the command then has no input. By default the command uses
            the streams of this process.
        options: of the recording.

    Raises:
        OptionError: an invalid option, control file or command.
        DumpWriteError: the folder can't be written, or less than 2 GB are free.
    """
    words = words_of(command)
    chosen = _checked(files, options)
    url = url_of(chosen)  # its processes record here first
    parent = (runs_folder() if chosen.path is None or url else Path(chosen.path)).absolute()
    refuse_bad_place(parent)
    _refuse_full_disk(parent, chosen)
    orders = {**_plain(chosen), "path": url or str(parent)}
    with hooked(words, orders, chosen.seed, pth) as (handover, variables):
        if url is not None:
            variables["LLMDEBUG_RUNS"] = str(parent)
        launched = _run(words, variables, handover, pth, output)
    if files and launched.path is not None:
        launched.messages += products.write(launched.path, files)
    if url is not None and launched.path is not None:
        from llmdebug_nb.app import uploading

        launched.messages += uploading.messages(launched.path, url)
    return launched


@contextmanager
def hooked(
    words: list[str], options: Mapping[str, object], seed: int | None, pth: bool
) -> Iterator[tuple[Handover, dict[str, str]]]:
    """Prepare a command: give the handover, with these options, and the command's environment."""
    with Handover.made() as handover:
        handover.write_options(options, PACKAGES)
        pth_file = PthFile(words) if pth else None
        try:
            yield handover, environment(handover, os.environ, seed)
        finally:
            if pth_file is not None:
                pth_file.remove()


def words_of(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command; a text is split as a POSIX shell does.

    Raises:
        OptionError: a quote is missing, the command is empty, or it needs a shell.
    """
    words = _split(command) if isinstance(command, str) else [os.fspath(each) for each in command]
    if not words:
        raise OptionError(
            "exec: expected a command, such as --exec 'python run.py', or -- python run.py"
        )
    return words


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OptionError(
            f"exec {command!r}: {error}; quote a word with spaces as in 'a word'"
        ) from None
    for word in words:
        if word in _SHELL:
            raise OptionError(
                f"exec {command!r}: there is no shell to understand {word!r}; write the line into"
                f" a script, or use bash -c {shlex.quote(command)}"
            )
    return words


def _checked(files: Collection[str], options: DumpKeywords) -> DumpOptions:
    """Return the options, with those that the files need. Raises OptionError."""
    chosen = products.options_for(files, **options)
    if os.name != "posix":
        raise OptionError(
            "a program can only be launched on Linux and macOS; record inside it, by ld.dump"
        )
    if chosen.control is not None:
        from llmdebug_nb.capture.control_file import ControlFile

        ControlFile(chosen.control)  # report errors in the file before anything starts
    return chosen


def _plain(options: DumpOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, as JSON for another process."""
    plain = options.given()
    for name in ("control", "fusion_switch"):
        if isinstance(plain.get(name), (str, os.PathLike)):
            plain[name] = os.path.abspath(plain[name])
    return plain


def _nearest_existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def refuse_bad_place(parent: Path) -> None:
    """Refuse a folder that can't be written before the program runs, perhaps for hours."""
    existing = _nearest_existing(parent)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written" if existing.is_dir() else "is no folder"
        raise DumpWriteError(
            f"can't write the dump to {parent}: {existing} {why};"
            " choose another place with path= (-o)"
        )


def _refuse_full_disk(parent: Path, options: DumpOptions) -> None:
    need = min(ROOM, options.max_bytes or ROOM)
    existing = _nearest_existing(parent)
    usage = shutil.disk_usage(existing)
    if not options.stats_only and usage.total and usage.free < need:
        from llmdebug_nb.show.words import size_text

        raise DumpWriteError(
            f"{size_text(usage.free)} are free in {existing}, and a dump of a program needs"
            f" {size_text(need)}; free some, choose another place with path= (-o), or record less"
            " (max_bytes, stats_only)"
        )


def _run(
    words: list[str],
    variables: dict[str, str],
    handover: Handover,
    pth: bool,
    output: Callable[[str, str], object] | None,
) -> Launched:
    """Run the program to its end, and collect the messages."""
    try:
        program = process.start(words, variables, output is not None)
    except process.NotStarted as error:
        return Launched(error.status, None, [("error", str(error))])
    unreached = Unreached(pth)
    status = process.wait(program, output, unreached.look)
    path = handover.run
    parts = _parts(path, handover) if path is not None else []
    if path is not None and status in _IN_ORDER and _finished(path, parts):
        parts = _parts(path, handover)
    messages = list(_messages(path, parts, words, handover, unreached, pth))
    if path is not None and not parts:
        for folder in (path, path.with_name(f"{path.name}.fx")):
            _remove_empty(folder)
        path = None
    return Launched(status, path, messages)


def _parts(path: Path, handover: Handover) -> list[Part]:
    """Return what each process wrote of a run. The indexes are asked unless all have told."""
    ended = map(Part.of, handover.ended())
    # others may change: `_finished`
    told = {part.folder: part for part in ended if part is not None and part.complete}
    folders = sorted(each.name for each in path.iterdir() if each.is_dir())
    if told.keys() >= set(folders):
        return [told[name] for name in folders]
    from llmdebug_nb.store import progress

    return progress.parts(path)


def _finished(path: Path, parts: Sequence[Part]) -> bool:
    """Close the parts of processes that the program killed between two steps: engines, by servers.

    Return whether there were any.
    """
    killed = [path / part.folder for part in parts if not part.complete]
    if not killed:
        return False
    from llmdebug_nb.store import writer

    found = False
    for folder in killed:
        with suppress(StoreError):
            found |= writer.finish(folder)
    return found


def _remove_empty(run: Path) -> None:
    """Remove a run that holds nothing but its marker file."""
    marker = run / "llmdebug.json"
    if run.is_dir() and list(run.iterdir()) == [marker]:
        marker.unlink()
        run.rmdir()


# -- messages --------------------------------------------------------------------------------------


def _messages(
    path: Path | None,
    parts: Sequence[Part],
    words: Sequence[str],
    handover: Handover,
    unreached: Unreached,
    pth: bool,
) -> Iterator[tuple[str, str]]:
    """Yield messages with their levels: the recording, its end, and the processes it missed."""
    reached, messages = handover.processes(), handover.messages()
    pids = ", ".join(map(str, reached)) or "none"
    yield "debug", f"processes that imported {either(PACKAGES)}: {pids}"
    if path is not None and parts:
        yield "info", _recorded(path, parts)
    for part in parts:
        if not part.complete:
            why = part.ended_by or "its process was killed, or left by os._exit"
            yield (
                "warning",
                f"{part.folder} is incomplete ({why}); what it holds can be read",
            )
    for pid, text in messages:
        yield "warning", f"{text} (process {pid})" if len(reached) > 1 else text
    if not parts and not messages:
        yield "warning", f"nothing was recorded: {why_nothing(reached)}"
        why_not = None if unreached.messages else why_unreached(words, pth)
        if why_not is not None:
            yield "warning", f"not reached: {words[0]}: {why_not}"
    for text in unreached.messages:
        yield "warning", text


def _recorded(path: Path, parts: Sequence[Part]) -> str:
    from llmdebug_nb.show.words import count_text, size_text

    folder = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    tensors = count_text(sum(part.records or 0 for part in parts), "tensor")
    ranks = len({part.rank for part in parts})
    spread = f" of {len(parts)} processes" if len(parts) > 1 else ""
    spread += f" ({ranks} ranks)" if ranks > 1 else ""
    size = size_text(sum(part.bytes for part in parts))
    return (
        f"{path.name}: {tensors}{spread}, {size} in {folder};"
        f" look at it with: llmdebug info {folder}"
    )


def why_nothing(reached: dict[int, str]) -> str:
    """Return why no model was seen. ``reached``: the package that each process imported."""
    if not reached:
        return f"no Python that could be reached imported {either(PACKAGES)}"
    packages = " and ".join(sorted(set(reached.values())))
    processes = "a process" if len(reached) == 1 else f"{len(reached)} processes"
    return f"{processes} imported {packages}, and no model ran"
