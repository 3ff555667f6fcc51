"""`Stop`: the call at which a program is halted, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.app.compare import compare
from llmdebug_nb.app.stepping.agreement_after_graft import Place, place_of
from llmdebug_nb.app.stepping.golden import Golden
from llmdebug_nb.comparison.engine import error
from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.printable import printable_lines
from llmdebug_nb.core.records import Record, RootCall, Site
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.layouts import Contents
from llmdebug_nb.store.reader import in_memory

if TYPE_CHECKING:
    from llmdebug_nb.capture.current_line import Here
    from llmdebug_nb.show.views import View
    from llmdebug_nb.store.run import Run


@dataclass
class Stop:
    """A halt of the program: a call that has just ended.

    ``inputs``, ``outputs``: its live tensors by slot. If you write to them, the program continues
    with the new values. ``why``: the condition that held, in words. ``here``: the line of the
    program that made the call; None if it has none.
    """

    path: str
    op: str
    call: int
    generation: int
    step: int
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    against: Golden | None = None
    why: str = ""
    here: Here | None = None

    @cached_property
    def golden(self) -> dict[str, torch.Tensor]:
        """The outputs that golden's run recorded for this call, by slot."""
        return self._golden_tensors("output", self.outputs)

    @cached_property
    def errors(self) -> dict[str, float]:
        """The relative L2 error of the outputs, by slot."""
        return {
            slot: error(theirs, self.outputs[slot].detach().cpu())
            for slot, theirs in self.golden.items()
            if slot in self.outputs and theirs.numel() == self.outputs[slot].numel()
        }

    @cached_property
    def given(self) -> float:
        """How far its inputs are from those that golden's call took; infinite if that is unknown.

        Of a call by its number in its module, this tells whether it is golden's at all. A weight
        that differs excuses nothing.
        """
        theirs = self._golden_tensors("input", self.inputs)
        if not theirs or theirs.keys() != self.inputs.keys():
            return math.inf
        pairs = [
            (theirs[slot], mine.detach().cpu())
            for slot, mine in self.inputs.items()
            if not isinstance(mine, torch.nn.Parameter)
        ]
        if any(golden.numel() != mine.numel() for golden, mine in pairs):
            return math.inf
        return max((error(golden, mine.reshape(golden.shape)) for golden, mine in pairs), default=0)

    @property
    def names(self) -> tuple[str, str, str]:
        """The names that a condition may use: path, operator, and operator without its level."""
        return self.path, self.op, self.op.partition(".")[2]

    @property
    def place(self) -> Place:
        return place_of(self._site("output"))

    def view(self) -> View:
        """Return the view for an explorer: the present tensors, beside golden's if known."""
        mine = self._run("stop", {"input": self.inputs, "output": self.outputs}, {
            "input": "stop.inputs[{slot!r}]", "output": "stop.outputs[{slot!r}]",
        })  # fmt: skip
        if self.golden:
            theirs = {"input": self._golden_tensors("input", self.inputs), "output": self.golden}
            golden = self._run("golden", theirs, {"output": "stop.golden[{slot!r}]"})
            report = compare(golden, mine, explain=False, progress=False)
            if not report.incomparable:
                return report.view()
        return RunView(mine)

    def telling_row(self, view: View) -> int:
        """Return the row of a view of this halt that diverges, else that of an output; or -1."""
        row = view.overview()["first_bad"]
        return row if row >= 0 or not self.outputs else view.find(self.path, self.step, "output")

    def _golden_tensors(
        self, role: str, live: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {} if self.against is None else self.against.tensors(self._site(role), live)

    def _site(self, role: str, slot: str = "") -> Site:
        return Site(
            self.path, self.step, self.call, role=role, slot=slot, generation=self.generation
        )

    def _run(
        self,
        name: str,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        code: Mapping[str, str],
    ) -> Run:
        """Return tensors, by role and slot, as a run. ``code``: Python that gives one, by role."""
        records: list[Record] = []
        values: list[torch.Tensor] = []
        for role, by_slot in tensors.items():
            for slot, tensor in by_slot.items():
                number, why = len(records), unreadable(tensor)
                values.append(tensor.detach())
                records.append(Record(
                    number, self._site(role, slot), number, self.op, summarize(values[number]),
                    str(tensor.device), None, number if why is None else None, why,
                ))  # fmt: skip
        calls = [RootCall(0, self.generation, self.step)]
        contents = Contents(
            records, calls, [], lambda record: values[record.id].cpu(), {"code": code}
        )
        return in_memory(name, contents, sum(t.numel() * t.element_size() for t in values))

    def __repr__(self) -> str:
        lines = [f"{self.path or 'the model'} ({self.op}), step {self.step}: {self.why}"]
        if self.here is not None:
            lines.append(f"  {self.here.frame}")
        lines += [f"  input  {slot}  {_text(tensor)}" for slot, tensor in self.inputs.items()]
        lines += [f"  {line}" for line in self.outputs_text()]
        return printable_lines(lines)

    def outputs_text(self) -> list[str]:
        """Return a line for each output: type, shape, range, and how far it is off golden."""
        return [
            f"output {slot}  {_text(tensor)}"
            + (f", {self.errors[slot]:.2g} off golden" if slot in self.errors else "")
            for slot, tensor in self.outputs.items()
        ]


def _text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}{_range(tensor)}"


def _range(tensor: torch.Tensor) -> str:
    values = computable(tensor)
    if values is None or values.is_complex():
        return ""
    return f", {float(values.min()):.4g} to {float(values.max()):.4g}"


def computable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values as a tensor that has min and max; None if it is empty or has no values."""
    import torch

    if not tensor.numel() or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    values = tensor.detach()
    # float8 has no min
    return values.float() if values.is_floating_point() and values.dtype.itemsize == 1 else values
