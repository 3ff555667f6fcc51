"""The magics: each reads its line, calls one use case and shows the result."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from llmdebug_nb.app.compare import compare, first_steps
from llmdebug_nb.app.errcheck import CheckOptions, ErrorCheck, StoppedAtError
from llmdebug_nb.app.launching import check_arguments
from llmdebug_nb.app.launching.checking import check_program
from llmdebug_nb.app.opcheck import arguments as opcheck_arguments
from llmdebug_nb.app.opcheck.check import OpCheck, opcheck
from llmdebug_nb.app.option_flags import LEVELS
from llmdebug_nb.app.perturbing.perturb import Perturbed, perturb
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import delete_run, runs
from llmdebug_nb.app.upstream import compare_arguments
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.perturbations import KINDS
from llmdebug_nb.core.perturbations import MODES as PERTURB_MODES
from llmdebug_nb.notebook.explore import explore, show_report
from llmdebug_nb.notebook.magic_line import declared, one_line, parse, write
from llmdebug_nb.notebook.namespace import NamespaceMagics
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.text import notebook_text
from llmdebug_nb.show.words import size_text
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAGICS = (
    "llmdump", "llmcompare", "llmdebug", "llmdoctor", "llmerrcheck", "llmexplore",
    "llmlockstep", "llmlogits", "llmopcheck", "llmperturb", "llmruns", "llmstep",
)  # fmt: skip
_RUNS = ["name", "recorded", "tensors", "steps", "size", "state", "path"]


def _check_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of %%llmerrcheck: a model or a command, and the options of a check."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_EXPR", help="the model; without it, whatever runs")
    add("--exec", metavar="COMMAND", help="%%llmerrcheck --exec 'python run.py': a command")
    add("--pth", action="store_true",
        help="with --exec: also reach Pythons that ignore PYTHONPATH")  # fmt: skip
    add("--name", default="errcheck", help="variable of the result (default: %(default)s)")
    check_arguments.declare(parser)


def _opcheck_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of %llmopcheck: a run, and the options of a check."""
    what = "name or path of a run, or its variable"
    parser.add_argument("name", metavar="RUN", nargs="?", help=what)
    parser.add_argument("-i", "--input", metavar="RUN", help="the same, as msit writes it")
    opcheck_arguments.declare(parser)


@magics_class
class LLMDebugMagics(NamespaceMagics):
    """%llmcompare, %%llmerrcheck, %llmopcheck, %llmperturb, %llmexplore, %llmruns."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shown: tuple[int, Report] | None = None  # the last report and its cell's number

    @magic_arguments()
    @declared(compare_arguments.declare)
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
        in_notebook = getattr(self.shell, "kernel", None) is not None
        with one_line(), Stages("opening the runs", shown=in_notebook) as stages:
            golden, mine = map(namespace.run, compare_arguments.both_sides(args))
            chosen = {
                "explain": not args.no_explain,
                "mapping": namespace.get(args.map),
                "limits": namespace.get(args.limits),
                "metrics": [namespace.get(name) for name in args.metric or ()],
            }
            if in_notebook and (first := first_steps(golden, mine)) is not None:
                early = compare(*first, **chosen).view()
                stages.say(f"Its first step alone: {notebook_text(early)}")
            calibrate = [namespace.run(name) for name in args.calibrate or ()]
            report = compare(
                golden, mine, prove=args.prove, calibrate=calibrate,
                cluster=namespace.get(args.cluster), **chosen,
            )  # fmt: skip
            stages.stage("drawing")
            for glob in args.unexpect:
                report.unexpect(glob)
            for glob in args.expect:
                report.expect(glob, args.comment)
            self.show(report, args.log_level)
            stages.stage("writing the results")
            for text in compare_arguments.write_results(report, args):
                print(text)
        return report

    def show(self, report: Report, level: str) -> None:
        """Show a report as the messages of a level have it, and make it a variable."""
        if LEVELS[level] > LEVELS["info"]:
            print(compare_arguments.report_text(report, level))
        else:
            show_report(report, self.shell)
        self._namespace.bind_report(report)
        self._shown = self.shell.execution_count, report

    @magic_arguments()
    @declared(_check_options)
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
                checked = check_program(args.exec, stream=write, pth=args.pth, **chosen)
                self._show_check(args.name, checked)
            return None
        if args.pth:
            raise UsageError("%%llmerrcheck: --pth is of a command; a cell runs in this Python")
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
    @declared(_opcheck_options)
    @line_magic
    def llmopcheck(self, line: str) -> OpCheck:
        """Compute each recorded operator of a run again, and show which are wrong.

        Example: ``%llmopcheck golden --path model.layers.3 -rerun -j 2``
        """
        args = parse(self.llmopcheck, line)
        if (args.name is None) == (args.input is None):
            raise UsageError("%llmopcheck: name one run, as in %llmopcheck golden or -i golden")
        run = self._namespace.run(args.name or args.input)
        with one_line():
            chosen = opcheck_arguments.options(vars(args))
            chosen["cluster"] = self._namespace.get(args.cluster)
            return opcheck(run, **chosen)

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


def _run_cells(run: Run) -> list[str]:
    """Return the row of a run in `%llmruns`; its first cell opens the run."""
    info = run.info()
    recorded = f"{datetime.fromtimestamp(run.meta['created']):%Y-%m-%d %H:%M:%S}"
    state = "complete" if info["complete"] else "incomplete"
    figures = [f"{info['records']:,}", str(info["steps"]), size_text(info["bytes"])]
    return [run.label, recorded, *figures, state, os.path.relpath(info["path"])]
