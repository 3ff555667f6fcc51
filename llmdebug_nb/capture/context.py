"""Where a recording stands: what its observer shares with those that record beside it."""

from __future__ import annotations

from llmdebug_nb.capture.calls import OpenCall, SharedCounts, ThreadState
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.name_filter import NameFilter
from llmdebug_nb.core.options import DumpOptions


class Context:
    """Where one recording stands, and which calls it wants.

    ``thread``: the state of the running thread. ``counts``, ``names``: of the calls of all threads.
    ``forward``, ``backward``: the phases that are recorded.
    ``latest``: the root call that backward passes belong to; None if it is not recorded.
    ``paused``: gradients and compiled code are not recorded now.
    ``filtered``: only calls in some modules are recorded.
    """

    def __init__(self, options: DumpOptions, thread: ThreadState, latest: int | None) -> None:
        self.thread = thread
        self.counts = SharedCounts()
        self.names = NameFilter(options, thread, self.counts)
        self.forward = "forward" in options.phases
        self.backward = "backward" in options.phases
        self.filtered = bool(options.layers or options.types)
        self.latest = latest
        self.paused = False

    def selects_inside(self, parent: OpenCall | None) -> bool:
        """Return whether operators directly in a call are selected.

        Outside of all calls, an operator of another model isn't.
        """
        if parent is None:
            return not self.filtered and not pytorch.in_model()
        return parent.selected or not self.filtered

    def wants_phase(self, call: OpenCall) -> bool:
        return self.forward or call.phase == "backward"
