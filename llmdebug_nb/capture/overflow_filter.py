"""The option ``overflow``: only calls whose outputs hold NaN or infinity are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.core.kernels.overflow import overflows

RecordLeaves = Callable[[OpenCall, str, Iterable[Leaf]], None]


class OverflowFilter:
    """Holds the leaves of a call until its outputs show whether they overflow."""

    def __init__(self, limit: int, record: RecordLeaves, full: Callable[[], None]) -> None:
        """``limit``: count of calls to record, 0 for any; at the limit, ``full()`` is called."""
        self._limit, self._record, self._full = limit, record, full
        self._recorded = 0

    def hold(self, call: OpenCall, role: str, leaves: Iterable[Leaf]) -> None:
        """Keep leaves of a call. Inputs are copied, as they may change until the call ends."""

        def kept(leaf: object) -> object:
            return leaf.clone() if isinstance(leaf, torch.Tensor) and role == "input" else leaf

        call.pending = [*call.pending, *((role, slot, kept(leaf)) for slot, leaf in leaves)]

    def decide(self, call: OpenCall) -> None:
        """Record the held leaves of a call that has ended, or drop them."""
        pending, call.pending = call.pending, ()
        if self._is_full() or not any(
            role == "output" and isinstance(leaf, torch.Tensor) and overflows(leaf)
            for role, _, leaf in pending
        ):
            return
        for role, slot, leaf in pending:
            self._record(call, role, [(slot, leaf)])
        self._recorded += 1
        if self._is_full():
            self._full()

    def _is_full(self) -> bool:
        return 0 < self._limit <= self._recorded


def record_both(
    record: RecordLeaves, reference: RecordLeaves, call: OpenCall, role: str, leaves: Iterable[Leaf]
) -> None:
    """Record the inputs of modules in the dump and in the reference; all else in the dump."""
    leaves = list(leaves)
    record(call, role, leaves)
    if call.level == "module" and role == "input":
        reference(call, role, leaves)
