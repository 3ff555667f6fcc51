"""What tensors are made of in the end: nothing, what a model holds, or what it is given."""

from __future__ import annotations

from functools import cached_property

from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow


class Origin:
    """Tells which tensors of one program do not depend on what the program is given."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._known: dict[tuple[int, bool], bool] = {}  # by record, and whether held ones count

    def is_constant(self, record: Record, held: bool = False) -> bool:
        """Tell whether operators made a tensor of no other one, as they make numbers of places.

        ``held``: what a model holds, as the slopes of a bias by distance, counts as no other one.
        """
        key = record.id, held
        if key not in self._known:
            self._known[key] = self._is_constant(record, held)
        return self._known[key]

    @cached_property
    def is_told(self) -> bool:
        """Whether it can be seen that what the outermost calls give depends on what they take.

        Dumps of engines do not show what some operators take, such as the one that looks up tokens.
        """
        outermost = (call for call in self._flow.calls.values() if call.around is None)
        given = [r for c in outermost for r in c.outputs if is_floating(r.summary.dtype)]
        return bool(given) and not any(self.is_constant(r, held=True) for r in given)

    def _is_constant(self, record: Record, held: bool) -> bool:
        queue, seen = [record], {record.id}
        while queue:
            taken = queue.pop()
            known = self._known.get((taken.id, held))
            maker = None if known is not None else self._flow.maker(taken)
            if known or (known is None and maker is None and held and self._is_held(taken)):
                continue
            if maker is None or maker.weights:
                return False
            queue += [r for r in maker.inputs if r.id not in seen]
            seen |= {r.id for r in maker.inputs}
        return True

    def _is_held(self, record: Record) -> bool:
        """Tell whether a tensor is a weight or a buffer of a module, or a view of all of one."""
        return record.producer is None and record.summary.fingerprint in self._weights

    @cached_property
    def _weights(self) -> set[str | None]:
        """Return what modules hold, by its bytes."""
        weights = (each for call in self._flow.calls.values() for each in call.weights)
        return {each.summary.fingerprint for each in weights} - {None}
