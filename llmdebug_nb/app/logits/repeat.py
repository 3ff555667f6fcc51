"""Determinism: the same program twice, and the operator that differs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.app import rerun
from llmdebug_nb.app.compare import compare
from llmdebug_nb.app.report import Report
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import CompareError, OptionError
from llmdebug_nb.core.printable import bracketed, printable_lines
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.show.words import count_text

if TYPE_CHECKING:
    from llmdebug_nb.store.run import Run

MODE = "module+aten"
NAMES = ("first", "second")


@dataclass(frozen=True)
class Repeated:
    """The same program twice. ``report``: the comparison of both recordings, bit by bit."""

    report: Report

    @property
    def verdict(self) -> str:
        """``pass`` if all that was recorded is equal, ``fail``, or ``not compared``."""
        if not self.compared:
            return "not compared"
        return "fail" if self.first is not None or self.unmatched else "pass"

    @property
    def first(self) -> Difference | None:
        """The first output that differs, in execution order; else the first such tensor."""
        differing = [d for d in self.report.differences if _differs(d)]
        made = (d for d in differing if d.site.role == "output")
        return min(made, key=_order, default=min(differing, key=_order, default=None))

    @property
    def unmatched(self) -> int:
        """How many tensors only one of the two has."""
        pairs = [d.pair for d in self.report.differences if d.verdict == "unmatched"]
        return sum(pair.golden is None or pair.mine is None for pair in pairs)

    @property
    def compared(self) -> int:
        """How many tensors were compared: memory that nothing has written yet is not."""
        return sum(d.verdict != "unmatched" for d in self.report.differences)

    def __str__(self) -> str:
        return printable_lines(self._lines())

    def _lines(self) -> Iterator[str]:
        count = count_text(self.compared, "tensor")
        yield f"the same program twice: {self.verdict}: {count} compared"
        first = self.first
        if first is not None:
            error = "" if first.error is None else f", error {first.error:.3g}"
            yield f"first that differs: {first.site}{bracketed(first.op)}{error}"
        elif self.verdict == "pass":
            yield "all of them are equal, bit by bit"
        if self.unmatched:
            yield f"only one of the two has {count_text(self.unmatched, 'tensor')}"
        if self.report.incomparable:
            yield self.report.incomparable

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _differs(row: Difference) -> bool:
    return row.verdict not in ("match", "unmatched")


def _order(row: Difference) -> tuple[int, int]:
    """Order by execution; an operator comes before the modules that end with its result."""
    pair = row.pair
    return (pair.golden.id if pair.golden is not None else 0, row.index)


def repeated(program: object, inputs: object = None) -> Repeated:
    """Run a program twice, record its operators, and compare.

    ``program``: a model, which is called with ``inputs`` (a tensor, or keyword arguments), or a
    callable without arguments.

    Raises:
        OptionError: there is nothing to run.
        CompareError: the program ran no model, or a recording is running.
    """
    work = _work(program, inputs)
    models = [program] if isinstance(program, torch.nn.Module) else []
    runs = [_recorded(models, work, name) for name in NAMES]
    return compared(runs[0], runs[1])


def compared(first: Run, second: Run) -> Repeated:
    """Compare two recordings of one program. Raises CompareError."""
    return Repeated(compare(first, second, explain=False))


def _recorded(models: list[torch.nn.Module], work: Callable[[], object], name: str) -> Run:
    options = {"name": name, "mode": MODE, "tokens": "all"}
    try:
        return rerun.record(models, work, options)
    except CannotReplay as error:
        raise CompareError(f"the program can't be recorded: {error}") from None


def _work(program: object, inputs: object) -> Callable[[], object]:
    if isinstance(program, torch.nn.Module):
        if inputs is None:
            raise OptionError(
                "a model that is run twice needs inputs=, a tensor or keyword arguments; a run"
                " needs a second run or a model to be compared with"
            )
        if isinstance(inputs, Mapping):
            named = {str(key): value for key, value in inputs.items()}
            return lambda: program(**named)
        return lambda: program(inputs)
    if not callable(program) or inputs is not None:
        raise OptionError(
            f"expected a second run or model, or a program to run twice, got"
            f" {f'{program!r:.80}' if isinstance(program, str) else type(program).__name__} alone"
        )
    return program
