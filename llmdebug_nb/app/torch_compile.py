"""Backends of `torch.compile` that record what the compiled code computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from llmdebug_nb.app.option_signatures import shows_options
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import DumpKeywords, DumpOptions

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.store.run import Run


class GraphBackend:
    """A backend of `torch.compile` that records; made by `fx_backend` and `inductor_backend`.

    Recording begins at once and ends with `stop`, with a ``with`` block, or with the process.
    ``run``: the run; a step is in it as soon as it has ended. Compiled code keeps working after
    `stop`, unrecorded.
    """

    def __init__(self, options: DumpOptions) -> None:
        """Raises what `Recording.start` raises."""
        self._recording = Recording(None, options, compiles=True)
        self.run: Run = self._recording.start()
        self._compile = self._recording.backend

    def __call__(
        self, traced: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **_: object
    ) -> Callable[..., object]:
        return self._compile(traced, inputs)

    def stop(self) -> Run:
        """End the recording. Raises EmptyDumpError if nothing was recorded, DumpWriteError."""
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
    """Return a backend that runs each graph node by node and records every node.

    Results are those of eager code, bit for bit.

        model.forward = torch.compile(model.forward, backend=ld.fx_backend(name="fx"))

    Raises:
        OptionError: an unknown or invalid option.
        DumpWriteError: the run can't be written.
    """
    graph = options.setdefault("graph", "fx")
    if graph != "fx":
        raise OptionError(f"graph {graph!r}: expected 'fx'; for 'fused' there is inductor_backend")
    return GraphBackend(DumpOptions.of(**options))


@shows_options(graph="fused")
def inductor_backend(**options: Unpack[DumpKeywords]) -> GraphBackend:
    """Return Inductor as a backend that records every buffer that its kernels write.

    Results are those of Inductor, bit for bit. ``graph="both"`` also records the graph that the
    kernels were made of, as the run ``NAME.fx``.

    Raises:
        CaptureError: there is no compiler.
        OptionError, DumpWriteError: as `fx_backend`.
    """
    graph = options.setdefault("graph", "fused")
    if graph not in ("fused", "both"):
        raise OptionError(
            f"graph {graph!r}: expected 'fused' or 'both'; for 'fx' there is fx_backend"
        )
    return GraphBackend(DumpOptions.of(**options))
