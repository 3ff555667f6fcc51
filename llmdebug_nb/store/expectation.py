"""An expectation: a deviation that the user knows and wants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from glob import has_magic

from llmdebug_nb.core.paths import matches
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import Site

_ESCAPED = re.compile(r"\[[*?[]\]")  # what glob.escape makes of a wildcard


@dataclass(frozen=True, slots=True)
class Expectation:
    """A deviation that the user knows and wants; ``comment`` says why.

    ``path``: a glob over module and operator paths. Alone it covers the outputs of such a module
    and everything inside it, but not its inputs. With ``role`` and ``slot`` it covers one tensor of
    such a module. ``phase`` and ``step`` restrict both; None means any. A pattern (a path with
    wildcards, and no slot) covers only differences that are small against the tensor.
    """

    path: str
    comment: str = ""
    role: str | None = None
    slot: str | None = None
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        tensor = f" {self.role or '*'}[{self.slot or '*'}]" if self.role or self.slot else ""
        phase = f" {self.phase}" if self.phase else ""
        step = "" if self.step is None else f" step {self.step}"
        return printable(f"{self.path or '(root)'}{phase}{tensor}{step}")

    def covers(self, site: Site) -> bool:
        """Return whether the expectation covers a tensor."""
        if self.step not in (None, site.step) or self.phase not in (None, site.phase):
            return False
        at_it, inside = matches(self.path, site.path)
        if self.role is None and self.slot is None:
            return inside or (at_it and site.role != "input")
        return at_it and self.role in (None, site.role) and self.slot in (None, site.slot)

    @property
    def is_pattern(self) -> bool:
        """True if it names no tensor or module, but what they have in common."""
        return self.slot is None and has_magic(_ESCAPED.sub("", self.path))

    def means(self, other: Expectation) -> bool:
        """Return whether both cover the same tensors; comments may differ."""
        return replace(self, comment="") == replace(other, comment="")


def covering(
    expected: Iterable[Expectation], sites: Sequence[Site], large: bool = False
) -> Expectation | None:
    """Return the first expectation that covers one of the sites of a row or of a finding.

    ``large``: its difference is not small against the tensor, so that no pattern covers it.
    """
    marks = (m for m in expected if any(map(m.covers, sites)) and not (large and m.is_pattern))
    return next(marks, None)
