"""The parts of a dump of compiled code: each call's node in the traced program, and its kernel."""

from __future__ import annotations

from llmdebug_nb.core.records import CallKey, Kernel, Site
from llmdebug_nb.store.queries import Index

_ROLES = {"graph": "forward", "graph.backward": "backward"}


def is_compiled(index: Index) -> bool:
    """Tell whether a run is of compiled code."""
    return bool((index.source.meta.get("options") or {}).get("graph"))


def nodes(index: Index) -> dict[CallKey, str]:
    """Return the node of the traced program that each call is, the same for all its graphs.

    Empty for runs that are not of compiled code; so is `names`. Keys have rank 0: every rank
    runs the same graphs.
    """
    return _texts(index, "node")


def names(index: Index) -> dict[CallKey, str]:
    """Return the name of each call's node in its graph."""
    return _texts(index, "fx")


def key_of(site: Site) -> CallKey:
    """Return the key of a site's call in `nodes` and `names`."""
    return site.key._replace(rank=0)


def _texts(index: Index, slot: str) -> dict[CallKey, str]:
    if not is_compiled(index):
        return {}
    rows = index.scalars(role=tuple(_ROLES), slot=slot)
    return {
        CallKey(0, row.generation, row.step, _ROLES[row.role], row.path, row.call): row.value
        for row in rows
        if row.value
    }


def kernel(index: Index, site: Site) -> Kernel | None:
    """Return the fused kernel that computed a tensor; None if no fused kernel did."""
    if not is_compiled(index):
        return None
    role = next(role for role, phase in _ROLES.items() if phase == site.phase)
    rows = index.scalars(
        generation=site.generation,
        step=site.step,
        role=role,
        path=site.path,
        call=site.call,
        slot="kernel",
    )
    kernels = (index.kernel(row.value) for row in rows if row.value)
    return next((kernel for kernel in kernels if kernel is not None), None)
