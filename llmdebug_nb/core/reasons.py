"""The reasons why a tensor has no partner, or is compared although it looks otherwise there.

A closed set, in the words that the user reads.
"""

from __future__ import annotations

from typing import Final

NO_PATH: Final = "the module is not in the other run"
NO_OPERATOR: Final = "the operator was not called there in the other run"
NO_SLOT: Final = "the other run has no such argument or output"
NOT_RECORDED: Final = "the module was not called in the other run, or not recorded"
NO_LEVEL: Final = "the other run recorded no operators"
NO_MODULES: Final = "the other run recorded no modules, only operators"
NO_RANK: Final = "the other run did not record this rank"
NO_STEP: Final = "the other run did not record this step"
NO_PHASE: Final = "the other run did not record this phase"
NO_CALL: Final = "the module was called fewer times in the other run"
LEFT_OUT: Final = "the map leaves it out"
# the other program has no such tensor: not a gap of its recording, nor the user's choice
WRITTEN_OTHERWISE = frozenset({NO_PATH, NO_OPERATOR, NO_SLOT})

# why a tensor of compiled code has no partner, though nothing is missing
INSIDE: Final = "computed inside a kernel in the other run, and written nowhere"
WRITTEN: Final = "written by a kernel; the other run has a view or a whole operator there"
READ: Final = "a kernel's input, compared where it was computed"
OF_COMPILED = frozenset({INSIDE, WRITTEN, READ})
# the same for a graph that was exported (ONNX)
FOLDED: Final = "not in the exported graph: folded into a constant, fused, or unused there"
INNER: Final = "a value of the exported graph that no module of the other run returns"
EXCUSED = OF_COMPILED | {FOLDED, INNER}
RESULT: Final = "result of the program"  # why two results are paired that share a shape at most

# what the comparison of values says
CLOSE: Final = "close to a tensor of the other run, but by more than noise"
AFTER_TIE: Final = "not comparable: it follows a choice that was made differently at a near tie"
UNTOUCHED: Final = "compared at the tokens that another choice at a near tie has not touched"
OTHER_BATCH: Final = "not comparable: it is made of all of a batch, and the runs have other batches"
MASK_ALONE: Final = "not comparable: its statistics are those of what a mask hides"
REJOINED: Final = "written otherwise in the other run, equal in effect"  # what is made of it agrees
