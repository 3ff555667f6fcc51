"""The nouns of a recording. Every stage exchanges these; read this file first.

A tensor is seen at a **Site** during a **RootCall**, is described by a **Summary**, and becomes a
**Record**. An opened dump of records is a **Run** (`store/run.py`); its modules are **Node** rows.
The nouns of a comparison are in `findings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmdebug_nb.core.placement import Placement
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.quick import quick

WARMUP = "warmup"
DUMMY = "dummy"  # a call that an engine makes of its own: to measure memory, or to warm up
ONNX = "Onnx."  # the prefix of the operators of an ONNX graph
OPENVINO = "OpenVINO."
EXPORTED = ONNX, OPENVINO  # the prefixes of an exported graph's operators
GRAPH_LEVEL = "onnx"  # of an exported graph's nodes, and the role of their facts, in every runtime
IN_KERNEL = "kernel."  # the prefix of a fused kernel's slots: names of buffers, not of arguments


_SUM = re.compile(r"(\S+) sum of ([1-9]\d{0,11})")


def summed(slot: str) -> tuple[str, int] | None:
    """Read a slot such as ``0 sum of 64``: output 0, not yet divided by 64. Else return None."""
    parts = _SUM.fullmatch(slot)
    return (parts[1], int(parts[2])) if parts else None


@dataclass(frozen=True, slots=True)
class RootCall:
    """One forward call of an outermost module.

    ``index``: n-th root call of this process, from 0.
    ``generation``: the `generate` call (or unbroken series of bare forward calls) it belongs to,
    from 0. Warm-ups come before and count down: -1 is the last warm-up.
    ``step``: generated token of that generation, prefill 0, then one per decode iteration; for
    bare calls their ordinal. Chunks of one prefill share step 0.
    ``kind``: prefill, decode, verify (assisted decoding), full (no cache), extra (a further call
    within the same token, e.g. guidance), encoder, forward (unknown), warmup, engine (a step of an
    engine, which has tokens of several requests) or dummy (see `DUMMY`).
    ``query``/``total``/``batch``: token rows fed in, prompt + generated tokens so far, sequences;
    None if the call has no token ids. Nor is ``total`` known of a bare call that may have a cache.
    """

    index: int
    generation: int = 0
    step: int = 0
    kind: str = "forward"
    query: int | None = None
    total: int | None = None
    batch: int | None = None
    root: str = ""


class TokenRow(NamedTuple):
    """The token that a row of an engine's flat tensors belongs to.

    ``root_call``: the index of the `RootCall`. ``row``: of ``[tokens, ...]``; None if the engine
    took this position from its cache and computed nothing. ``request``: the engine's id.
    ``position``: in the request's tokens, prompt and output, from 0. ``token``: the id that the
    model was given, or None. ``attempt``: how often the engine had preempted the request.
    ``sampled``: 0 if the token is of the prompt, 1 if the engine sampled it, None if not known.
    """

    root_call: int
    row: int | None
    request: str
    position: int
    token: int | None
    attempt: int = 0
    sampled: int | None = None


class StepRows(NamedTuple):
    """The rows of one request in a step of an engine: from ``row`` to ``last_row``, both included.

    ``position``, ``last_position``: in the request's tokens.
    """

    generation: int
    step: int
    request: str
    row: int
    last_row: int
    position: int
    last_position: int


class CallKey(NamedTuple):
    """The key of a call among all calls of a run.

    ``call``: n-th call of that path within the step, from 0.
    """

    rank: int
    generation: int
    step: int
    phase: str
    path: str
    call: int


_FRAME = re.compile(r"(.*):(\d{1,9}) (.*)", re.DOTALL)


class Frame(NamedTuple):
    """A line of the program on a call stack. ``file``: ``cell 3`` for the cell of a notebook."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"

    @classmethod
    def read(cls, text: str) -> Frame | None:
        """Return the frame of a text ``file:line function``; None if it is no such text."""
        parts = _FRAME.fullmatch(text)
        return None if parts is None else cls(parts[1], int(parts[2]), parts[3])


