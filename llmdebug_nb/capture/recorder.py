"""From a tensor that was seen to a row in the dump: described once, kept once.

A tensor seen again is neither computed nor written twice. On the CPU it is known by a fingerprint of
its bytes, which costs less than any figure and can't be fooled; elsewhere, within a root call, by its
storage, its place in it and its version counter (which `tensor.data` and foreign kernels go past). Of large weights, which
operators are given again in every step, a sample of the bytes has to agree as well, and then they are not read again. Payloads go to
the sink at once, since the program may crash next; small tensors of which only statistics are kept are copied, and their rows
made later, many at a time (`kernels/look.py`). Rows are committed once per root call, when the
figures of accelerator tensors are read back together. Figures and fingerprint are always those of the
whole tensor, also where only a part of it is kept (`payload.py`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.payload import NotKept, Policy
from llmdebug_nb.capture.walk import scalar_text
from llmdebug_nb.core.columns import AT, COLUMNS, RECORDS, Row
from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.kernels import look
from llmdebug_nb.core.kernels import summary as kernel
from llmdebug_nb.core.kernels.fingerprint import ALGORITHM, ALGORITHMS, fingerprint
from llmdebug_nb.core.kernels.raw import dtype_name, memory, plain, to_bytes, unreadable, view
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node, RootCall

_MIN = AT["min"]
_KIND = RECORDS.span("dtype", "shape")
_FIGURES = RECORDS.span("min", "zero")
_CONTENT = RECORDS.span("min", "fingerprint")
_FINGERPRINT, _OFFSET, _LENGTH, _LOST = AT["fingerprint"], AT["offset"], AT["length"], AT["lost"]
_DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]
_DEVICE, _PRODUCER, _ROLE = AT["device"], AT["producer"], AT["role"]
_REST = [None] * (len(COLUMNS) - _DTYPE)
_UNKEPT = [None] * (len(COLUMNS) - _PRODUCER)
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
        called: Iterable[tuple[int, str, int, str]] = (),
    ) -> None: ...
    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def table(self, name: str, rows: Iterable[Any]) -> None: ...
    def close(self, meta: dict[str, Any]) -> None: ...


class RecordedCall(Protocol):
    """What a record says of the call that it belongs to."""

    @property
    def root_call(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def op(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def id(self) -> str | None: ...


class _Shapes(dict[tuple[int, ...], str]):
    """Sizes as JSON, made once for equal ones."""

    def __missing__(self, shape: tuple[int, ...]) -> str:
        text = self[shape] = json.dumps(shape)
        return text


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
        self.knows_by_place = (
            True  # a tensor on an accelerator is known again by its place and version
        )
        self._policy = Policy(options, sink.shortage)
        self._shown = None if options.fingerprint == ALGORITHM else ALGORITHMS[options.fingerprint]
        self._lock = threading.RLock()
        self._rows: list[Row] = []
        self._operators: list[Row] = []
        self._called: list[tuple[int, str, int, str]] = []
        self._sources: dict[tuple[str, ...], int] = {}
        self._new_sources: list[tuple[int, str]] = []
        self._scalars: list[tuple[Any, ...]] = []
        self._contents: dict[
            tuple[Any, ...], Row
        ] = {}  # XXH3, dtype, shape -> the row that describes it
        self._seen: dict[tuple[Any, ...], Row] = {}  # the same by identity, within one root call
        self._weights: dict[
            int, Any
        ] = {}  # numbers of storages of weights, and what keeps them their own
        self._standing: dict[
            tuple[Any, ...], tuple[bytes, Row]
        ] = {}  # by identity: a sample of a weight, and its row
        self._makers: dict[
            int | None, int
        ] = {}  # number of a storage -> the record that put it out last
        self._held: list[int] = []  # numbers that stay the storages' own meanwhile
        self._shapes = _Shapes()
        self._vectors: dict[torch.device, list[tuple[Row, torch.Tensor]]] = defaultdict(list)
        self._arena = look.arena() if self._policy.kept is None else None
        # numbers of look and record, call, phase, role, slot, number of the storage
        self._looked: list[tuple[int, int, RecordedCall, str, str, str, int | None]] = []
        self._copies: list[tuple[Row, Row]] = []  # rows whose figures wait for those of another

    def record(self, call: RecordedCall, role: str, found: Iterable[tuple[str, Any]]) -> None:
        """Record what a call was given or gave: tensors by `record_tensor`, and in words what is none, each with its slot."""
        for slot, leaf in found:
            if isinstance(leaf, torch.Tensor):
                self.record_tensor(call, role, slot, leaf, call.phase)
            else:
                with self._lock:
                    self._scalars.append(
                        (call.root_call, call.path, call.number, role, slot, *scalar_text(leaf))
                    )

    def record_texts(self, call: RecordedCall, role: str, texts: Iterable[tuple[str, str]]) -> None:
        """Record what is known of a call, slot and text."""
        with self._lock:
            self._scalars += [
                (call.root_call, call.path, call.number, role, slot, "str", text)
                for slot, text in texts
            ]

    def record_tensor(
        self, call: RecordedCall, role: str, slot: str, tensor: torch.Tensor, phase: str = "forward"
    ) -> None:
        """Record a tensor as it is now. Never raises on account of the tensor: what can't be kept is counted."""
        with self._lock:
            number = self.records
            self.records = number + 1
            place, seen = None, look.NOT_FOR_THIS
            try:
                if pytorch.is_wrapped(tensor):
                    tensor = pytorch.plain(tensor)
                storage = tensor.untyped_storage()
                place = (
                    pytorch.reserve_storage_number(storage)
                    if role == "output"
                    else pytorch.storage_number(storage)
                )
                if self._arena is not None and on_host(tensor):
                    seen = self._arena.look(tensor, storage)
                    if seen == look.NO_ROOM:
                        self._write_down()
                        seen = self._arena.look(tensor, storage)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, BufferError):
                pass  # it can't be told what it is: `_describe` says why
            if place is not None and role == "output":
                self._held.append(place)
            if seen >= 0:
                self._looked.append((seen, number, call, phase, role, slot, place))
                if self._policy.wanted:
                    self._write_down()  # at once: a program that crashes leaves all that it had computed
            else:
                self._at_once(
                    tensor,
                    place,
                    [number, call.root_call, call.path, call.number, phase, role, slot, call.op],
                )

    def _at_once(self, tensor: torch.Tensor, place: int | None, site: list[Any]) -> None:
        """Make the row of a tensor now."""
        self._write_down()
        row: Row = [*site, *_REST]
        self._rows.append(row)
        self._fill(row, self._stands if place in self._weights else self._describe, tensor)
        self._made(row, place)
        if len(self._rows) >= _MANY:
            self.flush()

    def _write_down(self) -> None:
        """Make rows of what was looked at. An interrupt on the way loses no more than one."""
        if not self._looked or self._arena is None:
            return
        done, more = 0, self._policy.wanted or self._shown is not None
        try:
            for look_number, number, call, phase, role, slot, place in self._looked:
                done += 1
                dtype, shape, figures, data = self._arena.take(look_number)
                text, content = self._shapes[shape], fingerprint(data)
                row: Row = [
                    number, call.root_call, call.path, call.number, phase, role, slot, call.op, dtype, text, *figures,
                    content, "cpu", *_UNKEPT,
                ]  # fmt: skip
                self._rows.append(row)
                known = self._contents.setdefault((content, dtype, text), row)
                if more and known is not row:
                    self._fill(row, self._repeat, known)
                elif more:
                    self._fill(row, self._content, data)
                self._made(row, place)
        finally:
            del self._looked[:done]
            if not self._looked:
                self._arena.clear()

    def _made(self, row: Row, place: int | None) -> None:
        """Note which record put the tensor out that lies there, and that this one does if it is an output."""
        row[_PRODUCER] = self._makers.get(place)
        if place is not None and row[_ROLE] == "output":
            self._makers[place] = row[0]

    def _content(self, row: Row, data: Any) -> None:
        """Keep the payload of a row that is described."""
        if self._shown is not None:
            row[_FINGERPRINT] = self._shown(data)
        if self._policy.wanted:
            self._keep(row, data.nbytes, lambda: data)

    def _fill(self, row: Row, work: Callable[..., None], *given: Any) -> None:
        """Do ``work(row, *given)``; after an error go on, and the dump tells of it."""
        try:
            work(row, *given)
        except StoreError as error:
            self.failure = error
            if (
                row[_OFFSET] is None
            ):  # a duplicate whose frame could not be written still has its payload
                self._lose(row, str(error).partition(";")[0])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            self._lose(row, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    @property
    def written(self) -> int:
        """Bytes of payload written so far."""
        return self._policy.written

    def record_weight(self, call: RecordedCall, slot: str, tensor: torch.Tensor) -> None:
        """Record the fingerprint of a weight that lies in the host's memory in one piece; of others, nothing."""
        found = memory(tensor) if on_host(tensor) and not tensor.is_nested else None
        if found is not None:
            kind, content = (
                f"{dtype_name(tensor)} {self._shapes[tensor.shape]}",
                fingerprint(view(tensor, found)),
            )
            with self._lock:
                self._scalars.append(
                    (call.root_call, call.path, call.number, "weight", slot, kind, content)
                )

    def record_call(self, call: RecordedCall) -> None:
        """Record that a call began, recorded or not, and its execution id. In execution order."""
        if call.id is not None:
            self._called.append((call.root_call, call.path, call.number, call.id))

    def record_operator(self, row: Row) -> None:
        """Record an operator call: a list in the order of `columns.OPERATORS`. In execution order."""
        with self._lock:
            self._operators.append(row)
            if len(self._operators) >= _MANY:
                self.flush()

    def stack_number(self, frames: list[str]) -> int:
        """Return the number of a call stack, innermost frame first; equal stacks have one number."""
        with self._lock:
            number = self._sources.get(tuple(frames))
            if number is None:
                number = self._sources[tuple(frames)] = len(self._sources)
                self._new_sources.append((number, json.dumps(frames)))
            return number

    def add_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Name the weights of a model, which are only read anew where they seem to have changed."""
        with self._lock:
            for weight in weights:
                storage = pytorch.storage_of(weight) if on_host(weight) else None
                if storage is not None:
                    self._weights.setdefault(storage.cdata, storage)

    def _stands(self, row: Row, tensor: torch.Tensor) -> None:
        """Describe a weight, or a view of one: as before if torch counts no change, and a sample of it shows none."""
        identity = _identity(tensor)
        sample = look.sample(tensor) if identity is not None else None
        if identity is None or sample is None:
            self._describe(row, tensor)
            return
        then, known = self._standing.get(identity, (None, row))
        if then == sample:
            row[_KIND], row[_DEVICE] = known[_KIND], known[_DEVICE]
            self._repeat(row, known)
        else:
            self._describe(row, tensor)
            self._standing[identity] = sample, row

    def _describe(self, row: Row, tensor: torch.Tensor) -> None:
        """Fill in what a tensor is, its figures, fingerprint and payload, once for equal tensors."""
        row[_DTYPE], row[_SHAPE] = dtype_name(tensor), "[]"
        row[_SHAPE] = _shape_text(tensor)
        row[_DEVICE] = "cpu" if tensor.is_cpu else str(tensor.device)
        found = memory(tensor) if on_host(tensor) and not tensor.is_nested else None
        why = unreadable(tensor) if found is None else None
        if why is not None:
            self._lose(row, why)
            return
        if found is None and on_host(tensor) and not tensor.is_quantized:
            tensor = plain(tensor)  # a strided one is copied once, for all that follows
            found = memory(tensor)
        data = view(tensor, found) if found else to_bytes(tensor) if on_host(tensor) else None
        if data is None:
            known_by, key = self._seen, _identity(tensor) if self.knows_by_place else None
        else:
            row[_FINGERPRINT] = fingerprint(data)
            known_by, key = self._contents, (row[_FINGERPRINT], row[_DTYPE], row[_SHAPE])
        if key and self._is_known(row, known_by, key):
            return
        if data is not None and self._shown is not None:
            row[_FINGERPRINT] = self._shown(data)
        self._figures(row, tensor, found)
        if self._policy.wanted:
            self._keep_part(row, tensor, data)

    def _is_known(
        self, row: Row, known_by: dict[tuple[Any, ...], Row], key: tuple[Any, ...]
    ) -> bool:
        """Describe a row as the one of an equal tensor is described, if there is one; else it will be that one."""
        known = known_by.get(key)
        if known is None:
            known_by[key] = row
            return False
        self._repeat(row, known)
        return True

    def _repeat(self, row: Row, known: Row) -> None:
        row[_CONTENT] = known[_CONTENT]
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
                row[_FIGURES] = kernel.figures(tensor, found)
                return
            vector = kernel.device_figures(tensor)
        except (RuntimeError, NotImplementedError):
            return  # packed fp4 and the like: bytes can be kept, values can't be read
        if vector is not None:
            self._vectors[tensor.device].append((row, vector))

    def _keep_part(self, row: Row, tensor: torch.Tensor, data: Any) -> None:
        """Write what is to be kept of a tensor. ``data``: its bytes, None while they are on a device."""

        def read() -> Any:
            read = data
            if read is None:
                read = to_bytes(tensor)
                row[_FINGERPRINT] = (self._shown or fingerprint)(read)
            if self._policy.kept is None:
                return read
            row[_KEPT], row[_KEPT_SHAPE] = self._policy.kept, _shape_text(part)
            return to_bytes(part)

        try:
            part = self._policy.part(tensor)
        except NotKept as why:
            self._lose(row, str(why))
        else:
            self._keep(row, part.nbytes, read)

    def _keep(self, row: Row, nbytes: int, read: Callable[[], Any]) -> None:
        """Write a payload, if there is room for it."""
        if self.failure is not None:
            raise self.failure
        try:
            self._policy.admit(nbytes)
        except NotKept as why:
            self._lose(row, str(why))
            return
        self.sink.payload(row, read())
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
            held, self._held = self._held, []
            pytorch.release_storage_numbers(held)
            self._seen.clear()

    def flush(self, calls: Iterable[RootCall] = ()) -> None:
        """Read the figures of accelerator tensors back, once per device, and commit the rows in hand."""
        with self._lock:
            self._write_down()
            for pending in self._vectors.values():
                for (row, _), figures in zip(
                    pending, kernel.read_back([v for _, v in pending]), strict=True
                ):
                    row[_FIGURES] = figures
            for row, known in self._copies:
                row[_FIGURES] = known[_FIGURES]
            rows, scalars, self._rows, self._scalars = self._rows, self._scalars, [], []
            operators, self._operators = self._operators, []
            called, self._called = self._called, []
            self._vectors.clear()
            self._copies.clear()
            try:
                self.sink.commit(
                    rows,
                    calls,
                    scalars,
                    operators=operators,
                    sources=self._new_sources,
                    called=called,
                )
                self._new_sources.clear()
            except StoreError as error:
                self.failure = error
                self.lost[f"not in the index: {str(error).partition(';')[0]}"] += len(rows)


def on_host(tensor: torch.Tensor) -> bool:
    """Tell whether the values can be read without waiting for a device."""
    return tensor.is_cpu


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what tells a tensor and its state from others, or None where torch does not keep track."""
    storage, version = pytorch.storage_of(tensor), pytorch.version_of(tensor)
    if storage is None or version is None:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return (
        storage,
        version,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        flags,
    )


def _shape_text(tensor: torch.Tensor) -> str:
    """Return the sizes as JSON; -1 for one that is no plain number (nested tensors)."""
    if tensor.is_nested:
        sizes = [tensor.size(0), *[-1] * (tensor.dim() - 1)]
    else:
        sizes = [size if type(size) is int else -1 for size in tensor.shape]
    return f"[{', '.join(map(str, sizes))}]"
