"""What blame needs of two runs: their rows, values and scalars, a way to measure, and the model that mine recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.opened_run import OpenedRun
from llmdebug_nb.core.records import Kernel, Record, Site
from llmdebug_nb.explain.calls import Key

if TYPE_CHECKING:
    import torch

Scalar = tuple[str, str | None]  # type name, text


class NotAgain(Exception):
    """A recorded call can't be made again; says why."""


class Side:
    """One of the two runs."""

    def __init__(
        self, run: OpenedRun, kernels: Callable[[Site], Kernel | None] = lambda site: None
    ) -> None:
        """``kernels(site)``: the kernel that computed what a call gave."""
        self.run, self.kernels = run, kernels
        self._steps: dict[tuple[int, int], dict[tuple[str, int], dict[str, Scalar]]] = {}

    def records(self, key: Key, role: str) -> list[Record]:
        """Return the records of one call in that role."""
        found = self.run.records(
            path=key.path,
            call=key.call,
            phase=key.phase,
            generation=key.generation,
            step=key.step,
            rank=key.rank,
            role=role,
        )
        return list(found)

    def load(self, record: Record) -> torch.Tensor:
        """Return the values of a record. Raises NotAgain where they are not there whole."""
        if record.payload is None or record.kept is not None:
            raise NotAgain(f"the values of {record.site.role} {record.site.slot} were not kept")
        try:
            return self.run.load(record)
        except (CorruptDumpError, TensorLookupError) as error:
            raise NotAgain(str(error)) from None

    def scalars(self, key: Key) -> dict[str, Scalar]:
        """Return the arguments of one call that are no tensors, by slot; of a forward call only, as no other is told apart."""
        if key.phase != "forward":
            return {}
        step = (key.generation, key.step)
        if step not in self._steps:
            found = self._steps[step] = {}
            rows = self.run.index.scalars(generation=key.generation, step=key.step, role="input")
            for row in rows:
                found.setdefault((row.path, row.call), {})[row.slot] = (row.type, row.value)
        return self._steps[step].get((key.path, key.call), {})

    @cached_property
    def attributes(self) -> dict[str, dict[str, Scalar]]:
        """Plain attributes of each module, by path."""
        return self._of_modules("attribute")

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, Scalar]]:
        """Fingerprints of each module's own parameters, by path: (dtype and shape, fingerprint)."""
        return self._of_modules("weight")

    def _of_modules(self, role: str) -> dict[str, dict[str, Scalar]]:
        found: dict[str, dict[str, Scalar]] = {}
        for row in self.run.index.scalars(role=role):
            found.setdefault(row.path, {}).setdefault(row.slot, (row.type, row.value))
        return found

    def source(self, key: Key) -> str | None:
        """Return where in the program an operator was called: the innermost frame."""
        return self.run.index.innermost_frame(
            path=key.path,
            call=key.call,
            phase=key.phase,
            generation=key.generation,
            step=key.step,
        )

    def kernel(self, key: Key) -> Kernel | None:
        """Return the kernel of compiled code that computed what a call gave, or None."""
        return self.kernels(
            Site(key.path, key.step, key.call, key.phase, generation=key.generation)
        )


@dataclass
class Runs:
    """Both runs. ``error(golden, mine)``: relative L2 error of two tensors of equal shape, inf where NaN or infinities differ.

    ``module(path)``: the live module of mine's model, or None where it is gone.
    """

    golden: Side
    mine: Side
    error: Callable[[torch.Tensor, torch.Tensor], float]
    module: Callable[[str], torch.nn.Module | None] = field(default=lambda path: None)
