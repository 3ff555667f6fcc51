"""Turns observed tensors into rows of a dump: each one is described once and kept once.

A tensor seen again is neither computed nor written twice. On the CPU it is recognised by a
fingerprint of its bytes, which costs less than any statistic and can't be fooled. Elsewhere it is
recognised within a root call by its storage, its place in it and its version counter (which
`tensor.data` and foreign kernels bypass). Large weights, which operators receive in every step, are
not read again if their version and a sample of their bytes agree.

Payloads go to the sink at once, since the program may crash next. Of hooks that only note what they
see, rows are made later (`tape/`). Rows are committed once per root call, when the statistics of
accelerator tensors are read back together. Statistics and fingerprint describe the whole tensor,
even if a part of it is kept (`payload.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from llmdebug_nb.capture import geometry, rows
from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.geometry import on_host
from llmdebug_nb.capture.kept_sources import KeptSources
from llmdebug_nb.capture.known_weights import KnownWeights
from llmdebug_nb.capture.operators.view_chains import ViewChains
from llmdebug_nb.capture.placements import Placements
from llmdebug_nb.capture.rows import MANY, NO_NUMBERS, Hand, Numbers, Settled, Site, row_of
from llmdebug_nb.capture.signatures import argument_of
from llmdebug_nb.capture.sink import Bytes, Sink
from llmdebug_nb.capture.tape import native
from llmdebug_nb.capture.values import KeptValues
from llmdebug_nb.capture.waiting_rows import WaitingRows
from llmdebug_nb.capture.walk import scalar_text
from llmdebug_nb.core.batches import NO_FRAMES
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.kernels import row_sizes
from llmdebug_nb.core.kernels import summary as kernel
from llmdebug_nb.core.kernels.fingerprint import ALGORITHM, ALGORITHMS, fingerprint
from llmdebug_nb.core.kernels.raw import dtype_name, memory, plain, to_bytes, unreadable, view
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall, View

T = TypeVar("T")


class Packing(NamedTuple):
    """Where records are packed.

    ``producers``: by storage, the record that last put it out. ``seen``: what reserves numbers of
    storages. ``chains``: the views, see `ViewChains`. ``contents``: of values that are kept, the
    rows that describe them; None: none are. ``frames``, ``stored``: see `Frames`.
    """

    recorder: Recorder
    producers: dict[int | None, int]
    seen: list[native.Seen]
    chains: tuple[object, ...]
    values: KeptValues
    contents: native.Contents | None
    frames: bytearray
    stored: Mapping[str, str]


class Recorder:
    """Turns observed tensors into rows of one sink. Thread-safe.

    ``records``: count of rows. ``values``: those that are kept, and what is missing; if the sink
    can't go on, recording continues without it and counts.
    ``devices``: the rows of tensors on accelerators. ``hand``: rows that are not committed yet.
    ``weights``: those of the models. ``watch``: is shown all rows before they are committed.
    """

    def __init__(self, sink: Sink, options: DumpOptions) -> None:
        self.sink = sink
        self.records = 0
        self.watch: Callable[[list[Row]], None] | None = None
        self.values = KeptValues(sink, options)
        other = options.fingerprint != ALGORITHM
        # functions take them as they are, so what they are is found out once
        self._gives_weights = "api" in options.operator_levels
        self._shown_fingerprint = ALGORITHMS[options.fingerprint] if other else None
        self._lock = threading.RLock()
        self.hand = Hand()
        self.sources = KeptSources(options.sources, self._lock)
        self._chains = ViewChains()
        self.weights = KnownWeights()
        # storage number -> the record of the last output in it
        self._producers: dict[int | None, int] = {}
        self._settled: dict[int, Settled] = {}  # by id, of one root call
        self._reserved: list[int] = []  # storage numbers that no other storage may take meanwhile
        self._seen: list[native.Seen] = []  # outputs, which reserve those of their storages
        self._sizes_rows = options.stats_only
        self.devices = WaitingRows(native.eye(self._sizes_rows))
        self.weights.share(self.devices.eye)
        self._uncounted = False  # the tensor at hand may have changed without a new version
        self._placements = Placements(sink)
        self._packed_with = (
            self._producers, self._seen, self._chains.in_c(), self.values, self.values.in_c(),
            *(sink.frames or NO_FRAMES),
        )  # fmt: skip

    # -- what is recorded -----------------------------------------------------------------------

    def record(self, call: OpenCall, role: str, leaves: Iterable[Leaf]) -> None:
        """Record inputs or outputs of a call: tensors by `record_tensor`, other leaves as text."""
        for slot, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.record_tensor(call, role, slot, leaf, call.phase)
            else:
                self.add_scalars(call, role, [(slot, *scalar_text(leaf, slot))])

    def record_texts(self, call: OpenCall, role: str, texts: Iterable[tuple[str, str]]) -> None:
        """Record facts about a call: slots and texts."""
        self.add_scalars(call, role, [(slot, "str", masked(text)) for slot, text in texts])

    def add_scalars(
        self, call: OpenCall, role: str, values: list[tuple[str, str, str | None]]
    ) -> None:
        """Record values that are no tensors: slots, types and texts, in which nothing is masked."""
        place = call.root_call, call.path, call.number, role
        with self._lock:
            self.hand.scalars += [(*place, *value, call.phase) for value in values]

    def record_tensor(
        self, call: OpenCall, role: str, slot: str, tensor: torch.Tensor, phase: str = "forward"
    ) -> None:
        """Record a tensor as it is now. One that can't be kept raises nothing; it is counted."""
        with self._lock:
            settled = self._settled.get(id(tensor))
            # torch counts a change in place only after a dispatch mode has seen the operator
            self._uncounted = role != "input" and call.level == "aten"
            seen = self._seen_at_once(role, tensor) if settled is None else None
            if seen is not None:
                self.record_seen(call, role, [(slot, seen)], phase)
                return
            number, self.records = self.records, self.records + 1
            if settled is not None:
                self._write_settled(settled, (number, call, phase, role, slot))
                return
            place, views, placed, is_output = None, None, None, role == "output"
            try:
                if pytorch.is_wrapped(tensor):
                    tensor = pytorch.plain(tensor)
                tensor, placed = self._placements.local(tensor)
                number_of = pytorch.reserve_storage_number if is_output else pytorch.storage_number
                place = number_of(tensor.untyped_storage())
                if place in self._chains.storages and phase == "forward":
                    views = self._chains.number_of(tensor, place, is_output)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, BufferError):
                pass  # `_describe` reports why it can't be read
            if place is not None and is_output:
                self._reserved.append(place)
            self._write_row(tensor, place, (number, call, phase, role, slot), (views, placed))

    def _seen_at_once(self, role: str, tensor: torch.Tensor) -> native.Seen | None:
        """Return what C makes of a tensor; None if more is wanted, or something is unusual."""
        if self.values.policy.wanted or self._shown_fingerprint or pytorch.is_wrapped(tensor):
            return None
        anew = self._uncounted or not self.devices.recognizes
        return self.devices.eye.look(tensor, role == "output", anew)

    def record_seen(
        self, call: OpenCall, role: str, leaves: Iterable[Leaf], phase: str = "forward"
    ) -> None:
        """Record inputs, outputs or gradients of a call, as the tape has them."""
        seen_class, producers, is_output = native.seen_class(), self._producers, role == "output"
        arguments = call.parameters if rows.is_of_input(call, phase, role) else None
        views = phase == "forward" and self._chains.storages
        place, keeps = (call.root_call, call.path, call.number), self.values.policy.wanted
        with self._lock:
            made, scalars = self.hand.records, self.hand.scalars
            for slot, leaf in leaves:
                if isinstance(leaf, seen_class):
                    number, storage = self.records, leaf.storage
                    self.records = number + 1
                    device = leaf.device
                    row = [
                        number, *place, phase, role, slot, call.op, *leaf.content(), device,
                        producers.get(storage), *rows.WITHOUT_VALUES,
                        argument_of(slot, arguments) if arguments else None,
                        self._chains.number_of_seen(leaf, is_output) if views else None, None,
                        leaf.row_sizes,
                    ]  # fmt: skip
                    made.append(row)
                    if device != "cpu":
                        self.devices.add(row, leaf)
                    elif keeps:
                        self._attempt(row, self.values.describe_seen, leaf)
                    if is_output:
                        producers[storage] = number
                        self._seen.append(leaf)
                else:
                    scalars.append((*place, role, slot, *scalar_text(leaf, slot), phase))
            if len(made) >= MANY:
                self.flush()

    @property
    def packs(self) -> bool:
        """Whether `pack` may be used: nobody looks at records before they are in the index."""
        return self.sink.waits and self.watch is None

    def pack(self, play: Callable[[Packing], T]) -> T:
        """Let ``play`` pack records itself."""
        with self._lock:
            if self.hand.is_full:
                self.flush()
            return play(Packing(self, *self._packed_with))

    def settle(self, tensor: torch.Tensor) -> None:
        """Promise that a tensor never changes again: until the root call ends it is read once."""
        settled = self._settled[id(tensor)] = Settled(tensor)
        self._reserved.append(settled.place)

    def unsettle(self, tensor: torch.Tensor) -> None:
        """Let go of a tensor that `settle` was given."""
        self._settled.pop(id(tensor), None)

    def record_weight(self, call: OpenCall, slot: str, tensor: torch.Tensor) -> None:
        """Record a weight's fingerprint; its type alone if memory does not hold it as it is."""
        tensor, _ = self._placements.local(tensor)
        where = memory(tensor) if on_host(tensor) and not tensor.is_nested else None
        kind = f"{dtype_name(tensor)} {geometry.shape_text(tensor)}"
        if where is None:
            with self._lock:
                self.add_scalars(call, "weight_type", [(slot, kind, None)])
            return
        with self._lock:
            seen = self.devices.eye.look(tensor, False, True) if self._gives_weights else None
        content = None if seen is None else native.Content(*seen.content())
        found = fingerprint(view(tensor, where)) if content is None else content.fingerprint
        self.add_scalars(call, "weight", [(slot, kind, found)])

    def record_call(self, call: OpenCall) -> None:
        """Record that a call began, with its execution id. Call it in execution order."""
        with self._lock:
            if call.id is not None:
                self.hand.called.append((call.root_call, call.path, call.number, call.id))

    def record_operator(self, row: Row) -> None:
        """Record an operator call, a row of `columns.OPERATORS`. Call it in execution order."""
        with self._lock:
            self.hand.operators.append(row)
            if len(self.hand.operators) >= MANY:
                self.flush()

    def add_view(self, view: View, base: native.AnyTensor, result: native.AnyTensor) -> None:
        """Note a view, for the records of what is made of it."""
        with self._lock:
            self._chains.add(view, base, result)

    def add_weights(self, weights: list[torch.Tensor]) -> None:
        """Note the weights of a model, which are read again only if they seem to have changed."""
        with self._lock:
            self.weights.add(weights, lambda weight: self._placements.local(weight)[0])

    # -- rows -----------------------------------------------------------------------------------

    def _write_row(
        self, tensor: torch.Tensor, place: int | None, site: Site, numbers: Numbers
    ) -> Row:
        """Make the row of a tensor now."""
        row = row_of(site, numbers, *rows.AFTER_SITE)
        row[rows.PRODUCER] = self._producers.get(place)
        self.hand.records.append(row)
        is_weight = self.weights.has(place, tensor) and not self._uncounted
        self._attempt(row, self._describe_weight if is_weight else self._describe, tensor)
        if self._sizes_rows and row[rows.ROW_SIZES] is None and place not in self.weights.storages:
            self._attempt(row, _size_rows, tensor)
        self._end_row(row, place)
        return row

    def _write_settled(self, settled: Settled, site: Site) -> None:
        """Make the row of a tensor that was promised to stay as it is."""
        if settled.row is None:
            settled.row = self._write_row(settled.tensor, settled.place, site, NO_NUMBERS)
            return
        row = row_of(site, NO_NUMBERS, *settled.row[rows.DTYPE :])
        row[rows.PRODUCER] = self._producers.get(settled.place)
        self.hand.records.append(row)
        self._attempt(row, self._repeat, settled.row)
        self._end_row(row, settled.place)

    def _end_row(self, row: Row, place: int | None) -> None:
        """Note the record that has put out the storage last, if it is that of an output."""
        if place is not None and row[rows.ROLE] == "output":
            self._producers[place] = row[0]
        if len(self.hand.records) >= MANY:
            self.flush()

    def _attempt(self, row: Row, work: Callable[[Row, T], None], argument: T) -> None:
        """Do ``work(row, argument)``; an error is noted in the row."""
        try:
            self.values.attempt(row, work, argument)
        except BaseException:  # of the program: its handler of a signal, say
            row[rows.SHAPE] = None  # it is dropped, so nothing may be described by it
            self.values.contents.clear()
            self.weights.forget_rows()
            self.devices.forget()
            raise

    # -- descriptions -----------------------------------------------------------------------------

    def _describe_weight(self, row: Row, tensor: torch.Tensor) -> None:
        """Describe a weight or a view of one: as before if its version and a sample agree."""
        known = self.weights.row_of(tensor, row)
        if known is None or known is row:
            self._describe(row, tensor)
        else:
            row[rows.KIND], row[rows.DEVICE] = known[rows.KIND], known[rows.DEVICE]
            self._repeat(row, known)

    def _describe(self, row: Row, tensor: torch.Tensor) -> None:
        """Fill in dtype, shape, statistics, fingerprint and payload, once for equal tensors."""
        look = self.devices.eye.look
        seen = look(tensor, False, self._uncounted) if on_host(tensor) else None
        if seen is not None:
            self._describe_seen(row, tensor, seen)
            return
        row[rows.DTYPE], row[rows.SHAPE] = dtype_name(tensor), "[]"
        row[rows.SHAPE] = geometry.shape_text(tensor)
        row[rows.DEVICE] = "cpu" if tensor.is_cpu else str(tensor.device)
        where = memory(tensor) if on_host(tensor) and not tensor.is_nested else None
        why = geometry.too_many_sizes(tensor) or (unreadable(tensor) if where is None else None)
        if why is not None:
            self.values.lose(row, why)
            return
        if where is None and on_host(tensor) and not tensor.is_quantized:
            tensor = plain(tensor)  # copy a strided tensor once, for all that follows
            where = memory(tensor)
        data = view(tensor, where) if where else to_bytes(tensor) if on_host(tensor) else None
        if data is None:
            first = self.devices.known(row, tensor, self._uncounted)
        else:
            row[rows.FINGERPRINT] = fingerprint(data)
            first = self.values.first(row)
        if first is not row:
            self._repeat(row, first)
            return
        if data is not None and self._shown_fingerprint is not None:
            row[rows.FINGERPRINT] = self._shown_fingerprint(data)
        self._measure(row, tensor, where)
        if self.values.policy.wanted:
            self.values.keep_part(row, tensor, partial(self._bytes_of, row, tensor, data))

    def _describe_seen(self, row: Row, tensor: torch.Tensor, seen: native.Seen) -> None:
        """Do the same with what C made of a tensor."""
        row[rows.SEEN], row[rows.DEVICE] = seen.content(), "cpu"
        row[rows.ROW_SIZES] = seen.row_sizes
        first = self.values.first(row)
        if first is not row:
            self._repeat(row, first)
            return
        if self._shown_fingerprint is not None:
            row[rows.FINGERPRINT] = self._shown_fingerprint(to_bytes(tensor))
        if self.values.policy.wanted:
            self.values.keep_part(row, tensor, partial(to_bytes, tensor))

    def _repeat(self, row: Row, known: Row) -> None:
        """Describe a row like that of an equal tensor."""
        row[rows.CONTENT] = known[rows.CONTENT]
        if row[rows.MIN] is None:
            self.devices.repeat(row, known)
        self.values.repeat(row, known)

    def _measure(self, row: Row, tensor: torch.Tensor, where: tuple[int, int] | None) -> None:
        try:
            if on_host(tensor):
                row[rows.STATISTICS] = kernel.figures(tensor, where)
            else:
                self.devices.measure(row, tensor)
        except NotImplementedError:
            pass  # packed fp4, for example: its bytes can be kept, its values can't be read

    def _bytes_of(self, row: Row, tensor: torch.Tensor, data: Bytes | None) -> Bytes:
        """Return the bytes of a tensor. ``data``: these, None while on a device."""
        if data is None:
            data = to_bytes(tensor)
            row[rows.FINGERPRINT] = (self._shown_fingerprint or fingerprint)(data)
        return data

    # -- commits --------------------------------------------------------------------------------

    def end_call(self, calls: Iterable[RootCall]) -> None:
        """End a root call: commit its rows and forget the identities of its tensors."""
        with self._lock:
            self.flush(calls)
            self._producers.clear()
            self._settled.clear()
            reserved, self._reserved = self._reserved, []
            self._seen.clear()
            pytorch.release_storage_numbers(reserved)
            self._chains.clear()
            self.devices.forget()

    def forget(self, calls: Collection[int], into: int) -> None:
        """Drop root calls; later steps share no values with earlier ones. ``into``: see `Sink`."""
        with self._lock:
            self.values.contents.clear()
            if self.values.policy.wanted:
                self.weights.forget_rows()
            try:
                self.values.policy.free(self.sink.drop(calls, into))
            except StoreError as error:
                self.values.failure = error

    def _fill(self) -> None:
        """Read the statistics of all rows back. A finalizer may commit some, and add others."""
        filled: Hand | None = None
        while filled is not self.hand or self.devices.has_work(filled):
            filled = self.hand
            without, why = self.devices.fill(filled)
            for row in (each for each in without if each[rows.OFFSET] is None):  # no values either
                self.values.lose(row, why)

    def flush(self, calls: Iterable[RootCall] = ()) -> None:
        """Commit the rows."""
        with self._lock:
            self._fill()
            hand, fresh = self.hand, Hand()
            hand.drop_partial(self.values.lost)
            if self.watch is not None:
                self.watch(hand.records)
            batch = hand.batch(calls, self.sources, self._chains.new)
            try:
                self.sink.commit(batch)
                batch.written = True
            except StoreError as error:
                self.values.lose_rows(hand.count, error)
            finally:  # else they wait. No calls: a handler could raise, and rows be written twice
                if batch.written:
                    self.sources.stacks, self.sources.functions, self._chains.new = [], [], []
                if batch.written or self.values.failure is not None:
                    self.hand = fresh


def _size_rows(row: Row, tensor: torch.Tensor) -> None:
    """Add the sizes of a tensor's rows to its row, if its values can be read here."""
    if row[rows.MIN] is not None and on_host(tensor):
        row[rows.ROW_SIZES] = row_sizes.of(tensor)
