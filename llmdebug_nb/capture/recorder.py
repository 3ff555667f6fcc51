"""From a tensor that was seen to a row in the dump: described once, kept once.

A tensor seen again is neither computed nor written twice. On the CPU it is known by a fingerprint of
its bytes, which costs less than any figure and can't be fooled; elsewhere, within a root call, by its
storage, its place in it and its version counter (which `tensor.data` and foreign kernels go past). Payloads go to the
sink at once, since the program may change them next; rows follow once per root call, when the
figures of accelerator tensors are read back together. Figures and fingerprint are always those of the
whole tensor, also where only a part of it is kept (`payload.py`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from llmdebug_nb.capture import compat
from llmdebug_nb.capture.payload import NotKept, Policy
from llmdebug_nb.errors import StoreError
from llmdebug_nb.kernels import summary as kernel
from llmdebug_nb.kernels.fingerprint import ALGORITHM, ALGORITHMS, fingerprint
from llmdebug_nb.kernels.raw import dtype_name, memory, plain, to_bytes, unreadable, view
from llmdebug_nb.options import DumpOptions
from llmdebug_nb.records import AT, COLUMNS, Node, RootCall, Row

_MIN, _ZERO = AT["min"], AT["zero"]
_FINGERPRINT, _OFFSET, _LENGTH, _LOST = AT["fingerprint"], AT["offset"], AT["length"], AT["lost"]
_DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]
_DEVICE, _PRODUCER = AT["device"], AT["producer"]
_MANY = 4096  # rows in hand before they are committed, also in the middle of a root call


class Sink(Protocol):
    """Where rows go. `store.writer.Writer` is one."""

    def shortage(self, nbytes: int) -> str | None: ...
    def payload(self, row: Row, data: Any) -> None: ...
    def duplicate(self, row: Row, offset: int, length: int) -> None: ...
    def commit(
        self,
        rows: Iterable[Row] = (),
        calls: Iterable[RootCall] = (),
        scalars: Iterable[tuple[Any, ...]] = (),
        meta: dict[str, Any] | None = None,
        *,
        operators: Iterable[Row] = (),
        sources: Iterable[tuple[int, str]] = (),
    ) -> None: ...
    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def close(self, meta: dict[str, Any]) -> None: ...


class Recorder:
    """Turns observed tensors into rows of one sink. Thread-safe.

    ``records``: rows made. ``kept``/``distinct``: rows with a payload, payloads written.
    ``lost``: why -> how many payloads that were asked for are not there. ``failure``: the error of a
    sink that can't go on (disk full); recording then continues without it, and counts.
    """

    def __init__(self, sink: Sink, options: DumpOptions) -> None:
        self.sink = sink
        self.records = self.kept = self.distinct = 0
        self.lost: Counter[str] = Counter()
        self.failure: StoreError | None = None
        self._policy = Policy(options, sink.shortage)
        self._shown = None if options.fingerprint == ALGORITHM else ALGORITHMS[options.fingerprint]
        self._lock = threading.RLock()
        self._rows: list[Row] = []
        self._operators: list[Row] = []
        self._sources: dict[tuple[str, ...], int] = {}
        self._new_sources: list[tuple[int, str]] = []
        self._scalars: list[tuple[Any, ...]] = []
        self._contents: dict[tuple[Any, ...], Row] = {}  # XXH3, dtype, shape -> the row that describes it
        self._seen: dict[tuple[Any, ...], Row] = {}  # the same by identity, within one root call
        # number of a storage -> the record that put it out last, and what keeps the number its own
        self._makers: dict[int | None, tuple[int, Any]] = {}
        self._shapes: dict[torch.Size, str] = {}
        self._vectors: dict[torch.device, list[tuple[Row, torch.Tensor]]] = defaultdict(list)
        self._copies: list[tuple[Row, Row]] = []  # rows whose figures wait for those of another

    def tensor(
        self,
        root_call: int,
        path: str,
        call: int,
        role: str,
        slot: str,
        op: str,
        tensor: torch.Tensor,
        phase: str = "forward",
    ) -> None:
        """Record a tensor as it is now. Never raises on account of the tensor: what can't be kept is counted."""
        with self._lock:
            row: Row = [None] * len(COLUMNS)
            row[:10] = self.records, root_call, path, call, phase, role, slot, op, dtype_name(tensor), "[]"
            self.records += 1
            self._rows.append(row)
            try:
                row[_SHAPE] = self._shape(tensor)
                row[_DEVICE] = "cpu" if tensor.is_cpu else str(tensor.device)
                storage = compat.storage_number(tensor)
                made = self._makers.get(storage)
                row[_PRODUCER] = None if made is None else made[0]
                self._describe(row, tensor)
                if role == "output" and storage is not None:
                    self._makers[storage] = row[0], compat.storage_of(tensor)
            except StoreError as error:
                self.failure = error
                if row[_OFFSET] is None:  # a duplicate whose frame could not be written still has its payload
                    self._lose(row, str(error).partition(";")[0])
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
                self._lose(row, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            if len(self._rows) >= _MANY:
                self.flush()

    @property
    def written(self) -> int:
        """Bytes of payload written so far."""
        return self._policy.written

    def scalar(self, root_call: int, path: str, call: int, role: str, slot: str, kind: str, text: str | None) -> None:
        """Record a leaf that is no tensor."""
        with self._lock:
            self._scalars.append((root_call, path, call, role, slot, kind, text))

    def operator(self, row: Row) -> None:
        """Record an operator call: a list in the order of `records.OPERATOR`. In execution order."""
        with self._lock:
            self._operators.append(row)
            if len(self._operators) >= _MANY:
                self.flush()

    def source(self, frames: list[str]) -> int:
        """Return the number of a call stack, innermost frame first; equal stacks have one number."""
        with self._lock:
            number = self._sources.get(tuple(frames))
            if number is None:
                number = self._sources[tuple(frames)] = len(self._sources)
                self._new_sources.append((number, json.dumps(frames)))
            return number

    def _shape(self, tensor: torch.Tensor) -> str:
        """Return the sizes as JSON, made once for equal shapes."""
        if tensor.is_nested:
            return _shape_text(tensor)
        text = self._shapes.get(tensor.shape)
        if text is None:
            text = self._shapes[tensor.shape] = _shape_text(tensor)
        return text

    def _describe(self, row: Row, tensor: torch.Tensor) -> None:
        """Fill in figures, fingerprint and payload, once for equal tensors."""
        found = memory(tensor) if on_host(tensor) and not tensor.is_nested else None
        why = unreadable(tensor) if found is None else None
        if why is not None:
            self._lose(row, why)
            return
        if found is None and on_host(tensor) and not tensor.is_quantized:
            tensor = plain(tensor)  # a strided one is copied once, for all that follows
            found = memory(tensor)
        data = view(tensor, found) if found else to_bytes(tensor) if on_host(tensor) else None
        if data is not None:
            row[_FINGERPRINT] = fingerprint(data)
        known_by = self._seen if data is None else self._contents
        key = _identity(tensor) if data is None else (row[_FINGERPRINT], row[_DTYPE], row[_SHAPE])
        known = known_by.get(key) if key else None
        if known is not None:
            self._repeat(row, known)
            return
        if data is not None and self._shown is not None:
            row[_FINGERPRINT] = self._shown(data)
        self._figures(row, tensor, found)
        if self._policy.wanted:
            try:
                self._keep(row, tensor, data)
            except NotKept as why:
                self._lose(row, str(why))
        if key:
            known_by[key] = row

    def _repeat(self, row: Row, known: Row) -> None:
        """Describe a row as another one of an equal tensor is described."""
        row[_MIN : _FINGERPRINT + 1] = known[_MIN : _FINGERPRINT + 1]
        if row[_MIN] is None:
            self._copies.append((row, known))
        if known[_OFFSET] is not None:
            row[_KEPT], row[_KEPT_SHAPE] = known[_KEPT], known[_KEPT_SHAPE]
            self.kept += 1
            self.sink.duplicate(row, known[_OFFSET], known[_LENGTH])
        elif known[_LOST] is not None:
            self._lose(row, known[_LOST])

    def _figures(self, row: Row, tensor: torch.Tensor, found: tuple[int, int] | None) -> None:
        try:
            if on_host(tensor):
                row[_MIN : _ZERO + 1] = kernel.figures(tensor, found)
                return
            vector = kernel.device_figures(tensor)
        except (RuntimeError, NotImplementedError):
            return  # packed fp4 and the like: bytes can be kept, values can't be read
        if vector is not None:
            self._vectors[tensor.device].append((row, vector))

    def _keep(self, row: Row, tensor: torch.Tensor, data: Any) -> None:
        """Write what is to be kept of a tensor. ``data``: its bytes, None while they are on a device."""
        if self.failure is not None:
            raise self.failure
        part = self._policy.part(tensor)
        self._policy.admit(part.nbytes)
        if data is None:
            data = to_bytes(tensor)
            row[_FINGERPRINT] = (self._shown or fingerprint)(data)
        if self._policy.kept is not None:
            row[_KEPT], row[_KEPT_SHAPE] = self._policy.kept, _shape_text(part)
            data = to_bytes(part)
        self.sink.payload(row, data)
        self.distinct += 1
        self.kept += 1

    def _lose(self, row: Row, why: str) -> None:
        row[_LOST], row[_KEPT], row[_KEPT_SHAPE] = why, None, None
        self.lost[why] += 1

    def end_call(self, calls: Iterable[RootCall]) -> None:
        """A root call is over: make its rows part of the dump, and forget tensor identities."""
        with self._lock:
            self.flush(calls)
            self._makers.clear()
            self._seen.clear()

    def flush(self, calls: Iterable[RootCall] = ()) -> None:
        """Read the figures of accelerator tensors back, once per device, and commit the rows in hand."""
        with self._lock:
            for pending in self._vectors.values():
                for (row, _), figures in zip(pending, kernel.read_back([v for _, v in pending]), strict=True):
                    row[_MIN : _ZERO + 1] = figures
            for row, known in self._copies:
                row[_MIN : _ZERO + 1] = known[_MIN : _ZERO + 1]
            rows, scalars, self._rows, self._scalars = self._rows, self._scalars, [], []
            operators, self._operators = self._operators, []
            self._vectors.clear()
            self._copies.clear()
            try:
                self.sink.commit(rows, calls, scalars, operators=operators, sources=self._new_sources)
                self._new_sources.clear()
            except StoreError as error:
                self.failure = error
                self.lost[f"not in the index: {str(error).partition(';')[0]}"] += len(rows)


def on_host(tensor: torch.Tensor) -> bool:
    """Tell whether the values can be read without waiting for a device."""
    return tensor.is_cpu


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what tells a tensor and its state from others, or None where torch does not keep track."""
    storage, version = compat.storage_of(tensor), compat.version_of(tensor)
    if storage is None or version is None:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return storage, version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, flags


def _shape_text(tensor: torch.Tensor) -> str:
    """Return the sizes as JSON; -1 for one that is no plain number (nested tensors)."""
    if tensor.is_nested:
        sizes = [tensor.size(0), *[-1] * (tensor.dim() - 1)]
    else:
        sizes = [size if type(size) is int else -1 for size in tensor.shape]
    return f"[{', '.join(map(str, sizes))}]"
