"""The magics: parse, call one use case, show the result."""

from __future__ import annotations

import ast
import builtins
import keyword
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import (
    MagicArgumentParser,
    argument,
    magic_arguments,
    parse_argstring,
)

from llmdebug_nb.app import api
from llmdebug_nb.app.launching import arguments
from llmdebug_nb.app.launching.program import launch
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.stepping import COMMANDS
from llmdebug_nb.core.errors import LLMDebugError, nearest
from llmdebug_nb.core.options import GRAPHS, PARTS, PHASES, TOKENS, DumpOptions
from llmdebug_nb.notebook import explore, formatters
from llmdebug_nb.show.text import table
from llmdebug_nb.show.words import size_text
from llmdebug_nb.store.run import Run

_DEFAULTS = DumpOptions()


@contextmanager
def one_line() -> Iterator[None]:
    """Turn our errors into one readable line instead of a traceback."""
    try:
        yield
    except LLMDebugError as error:
        raise UsageError(str(error)) from None


def _dump_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options of a recording."""
    parts = [part for part in PARTS if len(part) < 5]
    for declare in reversed(
        [
            argument(
                "model",
                nargs="?",
                metavar="MODEL_EXPR",
                help="the model; without it, whatever module runs",
            ),
            argument(
                "--name",
                default=_DEFAULTS.name,
                help="name of the run and of its variable (default: %(default)s)",
            ),
            argument(
                "--tokens",
                default=TOKENS,
                help="steps: 0-3, 0,2,5-7, 4- or all (default: %(default)s)",
            ),
            argument(
                "--mode",
                default="module",
                help="module, api, aten, or several: module+aten (default: %(default)s)",
            ),
            argument(
                "--phase",
                choices=[*PHASES],
                default=_DEFAULTS.phase,
                help="forward, backward or both",
            ),
            argument(
                "--part", choices=parts, default=_DEFAULTS.part, help="inputs, outputs or both"
            ),
            argument("--layers", help="glob(s) over module paths, with commas: model.layers.*.mlp"),
            argument("--types", help="module class name(s), with commas: Linear,LlamaRMSNorm"),
            argument(
                "--apis",
                help="operators: names or globs with commas, ! in front leaves out; or a YAML file",
            ),
            argument(
                "--contains",
                help="only calls whose full name holds one of these texts, with commas",
            ),
            argument("--scope", help="only calls from one full name to another, with a comma"),
            argument("--weights", action="store_true", help="also the parameters, once"),
            argument("--logits", action="store_true", help="only the last logits of each step"),
            argument(
                "--overflow",
                type=int,
                metavar="N",
                help="only calls with NaN or infinity, N of them (0: all)",
            ),
            argument("--stats-only", action="store_true", help="record summaries, not the tensors"),
            argument("--slice", metavar="INDEX", help="keep a part of each tensor: 0,:,-1"),
            argument(
                "--reduce", metavar="R", help="keep figures of each tensor: minmax or quantile:N"
            ),
            argument(
                "--max-bytes", metavar="N", help="keep no more payload than this: 500MB, 2GiB"
            ),
            argument("--seed", type=int, help="seed Python, NumPy and torch before the cell runs"),
            argument(
                "--warmup",
                type=int,
                default=_DEFAULTS.warmup,
                help="generations at the start that are warm-ups",
            ),
            argument(
                "--force-eager",
                action="store_true",
                help="run what torch.compile compiled eagerly meanwhile",
            ),
            argument(
                "--graph",
                choices=[*GRAPHS],
                help="compile the model, and record its graph, its kernels, or both",
            ),
            argument(
                "--fusion-switch",
                metavar="F",
                help="with --graph: JSON file that says which fusions are off",
            ),
            argument(
                "--profile",
                metavar="T",
                help="also tables of times: op, kernel, host, tiling, joined by +",
            ),
            argument(
                "--control", metavar="F", help="JSON file that switches recording while it runs"
            ),
            argument("--path", help="folder that will hold the run (default: llmdebug_runs)"),
            argument(
                "--exec",
                metavar="COMMAND",
                help="%%llmdump --exec 'python run.py': run a command, and record it; options as llmdebug dump has them",
            ),
        ]
    ):
        function = declare(function)
    return function


@magics_class
class LLMDebugMagics(Magics):
    """%%llmdump, %llmdump on|off|status, %llmcompare, %llmexplore, %llmruns."""

    _switched_on: api.Recording | None = None

    @magic_arguments()
    @_dump_arguments
    @line_cell_magic
    def llmdump(self, line: str, cell: str | None = None) -> Any:
        """Record what the model in this cell computes; or, as a line magic, in all cells from here on.

        The cell runs as it would without the magic; its result still shows. The options of ``%llmdump on`` are the same.

        ``%%llmdump --tokens 0-3 --name golden``, ``%llmdump on model --name golden``, ``%llmdump status``, ``%llmdump off``,
        ``%llmdump --exec "python generate.py 'a b'" --name golden`` (options as ``llmdebug dump --help`` shows them)
        """
        __tracebackhide__ = True  # an error in the cell shows the cell, not us
        if cell is None:
            return self._launch(line) if re.search(r"(^|\s)--exec\b", line) else self._switch(line)
        recording = self._recording_of(line)
        run_cell = self.parsed(cell)
        with one_line():
            run = recording.start()
            try:
                result = run_cell()
            except BaseException as error:
                self._keep_what_there_is(recording, run, type(error).__name__)
                raise
            recording.stop()
        self.bind(run)
        return result

    @magic_arguments()
    @argument("golden", help="name or path of the run to hold against, or a variable")
    @argument("mine", help="name or path of the run in question, or a variable")
    @argument("--limits", metavar="F", help="fixed limits: a YAML or JSON file, or a variable")
    @argument(
        "--calibrate",
        metavar="RUN",
        action="append",
        help="another recording of golden; may be repeated",
    )
    @argument(
        "--metric",
        metavar="F",
        action="append",
        help="a metric: file.py:function, or a variable; may be repeated",
    )
    @argument("--csv", metavar="F", help="write the table of differences to this file")
    @argument("--html", metavar="F", help="write the report as one HTML page to this file")
    @argument(
        "--map",
        metavar="F",
        help="YAML or JSON file (or a variable): which module of golden is which of mine",
    )
    @argument("--no-explain", action="store_true", help="skip the search for what is to blame")
    @argument(
        "--expect",
        metavar="GLOB",
        action="append",
        help="mark what such modules make as expected, from now on",
    )
    @argument("--comment", metavar="TEXT", default="", help="why that is expected")
    @argument(
        "--unexpect",
        metavar="GLOB",
        action="append",
        help="take a mark back: its glob as it was given",
    )
    @line_magic
    def llmcompare(self, line: str) -> Report:
        """Compare two runs: verdict, first divergence, what is to blame, explorer.

        Example: ``%llmcompare golden mine --html report.html``
        """
        args = parse(self.llmcompare, line)
        with one_line():
            report = api.compare(
                self.known_run(args.golden),
                self.known_run(args.mine),
                explain=not args.no_explain,
                mapping=self.shell.user_ns.get(args.map, args.map),
                limits=self.shell.user_ns.get(args.limits, args.limits),
                calibrate=[self.known_run(name) for name in args.calibrate or ()],
                metrics=[self.shell.user_ns.get(name, name) for name in args.metric or ()],
            )
            for glob in args.unexpect or ():
                report.unexpect(glob)
            for glob in args.expect or ():
                report.expect(glob, args.comment)
            explore.show_report(report, self.shell)
            for target, write in ((args.csv, report.to_csv), (args.html, report.to_html)):
                if target:
                    print(f"written: {write(target)}")
        _shown[:] = [(self.shell.execution_count, report)]
        return report

    @magic_arguments()
    @argument("name", help="name or path of a run, or a variable that holds a run or a report")
    @argument(
        "--tokenizer", metavar="EXPR", help="a tokenizer: steps show the text that they were given"
    )
    @line_magic
    def llmexplore(self, line: str) -> Any:
        """Open the explorer of a run or a report.

        Example: ``%llmexplore golden``
        """
        args = parse(self.llmexplore, line)
        tokenizer = self.value(args.tokenizer, "%llmexplore")
        with one_line():
            held = self.shell.user_ns.get(args.name)
            return explore.explore(
                held if isinstance(held, Report) else self.known_run(args.name), tokenizer
            )

    @magic_arguments()
    @argument("--delete", metavar="NAME", help="delete this run from disk")
    @line_magic
    def llmruns(self, line: str) -> None:
        """List the runs that can be opened by name."""
        args = parse(self.llmruns, line)
        with one_line():
            if args.delete:
                gone = api.delete_run(args.delete)
                left = [run.label for run in api.runs() if run.name == args.delete]
                print(
                    f"deleted: {gone}"
                    + (f"; of that name there are still {', '.join(left)}" if left else "")
                )
                return
            rows = [_listed(run) for run in api.runs()]
        head = ["name", "recorded", "tensors", "steps", "size", "state", "path"]
        print(table(head, rows) if rows else "no runs yet: record one with %%llmdump")

    # -- recording ----------------------------------------------------------------------------

    def _recording_of(self, line: str) -> api.Recording:
        options = vars(parse(self.llmdump, line))
        if options.pop("exec") is not None:
            raise UsageError(
                "%%llmdump: --exec runs a command in place of a cell: %llmdump --exec 'python run.py'"
            )
        model = self.value(options.pop("model"))
        with one_line():
            return api.dump(model, **options)

    def _launch(self, line: str) -> None:
        """Run a command, show what it writes, and bind the run."""
        parser = MagicArgumentParser("%llmdump", add_help=False)
        arguments.declare(parser)
        try:
            given = parser.parse_args(shlex.split(line))
        except ValueError as error:
            raise UsageError(
                f"%llmdump: {error}; quote the command as in --exec 'python run.py'"
            ) from None
        if given.exec is None:
            raise UsageError(
                "%llmdump: expected a command behind --exec, as in %llmdump --exec 'python run.py'"
            )
        with one_line():
            done = launch(
                given.exec, pth=given.pth, output=_write, **arguments.options(vars(given))
            )
            for text in done.lines("warning"):
                print(f"llmdump: {text}", file=sys.stderr)
            if done.status:
                print(f"llmdump: the command ended with status {done.status}", file=sys.stderr)
            if done.path is not None:
                self.bind(done.run)

    def _switch(self, line: str) -> None:
        command, _, rest = line.strip().partition(" ")
        if command not in _SWITCHES:
            near = nearest(command, _SWITCHES) if command else ""
            raise UsageError(
                f"%llmdump {command}: expected on, off or status{near}; %%llmdump records one cell, --exec a command"
            )
        now = (
            self._switched_on
            if self._switched_on is not None and self._switched_on.running
            else None
        )
        if command == "on":
            if now is not None:
                raise UsageError(
                    f"%llmdump on: {now.options.name} is being recorded; %llmdump off ends that"
                )
            recording = self._recording_of(rest)
            with one_line():
                recording.start()
            self._switched_on = recording
            print(f"{recording.options.name}: recording until %llmdump off")
        elif now is None:
            raise UsageError(
                f"%llmdump {command}: nothing is being recorded; %llmdump on starts it"
            )
        elif command == "status":
            print(now.status())
        else:
            with one_line():
                self.bind(now.stop())

    # -- running the cell ---------------------------------------------------------------------

    def parsed(self, cell: str) -> Callable[[], Any]:
        """Return what runs the cell in the user's namespace and gives the value of its last expression, as a plain cell does."""
        shell = self.shell
        source = shell.transform_cell(cell)
        name = shell.compile.cache(source, shell.execution_count, raw_code=cell)
        tree = shell.transform_ast(ast.parse(source, name))
        if any(
            isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
            for node in _outside_functions(tree)
        ):
            raise UsageError(
                "%%llmdump: no await at the top of the cell; use `with ld.dump(...)` in a plain cell"
            )
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = shell.compile(tree, name, "exec")
        value = None if last is None else shell.compile(ast.Expression(last.value), name, "eval")
        quiet = shell.displayhook.semicolon_at_end_of_expression(cell)

        def run() -> Any:
            __tracebackhide__ = True
            exec(body, shell.user_ns)
            result = None if value is None else eval(value, shell.user_ns)
            return None if quiet else result

        return run

    def _keep_what_there_is(self, recording: api.Recording, run: Run, ended_by: str) -> None:
        """End the recording of a cell that failed. Its error is the news; ours is a line beside it."""
        try:
            recording.stop(ended_by)
        except LLMDebugError as error:
            print(f"llmdump: {error}")
        else:
            self.bind(run)

    def value(self, expression: str | None, magic: str = "%%llmdump") -> Any:
        """Return what an expression of the user's is; None for none. Raises UsageError."""
        if expression is None:
            return None
        try:
            return eval(expression, self.shell.user_ns)
        except Exception as error:
            near = nearest(expression, _modules(self.shell)) if isinstance(error, NameError) else ""
            raise UsageError(
                f"{magic}: can't evaluate {expression!r}: {type(error).__name__}: {error}{near}"
            ) from None

    def known_run(self, name: str) -> Any:
        """Return the Run in the variable of that name, else the name to open it by."""
        held = self.shell.user_ns.get(name)
        return held if isinstance(held, Run) else name

    def bind(self, run: Run) -> None:
        """Say what was kept, and put the run into the user's namespace unless its name holds something else."""
        note = ""
        held = self.shell.user_ns.get(run.name)
        if (
            not run.name.isidentifier()
            or keyword.iskeyword(run.name)
            or hasattr(builtins, run.name)
        ):
            note = f"; open it with ld.open_run({run.name!r})"
        elif held is not None and not isinstance(held, Run):
            note = f"; the variable {run.name!r} is yours ({type(held).__name__}) and was left alone: ld.open_run({run.name!r})"
        else:
            self.shell.user_ns[run.name] = run
        print(api.kept_line(run) + note)


