"""Completes the lines of our magics."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from llmdebug_nb.app.report import Report
from llmdebug_nb.app.stepping import COMMANDS
from llmdebug_nb.cli.command import run_name
from llmdebug_nb.comparison.token_checks import RULES
from llmdebug_nb.core.options import TOKENS
from llmdebug_nb.notebook.command_magic import parsers
from llmdebug_nb.notebook.dump_magic import SWITCHES
from llmdebug_nb.notebook.magic_line import long_options
from llmdebug_nb.notebook.magics import MAGICS
from llmdebug_nb.notebook.namespace import Namespace

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Matcher = Callable[[CompletionContext], SimpleMatcherResult]

_COMMANDS = {"llmdump": SWITCHES, "llmstep": (*COMMANDS, "status")}
_LIVE = ("llmdoctor", "llmlogits")  # they take a live model as well
_MODELS = {"llmperturb": 1, "llmlockstep": 2}  # magics whose first words are models
_VALUES = {
    "mode": ["module", "api", "aten", "module+api", "module+aten", "module+api+aten"],
    "profile": ["host", "kernel+host", "op+kernel+host", "kernel+host+tiling"],
    "reduce": ["minmax", "quantile:5"],
    "tokens": ["0", TOKENS, "4-", "all"],
    "layout": ["msit", "msprobe", "atb", "npy", "fx", "fx-old", "ge"],
    "side": ["golden", "mine", "difference", "all"],
    "rule": list(RULES),
    "when": ["nan", "inf", "abs>1e4", "diverges"],
}


def matcher(shell: InteractiveShell) -> Matcher:
    """Return what offers IPython's completer the options and values of our magics."""
    our_line = re.compile(rf"\s*(%%?(?:{'|'.join(MAGICS)})\s.*)$", re.DOTALL)

    @context_matcher(identifier="llmdebug_nb.magics")
    def match(context: CompletionContext) -> SimpleMatcherResult:
        line = context.line_with_cursor[: context.cursor_position]
        ours = our_line.match(line)
        if not ours:
            return {"completions": []}
        fragment = re.search(r"[^\s,=]*$", line)
        token = fragment[0] if fragment else ""
        completions = [
            SimpleCompletion(text, type=kind)
            for text, kind in _completions(shell, ours[1])
            if text.startswith(token)
        ]
        suppress = bool(completions)
        return {"completions": completions, "suppress": suppress, "matched_fragment": token}

    return match  # type: ignore[no-any-return]  # IPython's decorator is untyped


def _completions(shell: InteractiveShell, before: str) -> list[tuple[str, str]]:
    """Return text and kind of the words that can follow ``before``, a line up to the cursor."""
    word = re.match(r"%%?(\w+)", before)
    assert word is not None
    magic = word[1]
    try:
        done = shlex.split(before[word.end() :], posix=False)
    except ValueError:
        return []
    if done and not before.endswith(" "):
        done.pop()
    if magic == "llmdebug":
        return _of_command(shell, done)
    return _of_magic(shell, magic, word[0] == f"%{magic}", done)


def _of_command(shell: InteractiveShell, done: list[str]) -> list[tuple[str, str]]:
    """Return what can follow ``%llmdebug`` and the words ``done``."""
    known = parsers()
    if not done:
        return [(name, "command") for name in known]
    if f"llm{done[0]}" in MAGICS:
        return _of_magic(shell, f"llm{done[0]}", True, done[1:])
    if done[0] not in known:
        return []
    actions = known[done[0]]._actions
    options = {name: each for each in actions for name in each.option_strings if name[1] == "-"}
    last = options.get(done[-1])
    if last is not None and last.nargs != 0:
        return [(str(value), "value") for value in last.choices or _VALUES.get(last.dest, [])]
    takes_run = any(each.type is run_name for each in actions)
    runs = Namespace(shell).run_names() if takes_run else []
    names = [name for name in options if name not in done and name != "--help"]
    return [(name, "run") for name in runs] + [(name, "param") for name in names]


def _of_magic(
    shell: InteractiveShell, magic: str, is_line: bool, done: list[str]
) -> list[tuple[str, str]]:
    """Return what can follow a magic and the words ``done``."""
    namespace = Namespace(shell)
    options = long_options(shell.magics_manager.magics["line"][magic])
    last = options.get(done[-1]) if done else None
    if last is not None and last.nargs != 0 and (values := _values(namespace, last)):
        return [(str(value), "value") for value in values]
    names = [(name, "param") for name in options if name not in done and name != "--help"]
    if magic in _COMMANDS:
        if is_line and not done:
            return [(name, "command") for name in _COMMANDS[magic]]
        return names + [(name, "model") for name in namespace.modules()]
    if magic in _MODELS:
        words = [word for word in done if not word.startswith("-")]
        variables = namespace.modules() if len(words) < _MODELS[magic] else namespace.names()
        return [*((name, "variable") for name in variables), *names]
    runs = set(namespace.run_names())
    if magic == "llmexplore":
        runs.update(namespace.names_of(Report))
    models = [(name, "model") for name in namespace.modules()] if magic in _LIVE else []
    return [(name, "run") for name in sorted(runs)] + models + names


def _values(namespace: Namespace, option: argparse.Action) -> Iterable[object]:
    """Return the values that an option can have, as far as they are known."""
    if option.choices:
        return option.choices
    if option.dest in ("calibrate", "delete", "golden", "golden_path", "mine_path"):
        return [*namespace.run_names(), *(["auto"] if option.dest == "calibrate" else [])]
    if option.dest == "inputs":
        return namespace.names()
    if option.dest not in ("layers", "at", "types"):
        return _VALUES.get(option.dest, [])
    parts = {
        (path, type(part).__name__)
        for module in namespace.modules().values()
        for path, part in module.named_modules()
        if path
    }
    return sorted({kind if option.dest == "types" else path for path, kind in parts})
