"""Filters of calls by name: the options ``opname``, ``contains``, ``scope`` and ``ids``."""

from __future__ import annotations

from llmdebug_nb.capture.calls import OpenCall, SharedCounts, ThreadState
from llmdebug_nb.capture.execution_ids import WantedIds
from llmdebug_nb.capture.selection import starts_with_any
from llmdebug_nb.core.options import DumpOptions

_REMEMBERED = 10_000  # names of calls, to explain a filter that matched none


class NameFilter:
    """Selects calls by their names and execution ids.

    ``seen``: full names of calls, if calls are filtered by them. ``ids``: the filter by id.
    """

    def __init__(self, options: DumpOptions, thread: ThreadState, counts: SharedCounts) -> None:
        self.seen: set[str] = set()
        self._options, self._thread, self._counts = options, thread, counts
        self._opname = options.opname
        self._selected_paths: set[str] = set()
        self.use_ids(options.ids, options.children)

    def use_ids(self, ids: tuple[str, ...], children: bool) -> None:
        """Select only calls with these ids (empty: all), with ``children`` also those in them.

        Without either, only calls of modules are selected: those of layers, see `RecordingFilter`.
        """
        self.ids = WantedIds(ids, children)
        self._modules_alone = not ids and not children
        self._by_full_name = bool(self._options.contains or self._options.scope or ids)

    @property
    def selects_all(self) -> bool:
        """Whether every call is selected."""
        return not (self._modules_alone or self._opname or self._by_full_name)

    def selects(self, call: OpenCall) -> bool:
        """Return whether a call that begins is selected."""
        if self._modules_alone and call.level != "module":
            return False
        if self._opname and not starts_with_any(call.op, self._opname):
            return False
        return not self._by_full_name or self._selects_full_name(call)

    def excludes(self, path: str) -> bool:
        """Return whether no call of a path was selected."""
        return self._by_full_name and path not in self._selected_paths

    def end(self, call: OpenCall) -> None:
        """Note that a call has ended: it may be the last one of the scope."""
        if self._options.scope and _matches(call.name, self._options.scope[1]):
            self._thread.in_scope = False

    def _selects_full_name(self, call: OpenCall) -> bool:
        if call.level == "module":
            call.name = f"Module.{call.path}.{call.op}.{call.phase}.{call.number}"
        else:
            number = self._counts.next(call.op, call.phase, call.root_call)
            call.name = f"{call.op}.{number}.{call.phase}"
        if len(self.seen) < _REMEMBERED:
            self.seen.add(call.name)
        scope, contains = self._options.scope, self._options.contains
        if scope and _matches(call.name, scope[0]):
            self._thread.in_scope = True
        selected = (
            (not scope or self._thread.in_scope)
            and (not contains or any(text in call.name for text in contains))
            and self.ids.select(call.id, call.part_id)
        )
        if selected:
            self._selected_paths.add(call.path)
        return selected


def _matches(name: str, wanted: str) -> bool:
    """Match a full name with or without its end: ``Functional.linear.0`` for ``….0.forward``."""
    return name == wanted or name.startswith(wanted + ".")
