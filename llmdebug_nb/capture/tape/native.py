"""Loading and testing the tape of hooks (`tape.c`): a module's call is noted by two calls of C.

It is optional: without it, each call is recorded while the program waits, with the same result.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash

from llmdebug_nb.capture.calls import Counts, Leaf, OpenCall
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.operators.kinds import Operator
from llmdebug_nb.capture.signatures import Parameters
from llmdebug_nb.capture.tape import devices
from llmdebug_nb.capture.walk import LEAVES, OtherLeaf, leaves
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.on_device import Page
from llmdebug_nb.core.records import View

T = TypeVar("T")
LIBRARY = Path(__file__).with_name("_tape.so")  # on every platform: it is opened by its path
_VERSION = 12  # of what lies between the library and this module, as in tape.c
_KINDS = (*native.TABLE, "bool")  # as in tensor.h
_DIMENSIONS = 8  # of a tensor that is seen: MOST_DIMS in tensor.h


class Content(NamedTuple):
    """The columns of a row that a tensor's values and their layout decide."""

    dtype: str
    shape: str
    min: float
    max: float
    mean: float
    l2norm: float
    nan: int
    inf: int
    zero: int
    fingerprint: str


class Seen(Protocol):
    """A tensor that a hook saw. ``storage``: its number, see `pytorch.storage_number`."""

    @property
    def storage(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def row_sizes(self) -> bytes | None: ...
    def content(self) -> tuple[Any, ...]:
        """Return what `Content` declares; of a tensor on a device, dtype and shape alone."""

    def measured(self) -> tuple[Page, int, int, int]:
        """Return what it was measured to be on a device, see `on_device.Measured`."""

    def place(self) -> bytes:
        """Return where it lies in its storage, as `place_of` does."""

    def values(self) -> bytes | None:
        """Return its elements, if they are to be kept and equal ones are not there."""

    def known(self) -> Row | None:
        """Return the row that describes equal values, if there was one when it was seen."""


AnyTensor: TypeAlias = "torch.Tensor | Seen"
# the call of a module begins or ends: what it is, whether it ends, its leaves (None: it raised)
ModuleEvent: TypeAlias = tuple[T, bool, list[Leaf] | None]
# views were made: the operator, the place in the program, the arguments, pairs of base and view
ViewEvent: TypeAlias = tuple[Operator, str, tuple[object, ...], list[tuple[Seen, Seen]]]
# an operator ran: what it is, its call stack, its leaves (of outputs None: it raised; False: they
# follow), and its level if that is api
Outputs: TypeAlias = list[Leaf] | Literal[False] | None
OperatorEvent: TypeAlias = tuple[Operator, int | None, list[Leaf], Outputs, str | None]
# the function of level api has ended that is open: its leaves (None: it raised)
EndEvent: TypeAlias = tuple[list[Leaf] | None]
Contents: TypeAlias = dict[Hashable, Row]  # by fingerprint, dtype and shape
# of a view: its operator's name, the place, the arguments' repr, and which of several it is
ViewKey: TypeAlias = tuple[str, str, str, int | None]
Event: TypeAlias = ModuleEvent[T] | ViewEvent | OperatorEvent | EndEvent
# an operator of the dispatcher, what runs it, what it is, and whether it makes views
Known: TypeAlias = tuple[object, Callable[..., object], Operator, bool]


class Means(NamedTuple):
    """What `play` needs in a session, see playing.h.

    ``signature``, ``argument``: parameters of a module, and which of them a slot is. ``views``:
    known ones; ``view(*key)``: makes one. ``modules``: calls of modules are recorded.
    ``keeps_ids``: ids of calls are looked up later.
    """

    call_class: type[OpenCall]
    signature: Callable[[torch.nn.Module], Parameters]
    views: dict[ViewKey, View]
    view: Callable[[Operator, str, tuple[object, ...], int | None], View]
    scalar_text: Callable[[object, str], tuple[str, str | None]]
    argument: Callable[[str, Parameters], str | None]
    classes: dict[object, tuple[object, ...]]
    paths: dict[str | None, dict[str, str]]
    modules: bool
    keeps_ids: bool


class Now(NamedTuple):
    """What is played: what waits, and the thread's calls, open functions, and counts."""

    waiting: deque[Event[Any]]
    open_calls: list[OpenCall]
    functions: list[OpenCall | None]
    counts: Counts
    root_call: int
    root: str


# plays what waits, packs its rows as `recorder.Packing` says, and returns the first event that is
# unusual; None: there is none, or many rows
Play: TypeAlias = Callable[[Means, Now, tuple[object, ...]], "Event[Any] | None"]


_PLACE = struct.Struct(f"={3 + 2 * _DIMENSIONS}q")
_KIND_NUMBERS = {DTYPES[name]: number for number, name in enumerate(_KINDS)}


def place_of(tensor: torch.Tensor) -> Hashable:
    """Return where a tensor lies in its storage: offset, dtype, shape and strides, to compare."""
    offset, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
    kind, rest = _KIND_NUMBERS.get(tensor.dtype), (0,) * (_DIMENSIONS - len(shape))
    plain = all(type(size) is int for size in (offset, *shape, *strides))
    if kind is None or len(shape) > _DIMENSIONS or not plain:
        return offset, shape, strides, tensor.dtype
    return _PLACE.pack(offset, kind, len(shape), *shape, *rest, *strides, *rest)


class Eye(Protocol):
    """Looks at tensors: ``look`` returns what one is, None if another way must find out.

    So it is with special classes and dtypes, with empty and freed tensors, and large strided ones.
    Strided tensors are copied to memory of its own, so only one thread may call it at a time.
    ``is_output``: the number of its storage is reserved. ``anew``: a tensor on a device may have
    changed without a new version; ``forget``: all may. ``weigh``: large weights, known by their
    storage numbers, are read again only if they seem to have changed.
    """

    def look(
        self, tensor: torch.Tensor, is_output: bool = False, anew: bool = False, /
    ) -> Seen | None: ...
    def weigh(self, weights: dict[int, object], measured: dict[bytes, bytes], /) -> None: ...
    def forget(self) -> None: ...


class Tape(Eye, Protocol[T]):
    """What the hooks of one thread see. Tensors in its leaves are `Seen`.

    ``begin``, ``end``: note that a call begins or ends; False: nothing was noted, as something in
    it is unusual, or the tape isn't open for this thread. ``tag``: comes back in the event.
    ``looks``: its leaves are wanted. Of a result None, the exception that is handled tells whether
    the call raised.
    ``open``, ``shut``: for the running thread. ``take``: the events, which leave the tape.
    ``watch``: what the gates of operators know; see `OperatorTape`. Only then:
    ``begin_function``, ``end_function``, ``note_views``: note a function, its end (with a tuple of
    its result, None if it raised), and a function that makes views; False: nothing was noted. None:
    its result is a copy of its only tensor, no view.
    ``devices``: how to measure tensors on CUDA devices; see `devices.Means`.
    ``keep``: keep values of tensors on the CPU; ``play()`` records what is on the tape, and is
    called as soon as there are some that ``contents`` lacks. It may raise for the program.
    """

    def begin(
        self, tag: T, looks: bool, args: tuple[object, ...], kwargs: Mapping[str, object], /
    ) -> bool: ...
    def end(
        self, tag: T, looks: bool, args: tuple[object, ...], kwargs: Mapping[str, object],
        result: object, /,
    ) -> bool: ...  # fmt: skip
    def watch(
        self, operators: dict[int, Known], kinds: Mapping[int, int] | None,
        numbers: Mapping[tuple[int, ...], int], lines: Mapping[tuple[int, int], tuple[str, str]],
        clock: Callable[[], int] | None,
        looks_in: bool, looks_out: bool, /,
    ) -> None: ...  # fmt: skip
    def begin_function(
        self, operator: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], /
    ) -> bool: ...
    def end_function(self, results: tuple[object] | None, /) -> bool: ...
    def note_views(
        self, operator: Operator, args: tuple[object, ...], kwargs: Mapping[str, object],
        result: object, /,
    ) -> bool | None: ...  # fmt: skip
    def devices(
        self, launch: int, new_page: Callable[[int], object],
        new_kernel: Callable[[int, str, bool, bool], object], stream: Callable[[int], object],
        current: Callable[[], object], capturing: Callable[[], object], /,
    ) -> None: ...  # fmt: skip
    def keep(self, contents: Contents, play: Callable[[], object], /) -> None: ...
    def open(self) -> None: ...
    def shut(self) -> None: ...
    def take(self) -> list[Event[T]]: ...
    def __len__(self) -> int: ...


