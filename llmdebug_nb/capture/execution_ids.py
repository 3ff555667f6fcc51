"""The option ``ids``: which calls it selects, and hints for ids that select none."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core.part_ids import MARK, PartIds, holders
from llmdebug_nb.core.records import Node

_SEEN = 10_000  # ids of calls, remembered to name the nearest


class WantedIds:
    """The execution ids that the user selects.

    ``wanted``: ids such as ``3_1`` and ``3_1.4``, or as msit counts, ``msit:3_1``; empty selects
    every call. ``children``: calls inside of those are selected too.
    """

    def __init__(self, wanted: tuple[str, ...], children: bool) -> None:
        self._wanted, self._children = wanted, children
        self._matched: set[str] = set()
        self._seen: dict[str, None] = {}
        self._kinds = {one.startswith(MARK) for one in wanted}

    def part_ids(self, nodes: Sequence[Node]) -> PartIds | None:
        """Return what numbers the calls of a step as msit does; None if no such id is wanted."""
        return PartIds(holders(nodes)) if True in self._kinds else None

    def select(self, id_: str | None, part_id: str | None = None) -> bool:
        """Return whether a call of that id is selected, and remember the id.

        ``part_id``: its id as msit counts, if it has one.
        """
        if not self._wanted:
            return True
        marked = None if part_id is None else MARK + part_id
        names = [name for name, kind in ((id_, False), (marked, True)) if kind in self._kinds]
        known = [name for name in names if name is not None]
        if len(self._seen) < _SEEN:
            self._seen.update(dict.fromkeys(known))
        matches = [
            wanted
            for wanted in self._wanted
            for name in known
            if name == wanted or (self._children and name.startswith((f"{wanted}_", f"{wanted}.")))
        ]
        self._matched.update(matches)
        return bool(matches)

    @property
    def unmatched(self) -> list[str]:
        """Wanted ids that selected no call so far."""
        return [wanted for wanted in self._wanted if wanted not in self._matched]

    def notes(self) -> list[str]:
        """Return a note for each id that selected no call; none if no call was seen at all."""
        return self._unmatched_texts() if self._seen else []

    def why_none(self) -> str:
        """Explain why no call was selected."""
        return f"ids {', '.join(self._wanted)!r}: {'. '.join(self._unmatched_texts())}"

    def _unmatched_texts(self) -> list[str]:
        return [f"no call has the id {wanted}{self._nearest(wanted)}" for wanted in self.unmatched]

    def _nearest(self, wanted: str) -> str:
        """Return a clause with the ids that exist in the innermost call around a wanted one."""
        seen = [one for one in self._seen if one.startswith(MARK) == wanted.startswith(MARK)]
        separator, parent = ".", wanted.rpartition(".")[0]
        if "." in wanted and parent in ("", *seen) and not _children(seen, parent, "."):
            return f"; no operator was seen in call {parent}, they count where mode is api or aten"
        if not _children(seen, parent, ".") or "." not in wanted:
            separator, parent = "_", wanted.partition(".")[0].rpartition("_")[0]
        while not (children := _children(seen, parent, separator)) and parent:
            separator, parent = "_", parent.rpartition("_")[0]
        where = f"call {parent}" if parent else "the root"
        last = f" to {children[-1]}" if len(children) > 1 else ""
        return f"; nearest: {children[0]}{last} in {where}" if children else ""


def _children(seen: Sequence[str], parent: str, separator: str) -> list[str]:
    """Return the ids of modules (``_``) or operators (``.``) directly in a call."""
    return [
        one
        for one in seen
        if one and ("." in one) == (separator == ".") and one.rpartition(separator)[0] == parent
    ]
