"""How a comparison in lockstep is asked for, what it took, and what it did to the programs."""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW = "1GiB"
AT_FIRST = "first"  # where both programs may be stopped
TIMEOUT = 3600.0  # seconds: a large model may compute that long between two calls
# options of recordings that make no sense here: files, code that is compiled, times
NOT_HERE = (
    "name", "path", "graph", "profile", "control", "seed", "ranks", "requests", "fusion_switch",
    "compiler_config", "last", "alarm",
)  # fmt: skip


@dataclass(frozen=True)
class Graft:
    """A call of mine that gave a wrong value, after which mine went on with golden's.

    ``records``: the ids of mine's own, wrong tensors. ``error``: the largest of them.
    """

    path: str
    generation: int
    step: int
    call: int
    error: float
    records: tuple[int, ...]

    def __str__(self) -> str:
        again = f" call {self.call}" if self.call else ""
        return f"{self.path or 'the model'} step {self.step}{again} (error {self.error:.2g})"


@dataclass
class Lockstep:
    """What a comparison in lockstep took, by now.

    ``window``: the bytes of values that may be held. ``most``: those that were, at most.
    ``whole``: those that two dumps would hold, golden's and mine's. ``ran``: how often each program
    ran. ``met``: the pairs that were measured as soon as both values were there. ``unsteady``: the
    values that were other ones when a program ran again. ``stopped``: the call of mine after which
    both programs were stopped, and by how much it was off; "" if they ran to their end.
    ``unjudged``: the calls that ``stop`` and ``graft`` passed over, as a value was not held.
    ``grafts``: the calls in whose place mine went on with golden's values. ``passed``: the places
    that gave another value than golden's module there, and that the comparison found right.
    """

    window: int
    most: int = 0
    whole: tuple[int, int] = (0, 0)
    ran: tuple[int, int] = (0, 0)
    met: int = 0
    unsteady: int = 0
    stopped: str = ""
    unjudged: int = 0
    grafts: list[Graft] = field(default_factory=list)
    passed: tuple[str, ...] = ()