def tape(without_gradients: bool, sizes_rows: bool = False) -> Tape[Any] | None:
    """Return a new tape, or None if the C kernel isn't used or torch lacks what it needs.

    ``without_gradients``: it refuses calls while gradients are on. ``sizes_rows``: what is seen has
    the sizes of its rows.
    """
    make = _make()
    return None if make is None else make(without_gradients, sizes_rows)


@cache
def _make() -> Callable[[bool, bool], Tape[Any]] | None:
    view, module = native.tensor_view(), _library()
    if view is None or module is None or native.kernel() is None:
        return None

    def make(without_gradients: bool, sizes_rows: bool) -> Tape[Any]:
        calm = list(torch_modes.UNWATCHED)
        if without_gradients:
            calm.append((torch.is_grad_enabled, False))
        ask, answers = zip(*calm, strict=True)
        plain = frozenset(LEAVES - {torch.Tensor, torch.nn.Parameter})
        made: Tape[Any] = module.Tape(
            view, torch.Tensor, torch.nn.Parameter, plain, xxhash.xxh3_64_intdigest,
            xxhash.xxh3_64,
            torch.get_num_threads, pytorch.release_storage_number, leaves, OtherLeaf.of,
            ask, answers, *torch_modes.FUNCTION_MODES, _KINDS, sizes_rows,
        )  # fmt: skip
        means = devices.means()
        if means is not None:
            made.devices(*means)
        return made

    return make if _is_right(make(False, True)) else None


