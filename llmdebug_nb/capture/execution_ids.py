"""Execution ids that are asked for: which calls they mean, and what to say of those that mean none."""

from __future__ import annotations

_SEEN = 10_000  # ids of calls, remembered to name the nearest


class WantedIds:
    """``wanted``: ids such as ``3_1`` and ``3_1.4``; none asks for every call. ``children``: what lies below them too."""

    def __init__(self, wanted: tuple[str, ...], children: bool) -> None:
        self._wanted, self._children = wanted, children
        self._met: set[str] = set()
        self._seen: dict[str, None] = {}

    def asks_for(self, id_: str | None) -> bool:
        if not self._wanted:
            return True
        if id_ is None:
            return False
        if len(self._seen) < _SEEN:
            self._seen[id_] = None
        asked = [
            one
            for one in self._wanted
            if id_ == one or (self._children and id_.startswith((f"{one}_", f"{one}.")))
        ]
        self._met.update(asked)
        return bool(asked)

    @property
    def unmatched(self) -> list[str]:
        """WantedIds that meant no call so far."""
        return [one for one in self._wanted if one not in self._met]

    def notes(self) -> list[str]:
        """Say which ids meant no call, where any call was seen."""
        return (
            [f"no call has the id {one}{self._nearest(one)}" for one in self.unmatched]
            if self._seen
            else []
        )

    def why_none(self) -> str:
        """Say why nothing was asked for."""
        said = [f"{one} is no call's{self._nearest(one)}" for one in self.unmatched]
        return f"ids {', '.join(self._wanted)!r}: {'. '.join(said)}"

    def _nearest(self, wanted: str) -> str:
        """Return a clause with the ids that there are where this one would be: of the innermost call around it that was seen."""
        mark, above = ".", wanted.rpartition(".")[0]
        if "." in wanted and above in ("", *self._seen) and not self._below(above, "."):
            return f"; no operator was seen in call {above}, they count where mode is api or aten"
        if not self._below(above, ".") or "." not in wanted:
            mark, above = "_", wanted.partition(".")[0].rpartition("_")[0]
        while not (there := self._below(above, mark)) and above:
            mark, above = "_", above.rpartition("_")[0]
        where = f"call {above}" if above else "the root"
        last = f" to {there[-1]}" if len(there) > 1 else ""
        return f"; nearest: {there[0]}{last} in {where}" if there else ""

    def _below(self, above: str, mark: str) -> list[str]:
        """Return the ids seen of modules (``_``) or operators (``.``) right in a call."""
        return [
            one
            for one in self._seen
            if one and ("." in one) == (mark == ".") and one.rpartition(mark)[0] == above
        ]
