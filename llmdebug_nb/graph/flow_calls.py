"""A call of one run, with its tensors, the calls inside it and the one around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import IN_KERNEL, CallKey, Record


@dataclass(eq=False)
class FlowCall:
    """A call of one run. ``inner``: the calls directly inside it; ``around``: the call it is in.

    Its tensors are in execution order.
    """

    key: CallKey
    inputs: list[Record] = field(default_factory=list)
    weights: list[Record] = field(default_factory=list)
    outputs: list[Record] = field(default_factory=list)
    inner: list[FlowCall] = field(default_factory=list)
    around: FlowCall | None = None

    @property
    def is_operator(self) -> bool:
        return is_operator(self.key.path)

    @property
    def is_kernel(self) -> bool:
        """True if compiled code makes it in a kernel, which reads these inputs."""
        return any(r.site.slot.startswith(IN_KERNEL) for r in self.inputs)

    @property
    def records_of(self) -> list[Record]:
        """Its tensors, the outputs first."""
        return self.outputs + self.inputs + self.weights

    @property
    def gives_indices(self) -> bool:
        """True if it gives indices or flags alone."""
        return not any(is_floating(r.summary.dtype) for r in self.outputs)

    @property
    def end(self) -> float:
        """The id of its last result; infinity in a backward pass, which goes on from there."""
        return self.outputs[-1].id if self.key.phase == "forward" and self.outputs else math.inf

    @property
    def passes_on(self) -> bool:
        """True if it gives what it takes."""
        return all(any(same_bytes(r, given) for given in self.inputs) for r in self.outputs)

    @property
    def operators(self) -> Iterator[FlowCall]:
        """All operators inside it."""
        for call in self.inner:
            yield from (call,) if call.is_operator else call.operators

    @property
    def start(self) -> int:
        """The id of its first record; weights are recorded before any call."""
        first = (self.inputs[:1] + self.outputs[:1]) or self.weights[:1]
        return min(record.id for record in first)


def same_bytes(one: Record, other: Record) -> bool:
    """Tell whether two records hold the same bytes."""
    a, b = one.summary, other.summary
    return a.fingerprint is not None and (a.fingerprint, a.dtype) == (b.fingerprint, b.dtype)