def forward_in(frames: Sequence[Frame], begins: Frame | None) -> int | None:
    """Return the frame of a stack that is a module's forward; None if it is not among them.

    ``begins``: where that forward begins. A function ends before the next one.
    """
    if begins is None:
        return None
    name = begins.function.rpartition(".")[2]
    lines = {
        at: frame.line - begins.line
        for at, frame in enumerate(frames)
        if frame.file == begins.file and frame.line >= begins.line and frame.function == name
    }
    return min(lines, key=lambda at: lines[at], default=None)


@quick
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
        """The call that has it as an input, output or weight."""
        return CallKey(self.rank, self.generation, self.step, self.phase, self.path, self.call)

    def __str__(self) -> str:
        phase = "" if self.phase == "forward" else f"{self.phase} "
        where = f"{self.path or '(root)'} {phase}{self.role}[{self.slot}]"
        extra = f" call {self.call}" if self.call else ""
        gen = f" generation {self.generation}" if self.generation else ""
        return printable(f"{where} step {self.step}{gen}{extra}")


@quick
@dataclass(frozen=True, slots=True)
class Summary:
    """The description of a recorded tensor, whether its values were kept or not.

    ``dtype``: torch name without the prefix (``bfloat16``). ``shape``: sizes; ``()`` is a scalar,
    -1 a size that is no single number (nested tensors).
    ``min``/``max``/``mean``/``l2norm``: over all elements, in IEEE arithmetic (a NaN anywhere gives
    NaN); booleans count as 0 and 1, complex numbers by magnitude; mean and norm are accumulated
    in float64; all four are None for an empty tensor or one whose values can't be read.
    ``nan``/``inf``/``zero``: element counts, or None likewise.
    ``fingerprint``: ``algorithm:hex`` of the raw bytes (see `kernels/fingerprint.py`), or None.
    ``row_sizes``: L2 norm and largest magnitude of each row (see `row_sizes.py`), or None.
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
    row_sizes: bytes | None = None

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


class View(NamedTuple):
    """A change of layout without new values: a transpose, a split, a slice.

    ``op``: ``Tensor.transpose``. ``source``: ``file:line function``, the innermost place in the
    program; "" if sources were not recorded. ``arguments``: those that are not tensors, ``1, 2``;
    with several results, the place of this one follows: ``3, dim=-1 [2]``.
    """

    op: str
    source: str
    arguments: str


@quick
@dataclass(frozen=True, slots=True)
class Record:
    """A tensor as recorded.

    ``seq``: execution order within the process. ``op``: class name of the module.
    ``producer``: id of the record whose output storage this tensor is, or None (a graph input, or
    made by code that was not observed).
    ``payload``: the place of the values, known to the store alone; None if they were not kept.
    ``lost``: why requested values are missing, or None.
    ``kept``: None if the values are the whole tensor, else ``slice[0,:]`` (that part, in the
    tensor's dtype), ``minmax`` (float64[2]) or ``quantile[N]`` (float64[N]); ``kept_shape``: its
    shape.
    ``argument``: of an input, or of a gradient for one, the name of the parameter: by position or
    by keyword. None if it has no certain name (``*args``, functions in C), or in older dumps.
    ``views``: those that lie between the recorded output it was made of and this tensor, in
    execution order. Only known where operators were recorded.
    ``placed``: where in a whole tensor this rank's part belongs, if the program said so (DTensor);
    the statistics are those of the part.
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
    argument: str | None = None
    views: tuple[View, ...] = ()
    placed: Placement | None = None

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """The shape of the kept values: the tensor's own, or that of the part."""
        return self.summary.shape if self.kept_shape is None else self.kept_shape


@dataclass(frozen=True, slots=True)
class Node:
    """A module of the model: a row of the topology, children after their parent.

    ``parent``: index in the list, -1 for a root. ``params``: own parameters and buffers -> shape.
    ``aliases``: further names of the same module object (tied modules).
    ``source``: where the forward of its class begins; None if that is not known.
    """

    path: str
    name: str
    type: str
    parent: int
    params: dict[str, list[int]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    root: str = ""
    source: Frame | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of compiled code.

    ``name``: ``graph0/cpp_fused_mul_1``. ``nodes``: the nodes of the graph that it computes.
    ``source``: its code, "" for a kernel of PyTorch itself.
    """

    name: str
    nodes: tuple[str, ...]
    source: str = ""
