"""Kinds of operators: their names, which of them compute something, and which are wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import BuiltinFunctionType

import torch
from torch.overrides import resolve_name

from llmdebug_nb.capture.compat import torch_distributed, torch_modes
from llmdebug_nb.capture.signatures import Parameters, parameters_of
from llmdebug_nb.core import torch_internals
from llmdebug_nb.core.errors import EmptyDumpError, nearest
from llmdebug_nb.core.paths import bounded

# namespace of a function or operator -> msprobe's prefix
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RECURRENT = _words("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
# they return no tensor, or pass one to autograd, storage or Python instead of computing with it
_QUERIES = _words(
    """size dim ndimension numel nelement stride storage_offset storage storage_type
    untyped_storage element_size data_ptr const_data_ptr get_device dense_dim sparse_dim dim_order
    backward autograd.backward retain_grad requires_grad_ share_memory_ pin_memory record_stream
    numpy tolist item
    apply_ map_ map2_ module_load result_type can_cast typename equal allclose __len__ __bool__
    __int__ __float__ __index__ __complex__ __nonzero__ __long__ __contains__ __repr__ __format__
    __array__ __array_wrap__ __deepcopy__ __reduce_ex__ __setstate__ __dlpack__ __dlpack_device__
    __hash__ set_ names rename rename_ qscheme broadcast_shapes"""
)
_QUERY_GLOBS = (
    "_C.*", "is_*", "_is_*", "q_*", "register_*", "_has_*", "_dim?", "__get__", "*.__get__",
    "*.__set__", "_set_*",
)  # fmt: skip
# they return a view of their input, always or in most cases: recorded where they had to copy
_REARRANGES = _words(
    """view view_as reshape reshape_as transpose permute expand expand_as squeeze unsqueeze t
    narrow select chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unflatten
    flatten ravel as_strided detach diagonal movedim moveaxis swapaxes swapdims adjoint real imag
    unfold view_as_real view_as_complex broadcast_to broadcast_tensors positive contiguous to type
    type_as float half bfloat16 double int long short char byte bool cpu cuda npu xpu resolve_conj
    resolve_neg alias __getitem__ __iter__ atleast_1d atleast_2d atleast_3d"""
)
_VIEW_PROPERTIES = _words("T mT H mH real imag")  # of tensors
READS = "Aten._local_scalar_dense"  # returns the number in a tensor to Python
# dispatcher operators that only touch metadata, although their schema does not say so
METADATA = _words(
    """Aten._unsafe_view Aten.detach_ Aten._reshape_alias Aten.lift_fresh
    Aten._local_scalar_dense Aten.is_same_size Aten._has_same_storage_numel Aten.is_nonzero"""
)


@dataclass(frozen=True, slots=True)
class Operator:
    """A kind of operator.

    ``name``: ``Functional.linear``, ``Aten.add.Tensor``. ``rearranges``: it may return a view; one
    of the dispatcher does nothing else, and is never wanted.
    ``wanted``: its calls are recorded; otherwise they are only counted.
    ``parameters``: the names of its arguments by position, see `signatures.py`.
    """

    name: str
    rearranges: bool = False
    wanted: bool = True
    parameters: Parameters = ()


class OperatorFilter:
    """Selects operators by names and globs, with or without prefix; a leading ``!`` excludes."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._included = [name for name in names if not name.startswith("!")]
        self._excluded = [name[1:] for name in names if name.startswith("!")]

    def __contains__(self, name: str) -> bool:
        if _matches(name, self._excluded):
            return False
        return not self._included or _matches(name, self._included)

    def refuse_unknown(self, levels: tuple[str, ...]) -> None:
        """Raise EmptyDumpError for a plain name that no operator of these levels has."""
        names = (*self._included, *self._excluded)
        plain = [name for name in names if not set(name) & set("*?[") and "::" not in name]
        known = sorted(_known_names(levels)) if plain else []
        for name in plain:
            if not any(_matches(one, [name]) for one in known):
                bare = sorted({one.partition(".")[2] for one in known} | set(known))
                raise EmptyDumpError(
                    f"apis: no operator of level {'+'.join(levels)} is called {name!r}"
                    f"{nearest(name, bare)}"
                )


def _matches(name: str, wanted: list[str]) -> bool:
    """Match ``Functional.linear`` also as ``linear``; ``Aten.add.Tensor`` also as ``Aten.add``."""
    bare = name.partition(".")[2]
    names = (name, bare, bare.partition(".")[0], ".".join(name.split(".")[:2]))
    return any(fnmatchcase(one, want) for one in names for want in wanted)