def _write(stream: str, text: str) -> None:
    """Show what a command has written, as what the cell writes."""
    print(text, end="", file=getattr(sys, stream), flush=True)


_SWITCHES = ("on", "off", "status")
_COMMANDS = {"llmdump": _SWITCHES, "llmstep": (*COMMANDS, "status")}
_NAMES = ("llmdump", "llmcompare", "llmexplore", "llmruns", "llmstep")


def parse(magic: Any, line: str) -> Any:
    """Parse a magic's line; an option that it does not know is answered with the nearest ones."""
    try:
        args = parse_argstring(magic, line)
    except UsageError as error:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", str(error))
        known = [
            name
            for action in magic.parser._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        raise UsageError(f"{error}{nearest(unknown[1], known) if unknown else ''}") from None
    for name, value in vars(args).items():
        setattr(
            args,
            name,
            [_unquoted(one) for one in value] if isinstance(value, list) else _unquoted(value),
        )
    return args


def _unquoted(value: Any) -> Any:
    """Return a word without the quotes around it, which IPython leaves there."""
    quoted = isinstance(value, str) and re.fullmatch(r"(['\"])(.*)\1", value, re.S)
    return quoted[2] if quoted else value


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a cell that are not inside a function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _outside_functions(node)


def _listed(run: Run) -> list[str]:
    """Return the cells of a run in `%llmruns`; the first one opens it."""
    info = run.info()
    when = f"{datetime.fromtimestamp(run.meta['created']):%Y-%m-%d %H:%M:%S}"
    state = "complete" if info["complete"] else "incomplete"
    place = os.path.relpath(info["path"])
    return [
        run.label,
        when,
        f"{info['records']:,}",
        str(info["steps"]),
        size_text(info["bytes"]),
        state,
        place,
    ]


# -- display and completion -------------------------------------------------------------------

_shown: list[
    tuple[int, Report]
] = []  # what a magic has shown in this cell: as the cell's value it is not shown again


def _display_report(shell: Any) -> Callable[[Report], None]:
    def display(report: Report) -> None:
        if not any(report is shown and count == shell.execution_count for count, shown in _shown):
            explore.show_report(report, shell)

    return display


def _completions(shell: Any, magics: LLMDebugMagics, before: str) -> list[tuple[str, str]]:
    """Return (text, kind) of what can follow ``before``, a line that starts with one of our magics."""
    word = re.match(r"%%?(\w+)", before)
    assert word is not None
    parser = shell.magics_manager.magics["line"][word[1]].parser
    try:
        done = shlex.split(before[word.end() :], posix=False)
    except ValueError:
        return []
    if done and not before.endswith(" "):
        done.pop()
    options = {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    last = options.get(done[-1]) if done else None
    if last is not None and last.nargs != 0:
        values = last.choices or _values(shell, last.dest)
        if values:
            return [(str(value), "value") for value in values]
    found = [(name, "param") for name in options if name not in done and name != "--help"]
    if word[1] in _COMMANDS:
        if word[0] == f"%{word[1]}" and not done:
            return [(name, "command") for name in _COMMANDS[word[1]]]
        return found + [(name, "model") for name in _modules(shell)]
    named = set(_run_names(shell))
    if word[1] == "llmexplore":
        named |= {
            name
            for name, value in shell.user_ns.items()
            if isinstance(value, Report) and name[0] != "_"
        }
    return [(name, "run") for name in sorted(named)] + found


def _modules(shell: Any) -> dict[str, Any]:
    import torch

    return {
        name: value
        for name, value in shell.user_ns.items()
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }


def _values(shell: Any, option: str) -> list[str]:
    """Return what an option that takes a value can be offered."""
    parts = {
        part for module in _modules(shell).values() for part in module.named_modules() if part[0]
    }
    if option in ("layers", "at"):
        return sorted({path for path, _ in parts})
    if option == "types":
        return sorted({type(part).__name__ for _, part in parts})
    if option in ("calibrate", "delete", "golden"):
        return _run_names(shell)
    return _OFFERS.get(option, [])


_OFFERS = {
    "mode": ["module", "api", "aten", "module+api", "module+aten", "module+api+aten"],
    "profile": ["host", "kernel+host", "op+kernel+host", "kernel+host+tiling"],
    "reduce": ["minmax", "quantile:5"],
    "tokens": ["0", TOKENS, "4-", "all"],
    "when": ["nan", "inf", "abs>1e4", "diverges"],
}


def _run_names(shell: Any) -> list[str]:
    """Return the names that open a run: those on disk, and variables."""
    held = {
        name for name, value in shell.user_ns.items() if isinstance(value, Run) and name[0] != "_"
    }
    return sorted(held | {run.name for run in api.runs()})


def _matcher(shell: Any, magics: LLMDebugMagics) -> Any:
    ours = re.compile(rf"\s*(%%?(?:{'|'.join(_NAMES)})\s.*)$", re.DOTALL)

    @context_matcher(identifier="llmdebug_nb.magics")
    def match(context: CompletionContext) -> SimpleMatcherResult:
        line = context.line_with_cursor[: context.cursor_position]
        found = ours.match(line)
        if not found:
            return {"completions": []}
        fragment = re.search(r"[^\s,=]*$", line)
        token = fragment[0] if fragment else ""
        completions = [
            SimpleCompletion(text, type=kind)
            for text, kind in _completions(shell, magics, found[1])
            if text.startswith(token)
        ]
        return {
            "completions": completions,
            "suppress": bool(completions),
            "matched_fragment": token,
        }

    return match


_matchers: dict[int, Any] = {}


def register(shell: Any) -> None:
    """Add the magics, their completion, and the display of reports to a shell. Twice does no harm."""
    unregister(shell)
    formatters.register(shell)
    from llmdebug_nb.notebook.stepping import StepMagics

    magics = LLMDebugMagics(shell)
    shell.register_magics(magics)
    shell.register_magics(StepMagics(shell, magics))
    shell.display_formatter.ipython_display_formatter.for_type(Report, _display_report(shell))
    _matchers[id(shell)] = _matcher(shell, magics)
    shell.Completer.custom_matchers.append(_matchers[id(shell)])


def unregister(shell: Any) -> None:
    """Take back what `register` added."""
    for kind, names in (("line", _NAMES), ("cell", ("llmdump", "llmstep"))):
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.display_formatter.ipython_display_formatter.pop(Report, None)
    matcher = _matchers.pop(id(shell), None)
    if matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(matcher)
