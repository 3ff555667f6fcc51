"""Texts from a run as they are printed: names and messages may hold anything.

A dump is made by a program, or by a stranger. An escape sequence in a name would change the
terminal, a newline would forge a line, and a bidi override would turn text round. So all that is
printed goes through `printable`.
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """Return one line of text. Control, format and unassigned characters become visible escapes.

    ``\\x1b[2J`` becomes the seven characters that stand here.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def lines(texts: Iterable[str]) -> str:
    """Return lines below each other; none of them holds a further line break."""
    return "\n".join(map(printable, texts))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