def _known_names(levels: tuple[str, ...]) -> Iterator[str]:
    if "api" in levels:
        for functions in torch.overrides.get_overridable_functions().values():
            yield from map(operator_name, functions)
        yield from (f"Distributed.{name}" for name in torch_distributed.COLLECTIVES)
    if "aten" in levels:
        for name in torch_internals.dispatched_operators():
            namespace, _, bare = name.partition("::")
            yield with_prefix(f"{namespace}.{bare}")


@functools.cache
def _names_of_several() -> dict[Callable[..., object], str]:
    """Return the name that the dispatcher has, of functions of torch with several names.

    ``torch.mm`` is ``torch.spmm`` too, and the two are equal.
    """
    names: dict[Callable[..., object], list[str]] = {}
    for name, value in vars(torch).items():
        if isinstance(value, BuiltinFunctionType):
            names.setdefault(value, []).append(name)
    several = {function: found for function, found in names.items() if len(found) > 1}
    return {
        function: next((name for name in found if hasattr(torch.ops.aten, name)), found[0])
        for function, found in several.items()
    }


@functools.cache
def operator_name(function: Callable[..., object]) -> str:
    """Return an operator's name with msprobe's prefix: ``Functional.linear``, ``Aten.add``."""
    own = _names_of_several().get(function)
    name = f"torch.{own}" if own is not None else resolve_name(function)
    if name is None:
        bare = getattr(function, "__name__", type(function).__name__)
        name = f"{getattr(function, '__module__', None) or 'torch'}.{bare}"
    return bounded(f"/{with_prefix(str(name).removesuffix('.default'))}")[1:]


def with_prefix(name: str) -> str:
    """Return a qualified name (``aten.mm``) with msprobe's prefix in place of its namespace."""
    for namespace, prefix in _PREFIXES:
        if name.startswith(namespace):
            bare = name.removeprefix(namespace)
            return f"{'VF' if prefix == 'Torch' and bare in _RECURRENT else prefix}.{bare}"
    return name


class OperatorKinds:
    """Looks up the kind of a function or dispatcher operator; each one is classified once."""

    def __init__(self, wanted: OperatorFilter) -> None:
        self.wanted = wanted
        self._api: dict[Callable[..., object], Operator | None] = {}
        self._aten: dict[Callable[..., object], Operator | None] = {}

    def api(self, function: Callable[..., object]) -> Operator | None:
        """Return the kind of a function or tensor method, or None if it computes nothing."""
        if function not in self._api:
            self._api[function] = self._of_function(function)
        return self._api[function]

    def _of_function(self, function: Callable[..., object]) -> Operator | None:
        name = operator_name(function)
        bare = name.partition(".")[2]
        read = bare.removesuffix(".__get__")
        if read != bare and read in _VIEW_PROPERTIES:
            return Operator(f"Tensor.{read}", rearranges=True)
        if bare in _QUERIES or any(fnmatchcase(bare, glob) for glob in _QUERY_GLOBS):
            return None
        return Operator(name, bare in _REARRANGES, name in self.wanted, _names(function, name))

    def aten(self, function: Callable[..., object]) -> Operator | None:
        """Return the kind of a dispatcher operator, or None if it is no operator.

        The schema of an operator says whether it only returns a view.
        """
        if function not in self._aten:
            self._aten[function] = self._of_dispatcher(function)
        return self._aten[function]

    def _of_dispatcher(self, function: Callable[..., object]) -> Operator | None:
        name, schema = operator_name(function), getattr(function, "_schema", None)
        if schema is None:
            return None
        if torch_modes.returns_view(schema) or name in METADATA:
            return Operator(name, rearranges=True, wanted=False)
        parameters = torch_modes.names_of(schema)
        return Operator(name, wanted=name in self.wanted, parameters=parameters)


def _names(function: Callable[..., object], name: str) -> Parameters:
    """Return the parameters of a function or tensor method.

    One in C has those of the dispatcher's operator of that name, as far as all overloads agree. A
    function calls ``input`` what the operator calls ``self``.
    """
    written = parameters_of(function)
    prefix, _, bare = name.partition(".")
    if written or prefix not in ("Torch", "Functional", "Tensor"):
        return written
    agreed = torch_modes.agreed_names(bare)
    if prefix == "Tensor":
        return agreed
    return tuple("input" if each == "self" else each for each in agreed)
