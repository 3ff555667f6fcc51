"""Backends of `torch.compile` that record what the compiled code computes, also in the form that torchair's users know."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import DumpKeywords, DumpOptions, shows_options

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.store.run import Run

_PARTS = {"input": "in", "output": "out", "all": "both"}


class GraphBackend:
    """A backend of `torch.compile` with a recording of its own, which begins at once and ends with `stop` or with the process.

    ``run``: the dump; each step is part of it as soon as it is over. Code that it compiled goes on to run after `stop`, unrecorded.
    May be used as a context manager.
    """

    def __init__(self, options: DumpOptions) -> None:
        """Raises what a `Recording` raises."""
        self._recording = Recording(None, options, compiles=True)
        self.run: Run = self._recording.start()
        self._compile: Callable[..., Any] = self._recording.backend

    def __call__(
        self, traced: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._compile(traced, inputs)
        return compiled

    def stop(self) -> Run:
        """End the recording. Raises EmptyDumpError where nothing was recorded, DumpWriteError."""
        self.run = self._recording.stop()
        return self.run

    def __enter__(self) -> GraphBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recording.running:
            self._recording.__exit__(kind, error, trace)


@shows_options(graph="fx")
def fx_backend(**options: Unpack[DumpKeywords]) -> GraphBackend:
    """Return a backend that runs each graph node by node and records every node; bit for bit what eager code computes.

    Options: see `DumpOptions`, such as ``name``, ``path`` and ``tokens``.

        model.forward = torch.compile(model.forward, backend=ld.fx_backend(name="fx"))

    Raises:
        OptionError: an option that makes no sense, or is unknown. DumpWriteError: a place that can't be written to.
    """
    options["graph"] = "fx"
    return GraphBackend(DumpOptions.of(**options))


@shows_options(graph="fused")
def inductor_backend(**options: Unpack[DumpKeywords]) -> GraphBackend:
    """Return Inductor as a backend that records every buffer that its kernels write; bit for bit what Inductor computes.

    ``graph="both"`` records beside it, as run ``NAME.fx``, the graph that the kernels were made of. ``fusion_switch``: which fusions are off.
    Raises what `fx_backend` raises, and CaptureError where there is no compiler.
    """
    graph = options.setdefault("graph", "fused")
    if graph not in ("fused", "both"):
        raise OptionError(
            f"graph {graph!r}: expected 'fused' or 'both'; for 'fx' there is fx_backend"
        )
    return GraphBackend(DumpOptions.of(**options))


class CompilerConfig:
    """What `get_fx_dump_config` and `get_ge_dump_config` return: ``backend`` goes to `torch.compile`; ``run`` is the dump, ``stop()`` ends it."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    @property
    def run(self) -> Run:
        return self.backend.run

    def stop(self) -> Run:
        """End the recording. Raises what `GraphBackend.stop` raises."""
        return self.backend.stop()


def get_fx_dump_config(
    dump_path: str | os.PathLike[str] = "", compiler_config: Any = None
) -> CompilerConfig:
    """Return a config whose backend records every node of the graph, in a new run ``msit_fx_dump`` in ``dump_path``.

    The parameters of msit's `get_fx_dump_config`. ``compiler_config`` configures kernels, of which there are none here. Raises
    OptionError, DumpWriteError.
    """
    if _mapping(compiler_config):
        warnings.warn(
            "compiler_config has no effect on an FX dump: no kernels are compiled for it",
            stacklevel=2,
        )
    return CompilerConfig(fx_backend(name="msit_fx_dump", path=dump_path or ".", tokens="all"))


def get_ge_dump_config(
    dump_path: str | os.PathLike[str] = "", dump_mode: str = "all", fusion_switch_file: str | os.PathLike[str] | None = None,
    dump_token: Sequence[int] | None = None, dump_layer: Sequence[str] | str | None = None, compiler_config: Any = None,
) -> CompilerConfig:  # fmt: skip
    """Return a config whose backend records what Inductor's kernels write (and read), in a new run ``msit_ge_dump`` in ``dump_path``.

    The parameters of msit's `get_ge_dump_config`, with Inductor in GE's place. ``dump_mode``: input, output or all. ``fusion_switch_file``: see
    `capture/fusion.py`. ``dump_token``: steps, all if None. ``dump_layer``: names or globs of modules, in a list or with spaces between
    them. ``compiler_config``: settings of Inductor by name. Raises OptionError, DumpWriteError, CaptureError.
    """
    if dump_mode not in _PARTS:
        raise OptionError(f"dump_mode {dump_mode!r} is not known; known: {', '.join(_PARTS)}")
    if dump_token is not None and not isinstance(dump_token, (list, tuple, range)):
        raise OptionError(
            f"dump_token {dump_token!r}: expected a list of token numbers such as [0, 1]"
        )
    return CompilerConfig(
        inductor_backend(
            name="msit_ge_dump",
            path=dump_path or ".",
            part=_PARTS[dump_mode],
            tokens=list(dump_token) if dump_token else "all",
            layers=dump_layer.split() if isinstance(dump_layer, str) else dump_layer,
            fusion_switch=fusion_switch_file,
            compiler_config=_mapping(compiler_config),
        )
    )


def _mapping(compiler_config: Any) -> Mapping[str, Any] | None:
    if compiler_config is not None and not isinstance(compiler_config, Mapping):
        kind = type(compiler_config).__name__
        raise OptionError(
            f"compiler_config: expected a mapping of Inductor's settings, such as {{'max_fusion_size': 8}}, got {kind}"
        )
    return compiler_config or None
