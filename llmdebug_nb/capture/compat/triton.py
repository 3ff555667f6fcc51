"""The only home of Inductor's knowledge of launched Triton kernels.

This is the configuration that autotuning chose, and the compiler's figures for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

_CEILING = re.compile(r"-\(\((\w+)\) // -\((\d+)\)\)")


def configurations(run: Callable[..., object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield name and launch configuration of each Triton kernel of a graph that has run.

    Yields nothing if this version of Inductor doesn't reveal them.
    """
    call = getattr(run, "current_callable", None)
    names: Mapping[str, object] = getattr(getattr(call, "__func__", call), "__globals__", {})
    for name, value in list(names.items()):
        launcher = next(iter(getattr(value, "launchers", None) or ()), None)
        if launcher is not None:
            yield name, configuration(value, launcher)


def configuration(autotuner: object, launcher: object) -> dict[str, object]:
    """Return what is known of a kernel's launcher, by `store.tiling.COLUMNS`.

    ``grid``: Inductor's formula for each axis, in terms of element counts. ``registers`` and
    ``spills`` are per thread, ``shared`` is in bytes per block.
    """
    config = getattr(launcher, "config", None)
    block = dict(getattr(config, "kwargs", None) or {})
    meta = getattr(autotuner, "inductor_meta", None) or {}
    values = {
        "language": "triton",
        "grid": _grid(meta, block),
        "block": {name: int(size) for name, size in block.items() if isinstance(size, int)},
        "warps": getattr(config, "num_warps", None),
        "stages": getattr(config, "num_stages", None),
        "registers": getattr(launcher, "n_regs", None),
        "spills": getattr(launcher, "n_spills", None),
        "shared": getattr(launcher, "shared", None),
    }
    signature = (getattr(autotuner, "triton_meta", None) or {}).get("signature")
    if isinstance(signature, Mapping):
        values["arguments"] = [f"{kind} {name}" for name, kind in signature.items()]
    return {name: value for name, value in values.items() if value is not None}


def _grid(meta: Mapping[str, object], block: Mapping[str, object]) -> list[str] | None:
    try:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        grid = GridExpr.from_meta(dict(meta), dict(block))
    except (ImportError, KeyError, TypeError, ValueError, AssertionError, AttributeError):
        return None
    axes = (grid.x_grid, grid.y_grid, grid.z_grid)
    return [_CEILING.sub(r"ceil(\1 / \2)", str(axis)) for axis in axes]
