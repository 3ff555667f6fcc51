"""The option ``ids``: which calls it selects, and hints for ids that select none."""

from __future__ import annotations

_SEEN = 10_000  # ids of calls, remembered to name the nearest


class WantedIds:
    """The execution ids that the user selects.

    ``wanted``: ids such as ``3_1`` and ``3_1.4``; empty selects every call. ``children``: calls
    inside of those are selected too.
    """

    def __init__(self, wanted: tuple[str, ...], children: bool) -> None:
        self._wanted, self._children = wanted, children
        self._matched: set[str] = set()
        self._seen: dict[str, None] = {}

    def select(self, id_: str | None) -> bool:
        """Return whether a call of that id is selected, and remember the id."""
        if not self._wanted:
            return True
        if id_ is None:
            return False
        if len(self._seen) < _SEEN:
            self._seen[id_] = None
        matches = [
            wanted
            for wanted in self._wanted
            if id_ == wanted or (self._children and id_.startswith((f"{wanted}_", f"{wanted}.")))
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
        separator, parent = ".", wanted.rpartition(".")[0]
        if "." in wanted and parent in ("", *self._seen) and not self._children_of(parent, "."):
            return f"; no operator was seen in call {parent}, they count where mode is api or aten"
        if not self._children_of(parent, ".") or "." not in wanted:
            separator, parent = "_", wanted.partition(".")[0].rpartition("_")[0]
        while not (children := self._children_of(parent, separator)) and parent:
            separator, parent = "_", parent.rpartition("_")[0]
        where = f"call {parent}" if parent else "the root"
        last = f" to {children[-1]}" if len(children) > 1 else ""
        return f"; nearest: {children[0]}{last} in {where}" if children else ""

    def _children_of(self, parent: str, separator: str) -> list[str]:
        """Return the seen ids of modules (``_``) or operators (``.``) directly in a call."""
        return [
            seen
            for seen in self._seen
            if seen
            and ("." in seen) == (separator == ".")
            and seen.rpartition(separator)[0] == parent
        ]
