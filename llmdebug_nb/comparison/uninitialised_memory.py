"""Memory that was allocated and not, or not wholly, written to: what it holds is chance."""

from __future__ import annotations

import functools
import re

from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import CallKey, Record

# operators that return memory which nothing was written to yet, and those that write to all of
# their first argument
_ALLOCATES = re.compile(r"(.*\.)?(new_)?empty(_like|_strided|_permuted|_quantized)?(\.\w+)?")
_WRITES = re.compile(
    r"(.*\.)?(copy|fill|zero|normal|uniform|random|bernoulli|exponential|geometric|cauchy"
    r"|log_normal)_(\.\w+)?"
)
_ASSIGNS = "__setitem__"


class Unwritten:
    """Follows such memory through one run, by what made each tensor."""

    def __init__(self) -> None:
        self._memory: dict[int, int] = {}  # by the id of a record, that of the allocation
        self._left: dict[int, int] = {}  # elements of an allocation that were not written to
        self._first: dict[CallKey, int] = {}  # the memory that an operator has as first argument
        self._value: dict[CallKey, int] = {}  # elements that ``x[...] = value`` assigns

    def holds(self, record: Record) -> bool:
        """Tell whether a tensor is such memory. Ask for each record once, in execution order."""
        site = record.site
        if site.role == "input":
            return self._is_given(record)
        if site.role == "output" and is_operator(site.path):
            return self._is_made(record)
        return False

    def _is_given(self, record: Record) -> bool:
        site, producer = record.site, record.producer
        if site.slot == "2" and record.op.endswith(_ASSIGNS):
            self._value[site.key] = record.summary.numel
        memory = None if producer is None else self._memory.get(producer)
        if memory is None or self._left[memory] <= 0:
            return False
        if site.slot == "0":
            self._first[site.key] = memory
        self._memory[record.id] = memory
        return True

    def _is_made(self, record: Record) -> bool:
        """Note what an operator gives: new memory, a part of some, or what it wrote there."""
        numel = record.summary.numel
        if _allocates(record.op):
            self._memory[record.id], self._left[record.id] = record.id, numel
            return True
        memory = self._first.get(record.site.key)
        if memory is None:
            return False
        self._memory[record.id] = memory
        if _writes(record.op):
            self._left[memory] -= numel
            return False  # this part is written
        if record.op.endswith(_ASSIGNS):
            self._left[memory] -= self._value.get(record.site.key, numel)
        elif record.op.endswith("_"):
            self._left[memory] = 0  # it may be: where it writes is among its arguments
        return self._left[memory] > 0


@functools.cache
def _allocates(op: str) -> bool:
    return _ALLOCATES.fullmatch(op) is not None


@functools.cache
def _writes(op: str) -> bool:
    return _WRITES.fullmatch(op) is not None
