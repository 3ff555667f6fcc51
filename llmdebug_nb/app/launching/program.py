"""Launching a program: what it is told, waiting for it, and what became of the recording."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llmdebug_nb.app.launching import products
from llmdebug_nb.app.launching.children import Unreached, below, why_unreached
from llmdebug_nb.app.launching.environment import PthFile, environment
from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.capture.control_file import ControlFile
from llmdebug_nb.core.errors import DumpWriteError, OptionError, UnknownRunError
from llmdebug_nb.core.options import DumpOptions, runs_folder, shows_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llmdebug_nb.core.options import DumpKeywords
    from llmdebug_nb.store.progress import Part

ROOM = (
    2 * 10**9
)  # bytes that have to be free for a program that is not known beforehand, as in msit
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3}
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_SHELL = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
_LOOK = 0.25  # seconds between two looks at the program's processes


@dataclass
class Launched:
    """A program that has ended.

    ``status``: its exit status, 128 + n where signal n ended it, as in a shell. ``path``: the run's folder; None: nothing was recorded.
    ``messages``: what there is to say of it, each with its level, of `LEVELS`.
    """

    status: int
    path: Path | None = None
    messages: list[tuple[str, str]] = field(default_factory=list)

    def lines(self, level: str = "info") -> list[str]:
        """Return what there is to say of that level and those above it."""
        return [text for each, text in self.messages if LEVELS[each] >= LEVELS[level]]

    @property
    def run(self) -> Any:
        """The run. Raises UnknownRunError: nothing was recorded."""
        if self.path is None:
            raise UnknownRunError(
                f"nothing was recorded: {'; '.join(self.lines('warning')) or 'the program ran no model'}"
            )
        from llmdebug_nb.store import reader

        return reader.native(self.path)


def words_of(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command; a text is split as a POSIX shell does, and by nothing else is it understood.

    Raises:
        OptionError: a quote is missing, there is no command, or what only a shell can do is asked for.
    """
    if not isinstance(command, str):
        words = [os.fspath(word) for word in command]
    else:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise OptionError(
                f"exec {command!r}: {error}; quote a word with spaces as in 'a word'"
            ) from None
        for word in words:
            if word in _SHELL:
                raise OptionError(
                    f"exec {command!r}: there is no shell to understand {word!r}; write the line into a script, or use"
                    f" bash -c {shlex.quote(command)}"
                )
    if not words:
        raise OptionError(
            "exec: expected a command, such as --exec 'python run.py', or -- python run.py"
        )
    return words


@shows_options()
def launch(
    command: str | Sequence[str],
    *,
    files: Collection[str] = (),
    pth: bool = False,
    output: Callable[[str, str], Any] | None = None,
    **options: Unpack[DumpKeywords],
) -> Launched:
    """Run a command, and record what models compute in all Python processes of it, into one run.

    ``command``: a text, split as a shell does, or its words. No shell runs it. The command's input and output are ours; with
    ``output``, it has no input, and ``output(stream, text)`` is called with what it writes to ``stdout`` and ``stderr``.
    ``files``: what is written into the run's folder at the end, in the places of msit's dumps: any of `products.KNOWN` (``model``, ``layer``,
    ``onnx``, ``op``, ``kernel``, ``cpu_profiling``, ``tiling``). ``pth``: also reach Pythons that ignore PYTHONPATH, by a file in their site-packages for as long as the program runs.
    ``options``: those of `DumpOptions`. Interrupts go to the program, whose recording is kept.

        done = ld.launch("python generate.py --prompt 'a b'", name="golden", tokens="0-3")
        done.status, done.run

    Raises:
        OptionError: an option, a control file or a command that makes no sense. DumpWriteError: less than 2 GB are free.
    """
    words = words_of(command)
    unknown = next((each for each in files if each not in products.KNOWN), None)
    if unknown is not None:
        raise OptionError(f"files {unknown!r} is not known; known: {', '.join(products.KNOWN)}")
    ordered = DumpOptions.of(**options)
    options.update(products.needed(files, ordered))
    ordered = DumpOptions.of(**options)
    if os.name != "posix":
        raise OptionError(
            "a program can only be launched on Linux and macOS; record inside it, by ld.dump"
        )
    if ordered.control is not None:
        ControlFile(ordered.control)  # what is wrong with the file is said before anything starts
    parent = (runs_folder() if ordered.path is None else Path(ordered.path)).absolute()
    _refuse_full_disk(parent, ordered)
    with tempfile.TemporaryDirectory(prefix="llmdebug-") as folder:
        handover = Handover(Path(folder))
        handover.order({**_plain(ordered), "path": str(parent)})
        variables = environment(handover, os.environ, ordered.seed)
        file = PthFile(words) if pth else None
        try:
            done = _run(words, variables, handover, pth, output)
        finally:
            if file is not None:
                file.remove()
    if files and done.path is not None:
        done.messages += products.write(done.path, files)
    return done


def _plain(options: DumpOptions) -> dict[str, Any]:
    """Return options as another process can read them, all that differ from their defaults."""
    plain = options.given()
    for name in ("control", "fusion_switch"):
        if isinstance(plain.get(name), (str, os.PathLike)):
            plain[name] = os.path.abspath(plain[name])
    return plain


def _refuse_full_disk(parent: Path, options: DumpOptions) -> None:
    need = min(ROOM, options.max_bytes or ROOM)
    there = next(place for place in (parent, *parent.parents) if place.exists())
    usage = shutil.disk_usage(there)
    if not options.stats_only and usage.total and usage.free < need:
        from llmdebug_nb.show.words import size_text

        raise DumpWriteError(
            f"{size_text(usage.free)} are free in {there}, and a dump of a program wants {size_text(need)}; free some, choose another"
            " place with path= (-o), or record less (max_bytes, stats_only)"
        )


def _run(
    words: list[str],
    variables: dict[str, str],
    handover: Handover,
    pth: bool,
    output: Callable[[str, str], Any] | None,
) -> Launched:
    streams: dict[str, Any] = (
        {} if output is None else dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    )
    streams |= (
        {} if output is None else {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    )
    try:
        program = subprocess.Popen(words, env=variables, **streams)
    except FileNotFoundError:
        assigns = "=" in words[0].split("/")[0]
        hint = "; set variables before llmdebug itself: A=1 llmdebug dump …" if assigns else ""
        return Launched(NOT_FOUND, None, [("error", f"{words[0]}: command not found{hint}")])
    except OSError as error:
        return Launched(NOT_EXECUTABLE, None, [("error", f"{words[0]}: {error.strerror or error}")])
    from llmdebug_nb.store import progress  # while the program starts

    written = _Written(program, output) if output is not None else None
    unreached = Unreached(pth)
    with _signals_to(program), _looking(program, unreached):
        _wait(program, written)
    done = Launched(
        program.returncode if program.returncode >= 0 else 128 - program.returncode, handover.run
    )
    parts = progress.parts(done.path) if done.path is not None else []
    done.messages = list(_messages(done, parts, words, handover, unreached, pth))
    if done.path is not None and not parts:
        for made in (done.path, done.path.with_name(f"{done.path.name}.fx")):
            _remove_empty(made)
        done.path = None
    return done


def _remove_empty(run: Path) -> None:
    """Remove a run in which nothing is but the file that says what it is."""
    marker = run / "llmdebug.json"
    with contextlib.suppress(OSError):
        if list(run.iterdir()) == [marker]:
            marker.unlink()
            run.rmdir()


class _Written:
    """What a program writes to its two streams, handed on line by line in the thread that waits for it."""

    def __init__(self, program: subprocess.Popen[Any], output: Callable[[str, str], Any]) -> None:
        self._output = output
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=(name, getattr(program, name)), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put((name, line))

    def hand_on(self, seconds: float) -> None:
        """Hand on what comes within that time, up to the first pause after a line."""
        with contextlib.suppress(queue.Empty):
            self._output(*self._lines.get(timeout=seconds))
            while True:
                self._output(*self._lines.get_nowait())

    def finish(self) -> None:
        """Hand on the rest. What the program has left running in the background may hold its streams: it is not waited for."""
        for reader in self._readers:
            reader.join(timeout=1)
        self.hand_on(0.01)


@contextlib.contextmanager
def _looking(program: subprocess.Popen[Any], unreached: Unreached) -> Iterator[None]:
    """Look at the program's processes now and then; waiting for it is not held up by that."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK):
            unreached.look(program.pid)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait(program: subprocess.Popen[Any], written: _Written | None) -> None:
    while program.returncode is None:
        try:
            if written is None:
                program.wait()
            elif program.poll() is None:
                written.hand_on(0.05)
        except KeyboardInterrupt:  # the program decides what an interrupt means
            continue
    if written is not None:
        written.finish()


@contextlib.contextmanager
def _signals_to(program: subprocess.Popen[Any]) -> Iterator[None]:
    """Pass on what we are sent; a terminal's interrupt has reached the program already, as a kernel's has."""

    def pass_on(number: int, _: Any) -> None:
        if number == signal.SIGINT and _of_all():
            return
        for pid in (program.pid, *(below(program.pid) if number != signal.SIGINT else ())):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_all() -> bool:
    """Tell whether an interrupt comes to all processes at once: from the terminal that we are in front of, or from Jupyter."""
    if "ipykernel" in sys.modules:
        return True
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


# -- what became of it -------------------------------------------------------------------------------


def _messages(
    done: Launched,
    parts: list[Part],
    words: list[str],
    handover: Handover,
    unreached: Unreached,
    pth: bool,
) -> Iterator[tuple[str, str]]:
    """Yield what there is to say: what was kept, how the program ended, and what was not seen."""
    reached, said = handover.processes(), handover.said()
    yield (
        "debug",
        f"processes that imported torch or onnxruntime: {', '.join(map(str, reached)) or 'none'}",
    )
    if done.path is not None and parts:
        yield "info", _kept(done.path, parts)
    for part in parts:
        if not part.complete:
            why = part.ended_by or "its process was killed, or left by os._exit"
            yield (
                "warning",
                f"{part.folder} is incomplete ({why}); all that was written can be read",
            )
    for pid, text in said:
        yield "warning", f"{text} (process {pid})" if len(reached) > 1 else text
    if not parts and not said:
        yield "warning", f"nothing was recorded: {_why_nothing(reached)}"
        why_not = None if unreached.found else why_unreached(words, pth)
        if why_not is not None:
            yield "warning", f"not reached: {words[0]}: {why_not}"
    for text in unreached.found:
        yield "warning", text


def _kept(path: Path, parts: Sequence[Part]) -> str:
    from llmdebug_nb.show.words import count_text, size_text

    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    total, ranks = sum(part.records or 0 for part in parts), len({part.rank for part in parts})
    spread = f" of {len(parts)} processes" if len(parts) > 1 else ""
    spread += f" ({ranks} ranks)" if ranks > 1 else ""
    size = size_text(sum(part.bytes for part in parts))
    return f"{path.name}: {count_text(total, 'tensor')}{spread}, {size} in {shown}; look at it with: llmdebug info {shown}"


def _why_nothing(reached: dict[int, str]) -> str:
    if not reached:
        return "no Python that could be reached imported torch or onnxruntime"
    packages = " and ".join(sorted(set(reached.values())))
    who = "a process" if len(reached) == 1 else f"{len(reached)} processes"
    return f"{who} imported {packages}, and no model ran"
