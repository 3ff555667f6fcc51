"""The user's variables, and the cells that run with them."""

from __future__ import annotations

import ast
import builtins
import keyword
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics

from llmdebug_nb.app.runs import describe_run, runs
from llmdebug_nb.core.errors import nearest
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    from llmdebug_nb.app.report import Report

_AWAITS = ast.Await | ast.AsyncFor | ast.AsyncWith


class Namespace:
    """The variables of a shell's user."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._variables: dict[str, Any] = shell.user_ns

    def get(self, name: str | None) -> Any:
        """Return the variable of that name; without one, the name itself."""
        return name if name is None else self._variables.get(name, name)

    def evaluate(self, expression: str | None, magic: str) -> Any:
        """Return the value of an expression; None for no expression. Raises UsageError."""
        if expression is None:
            return None
        try:
            return eval(expression, self._shell.user_ns)
        except Exception as error:
            near = nearest(expression, self.modules()) if isinstance(error, NameError) else ""
            raise UsageError(
                f"{magic}: can't evaluate {expression!r}: {type(error).__name__}: {error}{near}"
            ) from None

    def run(self, name: str) -> Run | str:
        """Return the run in the variable of that name; without one, the name to open it by."""
        value = self._variables.get(name)
        return value if isinstance(value, Run) else name

    def run_names(self) -> list[str]:
        """Return the names that open a run: those on disk, and variables."""
        return sorted({*self.names_of(Run), *(run.name for run in runs())})

    def names_of(self, kind: type) -> list[str]:
        """Return the names of the variables of a class."""
        values = self._variables.items()
        return [name for name, value in values if isinstance(value, kind) and name[0] != "_"]

    def names(self) -> list[str]:
        """Return the names of all variables that are not hidden."""
        hidden = self._shell.user_ns_hidden
        return [name for name in self.names_of(object) if name not in hidden]

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules among the variables."""
        import torch

        names = self.names_of(torch.nn.Module)
        return {name: self._shell.user_ns[name] for name in names}

    def bind(self, run: Run, quiet: bool = False) -> None:
        """Make the run a variable unless its name is taken; print a line on it unless ``quiet``."""
        name, value = run.name, self._variables.get(run.name)
        note = ""
        if not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name):
            note = f"; open it with ld.open_run({name!r})"
        elif value is not None and not isinstance(value, Run):
            note = (
                f"; your variable {name!r} ({type(value).__name__}) was left alone: "
                f"open the run with ld.open_run({name!r})"
            )
        else:
            self._variables[name] = run
        if not quiet:
            print(describe_run(run) + note)

    def bind_report(self, report: Report) -> None:
        """Make a report the variable ``report``, unless that name is taken, and ``_report``."""
        from llmdebug_nb.app.report import Report

        if isinstance(self._variables.get("report", report), Report):
            self._variables["report"] = report
        self._variables["_report"] = report

    def compile(self, cell: str) -> Callable[[], object]:
        """Return a function that runs a cell and returns its last expression, as IPython does.

        Raises:
            UsageError: the cell awaits something at its top level.
        """
        from llmdebug_nb.capture.operators.call_stacks import ends_stacks

        shell = self._shell
        source = shell.transform_cell(cell)
        name = shell.compile.cache(source, shell.execution_count, raw_code=cell)
        tree = shell.transform_ast(ast.parse(source, name))
        if any(isinstance(node, _AWAITS) for node in _outside_functions(tree)):
            raise UsageError(
                "%%llmdump: a cell with await at the top level can't be recorded by the magic; "
                "use `with ld.dump(...)` in a plain cell"
            )
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = shell.compile(tree, name, "exec")
        value = None if last is None else shell.compile(ast.Expression(last.value), name, "eval")
        quiet = shell.displayhook.semicolon_at_end_of_expression(cell)

        def run() -> object:
            __tracebackhide__ = True
            exec(body, shell.user_ns)
            result = None if value is None else eval(value, shell.user_ns)
            return None if quiet else result

        ends_stacks(run.__code__)
        return run


class NamespaceMagics(Magics):
    """Magics that read and set the user's variables."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._namespace = Namespace(shell)


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a cell that are not inside a function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _outside_functions(node)
