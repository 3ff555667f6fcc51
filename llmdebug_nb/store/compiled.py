"""What a dump of compiled code knows besides: the node of the traced program that each call is, and the kernel that computes it."""

from __future__ import annotations

from typing import Any, Protocol

from llmdebug_nb.core.records import Kernel, Site

_Key = tuple[int, int, str, str, int]  # generation, step, phase, path, call
_ROLES = {"graph": "forward", "graph.backward": "backward"}


class Run(Protocol):
    @property
    def meta(self) -> dict[str, Any]: ...
    def query(self, sql: str, values: Any = ()) -> list[tuple[Any, ...]]: ...


def key_of(site: Site) -> _Key:
    """Return what calls are known by here."""
    return site.generation, site.step, site.phase, site.path, site.call


def is_compiled(run: Run) -> bool:
    """Tell whether a run is of compiled code."""
    return bool((run.meta.get("options") or {}).get("graph"))


def nodes(run: Run) -> dict[_Key, str]:
    """Return which node of the traced program each call is: the same for all graphs made of one program. Empty for other runs."""
    return _said(run, "node")


def names(run: Run) -> dict[_Key, str]:
    """Return the name of each call's node in its graph. Empty for runs that are not of compiled code."""
    return _said(run, "fx")


def _said(run: Run, slot: str) -> dict[_Key, str]:
    if not is_compiled(run):
        return {}
    sql = "SELECT generation, step, role, path, call, value FROM scalar_rows WHERE role IN ('graph', 'graph.backward') AND slot = ?"
    rows = run.query(sql, (slot,))
    return {
        (generation, step, _ROLES[role], path, call): text
        for generation, step, role, path, call, text in rows
        if text
    }


def kernel(run: Run, site: Site) -> Kernel | None:
    """Return the kernel that computed what a call gave; None where it is no fused run's."""
    if not is_compiled(run):
        return None
    role = next(role for role, phase in _ROLES.items() if phase == site.phase)
    sql = """SELECT k.name, k.nodes, k.source FROM scalar_rows s JOIN all_kernels k ON k.name = s.value WHERE s.generation = ? AND s.step = ?
 AND s.role = ? AND s.path = ? AND s.call = ? AND s.slot = 'kernel' LIMIT 1"""
    found = run.query(sql, (site.generation, site.step, role, site.path, site.call))
    return next(
        (
            Kernel(str(name), tuple(str(names).split(", ")), str(source))
            for name, names, source in found
        ),
        None,
    )
