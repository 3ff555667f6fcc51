"""Bugs as text. Each has a heading, what it changes, and where that shows.

    scaled_by_the_width: scores are divided by the root of the model's width
        - math.sqrt(q.shape[-1])
        + math.sqrt(x.shape[-1])
        in blocks.* $ATTENTION
        also scores = torch.where(

``-`` begins what stands in the port's source, ``+`` what stands there instead; without one, whole
lines are left out. In their place are ``weights`` and a Python expression that gives what changes
the converted weights (`CHANGES`, or a function of the port's module), or
``settings`` and one that gives settings of the port. The other words are attributes of `Bug`:
``in`` modules (``(root)`` is the root), ``golden``, ``also``, ``early``, ``least``. A name after a
dollar is a text, or some texts, of the port's module.
"""

from __future__ import annotations

import re
from string import Template
from typing import Any

import torch

from ports import weights
from ports.entry import Bug

ROOT = "(root)"
CHANGES = (
    "each", "swap", "copy", "transpose", "as_made",
    "turned", "reordered", "zeroed", "interleaved", "by_halves",
)  # fmt: skip


def bugs(text: str, module: dict[str, Any]) -> tuple[Bug, ...]:
    """Return the bugs of a text. ``module``: the names of the module that it is in."""
    values = {name: value for name, value in module.items() if isinstance(value, str | tuple)}
    joined = {
        name: value if isinstance(value, str) else " ".join(str(each or ROOT) for each in value)
        for name, value in values.items()
    }
    names = module | {"torch": torch} | {name: getattr(weights, name) for name in CHANGES}
    blocks = re.split(r"\n(?=\S)", text.strip("\n"))
    return tuple(_bug(block, joined, names) for block in blocks)


def _bug(block: str, paths: dict[str, str], names: dict[str, Any]) -> Bug:
    heading, *lines = block.splitlines()
    name, _, what = heading.partition(": ")
    facts: dict[str, list[str]] = {}
    for line in lines:
        word, _, rest = line[4:].partition(" ")
        facts.setdefault(word, []).append(rest)

    def listed(word: str) -> tuple[str, ...]:
        given = Template(" ".join(facts.get(word, ()))).substitute(paths)
        return tuple("" if path == ROOT else path for path in given.split())

    def value(word: str) -> Any:
        return eval("\n".join(facts[word]), names) if word in facts else None

    left_out = "-" in facts and "+" not in facts
    return Bug(
        name,
        what,
        "\n".join(facts.get("-", ())) + "\n" * left_out,
        "\n".join(facts.get("+", ())),
        convert=value("weights"),
        settings=value("settings") or {},
        modules=listed("in"),
        golden=listed("golden"),
        also=tuple(facts.get("also", ())),
        early="early" in facts,
        least=value("least") or Bug.least,
    )
