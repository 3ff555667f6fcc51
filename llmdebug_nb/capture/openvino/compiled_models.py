"""The compiled models of OpenVINO that are recorded: their choice, their runs and their results.

The program's requests run as ever. Our own model (`exposed_model.py`) runs beside each of them with
the same inputs and states, and its outputs are compared with the program's bit for bit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from llmdebug_nb.capture.compat import openvino_api
from llmdebug_nb.capture.compat.openvino_models import tensor_of
from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.followed_graphs import FollowedGraphs
from llmdebug_nb.capture.openvino.exposed_model import ExposedModel
from llmdebug_nb.capture.openvino.model_reader import any_name
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.records import RootCall

if TYPE_CHECKING:
    from openvino import InferRequest, Model

    from llmdebug_nb.capture.compat.openvino_api import Target

T = TypeVar("T")
_FALLBACK = "CompiledModel"
_OTHER_BITS = (
    "the compiled model gives other bits than the recorded one, which runs beside it; "
    "the program gets its own results"
)
_NO_TIMES = "times of nodes are not taken of OpenVINO"


class CompiledModels(FollowedGraphs):
    """The compiled models that one recording follows: the given ones, or any that runs."""

    kind = "a compiled model"
    listeners = openvino_api.listeners

    def __init__(self, parts: Parts, given: Sequence[Target | Model], only: bool) -> None:
        """``given``: also models that others were compiled of. ``only``: no others are recorded.

        Raises:
            CaptureError: a model can't be recorded.
        """
        super().__init__(parts, only)
        self._models = tuple(filter(openvino_api.is_model, given))
        self._lock = threading.RLock()  # requests run in threads of their own
        for target in given:
            if openvino_api.is_model(target):
                continue
            lacks = openvino_api.missing()
            if lacks is not None:
                raise CaptureError(_too_other(lacks))
            key = openvino_api.key_of(target)
            if key not in self._followed:  # a model and a request of it are one
                self._followed[key] = self._follow(target, may_fail=False)

    def stop(self) -> None:
        """Stop listening."""
        openvino_api.end(self)
        for followed in self._followed.values():
            if followed.exposed is not None:
                followed.exposed.close()

    def _follow(self, target: Target, may_fail: bool = True) -> FollowedGraph:
        exposed = None
        try:
            lacks = openvino_api.missing()
            if lacks is not None:
                raise CaptureError(_too_other(lacks))
            exposed = ExposedModel(target, self._models)
        except CaptureError as error:
            if not may_fail:
                raise
            problem = f"only the inputs and outputs of a compiled model are recorded: {error}"
            self._problems[problem] += 1
        if self._options.profile and _NO_TIMES not in self._parts.notes:
            self._parts.notes.append(_NO_TIMES)
        fed = set(map(any_name, openvino_api.compiled_of(target).inputs))
        if exposed is not None:
            self._note_limits(exposed.graph, "If, Loop or TensorIterator")
        return FollowedGraph(self._parts, target, fed, exposed, _FALLBACK)

    # -- runs -----------------------------------------------------------------------------------

    def infers(self, request: InferRequest, own: Callable[[], T]) -> T:
        """Run the program's request, and ours beside it."""
        followed = self._guarded(self._known, request)
        ours = None if followed is None else self._guarded(self._ours, followed, request)
        result = own()
        if followed is not None:
            self._guarded(self._ran, followed, request, ours)
        return result

    def resets(self, request: InferRequest) -> None:
        """Reset our states, as the program did with its own; another text begins."""
        followed = self._followed.get(openvino_api.key_of(request))
        if followed is not None:
            self._guarded(self._parts.steps.end_series, followed)
            if isinstance(followed.exposed, ExposedModel):
                self._guarded(followed.exposed.reset, request)

    def _known(self, request: InferRequest) -> FollowedGraph | None:
        with self._lock:
            follow = functools.partial(self._follow, request)
            return self._followed_by(openvino_api.key_of(request), follow)

    def _ours(self, followed: FollowedGraph, request: InferRequest) -> InferRequest | None:
        """Return our request, with the states that the program's has before it runs."""
        exposed = followed.exposed
        with self._lock:
            return exposed.request_for(request) if isinstance(exposed, ExposedModel) else None

    def _ran(
        self, followed: FollowedGraph, request: InferRequest, ours: InferRequest | None
    ) -> None:
        """Record what the program's request computed."""
        inputs = {
            name: tensor_of(tensor)
            for name, tensor in zip(
                self._fed(followed, request), request.input_tensors, strict=True
            )
        }
        with self._lock:
            root, on = self._begin(followed, inputs)
            try:
                exposed = followed.exposed
                if isinstance(exposed, ExposedModel) and ours is not None:
                    # states go on with each run, also with those that are not recorded
                    if on or exposed.has_state:
                        values = self._values(followed, exposed, ours, request)
                        if on:
                            self._record(followed, root, {**inputs, **values})
                elif on:
                    self._record_outside(followed, root, request, inputs)
            finally:
                self._end(on)

    def _fed(self, followed: FollowedGraph, request: InferRequest) -> list[str]:
        if followed.exposed is not None:
            return followed.exposed.graph.inputs
        return [any_name(port) for port in request.model_inputs]

    def _values(
        self, followed: FollowedGraph, exposed: ExposedModel, ours: InferRequest,
        request: InferRequest,
    ) -> dict[str, object]:  # fmt: skip
        """Run ours; if its outputs are other bits, hide the values that the program's fused."""
        followed.ran.append(self._parts.thread.root_call)
        values, agree = exposed.run(ours, request)
        if not agree and exposed.is_whole and not exposed.graph.random:
            exposed.narrow()
            followed.expose(exposed)
            values, agree = exposed.run(exposed.request_for(request), request)
        self._note(exposed, agree)
        return values

    def _note(self, exposed: ExposedModel, agree: bool) -> None:
        notes = self._parts.notes
        if not exposed.is_whole:
            note = (
                f"{exposed.hidden} values inside of fused nodes are not recorded:"
                " returning them would change the results"
            )
            if note not in notes:
                notes.append(note)
        if not agree and not exposed.graph.random and _OTHER_BITS not in notes:
            notes.append(_OTHER_BITS)

    def _record_outside(
        self, followed: FollowedGraph, root: RootCall, request: InferRequest,
        inputs: dict[str, torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Record inputs and outputs alone."""
        outputs = {
            name: tensor_of(tensor)
            for name, tensor in zip(
                map(any_name, request.model_outputs),
                request.output_tensors, strict=True,
            )
        }  # fmt: skip
        self._record(followed, root, {**inputs, **outputs})


def _too_other(lacks: str) -> str:
    return (
        f"openvino {openvino_api.release()} has no {lacks}, which recording needs:"
        " install one that is tested: 2026.4"
    )
