"""The parts of a dump of compiled code: each call's node in the traced program, and its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmdebug_nb.core.records import CallKey, Kernel, Site

if TYPE_CHECKING:
    from llmdebug_nb.store.run import Run

_ROLES = {"graph": "forward", "graph.backward": "backward"}


def is_compiled(run: Run) -> bool:
    """Tell whether a run is of compiled code."""
    return bool((run.meta.get("options") or {}).get("graph"))


def nodes(run: Run) -> dict[CallKey, str]:
    """Return the node of the traced program that each call is, the same for all its graphs.

    Empty for runs that are not of compiled code; so is `names`. Keys have rank 0: every rank
    runs the same graphs.
    """
    return _texts(run, "node")


def names(run: Run) -> dict[CallKey, str]:
    """Return the name of each call's node in its graph."""
    return _texts(run, "fx")


def key_of(site: Site) -> CallKey:
    """Return the key of a site's call in `nodes` and `names`."""
    return site.key._replace(rank=0)


def _texts(run: Run, slot: str) -> dict[CallKey, str]:
    if not is_compiled(run):
        return {}
    rows = run.index.scalars(role=tuple(_ROLES), slot=slot)
    return {
        CallKey(0, row.generation, row.step, _ROLES[row.role], row.path, row.call): row.value
        for row in rows
        if row.value
    }


def kernel(run: Run, site: Site) -> Kernel | None:
    """Return the fused kernel that computed a tensor; None if no fused kernel did."""
    if not is_compiled(run):
        return None
    role = next(role for role, phase in _ROLES.items() if phase == site.phase)
    rows = run.index.scalars(
        generation=site.generation,
        step=site.step,
        role=role,
        path=site.path,
        call=site.call,
        slot="kernel",
    )
    kernels = (run.index.kernel(row.value) for row in rows if row.value)
    return next((kernel for kernel in kernels if kernel is not None), None)
