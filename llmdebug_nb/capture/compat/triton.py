"""The only home of what Inductor knows of Triton's kernels once they were launched: the configuration that autotuning chose, and what the compiler made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_CEILING = re.compile(r"-\(\((\w+)\) // -\((\d+)\)\)")


def configurations(run: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and launch configuration of each Triton kernel of a compiled graph that has run. Nothing where that is not to be had."""
    call = getattr(run, "current_callable", None)
    names: Mapping[str, Any] = getattr(getattr(call, "__func__", call), "__globals__", {})
    for name, value in list(names.items()):
        launcher = next(iter(getattr(value, "launchers", None) or ()), None)
        if launcher is not None:
            yield name, configuration(value, launcher)


def configuration(autotuner: Any, launcher: Any) -> dict[str, Any]:
    """Return what is known of a kernel's launcher (`CachingAutotuner.launchers`), by `store.tiling.COLUMNS`.

    ``grid``: of each axis, in terms of the numbers of elements, as Inductor computes it. ``registers``, ``spills`` and ``shared`` (bytes) are of one thread and block.
    """
    config = getattr(launcher, "config", None)
    block = dict(getattr(config, "kwargs", None) or {})
    meta = getattr(autotuner, "inductor_meta", None) or {}
    found = {
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
        found["arguments"] = [f"{kind} {name}" for name, kind in signature.items()]
    return {name: value for name, value in found.items() if value is not None}


def _grid(meta: Mapping[str, Any], block: Mapping[str, Any]) -> list[str] | None:
    try:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        grid = GridExpr.from_meta(dict(meta), dict(block))
    except (ImportError, KeyError, TypeError, ValueError, AssertionError, AttributeError):
        return None
    return [
        _CEILING.sub(r"ceil(\1 / \2)", str(axis))
        for axis in (grid.x_grid, grid.y_grid, grid.z_grid)
    ]
