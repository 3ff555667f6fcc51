"""A finding in the words of the first screen; `findings/summary.py` finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """A finding in the words of the first screen.

    ``head``: ``Made in``. ``place``: the line to look at, with the name of its file alone; the path
    of the call if the line is unknown. ``where``: the call in mine, and what it was in golden.
    ``what``: how the values differ, or the evidence. ``which``: the tokens that differ, "" if there
    are not several. ``why``: the evidence, "" if it was said.
    ``do``: the advice.
    """

    head: str
    place: str
    where: str
    what: str
    which: str
    why: str
    do: str