class _NeverSeen:
    """The class of tensors that were seen, where there is no tape."""

    storage, device, row_sizes = 0, "", None

    def content(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def measured(self) -> tuple[Page, int, int, int]:
        raise NotImplementedError

    def place(self) -> bytes:
        raise NotImplementedError

    def values(self) -> bytes | None:
        raise NotImplementedError

    def known(self) -> Row | None:
        raise NotImplementedError


class _Blind:
    """Sees no tensor, where there is no tape."""

    def look(
        self, tensor: torch.Tensor, is_output: bool = False, anew: bool = False
    ) -> Seen | None:
        return None

    def weigh(self, weights: dict[int, object], measured: dict[bytes, bytes]) -> None:
        pass

    def forget(self) -> None:
        pass


def eye(sizes_rows: bool = False) -> Eye:
    """Return what looks at tensors. ``sizes_rows``: see `tape`."""
    made = tape(False, sizes_rows)
    return _Blind() if made is None else made


def seen_class() -> type[Seen]:
    """Return the class of tensors that a tape saw."""
    module = _library()
    return _NeverSeen if module is None else module.Seen


class _NoGate:
    """In the place of what a dispatch mode in C inherits from, where there is no tape."""


def player_in_c() -> Play | None:
    """Return what plays a tape and packs its records, if there is a tape; see `Player`."""
    module = _library() if _make() is not None else None
    return None if module is None else module.play


def gate_class() -> type:
    """Return the class whose `__torch_dispatch__` notes operators on the attribute ``tape``.

    What it can't note, it hands to the methods ``slowly`` (before it ran), ``note_slowly`` (views)
    and ``end_slowly`` (after it ran).
    """
    module = _library()
    return _NoGate if module is None else module.Gate


def notes() -> object | None:
    """Return what the tape offers to the observer of operators, a capsule; see `notes.h`."""
    module = _library() if _make() is not None else None
    return None if module is None else module.notes


@cache
def _library() -> Any:
    """Return the module in C, or None if it was not built, or for another Python.

    Where Python has no lock, objects lie otherwise in memory than the stable interface says.
    """
    free = "free-threading" in sys.version
    if free or sys.implementation.name != "cpython" or not LIBRARY.is_file():
        return None
    loader = ExtensionFileLoader("_tape", str(LIBRARY))
    spec = spec_from_loader("_tape", loader)
    try:
        module = None if spec is None else module_from_spec(spec)
    except ImportError:
        return None
    return module if getattr(module, "version", 0) == _VERSION else None  # built of other sources


def _is_right(tape: Eye) -> bool:
    """Test with a strided tensor, without torch's factories: a mode may watch them."""
    values = np.array([[1, 2], [3, 4]], np.float32)
    seen = tape.look(torch.from_numpy(values).t())
    if seen is None:
        return False
    found = Content(*seen.content())
    digest = f"xxh3:{xxhash.xxh3_64_hexdigest(struct.pack('<4f', 1, 3, 2, 4))}"
    norm = found.l2norm
    sizes = struct.pack("<4f", 10**0.5, 3, 20**0.5, 4)
    return (
        seen.row_sizes == sizes
        and abs(norm**2 - 30) < 1e-9
        and found == Content("float32", "[2, 2]", 1.0, 4.0, 2.5, norm, 0, 0, 0, digest)
    )
