"""`get_fx_dump_config` and `get_ge_dump_config`: recording compiled code as torchair users know it.

The parameters are those of msit's functions of these names; Inductor stands in for GE.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence

from llmdebug_nb.app.torch_compile import GraphBackend, fx_backend, inductor_backend
from llmdebug_nb.app.upstream.option_names import named_as
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import EVERY_TOKEN
from llmdebug_nb.store.run import Run

_PARTS = {"input": "in", "output": "out", "all": "both"}
_FX_NAMES = {"path": "dump_path"}
_GE_NAMES = {
    "path": "dump_path",
    "tokens": "dump_token",
    "layers": "dump_layer",
    "opname": "dump_layer",
    "fusion_switch": "fusion_switch_file",
}
# an operator in a graph of GE: its type, from the second one of a type on with a number
_OPERATOR = re.compile(r"([A-Z][A-Za-z0-9]*?)(?:V\d|D)?(_\d+)?")
# types of GE, in lower case, whose operators have other names in the dispatcher
_DISPATCHED = {
    "mat_mul": ("mm", "addmm", "bmm"), "batch_mat_mul": ("bmm", "baddbmm"),
    "conv": ("convolution",), "conv2d": ("convolution",), "conv2": ("convolution",),
    "real_div": ("div",), "reduce_mean": ("mean",), "reduce_sum": ("sum",),
    "reduce_max": ("amax", "max"), "cast": ("_to_copy",), "concat": ("cat",),
    "gather": ("embedding", "index", "gather"), "layer_norm": ("native_layer_norm",),
    "softmax": ("_softmax",), "transpose": ("permute", "transpose", "t"), "swish": ("silu",),
}  # fmt: skip


class CompilerConfig:
    """A config whose ``backend`` goes to `torch.compile`."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    @property
    def run(self) -> Run:
        """The run; it grows while recording goes on."""
        return self.backend.run

    def stop(self) -> Run:
        """End the recording. Raises what `GraphBackend.stop` raises."""
        return self.backend.stop()


def get_fx_dump_config(
    dump_path: str | os.PathLike[str] = "", compiler_config: Mapping[str, object] | object = None
) -> CompilerConfig:
    """Return a config whose backend records every node of the graph.

    The run is called ``msit_fx_dump`` and lies in ``dump_path``. ``compiler_config`` has no effect:
    it configures kernels, and none are compiled.

    Raises:
        OptionError, DumpWriteError: as `fx_backend`.
    """
    if _mapping(compiler_config):
        warnings.warn(
            "compiler_config has no effect on an FX dump: no kernels are compiled for it",
            stacklevel=2,
        )
    with named_as(_FX_NAMES):
        return CompilerConfig(
            fx_backend(name="msit_fx_dump", path=dump_path or ".", tokens=EVERY_TOKEN)
        )


def get_ge_dump_config(
    dump_path: str | os.PathLike[str] = "",
    dump_mode: str = "all",
    fusion_switch_file: str | os.PathLike[str] | None = None,
    dump_token: Sequence[int] | None = None,
    dump_layer: Sequence[str] | str | None = None,
    compiler_config: Mapping[str, object] | object = None,
) -> CompilerConfig:
    """Return a config whose backend records the outputs and inputs of Inductor's kernels.

    The run is called ``msit_ge_dump`` and lies in ``dump_path``.

    Args:
        dump_path: the folder that will hold the run.
        dump_mode: input, output or all.
        fusion_switch_file: the fusions to switch off, see `capture/compiled/fusion_switches.py`.
        dump_token: steps; None: all.
        dump_layer: operators as GE names them, such as ``["Add", "Conv_1"]``, or names or globs of
            modules; in a list or separated by spaces. All operators whose name begins so are
            recorded, if a kernel keeps their output. GE's numbers are those of its own graph: they
            have no effect, and a warning says so.
        compiler_config: settings of Inductor by name. An object with attributes, as torchair's
            CompilerConfig, has settings of GE alone: they have no effect, and a warning says so.

    Raises:
        OptionError, DumpWriteError, CaptureError: as `inductor_backend`.
    """
    if dump_mode not in _PARTS:
        raise OptionError(f"dump_mode {dump_mode!r} is not known; known: {', '.join(_PARTS)}")
    if dump_token is not None and not isinstance(dump_token, (list, tuple, range)):
        raise OptionError(
            f"dump_token {dump_token!r}: expected a list of token numbers such as [0, 1]"
        )
    layers, operators = _layers(dump_layer)
    with named_as(_GE_NAMES):
        backend = inductor_backend(
            name="msit_ge_dump",
            path=dump_path or ".",
            part=_PARTS[dump_mode],
            tokens=list(dump_token) if dump_token else EVERY_TOKEN,
            layers=layers,
            opname=operators,
            fusion_switch=fusion_switch_file,
            compiler_config=_mapping(compiler_config),
        )
    return CompilerConfig(backend)


def _layers(
    dump_layer: Sequence[str] | str | None,
) -> tuple[list[str] | None, list[str] | None]:
    """Return the modules and the operators that are named; one of them is None.

    Raises:
        OptionError: there are both.
    """
    names = dump_layer.split() if isinstance(dump_layer, str) else list(dump_layer or ())
    named = [(name, _OPERATOR.fullmatch(name)) for name in names if isinstance(name, str)]
    found = {name: match for name, match in named if match is not None}
    if len(found) != len(names):
        if found:
            raise OptionError(
                f"dump_layer {next(iter(found))!r} is an operator, others are modules: name either"
            )
        return names or None, None
    if any(match[2] for match in found.values()):
        warnings.warn(
            f"dump_layer {', '.join(found)}: numbers are those of GE's own graph; here every"
            " operator of that type is recorded",
            stacklevel=3,
        )
    snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower() for match in found.values()]
    return None, [one for kind in snake for one in _DISPATCHED.get(kind, (kind,))] or None


def _mapping(compiler_config: Mapping[str, object] | object) -> Mapping[str, object] | None:
    if compiler_config is None or isinstance(compiler_config, Mapping):
        return compiler_config or None
    if not hasattr(compiler_config, "__dict__") or callable(compiler_config):
        raise OptionError(
            "compiler_config: expected a CompilerConfig, or a mapping of Inductor's settings such"
            f" as {{'max_fusion_size': 8}}, got {type(compiler_config).__name__}"
        )
    names = [name for name in vars(compiler_config) if not name.startswith("_")]
    if names and not isinstance(compiler_config, CompilerConfig):
        warnings.warn(
            f"compiler_config: the settings {', '.join(sorted(names)[:8])} of"
            f" {type(compiler_config).__name__} are GE's and have no effect on Inductor; its own go"
            " into a mapping such as {'max_fusion_size': 8}",
            stacklevel=3,
        )
    return None
