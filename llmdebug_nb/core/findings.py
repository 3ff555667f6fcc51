"""The nouns of a comparison: a **Pair** of records, measured into a **Difference**, and the **Finding** that is to blame.

What is known of a difference and wanted is an **Expectation**.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.paths import matches
from llmdebug_nb.core.records import Kernel, Record, Site

if TYPE_CHECKING:
    import torch

EXPECTED = "expected"
MISMATCHES = ("diverged", "unmatched")  # verdicts of what asks to be looked at

# why a tensor of compiled code has no partner, though nothing is missing
INSIDE = "computed inside a kernel in the other run, and nowhere written"
WRITTEN = "written by a kernel, where the other run has a view or an operator that it keeps whole"
READ = "what a kernel reads, compared where it was made"
OF_COMPILED = frozenset({INSIDE, WRITTEN, READ})
# the same for a graph that was exported (ONNX)
FOLDED = (
    "not in the exported graph: folded into a constant, fused with something else, or unused there"
)
INNER = (
    "a value of the exported graph, which the other run does not hand from one module to another"
)
EXCUSED = OF_COMPILED | {FOLDED, INNER}


class Fit(Protocol):
    """Brings two tensors to one shape. ``says``: how, in words. ``whole``: every element of both takes part."""

    @property
    def says(self) -> str: ...
    @property
    def whole(self) -> bool: ...
    def __call__(
        self, golden: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records and why they were matched, or one record and why it stays alone.

    ``fit``: where the two lie differently, what brings them to one shape, and says so; see `align/fit.py`.
    """

    golden: Record | None
    mine: Record | None
    why: str
    fit: Fit | None = None

    @property
    def either(self) -> Record:
        record = self.golden or self.mine
        assert record is not None
        return record


@dataclass(frozen=True, slots=True)
class Expectation:
    """A deviation that is known and wanted, and why: ``comment``.

    ``path``: a glob over module and operator paths. By itself it means what such a module makes: its outputs and all
    inside it, not what it is given. With ``role`` and ``slot`` it means that one tensor of such a module; ``phase`` and ``step`` narrow
    either, None is any.
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
        return f"{self.path or '(root)'}{phase}{tensor}{'' if self.step is None else f' step {self.step}'}"

    @classmethod
    def of_row(cls, row: Difference, comment: str = "") -> Expectation:
        """Return one of that tensor, in all steps."""
        s = row.site
        return cls(escape(s.path), comment, s.role, s.slot, s.phase)

    @classmethod
    def of_finding(cls, finding: Finding, comment: str = "") -> Expectation:
        """Return one of the call that is blamed; where that was given something wrong, of what it was given."""
        mark, row = cls(escape(finding.path), comment), finding.difference
        given = row is not None and row.verdict == "diverged" and not mark.covers(row.site)
        return cls.of_row(row, comment) if row is not None and (given or not finding.path) else mark

    def covers(self, site: Site) -> bool:
        """Tell whether a tensor is meant."""
        if self.step not in (None, site.step) or self.phase not in (None, site.phase):
            return False
        at_it, inside = matches(self.path, site.path)
        if self.role is None and self.slot is None:
            return inside or (at_it and site.role != "input")
        return at_it and self.role in (None, site.role) and self.slot in (None, site.slot)

    def means(self, other: Expectation) -> bool:
        """Tell whether both mean the same tensors, whatever they say of them."""
        return replace(self, comment="") == replace(other, comment="")


class Comparison:
    """The comparison that rows belong to: it knows its report while somebody holds the report."""

    def __init__(self) -> None:
        self._report: weakref.ref[object] | None = None

    @property
    def report(self) -> object | None:
        return None if self._report is None else self._report()

    @report.setter
    def report(self, report: object) -> None:
        self._report = weakref.ref(report)


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """A pair, measured. ``metrics``: name -> value, names as in `comparison/metrics.py`.

    ``verdict``: match | within_noise | expected | diverged | unmatched. ``error``: the figure that was judged,
    ``limit``: what it was held against. ``reason``: why it is unmatched, or can't be measured. ``expected``: what says so of it, or None
    where it merely follows from what is expected.
    """

    index: int
    pair: Pair
    verdict: str
    error: float | None = None
    limit: float | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    reason: str | None = None
    expected: Expectation | None = None
    comparison: Comparison | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        figures = "" if self.error is None else f", error {self.error:.2g} (limit {self.limit:.2g})"
        return f"<{self.verdict}: {self.site}{figures}{', ' + self.reason if self.reason else ''}>"

    @property
    def site(self) -> Site:
        return self.pair.either.site

    @property
    def op(self) -> str:
        return self.pair.either.op

    @property
    def is_mismatch(self) -> bool:
        """It asks to be looked at: it diverged, or a partner is missing that there could be."""
        return self.verdict in MISMATCHES and self.pair.why not in EXCUSED


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """What is to blame. ``cause``: a closed set, see `explain/causes.py`. ``op``: golden's class of the module, or the operator.

    ``evidence``: in words, with figures. ``difference``: the row that shows it. ``source``: where in the program the
    operator was called (``file:line function``), if that was recorded. ``repro``: a Python script that makes the
    call again from the two dumps. ``kernel``: of compiled code, the one that computes it in mine (or in golden, where mine is not fused).
    ``expected``: what says that it is, or None.
    """

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    difference: Difference | None = None
    source: str | None = None
    repro: str | None = None
    kernel: Kernel | None = None
    expected: Expectation | None = None

    def script(self) -> str:
        """Return ``repro``. Raises StoreError where nothing can be called again (values were not kept, say)."""
        if self.repro is None:
            raise StoreError(
                f"there is nothing to run for {self.path or 'the root'}: its tensors were not recorded in both runs"
            )
        return self.repro

    def save_repro(self, path: str | os.PathLike[str]) -> Path:
        """Write ``repro`` to a file and return its path.

        Raises:
            StoreError: nothing can be called again (values were not kept, say), or the file can't be written.
        """
        script = self.script()
        try:
            Path(path).write_text(script, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"can't write {os.fspath(path)}: {error.strerror or error}") from None
        return Path(path)

    def __repr__(self) -> str:
        return f"<{self.cause}: {self.path or '(root)'} ({self.op}), step {self.step}; {self.evidence}>"


def covering(expected: Iterable[Expectation], what: Difference | Finding) -> Expectation | None:
    """Return the first that covers a row, by its place in golden or in mine, or what a finding blames."""
    if isinstance(what, Finding):
        seen = what.difference.site if what.difference else Site(what.path, what.step)
        sites = [replace(seen, path=what.path, role="output", slot="0"), seen]
    else:
        sites = [record.site for record in (what.pair.golden, what.pair.mine) if record is not None]
        if len(sites) == 1:  # what only one run has is not what it is given, but that it is there
            sites.append(replace(sites[0], role="output"))
    return next((mark for mark in expected if any(map(mark.covers, sites))), None)
