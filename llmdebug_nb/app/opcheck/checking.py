"""Check single calls of a run, in this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmdebug_nb.app.opcheck.choosing import Call
from llmdebug_nb.app.opcheck.judging import Judge
from llmdebug_nb.app.opcheck.weights import FileWeights
from llmdebug_nb.core.determinism import threads
from llmdebug_nb.core.dtypes import DTYPES, epsilon
from llmdebug_nb.core.ggml import PREFIX
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import EXPORTED, ONNX, CallKey
from llmdebug_nb.reference.atb_calls import SUFFIX, AtbCall
from llmdebug_nb.reference.computed import Computed, Rounded, Where
from llmdebug_nb.reference.ggml_calls import GgmlCall, RecordedWeights, Weights
from llmdebug_nb.reference.kernel_calls import KernelCall, KernelFacts
from llmdebug_nb.reference.module_calls import ModuleCall
from llmdebug_nb.reference.onnx_calls import OnnxCall, OnnxFacts
from llmdebug_nb.reference.operator_calls import GradientCall, OperatorCall
from llmdebug_nb.replay import execution, worker
from llmdebug_nb.replay.checks import DTYPE, MODES, WRONG, CallCheck
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.store.run import Run


@dataclass(frozen=True)
class How:
    """How calls are checked.

    ``metrics``: upstream's that are reported. ``device``: of the reference, and of the calls that
    are run again. ``rerun``: run wrong calls again. ``trusted``: this process recorded the run, so
    its operators run without a process of their own. ``mode``: of `core.opchecks.MODES`.
    ``dtype``: of the reference, of `core.opchecks.REFERENCES`. ``threads``: that compute it, 0 for
    as many as there are now. ``algorithms``: the user's comparisons, each FILE.py:FUNCTION.
    ``weights``: the GGUF file that has them; "": the run.
    """

    metrics: tuple[str, ...] = ("rel",)
    device: str = "cpu"
    rerun: bool = False
    trusted: bool = False
    mode: str = "keep_origin_dtype"
    algorithms: tuple[str, ...] = ()
    dtype: str = "float64"
    threads: int = 0
    weights: str = ""


class Checker:
    """Checks the calls of one run."""

    def __init__(self, run: Run, how: How) -> None:
        """Raises MissingPackageError; CorruptDumpError: the file of weights can't be read."""
        execute = execution.run if how.trusted else worker.Replays().run
        self._side = Side(run, run.kernel, execute)
        self._graph = OnnxFacts(self._side)
        self._weights: Weights = (
            FileWeights(Path(how.weights)) if how.weights else RecordedWeights(self._side)
        )
        self._kernels = KernelFacts(self._side)
        self._how = how
        self._judge = Judge(how.metrics, how.algorithms, how.dtype != "float64")
        self._where = Where(how.device, DTYPES.get(how.dtype))

    def check(self, call: Call) -> CallCheck:
        """Check one call. What can't be checked has a reason instead."""
        with threads(self._how.threads):
            return self._checked(call)

    def _checked(self, call: Call) -> CallCheck:
        again = ""
        try:
            computed = self._rounded(self._computed(call))
            outputs = self._judge.outputs(computed, call.op)
        except CannotReplay as why:
            return self._result(call, reason=why.kind, detail=str(why))
        result = self._result(call, outputs=outputs)
        if self._how.rerun and result.verdict == WRONG:
            again = self._judge.again(computed, call.op, self._how.device)
            result = self._result(call, outputs=outputs, again=again)
        return result

    def _rounded(self, computed: Computed) -> Computed:
        """Return the call with its tensors rounded first, unless one of them is coarser anyway."""
        name = MODES[self._how.mode]
        tensors = [*computed.operands, *computed.recorded.values()]
        found = {str(x.dtype)[6:] for x in tensors if x.is_floating_point()}
        if not name or any(epsilon(each) > epsilon(name) for each in found):
            return computed
        return Rounded(computed, DTYPES[name])

    def _computed(self, call: Call) -> Computed:
        key, where = call.key, self._where
        if not where.wide and (call.op.endswith(SUFFIX) or call.op.startswith((*EXPORTED, PREFIX))):
            raise CannotReplay("its formula is computed in float64 alone", DTYPE)
        if not is_operator(key.path):
            if call.op.endswith(SUFFIX):
                return AtbCall(self._side, key, call.op, call.parameters)
            return ModuleCall(self._side, key, call.op, where)
        if call.op.startswith(ONNX):
            return OnnxCall(self._graph, self._side, key, call.op)
        if call.op.startswith(PREFIX):
            return GgmlCall(self._side, key, call.op, self._weights)
        if self._kernels.has(key):
            return KernelCall(self._kernels, self._side, key, where)
        if key.phase == "backward" and not call.op.startswith("Aten."):
            return GradientCall(self._side, key, where)
        return OperatorCall(self._side, key, where)

    def _result(self, call: Call, **facts: object) -> CallCheck:
        path = call.key.path
        return CallCheck(
            call.record, call.key, call.op, call.id, self._parameters(call.key), path, **facts,  # type: ignore[arg-type]
        )  # fmt: skip

    def _parameters(self, key: CallKey) -> str:
        scalars = self._side.scalars(key).items()
        return ", ".join(f"{slot}={text}" for slot, (_, text) in scalars if text is not None)


def check_all(run: Run, calls: Iterable[Call], how: How) -> Iterable[CallCheck]:
    """Check calls one after the other."""
    return map(Checker(run, how).check, calls)
