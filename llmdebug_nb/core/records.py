"""The nouns of a recording. Every stage exchanges these; read this file first.

A tensor is seen at a **Site** while a **RootCall** runs, is described by a **Summary**, and becomes a **Record**.
A dump of records, opened again, is a **Run** (`store/run.py`), whose modules are the **Node** rows of its topology.
What comparing two runs gives is in `findings.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WARMUP = "warmup"
EXPORTED = "Onnx."  # operators of an exported graph begin with it
IN_KERNEL = "kernel."  # slots of what a kernel of compiled code reads start with it: they are names of buffers, not of arguments


_SUM = re.compile(r"(\S+) sum of ([1-9]\d{0,11})")


def summed(slot: str) -> tuple[str, int] | None:
    """Read a slot such as ``0 sum of 64``: output 0, yet to be divided by 64. None for any other."""
    found = _SUM.fullmatch(slot)
    return (found[1], int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class RootCall:
    """One forward call of an outermost module.

    ``index``: n-th root call of this process, from 0.
    ``generation``: which `generate` (or unbroken series of bare forward calls) it belongs to. Counted
    from 0 over the real ones; warm-ups come before them and count down: -1 is the last warm-up.
    ``step``: generated token of that generation, prefill 0, then one per decode iteration; for
    bare calls their ordinal. Chunks of one prefill share step 0.
    ``kind``: prefill, decode, verify (assisted decoding), full (no cache), extra (a further call
    within the same token, e.g. guidance), encoder, forward (none of these can be told) or warmup.
    ``query``/``total``/``batch``: token rows fed in, prompt + generated tokens so far, sequences;
    None where the call shows no token ids.
    """

    index: int
    generation: int = 0
    step: int = 0
    kind: str = "forward"
    query: int | None = None
    total: int | None = None
    batch: int | None = None
    root: str = ""


class CallKey(NamedTuple):
    """Which call of a module or operator, of all calls in a run. ``call``: n-th of that path within the step, from 0."""

    rank: int
    generation: int
    step: int
    phase: str
    path: str
    call: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor was seen.

    ``path``: qualified module name from the root; the root itself is ``""``.
    ``call``: n-th call of that path within the step, from 0.
    ``phase``: forward | backward. ``role``: input | output | weight | grad (of a weight).
    ``slot``: argument path: ``0``, ``kwargs.attention_mask``, ``hidden_states.3``. A bare tensor
    output has slot ``0``.
    """

    path: str
    step: int = 0
    call: int = 0
    phase: str = "forward"
    role: str = "output"
    slot: str = "0"
    rank: int = 0
    generation: int = 0

    @property
    def key(self) -> CallKey:
        """The call that it was an input, output or weight of."""
        return CallKey(self.rank, self.generation, self.step, self.phase, self.path, self.call)

    def __str__(self) -> str:
        phase = "" if self.phase == "forward" else f"{self.phase} "
        where = f"{self.path or '(root)'} {phase}{self.role}[{self.slot}]"
        extra = f" call {self.call}" if self.call else ""
        gen = f" generation {self.generation}" if self.generation else ""
        return f"{where} step {self.step}{gen}{extra}"


@dataclass(frozen=True, slots=True)
class Summary:
    """What every recorded tensor is described by, payload kept or not.

    ``dtype``: torch name without the prefix (``bfloat16``). ``shape``: sizes; ``()`` is a scalar, -1 a size
    that is no one number (nested tensors).
    ``min``/``max``/``mean``/``l2norm``: over all elements, in IEEE arithmetic (a NaN anywhere gives
    NaN); booleans count as 0 and 1, complex numbers by magnitude; mean and norm are accumulated
    in float64; all four are None for an empty tensor or one whose values can't be read.
    ``nan``/``inf``/``zero``: element counts, or None likewise.
    ``fingerprint``: ``algorithm:hex`` of the raw bytes (see `kernels/fingerprint.py`), or None.
    """

    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    l2norm: float | None = None
    nan: int | None = None
    inf: int | None = None
    zero: int | None = None
    fingerprint: str | None = None

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor as recorded.

    ``seq``: execution order within the process. ``op``: class name of the module.
    ``producer``: id of the record whose output storage this tensor is, or None (a graph input, or
    made by code that was not observed).
    ``payload``: where the bytes lie, opaque to all but the store; None if not kept.
    ``lost``: why a payload that was asked for is not there, or None.
    ``kept``: what the payload is where it is not the whole tensor: ``slice[0,:]`` (that part, in the tensor's
    dtype), ``minmax`` (float64[2]) or ``quantile[N]`` (float64[N]). ``kept_shape``: its shape then.
    """

    id: int
    site: Site
    seq: int
    op: str
    summary: Summary
    device: str = "cpu"
    producer: int | None = None
    payload: Any = None
    lost: str | None = None
    kept: str | None = None
    kept_shape: tuple[int, ...] | None = None

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """The shape of what was kept: the tensor's own, or that of the part."""
        return self.summary.shape if self.kept_shape is None else self.kept_shape


@dataclass(frozen=True, slots=True)
class Node:
    """A module of the model: a row of the topology, children after their parent.

    ``parent``: index in the list, -1 for a root. ``params``: own parameters and buffers -> shape.
    ``aliases``: further names of the same module object (tied modules).
    """

    path: str
    name: str
    type: str
    parent: int
    params: dict[str, list[int]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    root: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of compiled code. ``name``: ``graph0/cpp_fused_mul_1``. ``nodes``: of the graph, that it computes. ``source``: its code, "" for one of
    PyTorch's own."""

    name: str
    nodes: tuple[str, ...]
    source: str = ""
