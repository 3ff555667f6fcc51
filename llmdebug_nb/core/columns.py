"""The columns of what capture writes and the store keeps: records, operator calls, times and kernels."""

from __future__ import annotations

from typing import Any

# a record on its way from capture to the store is a list in this order; `id` counts up in execution order
COLUMNS = (
    "id",
    "root_call",
    "path",
    "call",
    "phase",
    "role",
    "slot",
    "op",
    "dtype",
    "shape",
    "min",
    "max",
    "mean",
    "l2norm",
    "nan",
    "inf",
    "zero",
    "fingerprint",
    "device",
    "producer",
    "offset",
    "length",
    "lost",
    "kept",  # which part of the tensor, or which figures of it, the payload is; None: all of it
    "kept_shape",
)
# an operator call is a list in this order. ``level``: api | aten. ``source``: number of its stack.
# ``within``/``within_call``: the call that it is part of, a module's or an api operator's.
# ``forward_path``/``forward_call``: in the backward phase, the forward call that it is the gradient of
OPERATOR = (
    "root_call",
    "path",
    "call",
    "phase",
    "level",
    "op",
    "source",
    "within",
    "within_call",
    "forward_path",
    "forward_call",
)
# host time of a call, in the same way; `start` and `duration` in nanoseconds of the program's clock (capture/timing.py)
TIMING = (
    "id",
    "root_call",
    "path",
    "call",
    "phase",
    "level",
    "op",
    "thread",
    "start",
    "duration",
    "gap",
)
# a kernel that an operator launched; `code`: its name among the kernels of compiled code; `inputs`, `outputs`: JSON, [dtype, shape] of each tensor
LAUNCH = ("id", "root_call", "path", "call", "phase", "op", "kernel", "code", "device", "stream", "start", "duration", "inputs", "outputs")  # fmt: skip

AT = {name: place for place, name in enumerate(COLUMNS)}
Row = list[Any]

# the columns of the views that every dump has when it is opened
ROW_COLUMNS = ("id", "rank", "generation", "step", "kind", "root", *COLUMNS[2:8], "seq", *COLUMNS[8:20], "payload", *COLUMNS[22:], "root_call")  # fmt: skip
OPERATOR_COLUMNS = ("id", "rank", "generation", "step", *OPERATOR[1:])
TIMING_COLUMNS = ("id", "rank", "generation", "step", *TIMING[2:], "root_call")
LAUNCH_COLUMNS = ("id", "rank", "generation", "step", *LAUNCH[2:], "root_call")
