"""Operators: functions and tensor methods (api), and what the dispatcher runs (aten).

Each level is a mode on the thread's stack while a recorded step runs. Operators that only look at a tensor
(its size, say) or only rearrange it (a view) compute nothing and are not recorded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from llmdebug_nb.capture.calls import Call
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.operators import collectives
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.errors import EmptyDumpError, nearest

# namespace of a function or operator -> upstream's prefix
_PREFIXES = (
    ("torch.nn.functional.", "Functional"),
    ("torch.Tensor.", "Tensor"),
    ("torch._VF.", "VF"),
    ("torch_npu.", "NPU"),
    ("torch.distributed.", "Distributed"),
    ("torch.", "Torch"),
    ("aten.", "Aten"),
    ("c10d.", "Distributed"),
    ("_c10d_functional.", "Distributed"),
    ("npu.", "NPU"),
)
_RECURRENT = (
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
)
# they give no tensor, or give it to autograd, storage or Python rather than to the computation
_LOOKS = frozenset(
    """size dim ndimension numel nelement stride storage_offset storage storage_type untyped_storage element_size
    data_ptr const_data_ptr get_device dense_dim sparse_dim dim_order backward retain_grad requires_grad_
    share_memory_ pin_memory record_stream numpy tolist item apply_ map_ map2_ module_load result_type can_cast
    typename equal allclose __len__ __bool__ __int__ __float__ __index__ __complex__ __nonzero__ __long__
    __contains__ __repr__ __format__ __array__ __array_wrap__ __deepcopy__ __reduce_ex__ __setstate__ __dlpack__
    __dlpack_device__ __hash__ set_ names rename rename_ qscheme broadcast_shapes""".split()  # noqa: SIM905
)
_LOOKS_LIKE = (
    "_C.*",
    "is_*",
    "_is_*",
    "q_*",
    "register_*",
    "_has_*",
    "_dim?",
    "__get__",
    "*.__get__",
    "*.__set__",
    "_set_*",
)
# they give a view of what they are given, always or in most cases: recorded where they had to copy
_REARRANGES = frozenset(
    """view view_as reshape reshape_as transpose permute expand expand_as squeeze unsqueeze t narrow select chunk split
    split_with_sizes tensor_split hsplit vsplit dsplit unbind unflatten flatten ravel as_strided detach diagonal movedim
    moveaxis swapaxes swapdims adjoint real imag unfold view_as_real view_as_complex broadcast_to broadcast_tensors
    positive contiguous to type type_as float half bfloat16 double int long short char byte bool cpu cuda npu xpu
    resolve_conj resolve_neg alias __getitem__ __iter__ atleast_1d atleast_2d atleast_3d""".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Operator:
    """A kind of operator. ``name``: ``Functional.linear``, ``Aten.add.Tensor``. ``rearranges``: it may give a view. ``wanted``: it is recorded; if not,
    it only counts."""

    name: str
    rearranges: bool = False
    wanted: bool = True


class Host(Protocol):
    """What the levels need of their session."""

    thread: Any
    guarded: Callable[..., Any]

    def listening(self) -> bool: ...
    def operator_begins(
        self, operator: Operator, level: str, args: Any, kwargs: Any
    ) -> Call | None: ...
    def operator_ends(self, call: Call, outputs: Any) -> None: ...
    def tell_forward(self, function: Any) -> None: ...


class Wanted:
    """Which operators are asked for: names and globs, with or without prefix; ``!`` in front leaves out."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._only = [name for name in names if not name.startswith("!")]
        self._never = [name[1:] for name in names if name.startswith("!")]

    def __contains__(self, name: str) -> bool:
        if _fits(name, self._never):
            return False
        return not self._only or _fits(name, self._only)

    def check(self, levels: tuple[str, ...]) -> None:
        """Raise EmptyDumpError for a plain name that no operator of these levels has."""
        plain = [
            n for n in (*self._only, *self._never) if not set(n) & set("*?[") and "::" not in n
        ]
        if not plain:
            return
        known = sorted(_known(levels))
        for name in plain:
            if not any(_fits(one, [name]) for one in known):
                bare = sorted({one.partition(".")[2] for one in known} | set(known))
                raise EmptyDumpError(
                    f"apis: no operator of level {'+'.join(levels)} is called {name!r}{nearest(name, bare)}"
                )


def _fits(name: str, wanted: list[str]) -> bool:
    """Match ``Functional.linear`` also as ``linear``, and ``Aten.add.Tensor`` also as ``add`` and ``Aten.add``."""
    bare = name.partition(".")[2]
    names = (name, bare, bare.partition(".")[0], ".".join(name.split(".")[:2]))
    return any(fnmatchcase(one, want) for one in names for want in wanted)


def _known(levels: tuple[str, ...]) -> Iterator[str]:
    if "api" in levels:
        for functions in torch.overrides.get_overridable_functions().values():
            for function in functions:
                yield name_of(function)
        yield from (f"Distributed.{name}" for name in pytorch.COLLECTIVES)
    if "aten" in levels:
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, bare = name.partition("::")
            yield prefixed(f"{namespace}.{bare}")


@functools.cache
def name_of(function: Any) -> str:
    """Return an operator's name with upstream's prefix: ``Functional.linear``, ``Aten.add.Tensor``."""
    found = resolve_name(function)
    if found is None:
        bare = getattr(function, "__name__", type(function).__name__)
        found = f"{getattr(function, '__module__', None) or 'torch'}.{bare}"
    return prefixed(str(found).removesuffix(".default"))


def prefixed(name: str) -> str:
    for namespace, prefix in _PREFIXES:
        if name.startswith(namespace):
            bare = name.removeprefix(namespace)
            return f"{'VF' if prefix == 'Torch' and bare in _RECURRENT else prefix}.{bare}"
    return name


