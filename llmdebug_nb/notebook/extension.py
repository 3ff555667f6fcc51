"""``%load_ext llmdebug_nb``: the magics, their completion, and the display of reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmdebug_nb.app.report import Report
from llmdebug_nb.notebook import formatters
from llmdebug_nb.notebook.check_magics import CheckMagics
from llmdebug_nb.notebook.command_magic import CommandMagic
from llmdebug_nb.notebook.completion import Matcher, matcher
from llmdebug_nb.notebook.dump_magic import DumpMagics
from llmdebug_nb.notebook.explore import show_report
from llmdebug_nb.notebook.lockstep_magic import LockstepMagic
from llmdebug_nb.notebook.magics import MAGICS, LLMDebugMagics
from llmdebug_nb.notebook.stepping import StepMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_matchers: dict[int, Matcher] = {}  # by the id of their shell


def register(shell: InteractiveShell) -> None:
    """Add everything to a shell. Calling it twice does no harm."""
    unregister(shell)
    formatters.register(shell)
    magics = LLMDebugMagics(shell)
    shell.register_magics(magics)
    for others in (DumpMagics, StepMagics, CheckMagics, CommandMagic):
        shell.register_magics(others(shell))
    shell.register_magics(LockstepMagic(shell, magics.show))
    display = shell.display_formatter.ipython_display_formatter
    display.for_type(Report, _report_display(shell, magics))
    _matchers[id(shell)] = matcher(shell)
    shell.Completer.custom_matchers.append(_matchers[id(shell)])


def unregister(shell: InteractiveShell) -> None:
    """Remove what `register` added. The formatters stay: importing the package adds them too."""
    for kinds in shell.magics_manager.magics.values():
        for name in MAGICS:
            kinds.pop(name, None)
    shell.display_formatter.ipython_display_formatter.pop(Report, None)
    known = _matchers.pop(id(shell), None)
    if known in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(known)


def _report_display(shell: InteractiveShell, magics: LLMDebugMagics) -> Callable[[Report], None]:
    def display(report: Report) -> None:
        if not magics.has_shown(report):
            show_report(report, shell)

    return display
