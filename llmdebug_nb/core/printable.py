"""Texts from a run as they are printed: names and messages may hold anything.

A dump is made by a program, or by a stranger. An escape sequence in a name would change the
terminal, a newline would forge a line, and a bidi override would turn text round. So all that is
printed goes through `printable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# what spreadsheets take for the start of a formula; in Asian ones the wide signs too
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_CODE = re.compile(r"[._/]")  # inside a word: it is no English one
_LONGEST_PART = 120  # characters: file systems allow 255 bytes, and other parts are added


def printable(text: str) -> str:
    """Return one line of text. Control, format and unassigned characters become visible escapes.

    ``\\x1b[2J`` becomes the seven characters that stand here.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def printable_lines(texts: Iterable[str]) -> str:
    """Return lines below each other; none of them holds a further line break."""
    return "\n".join(map(printable, texts))


def bracketed(text: str) -> str:
    """Return `` (text)``, or nothing for no text: a tensor of a file has no class or operator."""
    return f" ({text})" if text else ""


def cell(value: object) -> object:
    """Return a cell of a csv file. A text that a spreadsheet would compute has an apostrophe."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)


def file_part(text: str) -> str:
    """Return a text as one part of a file's name, which leads nowhere else.

    What is no letter, digit, or one of ``._#~-`` becomes ``_``. It has 120 characters at most.
    """
    part = re.sub(r"[^\w.#~-]", "_", text, flags=re.ASCII)
    return part[:_LONGEST_PART].lstrip(".") or "_"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def sentence(clause: str) -> str:
    """Return a clause, such as a relation or an advice, as a sentence; "" for none.

    A path or a name in code that it begins with keeps its letters.
    """
    word = clause.partition(" ")[0].rstrip(".,:;")
    start = clause[:1] if _CODE.search(word) else clause[:1].upper()
    return f"{start}{clause[1:].rstrip('.')}." if clause else ""