class _Modes(threading.local):
    """The modes of one thread: a mode remembers what it was put on."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self.modes = make()


class Levels:
    """The operator levels of one session, and the modes that watch them."""

    def __init__(self, host: Host, levels: tuple[str, ...], apis: tuple[str, ...]) -> None:
        """Raises EmptyDumpError for an operator that does not exist."""
        self._host = host
        self.wanted = Wanted(apis)
        self.wanted.check(levels)
        self._here = _Modes(
            lambda: [mode(host, self) for level, mode in _MODES.items() if level in levels]
        )
        self._api: dict[Any, Operator | None] = {}
        self._aten: dict[Any, Operator | None] = {}
        self._functions = "api" in levels

    def open(self) -> None:
        if self._functions:
            _fast_paths.add(self)
            collectives.listeners.add(self)

    def close(self) -> None:
        if self._functions:
            collectives.listeners.remove(self)
            _fast_paths.remove(self)

    def collective(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of `torch.distributed`. What it only writes later is not waited for, and not recorded."""
        operator = Operator(f"Distributed.{name}", wanted=f"Distributed.{name}" in self.wanted)
        if pytorch.tracing() or not self._host.listening():
            return function(*args, **kwargs)
        return _watched(self._host, operator, "api", function, args, kwargs)

    def push(self) -> list[Any]:
        """Put the modes on this thread's stack, but for those that are on it; return the ones put there."""
        return [mode for mode in self._here.modes if pytorch.push_mode(mode)]

    def pop(self, modes: list[Any] | None = None) -> list[Any]:
        """Take modes off this thread's stack: those that `push` returned, or all. Return the ones that were on it."""
        return [
            mode
            for mode in (self._here.modes if modes is None else modes)
            if pytorch.pop_mode(mode)
        ]

    def api(self, function: Any) -> Operator | None:
        """Return what a function is, or None where it computes nothing."""
        if function not in self._api:
            name = name_of(function)
            bare = name.partition(".")[2]
            looks = bare in _LOOKS or any(fnmatchcase(bare, glob) for glob in _LOOKS_LIKE)
            self._api[function] = (
                None if looks else Operator(name, bare in _REARRANGES, name in self.wanted)
            )
        return self._api[function]

    def aten(self, function: Any) -> Operator | None:
        """The same for an operator of the dispatcher: its schema says whether it only gives a view."""
        if function not in self._aten:
            name, schema = name_of(function), getattr(function, "_schema", None)
            returns = schema.returns if schema is not None else ()
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            looks = schema is None or view or name in METADATA
            self._aten[function] = None if looks else Operator(name, wanted=name in self.wanted)
        return self._aten[function]


METADATA = (
    "Aten._unsafe_view",
    "Aten.detach_",
    "Aten._reshape_alias",
    "Aten.lift_fresh",
    "Aten._local_scalar_dense",
    "Aten.is_same_size",
    "Aten._has_same_storage_numel",
    "Aten.is_nonzero",
)


class ApiLevel(TorchFunctionMode):
    """Sees each outermost call of a function or tensor method, by whatever name it was imported."""

    def __init__(self, host: Host, levels: Levels) -> None:
        super().__init__()
        self._host, self._levels = host, levels

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        host = self._host
        operator = None if pytorch.tracing() else self._levels.api(func)
        if operator is None or not host.listening():
            return func(*args, **kwargs)
        if operator.rearranges:
            result = func(*args, **kwargs)
            host.guarded(self._copied, operator, args, kwargs, result)
            return result
        return _watched(host, operator, "api", func, args, kwargs)

    def _copied(self, operator: Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator that might have given a view, if it did not: its inputs are still as they were."""
        if (
            args
            and type(result) is torch.Tensor is type(args[0])
            and pytorch.shares_storage(result, args[0])
        ):
            return  # a view, as nearly always
        given = {
            pytorch.storage_of(leaf)
            for _, leaf in leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        if any(
            isinstance(leaf, torch.Tensor) and pytorch.storage_of(leaf) not in given
            for _, leaf in leaves(result)
        ):
            call = self._host.operator_begins(operator, "api", args, kwargs)
            if call is not None:
                self._host.operator_ends(call, result)


class AtenLevel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator that the dispatcher runs, in forward and backward."""

    supports_higher_order_operators = True

    def __init__(self, host: Host, levels: Levels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host, self._levels = host, levels

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: else torch would run it eagerly under this mode, without a word."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        host = self._host
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a tensor that wraps others: its own operators come by
        if not host.listening():
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and pytorch.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        operator = self._levels.aten(func)
        if operator is None or not operator.wanted:
            if operator is not None:
                host.guarded(host.operator_begins, operator, "aten", args, kwargs)
            result = func(*args, **kwargs)
            host.guarded(host.tell_forward, func)
            return result
        return _watched(host, operator, "aten", func, args, kwargs)


_fast_paths: Listeners[Levels] = Listeners(lambda: pytorch.with_fast_paths(ApiLevel))
_PLAIN = torch.Tensor.__torch_dispatch__
_MODES = {"api": ApiLevel, "aten": AtenLevel}


def _watched(
    host: Host,
    operator: Operator,
    level: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operator and record it: what it was given before it runs, since it may write to that."""
    call: Call | None = host.guarded(host.operator_begins, operator, level, args, kwargs)
    if call is None:
        return func(*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except BaseException:
        host.thread.leave(call.path)
        raise
    host.guarded(
        host.operator_ends, call, _written(func, args, kwargs) if result is None else result
    )
    return result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator without a result has written to: by its schema, or its first argument."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return args[:1]
    named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    return {
        a.name: named.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }
