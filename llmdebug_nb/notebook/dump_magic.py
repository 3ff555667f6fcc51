"""The magic that records: `%%llmdump` a cell, `%llmdump on` all cells, `%llmdump --exec` a command.

Its flags are those of ``llmdebug dump``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser, magic_arguments

from llmdebug_nb.app.launching import arguments, products
from llmdebug_nb.app.launching.program import launch
from llmdebug_nb.app.option_flags import LEVELS
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core.errors import LLMDebugError, UploadWarning, nearest
from llmdebug_nb.notebook.magic_line import declared, one_line, parse, write
from llmdebug_nb.notebook.namespace import Namespace, NamespaceMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SWITCHES = ("on", "off", "status")
_OF_COMMANDS = {
    "exec": "--exec records a command, not a cell; use the line magic:"
    " %llmdump --exec 'python run.py'",
    "pth": "--pth reaches the Pythons that a command starts, and a cell runs in this one; use the"
    " line magic: %llmdump --pth --exec 'python run.py'",
}


def _recording_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of %%llmdump: a model, and the options of a recording."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_EXPR",
        help="the model; without it, whatever module runs")  # fmt: skip
    add("--exec", metavar="COMMAND",
        help="%%llmdump --exec 'python run.py': run a command and record it")  # fmt: skip
    add("--pth", action="store_true",
        help="with --exec: also reach Pythons that ignore PYTHONPATH")  # fmt: skip
    arguments.declare_recording(parser)


@dataclass
class _CellRecording:
    """A recording, the files to write when it ends, and the least level of messages to print."""

    recording: Recording
    files: tuple[str, ...]
    level: str

    def stop(self, space: Namespace, ended_by: str | None = None) -> None:
        """End it, make the run a variable, write the files, and print the messages."""
        quiet = LEVELS[self.level] > LEVELS["info"]
        with warnings.catch_warnings():
            if not quiet:  # the line of the run says it
                warnings.simplefilter("ignore", UploadWarning)
            run = self.recording.stop(ended_by)
        space.bind(run, quiet=quiet)
        if not self.files or run.path is None:
            return
        for level, text in products.write(run.path, self.files):
            if LEVELS[level] >= LEVELS[self.level]:
                print(text)


@magics_class
class DumpMagics(NamespaceMagics):
    """%%llmdump."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._running: _CellRecording | None = None  # from `%llmdump on`

    @magic_arguments()
    @declared(_recording_options)
    @line_cell_magic
    def llmdump(self, line: str, cell: str | None = None) -> object:
        """Record the model that runs in this cell; as a line magic, in all cells from here on.

        The cell runs as it would without the magic, and its result is shown as usual.
        ``%llmdump on`` takes the same options, which are those of ``llmdebug dump``.

        ``%%llmdump --tokens 0-3 --name golden``, ``%llmdump on model --name golden``,
        ``%llmdump status``, ``%llmdump off``,
        ``%llmdump --exec "python generate.py 'a b'" --name golden``
        """
        __tracebackhide__ = True  # an error in the cell shows the user's code, not ours
        if cell is None:
            act = self._launch if re.search(r"(^|\s)--exec\b", line) else self._switch
            act(line)
            return None
        new = self._new_recording(line)
        run_cell = self._namespace.compile(cell)
        with one_line():
            new.recording.start()
            try:
                result = run_cell()
            except BaseException as error:
                self._stop_after_error(new, type(error).__name__)
                raise
            new.stop(self._namespace)
        return result

    def _new_recording(self, line: str) -> _CellRecording:
        # msit's documents write ids with blanks: 2, 3_1
        args = vars(parse(self.llmdump, re.sub(r",\s+(?=\d)", ",", line)))
        for name, why in _OF_COMMANDS.items():
            if args.pop(name):
                raise UsageError(f"%%llmdump: {why}")
        model = self._namespace.evaluate(args.pop("model"), "%%llmdump")
        with one_line():
            chosen = arguments.options(args, rounds=None)
            files = tuple(chosen.pop("files"))
            recording = Recording(model, products.options_for(files, **chosen))
        return _CellRecording(recording, files, args["log_level"])

    def _launch(self, line: str) -> None:
        """Run a command, show its output, and bind the run."""
        parser = MagicArgumentParser("%llmdump", add_help=False)
        arguments.declare(parser)
        try:
            args = parser.parse_args(shlex.split(line))
        except ValueError as error:
            raise UsageError(
                f"%llmdump: {error}; quote the command, as in --exec 'python run.py'"
            ) from None
        if args.exec is None:
            raise UsageError(
                "%llmdump: --exec needs a command, as in %llmdump --exec 'python run.py'"
            )
        with one_line():
            done = launch(args.exec, pth=args.pth, output=write, **arguments.options(vars(args)))
            for text in done.lines("warning"):
                print(f"llmdump: {text}", file=sys.stderr)
            if done.status:
                print(f"llmdump: the command ended with status {done.status}", file=sys.stderr)
            if done.path is not None:
                self._namespace.bind(done.run)

    def _switch(self, line: str) -> None:
        """Carry out ``%llmdump on|off|status``."""
        command, _, rest = line.strip().partition(" ")
        if command not in SWITCHES:
            near = nearest(command, SWITCHES) if command else ""
            raise UsageError(
                f"%llmdump{command and ' '}{command}: expected on, off or status{near}; "
                "%%llmdump records one cell, --exec a command"
            )
        running = self._running
        if running is not None and not running.recording.running:
            running = None
        if command == "status":
            print("No recording is running." if running is None else running.recording.status())
        elif command == "on":
            self._switch_on(running, rest)
        elif running is None:
            raise UsageError("%llmdump off: no recording is running; %llmdump on starts one")
        else:
            with one_line():
                running.stop(self._namespace)

    def _switch_on(self, running: _CellRecording | None, line: str) -> None:
        if running is not None:
            name = running.recording.options.name
            raise UsageError(f"%llmdump on: {name} is being recorded; end it with %llmdump off")
        new = self._new_recording(line)
        with one_line():
            new.recording.start()
        self._running = new
        print(f"{new.recording.options.name}: recording until %llmdump off")

    def _stop_after_error(self, new: _CellRecording, ended_by: str) -> None:
        """End the recording of a cell that failed; print our own errors as a line."""
        try:
            new.stop(self._namespace, ended_by)
        except LLMDebugError as error:
            print(f"llmdump: {error}")
