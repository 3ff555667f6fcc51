"""Why a tensor has its partner, or has none. A closed set; the values are what the user reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """How a partner was found, or why there is none."""

    # the partner was found
    MAPPED = "user map"
    SAME_SITE = "same site"
    BELOW_WRAPPER = "same path below a wrapper"
    RENAMED = "renamed module"
    FUSED = "fused module"
    SEQUENCE = "sequence of operators"
    SAME_NODE = "same node of the traced program"
    SAME_VALUES = "same values"
    SAME_RESULT = "same result in the order of both"
    SAME_KIND = "same kind of operation in the order of both"
    HANDED_ON = "the same tensor as one that is paired"
    EARLIER = "same values in an earlier step"
    RESULT = "result of the program"  # two results that share a shape at most

    # the other program, or its recording, has no such tensor
    NO_PATH = "the module is not in the other run"
    NO_OPERATOR = "the operator was not called there in the other run"
    NO_SLOT = "the other run has no such argument or output"
    NOT_RECORDED = "the module was not called in the other run, or not recorded"
    NO_LEVEL = "the other run recorded no operators"
    NO_MODULES = "the other run recorded no modules, only operators"
    NO_RANK = "the other run did not record this rank"
    NO_STEP = "the other run did not record this step"
    NO_PHASE = "the other run did not record this phase"
    NO_CALL = "the module was called fewer times in the other run"
    NO_BACKWARD = "the backward pass of the other run does not reach this call"
    LEFT_OUT = "the map leaves it out"

    # compiled code and exported graphs have no partner for it, though nothing is missing
    INSIDE = "computed inside a kernel in the other run, and written nowhere"
    WRITTEN = "written by a kernel; the other run has a view or a whole operator there"
    READ = "a kernel's input, compared where it was computed"
    FOLDED = "not in the exported graph: folded into a constant, fused, or unused there"
    INNER = "a value of the exported graph that no module of the other run returns"

    @property
    def text(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Why:
    """A reason, and in words what it does not say by itself. ``more`` begins with punctuation."""

    reason: Reason
    more: str = ""

    def __str__(self) -> str:
        return f"{self.reason.text}{self.more}"

    def and_also(self, more: str) -> Why:
        """Return the same reason with another clause; this one if the clause is empty."""
        return Why(self.reason, f"{self.more}; {more}") if more else self


# the other program has no such tensor: not a gap of its recording, nor the user's choice
WRITTEN_OTHERWISE = frozenset({Reason.NO_PATH, Reason.NO_OPERATOR, Reason.NO_SLOT})
OF_GRAPH = frozenset({Reason.FOLDED, Reason.INNER})
EXCUSED = OF_GRAPH | {Reason.INSIDE, Reason.WRITTEN, Reason.READ}
