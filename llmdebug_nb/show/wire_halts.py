"""A halt of a program, as the kernel sends it to the explorer in a page; see `wire`."""

from __future__ import annotations

from typing import TypedDict

from llmdebug_nb.show.wire_findings import CodeView


class Command(TypedDict):
    """A way to go on. ``can``: it can be carried out here."""

    name: str
    effect: str
    can: bool


class HaltView(TypedDict):
    """Where a program is halted, or was halted last before it ended.

    ``head``, ``place``, ``where``: as of a `Headline`. ``why``: the condition that held, or how the
    program ended. ``tensors``: the outputs beside golden's in words. ``rest``: what agrees since
    golden's values were put in; "" if none were. ``file``, ``line``: to open, "" and 0 if unknown.
    ``listing``: the function that it is halted in; ``at``: the line.
    """

    ended: bool
    head: str
    place: str
    where: str
    why: str
    tensors: str
    rest: str
    file: str
    line: int
    commands: list[Command]
    listing: CodeView
