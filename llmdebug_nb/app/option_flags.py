"""The flags of the recording options, for the command line and the magics.

They are made from the declarations in `core.options`, so both front ends know the same options.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import Field, fields
from typing import Any

from llmdebug_nb.core.option_declaration import HOW_MUCH, WHAT, WHEN, Declaration, declaration_of
from llmdebug_nb.core.options import DumpOptions

# of messages, by msit's names
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "fatal": 4, "critical": 4}


def declare_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, object] | None = None,
    without: Collection[str] = (),
) -> None:
    """Add a flag for each option that has one.

    An option whose flag is not used is absent from the parsed arguments. ``defaults``: those that
    the help shows in place of `DumpOptions`' own. ``without``: options that get none.
    """
    groups = {title: parser.add_argument_group(title) for title in (WHAT, WHEN, HOW_MUCH)}
    for option in fields(DumpOptions):
        declaration = declaration_of(option)
        if declaration.flags is None or option.name in without:
            continue
        groups[declaration.group].add_argument(
            *declaration.flags,
            f"--{option.name.replace('_', '-')}",
            dest=option.name,
            default=argparse.SUPPRESS,
            **_behaviour(option, declaration),
            help=declaration.help
            + _default_text({option.name: option.default, **(defaults or {})}[option.name]),
        )


def _behaviour(option: Field[Any], declaration: Declaration) -> dict[str, Any]:
    """Return how argparse reads the value of a flag."""
    if option.default is False:
        return {"action": "store_true"}
    if option.default is True and declaration.flag_value is None:
        return {"action": argparse.BooleanOptionalAction}
    reads: dict[str, Any] = {"type": declaration.flag_value, "choices": declaration.choices}
    if declaration.bare_flag is not None:
        reads |= {"nargs": "?", "const": declaration.bare_flag}
    return {**reads, "metavar": declaration.metavar}


def _default_text(default: object) -> str:
    return "" if default is None or default is False else f" (default: {default})"


def given_options(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the options among parsed arguments."""
    return {name: arguments[name] for name in DumpOptions.names() if name in arguments}
