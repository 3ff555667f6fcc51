"""The calls that make an error of tensors that agree."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall


@dataclass(eq=False)
class Region:
    """The calls between tensors that agree and a pair that does not, on both sides.

    ``row``: the pair. ``golden``, ``mine``: the calls, in execution order; no calls where code or
    views between the recorded calls make the difference. ``entries``: the rows of the tensors
    that agree or differ as expected; ``expected``: the latter. ``before``: the call of the other
    side before which one-sided calls stand. ``taken``: golden's input, and the
    different input that mine uses instead. ``numbers``: golden's and mine's, as texts, if a number
    that mine's call takes makes the difference. ``missing``: a tensor that golden's call takes and
    no call of mine does.
    """

    row: Difference
    golden: list[FlowCall] = field(default_factory=list)
    mine: list[FlowCall] = field(default_factory=list)
    entries: list[Difference] = field(default_factory=list)
    before: FlowCall | None = None
    taken: tuple[Record, Record] | None = None
    expected: list[Difference] = field(default_factory=list)
    numbers: tuple[str, str] | None = None
    missing: Record | None = None

    @property
    def takes(self) -> tuple[Record | None, Record | None]:
        """The tensors that golden and mine have in one place, and that differ."""
        return self.taken or (self.row.pair.golden, self.row.pair.mine)

    def is_given_another(self, flow: Flow) -> bool:
        """Tell whether mine takes another tensor that it computes; ``flow``: mine's."""
        return self.taken is not None and flow.maker(self.taken[1]) is not None

    def has_in_it(self, other: Region) -> bool:
        """Tell whether code of another region, and more, makes this one's error.

        What errs on right tensors in one step errs in another one, where more code is between
        tensors that both programs have.
        """
        side = "mine" if other.mine else "golden"
        ours, theirs = ({c.key.path for c in getattr(r, side)} for r in (self, other))
        return bool(theirs) and theirs < ours

    @property
    def is_one_call(self) -> bool:
        """True if both programs make one call, the same, of the row's tensors."""
        pair = self.row.pair
        if len(self.golden) != 1 or len(self.mine) != 1 or not pair.golden or not pair.mine:
            return False
        sites = pair.golden.site.key, pair.mine.site.key
        return (self.golden[0].key, self.mine[0].key) == sites
