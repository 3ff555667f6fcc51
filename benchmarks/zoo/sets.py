"""The sets of the zoo by name."""

from __future__ import annotations

from zoo.bugs import BUGS
from zoo.controls import CONTROLS
from zoo.entry import Entry
from zoo.more import MORE
from zoo.rewrite import PORTS

SETS: dict[str, list[Entry]] = {"zoo": [*BUGS, *CONTROLS], "more": [*MORE, *PORTS]}
