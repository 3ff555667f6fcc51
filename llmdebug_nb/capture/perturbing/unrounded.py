"""Operators in a higher precision, whose results are not rounded before they are used.

An `Unrounded` says it has the dtype that the program expects, and holds values in a wider one.
Whatever takes it computes from these, and rounds as the program would have. Under `Precise`,
results stay unrounded, so a function of several operators rounds nowhere inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.operators.kinds import METADATA, operator_name
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.nested import mapped

Args = tuple[object, ...]
Kwargs = Mapping[str, object]
T = TypeVar("T")
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
# they copy values and compute none, so what is unrounded stays so
_COPIES = frozenset({
    "clone", "cat", "stack", "index", "gather", "index_select", "take_along_dim", "repeat", "flip",
    "roll", "masked_fill", "embedding", "where", "constant_pad_nd", "slice_scatter",
    "select_scatter",
})  # fmt: skip


class Unrounded(torch.Tensor):
    """A tensor that has a dtype, and values that are not rounded to it: ``wide``."""

    wide: torch.Tensor
    __torch_function__ = torch_modes.NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, wide: torch.Tensor, dtype: torch.dtype) -> Unrounded:
        made: Unrounded = torch_modes.wrapper(cls, wide, dtype)
        made.wide = wide
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature is untyped
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        return computed(func, args, kwargs or {}, keeps=False)

    def rounded(self) -> torch.Tensor:
        return self.wide.to(self.dtype)


class Precise(torch_modes.TorchDispatchMode):
    """Computes what runs under it in a higher precision. ``narrow``: calls that could not be."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        def failed() -> None:
            self.narrow += 1

        return computed(func, args, kwargs or {}, keeps=True, failed=failed)


def computed(
    func: Callable[..., object],
    args: Args,
    kwargs: Kwargs,
    keeps: bool,
    failed: Callable[[], None] = lambda: None,
) -> object:
    """Compute an operator from unrounded values. ``keeps``: its result stays unrounded, too.

    ``failed()``: called if it can only be computed from rounded ones.
    """
    return torch_modes.run_unseen(_computed, func, args, kwargs, keeps, failed)


def _computed(
    func: Callable[..., object], args: Args, kwargs: Kwargs, keeps: bool,
    failed: Callable[[], None],
) -> object:  # fmt: skip
    if isinstance(args[0] if args else None, Unrounded) and _writes_first(func):
        return _written(func, args, kwargs, keeps)
    moves = _moves(func)
    if (moves and not _any(args, kwargs, Unrounded)) or not _widens(func, args, kwargs):
        return func(*_rounded(args), **_rounded(kwargs))
    try:
        expected = func(*_on_meta(args), **_on_meta(kwargs))
        wide = func(*_wide(args), **_wide(kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        failed()
        return func(*_rounded(args), **_rounded(kwargs))
    return _like(wide, expected, keeps or moves)


def values(value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a result: the values of an `Unrounded`."""
    return value.wide if isinstance(value, Unrounded) else value


def rounds(func: Callable[..., object], args: Args, kwargs: Kwargs) -> bool:
    """Tell whether an operator computes new floating-point values, which it rounds."""
    return not _moves(func) and _widens(func, args, kwargs)


def _moves(func: Callable[..., object]) -> bool:
    """Tell whether an operator computes nothing: it returns a view, or copies."""
    name = operator_name(func)
    schema = getattr(func, "_schema", None)
    is_view = schema is not None and torch_modes.returns_view(schema)
    return is_view or name in METADATA or name.split(".")[1] in _COPIES


def _writes_first(func: Callable[..., object]) -> bool:
    schema = getattr(func, "_schema", None)
    first = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return first is not None and bool(first.is_write)


def _written(func: Callable[..., object], args: Args, kwargs: Kwargs, keeps: bool) -> object:
    """Let an operator write to an unrounded tensor."""
    first = args[0]
    assert isinstance(first, Unrounded)
    func(*_wide(args), **_wide(kwargs))
    if not keeps:
        first.wide.copy_(first.rounded())
    return first


def _widens(func: Callable[..., object], args: Args, kwargs: Kwargs) -> bool:
    """Tell whether an operator computes from floats, without chance, and into new memory."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or torch_modes.draws(func, args, kwargs):
        return False
    return any(each.dtype in _WIDER for each in _tensors((args, kwargs)))


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _any(args: Args, kwargs: Kwargs, kind: type) -> bool:
    return any(isinstance(each, kind) for each in _tensors((args, kwargs)))


def _rounded(value: T) -> T:
    return mapped(value, lambda x: x.rounded() if isinstance(x, Unrounded) else x)


def _wide(value: T) -> T:
    """Return arguments in a higher precision; a dtype that is asked for is made wider, too."""

    def change(x: object) -> object:
        if isinstance(x, Unrounded):
            return x.wide
        if isinstance(x, torch.dtype):
            return _WIDER.get(x, x)
        return x.to(_WIDER.get(x.dtype, x.dtype)) if isinstance(x, torch.Tensor) else x

    return mapped(value, change)


def _on_meta(value: T) -> T:
    """Return arguments without memory, which tell the dtypes of the results."""

    def change(x: object) -> object:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return mapped(value, change)


def _like(wide: object, expected: object, keeps: bool) -> object:
    """Return a result in the dtypes that the program expects."""
    if isinstance(wide, (list, tuple)) and isinstance(expected, (list, tuple)):
        return type(wide)(_like(w, e, keeps) for w, e in zip(wide, expected, strict=True))
    if not (isinstance(wide, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return wide
    if wide.dtype == expected.dtype:
        return wide
    return Unrounded(wide, expected.dtype) if keeps else wide.to(expected.dtype)
