"""How an option of a recording is declared; the options themselves are in `core.options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, NamedTuple

WHAT, WHEN, HOW_MUCH = "what is recorded", "when", "how much, and where"


class Declaration(NamedTuple):
    """The declaration of an option, besides its name, type and default.

    ``help``: one line. ``read``: takes a value and the option's name, returns the canonical form.
    ``store``: returns the form that a dump's JSON holds. ``flags``: spellings beside ``--name``;
    None: the option has no flag. ``flag_value``: reads the text after the flag. ``bare_flag``: the
    value of a flag without one.
    """

    help: str
    group: str
    read: Callable[[Any, str], object] | None
    store: Callable[[Any], object] | None
    flags: tuple[str, ...] | None
    flag_value: Callable[[str], object] | None
    bare_flag: object
    metavar: str | None
    choices: tuple[str, ...] | None


def option(
    default: object,
    help: str,
    group: str,
    *,
    read: Callable[[Any, str], object] | None = None,
    store: Callable[[Any], object] | None = None,
    flags: tuple[str, ...] | None = (),
    flag_value: Callable[[str], object] | None = None,
    bare_flag: object = None,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare an option: a dataclass field that carries a `Declaration`."""
    declaration = Declaration(
        help, group, read, store, flags, flag_value, bare_flag, metavar, choices
    )
    return field(default=default, metadata={"declaration": declaration})


def declaration_of(option: Field[Any]) -> Declaration:
    """Return the declaration of one of `DumpOptions`' fields."""
    declaration: Declaration = option.metadata["declaration"]
    return declaration
