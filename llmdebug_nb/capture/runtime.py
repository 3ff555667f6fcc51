"""What is known of one runtime, whose models are recorded beside modules of PyTorch.

Every launched program's processes may load this, so it loads nothing but the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.capture.listeners import Listeners
    from llmdebug_nb.capture.session_parts import Parts


class GraphFacts(NamedTuple):
    """What is known of a graph that is followed.

    ``label``: of its root. ``kept``: the filters ask for one of its modules. ``operators``: the
    names of its nodes. ``coarse``, ``rounding``, ``value_rounding``, ``products``: see `Run`.
    """

    label: str
    kept: bool
    operators: Collection[str]
    coarse: Sequence[str] = ()
    rounding: float = 0.0
    value_rounding: float = 0.0
    products: Mapping[str, str] = {}


class GraphSource(Protocol):
    """Follows models that run as graphs. ``listeners``: those of their runs."""

    listeners: ClassVar[Listeners[Any]]

    def __init__(self, parts: Parts, given: Sequence[Any], only: bool, /) -> None:
        """``given``: these models. ``only``: and no others that run. Raises CaptureError."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def graphs(self) -> Iterable[GraphFacts]: ...


class Engine(Protocol):
    """Follows an engine: it runs a module of PyTorch for several requests at once, in steps.

    ``model``: the module. ``compiler_settings``: those that it gives to Inductor.
    """

    model: nn.Module

    @classmethod
    def of(cls, given: object) -> Engine:
        """Follow what the user gave. Raises CaptureError."""

    @classmethod
    def calling(cls, module: nn.Module) -> Engine | None:
        """Follow the engine that calls a module now; return None if none does."""

    @staticmethod
    def compiles(module: nn.Module) -> bool:
        """Tell whether a part of a module runs as code that an engine compiled."""

    @property
    def compiler_settings(self) -> Mapping[str, object]: ...
    def run_eagerly(self) -> Callable[[], None]:
        """Run what is compiled as it is written; return how to undo it."""

    def start(self, parts: Parts) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime. Its models run as graphs (``source``), or call a module of PyTorch (``engine``).

    ``package``: that programs import. ``name``: in texts. ``model``: what a recording is given, in
    words; ``classes``: all that it may be, each with its module. ``libraries``: parts of the names
    of libraries in the memory of a process that runs it. ``extra``: pip installs it as an extra of
    ours. ``requests``: its models compute several requests at once.

    ``source()``, ``engine()``: load and return what follows its models.
    """

    package: str
    name: str
    model: str
    classes: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    extra: bool = False
    requests: bool = False
    source: Callable[[], type[GraphSource]] | None = None
    engine: Callable[[], type[Engine]] | None = None

    def is_model(self, value: object) -> bool:
        """Tell whether a value is a model of it, without importing it."""
        places = (name.rpartition(".") for name in self.classes)
        kinds = (getattr(sys.modules.get(module), name, None) for module, _, name in places)
        return any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)
