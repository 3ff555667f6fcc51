"""The magics: each reads its line, calls one use case and shows the result."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from datetime import datetime
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import (
    ArgDecorator,
    MagicArgumentParser,
    argument,
    magic_arguments,
)
from IPython.display import display

from llmdebug_nb.app.compare import compare
from llmdebug_nb.app.errcheck import CheckOptions, ErrorCheck, StoppedAtError
from llmdebug_nb.app.launching import arguments, check_arguments
from llmdebug_nb.app.launching.checking import check_program
from llmdebug_nb.app.launching.program import launch
from llmdebug_nb.app.opcheck import arguments as opcheck_arguments
from llmdebug_nb.app.opcheck.check import OpCheck, opcheck
from llmdebug_nb.app.option_flags import LEVELS, declare_options
from llmdebug_nb.app.perturbing.perturb import Perturbed, perturb
from llmdebug_nb.app.recording import Recording, dump
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import delete_run, runs
from llmdebug_nb.app.upstream import compare_arguments
from llmdebug_nb.core.errors import LLMDebugError, nearest
from llmdebug_nb.core.perturbations import KINDS
from llmdebug_nb.core.perturbations import MODES as PERTURB_MODES
from llmdebug_nb.notebook.explore import explore, show_report
from llmdebug_nb.notebook.magic_line import one_line, parse
from llmdebug_nb.notebook.namespace import Namespace
from llmdebug_nb.show.text import aligned
from llmdebug_nb.show.words import size_text
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAGICS = (
    "llmdump", "llmcompare", "llmdoctor", "llmerrcheck", "llmexplore", "llmlogits", "llmopcheck",
    "llmperturb", "llmruns", "llmstep",
)  # fmt: skip
SWITCHES = ("on", "off", "status")
_RUNS = ["name", "recorded", "tensors", "steps", "size", "state", "path"]


class _RecordingOptions(ArgDecorator):
    """Declares the arguments of %%llmdump: a model, and the options of a recording."""

    def add_to_parser(self, parser: argparse.ArgumentParser, _: object) -> None:
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL_EXPR",
            help="the model; without it, whatever module runs",
        )
        parser.add_argument(
            "--exec",
            metavar="COMMAND",
            help="%%llmdump --exec 'python run.py': run a command and record it;"
            " its options are those of llmdebug dump",
        )
        declare_options(parser)


class _CheckOptions(ArgDecorator):
    """Declares the arguments of %%llmerrcheck: a model or a command, and the options of a check."""

    def add_to_parser(self, parser: argparse.ArgumentParser, _: object) -> None:
        add = parser.add_argument
        add("model", nargs="?", metavar="MODEL_EXPR", help="the model; without it, whatever runs")
        add("--exec", metavar="COMMAND", help="%%llmerrcheck --exec 'python run.py': a command")
        add("--name", default="errcheck", help="variable of the result (default: %(default)s)")
        check_arguments.declare(parser)


class _OpCheckOptions(ArgDecorator):
    """Declares the arguments of %llmopcheck: a run, and the options of a check."""

    def add_to_parser(self, parser: argparse.ArgumentParser, _: object) -> None:
        parser.add_argument("name", metavar="RUN", help="name or path of a run, or its variable")
        opcheck_arguments.declare(parser)


class _CompareOptions(ArgDecorator):
    """Declares the arguments of %llmcompare, those of ``llmdebug compare``."""

    def add_to_parser(self, parser: argparse.ArgumentParser, _: object) -> None:
        compare_arguments.declare(parser)


@magics_class
class LLMDebugMagics(Magics):
    """%%llmdump, %llmcompare, %%llmerrcheck, %llmopcheck, %llmperturb, %llmexplore, %llmruns."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._namespace = Namespace(shell)
        self._recording: Recording | None = None  # from `%llmdump on`
        self._shown: tuple[int, Report] | None = None  # the last report and its cell's number

    @magic_arguments()
    @_RecordingOptions()
    @line_cell_magic
    def llmdump(self, line: str, cell: str | None = None) -> object:
        """Record the model that runs in this cell; as a line magic, in all cells from here on.

        The cell runs as it would without the magic, and its result is shown as usual.
        ``%llmdump on`` takes the same options.

        ``%%llmdump --tokens 0-3 --name golden``, ``%llmdump on model --name golden``,
        ``%llmdump status``, ``%llmdump off``,
        ``%llmdump --exec "python generate.py 'a b'" --name golden``
        (options: see ``llmdebug dump --help``)
        """
        __tracebackhide__ = True  # an error in the cell shows the user's code, not ours
        if cell is None:
            act = self._launch if re.search(r"(^|\s)--exec\b", line) else self._switch
            act(line)
            return None
        recording = self._new_recording(line)
        run_cell = self._namespace.compile(cell)
        with one_line():
            run = recording.start()
            try:
                result = run_cell()
            except BaseException as error:
                self._stop_after_error(recording, run, type(error).__name__)
                raise
            recording.stop()
        self._namespace.bind(run)
        return result

    @magic_arguments()
    @_CompareOptions()
    @argument(
        "--prove",
        action="store_true",
        help="put golden's value into mine's model, if it is still there, and run it on",
    )
    @line_magic
    def llmcompare(self, line: str) -> Report:
        """Compare two runs: show the verdict, the first divergence, the cause and the explorer.

        Examples: ``%llmcompare golden mine --html report.html``,
        ``%llmcompare -gp golden -mp mine -cl layer -o tables`` (as msit)
        """
        args = parse(self.llmcompare, line)
        namespace = self._namespace
        with one_line():
            golden, mine = compare_arguments.both_sides(args)
            report = compare(
                namespace.run(golden),
                namespace.run(mine),
                explain=not args.no_explain,
                prove=args.prove,
                mapping=namespace.get(args.map),
                limits=namespace.get(args.limits),
                calibrate=[namespace.run(name) for name in args.calibrate or ()],
                metrics=[namespace.get(name) for name in args.metric or ()],
            )
            for glob in args.unexpect:
                report.unexpect(glob)
            for glob in args.expect:
                report.expect(glob, args.comment)
            if LEVELS[args.log_level] > LEVELS["info"]:
                print(compare_arguments.report_text(report, args.log_level))
            else:
                show_report(report, self.shell)
            for text in compare_arguments.write_results(report, args):
                print(text)
        self._shown = self.shell.execution_count, report
        return report

    @magic_arguments()
    @_CheckOptions()
    @line_cell_magic
    def llmerrcheck(self, line: str, cell: str | None = None) -> object:
        """Name the first operator in this cell that makes NaN or overflows, and the headroom.

        The cell runs as it would without the magic, and its result is shown as usual. With
        ``--exit`` it ends at the error. The result is also in the variable ``errcheck``.

        ``%%llmerrcheck``, ``%%llmerrcheck model --type nan overflow --exit``,
        ``%llmerrcheck --exec "python train.py"``
        """
        __tracebackhide__ = True  # an error in the cell shows the user's code, not ours
        args = parse(self.llmerrcheck, line)
        if (cell is None) == (args.exec is None):
            raise UsageError(
                "%llmerrcheck checks a command (--exec 'python run.py'), %%llmerrcheck a cell"
            )
        chosen = check_arguments.options(vars(args))
        if cell is None:
            with one_line():
                self._show_check(args.name, check_program(args.exec, stream=_write, **chosen))
            return None
        model = self._namespace.evaluate(args.model, "%%llmerrcheck")
        run_cell = self._namespace.compile(cell)
        with one_line():
            check = ErrorCheck(model, CheckOptions.of(**chosen)).start()
        result, ended_by = None, None
        try:
            result = run_cell()
        except StoppedAtError:
            ended_by = StoppedAtError.__name__
        except BaseException as error:
            ended_by = type(error).__name__
            raise
        finally:
            with one_line():
                check.stop(ended_by)
                self._show_check(args.name, check)
        return result

    def _show_check(self, name: str, check: object) -> None:
        """Show the result of a check, and make it a variable."""
        self.shell.user_ns[name] = check
        display(check)

    def has_shown(self, report: Report) -> bool:
        """Return whether a magic of the running cell has already shown a report."""
        return self._shown == (self.shell.execution_count, report)

    @magic_arguments()
    @argument("name", help="name or path of a run, or a variable that holds a run or a report")
    @argument("--tokenizer", metavar="EXPR", help="a tokenizer: steps then show their input text")
    @line_magic
    def llmexplore(self, line: str) -> object:
        """Open the explorer of a run or a report.

        Example: ``%llmexplore golden``
        """
        args = parse(self.llmexplore, line)
        tokenizer = self._namespace.evaluate(args.tokenizer, "%llmexplore")
        with one_line():
            value = self._namespace.get(args.name)
            shown = value if isinstance(value, Report) else self._namespace.run(args.name)
            return explore(shown, tokenizer)

    @magic_arguments()
    @_OpCheckOptions()
    @line_magic
    def llmopcheck(self, line: str) -> OpCheck:
        """Compute each recorded operator of a run again, and show which are wrong.

        Example: ``%llmopcheck golden --path model.layers.3 -rerun -j 2``
        """
        args = parse(self.llmopcheck, line)
        with one_line():
            return opcheck(self._namespace.run(args.name), **opcheck_arguments.options(vars(args)))

    @magic_arguments()
    @argument("model", metavar="MODEL_EXPR", help="the model")
    @argument("inputs", metavar="INPUTS_EXPR", help="a tensor, a tuple or dict of arguments, or a"
              " function that runs the model; quoted if it has blanks")  # fmt: skip
    @argument("--mode", choices=PERTURB_MODES, default="api", help="what is perturbed")
    @argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS),
              help="of perturbations (default: all)")  # fmt: skip
    @argument("--result", metavar="SLOT", help="what moves (default: logits, or the first tensor)")
    @argument("--top", type=int, default=10, metavar="N",
              help="so many are measured alone (default: 10)")  # fmt: skip
    @line_magic
    def llmperturb(self, line: str) -> Perturbed:
        """Perturb the operators of a model, and rank them by how far its result moves.

        Example: ``%llmperturb model inputs --kinds ulp precise``
        """
        args = parse(self.llmperturb, line)
        model, inputs = (
            self._namespace.evaluate(each, "%llmperturb") for each in (args.model, args.inputs)
        )
        with one_line():
            return perturb(
                model, inputs, mode=args.mode, kinds=args.kinds, result=args.result, top=args.top
            )

    @magic_arguments()
    @argument("--delete", metavar="NAME", help="delete this run from disk")
    @line_magic
    def llmruns(self, line: str) -> None:
        """List the runs that can be opened by name."""
        args = parse(self.llmruns, line)
        with one_line():
            if args.delete:
                deleted = delete_run(args.delete)
                others = ", ".join(run.label for run in runs() if run.name == args.delete)
                print(
                    f"deleted: {deleted}{f'; runs of that name left: {others}' if others else ''}"
                )
                return
            rows = [_run_cells(run) for run in runs()]
        print(
            "\n".join(aligned(_RUNS, rows))
            if rows
            else "There are no runs yet: record one with %%llmdump."
        )

    def _new_recording(self, line: str) -> Recording:
        options = vars(parse(self.llmdump, line))
        if options.pop("exec") is not None:
            raise UsageError(
                "%%llmdump: --exec records a command, not a cell; use the line magic: "
                "%llmdump --exec 'python run.py'"
            )
        model = self._namespace.evaluate(options.pop("model"), "%%llmdump")
        with one_line():
            return dump(model, **options)

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
            done = launch(args.exec, pth=args.pth, output=_write, **arguments.options(vars(args)))
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
        recording = self._recording
        if recording is not None and not recording.running:
            recording = None
        if command == "status":
            print("No recording is running." if recording is None else recording.status())
        elif command == "on":
            self._switch_on(recording, rest)
        elif recording is None:
            raise UsageError("%llmdump off: no recording is running; %llmdump on starts one")
        else:
            with one_line():
                self._namespace.bind(recording.stop())

    def _switch_on(self, running: Recording | None, line: str) -> None:
        if running is not None:
            raise UsageError(
                f"%llmdump on: {running.options.name} is being recorded; end it with %llmdump off"
            )
        recording = self._new_recording(line)
        with one_line():
            recording.start()
        self._recording = recording
        print(f"{recording.options.name}: recording until %llmdump off")

    def _stop_after_error(self, recording: Recording, run: Run, ended_by: str) -> None:
        """End the recording of a cell that failed; print our own errors as a line."""
        try:
            recording.stop(ended_by)
        except LLMDebugError as error:
            print(f"llmdump: {error}")
        else:
            self._namespace.bind(run)


def _write(stream: str, text: str) -> None:
    """Show a command's output as the cell's."""
    print(text, end="", file=getattr(sys, stream), flush=True)


def _run_cells(run: Run) -> list[str]:
    """Return the row of a run in `%llmruns`; its first cell opens the run."""
    info = run.info()
    recorded = f"{datetime.fromtimestamp(run.meta['created']):%Y-%m-%d %H:%M:%S}"
    state = "complete" if info["complete"] else "incomplete"
    figures = [f"{info['records']:,}", str(info["steps"]), size_text(info["bytes"])]
    return [run.label, recorded, *figures, state, os.path.relpath(info["path"])]
