"""The steps of a vLLM engine as root calls of a recording, and the token of each of their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compat import vllm_api
from llmdebug_nb.capture.compat.vllm_api import Runner, RunningStep, Scheduled
from llmdebug_nb.capture.request_filter import Part
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.columns import TOKEN_ROWS
from llmdebug_nb.core.records import DUMMY, RootCall, TokenRow

if TYPE_CHECKING:
    from torch import nn


class VllmSteps:
    """Follows the steps of one engine for one recording.

    An engine computes a step for tokens of several requests at once, and calls its model also for
    itself: to measure memory, or to warm up. ``model``: the module that it runs.
    """

    def __init__(self, runner: Runner, begun: RunningStep | None = None) -> None:
        """``begun``: a step of it that runs now."""
        self._runner, self._begun = runner, begun
        self.model: nn.Module = runner.get_model()
        self._step, self._dummies = -1, 0
        self._live = False  # the engine computes a step: what its model is called for counts
        self._resting = False  # the dump says that no step is computed
        self._scheduled: Mapping[str, Scheduled] = {}
        self._order: Sequence[str] | None = None
        self._attempts: dict[str, int] = defaultdict(int)
        self._prompts: dict[str, int] = {}  # how long they are, of the requests that began since
        # by request and position: what a request finds in the cache when it begins again
        self._tokens: dict[str, dict[int, int | None]] = defaultdict(dict)

    @classmethod
    def of(cls, given: object) -> VllmSteps:
        """Return what follows a ``vllm.LLM``. Raises CaptureError."""
        return cls(vllm_api.runner_of(given))

    @classmethod
    def calling(cls, module: nn.Module) -> VllmSteps | None:
        """Return what follows the engine that calls a module now; None if none does."""
        step = vllm_api.running(module)
        return None if step is None else cls(step.runner, step)

    @staticmethod
    def compiles(module: nn.Module) -> bool:
        return vllm_api.compiles(module)

    @property
    def compiler_settings(self) -> Mapping[str, object]:
        return vllm_api.inductor_settings(self._runner)

    def run_eagerly(self) -> Callable[[], None]:
        """Run what is compiled as it is written; return how to undo it."""
        return vllm_api.run_eagerly(self.model)

    def start(self, parts: Parts) -> None:
        """Begin to follow the steps. The model is a root of the recording by now."""
        self._parts = parts
        parts.steps.numbered_by(self.model, self)
        if parts.options.graph is None and vllm_api.compiles(self.model):
            parts.notes.append(
                "the engine compiles its model, so only the modules outside of compiled code were"
                " seen; force_eager=True (--force-eager) runs and records the modules in place of"
                " that code, and dump(llm, graph='fused') records its kernels"
            )
        for recorder in parts.recorders:
            recorder.sink.note({"settings": parts.settings()})
        vllm_api.steps_of(self._runner).add(self)
        if self._begun is not None and self._begun.scheduled is not None:
            self.step_begins(self._begun.scheduled)
            self.prepared(self._begun.batch)

    def stop(self) -> None:
        vllm_api.steps_of(self._runner).remove(self)
        if self._step >= 0 and not self._resting:
            self._parts.guard.problems[f"step {self._step} of the engine did not end"] = 1
        if self._dummies:
            count, self._dummies = self._dummies, 0
            self._parts.notes.append(
                f"forward calls outside of the engine's steps (profiling, warm-up): {count}, not"
                " recorded"
            )

    # -- the listener of the runner ---------------------------------------------------------------

    def step_begins(self, scheduled: object) -> None:
        self._parts.guard.run(self._step_begins, scheduled)

    def _step_begins(self, scheduled: object) -> None:
        self._live = not vllm_api.is_empty(scheduled)
        if not self._live:
            return
        self._work()
        self._step += 1
        self._order = None
        self._scheduled = vllm_api.scheduled_requests(scheduled)
        for each in self._scheduled.values():
            self._attempts[each.request] += each.resumed

    def sampling_begins(self) -> None:
        """Logits of prompts are computed after the step: they belong to it."""
        self._live = self._step >= 0
        if self._live:
            self._parts.guard.run(self._work)

    def prepared(self, batch: object) -> None:
        self._order = vllm_api.order_of(batch)

    def returned(self) -> None:
        if self._live:
            self._parts.guard.run(self._rest)

    def _rest(self) -> None:
        """Note what there is to say at the end: a server may kill the process between two steps."""
        self._resting = True
        for recorder in self._parts.recorders:
            closing = self._parts.closing(recorder)
            recorder.sink.note({**closing, "complete": False, "idle": closing["complete"]})

    def _work(self) -> None:
        if self._resting:
            self._resting = False
            for recorder in self._parts.recorders:
                recorder.sink.note({"idle": False})

    def ends(self) -> None:
        self._live = False

    # -- numbering --------------------------------------------------------------------------------

    def numbered(
        self, index: int, whole: bool, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> RootCall:
        """Number a root call; note the token of each of its rows. ``whole``: of the model itself.

        Logits are computed by a call of their own, in the same step.
        """
        if not self._live:
            self._dummies += whole
            return RootCall(index, step=max(self._step, 0), kind=DUMMY)
        count = sum(each.tokens for each in self._scheduled.values())
        for each in self._scheduled.values():
            if each.prompt is not None:
                self._prompts.setdefault(each.request, len(each.prompt))
        self._parts.filter.requests.computes(
            index,
            (
                Part(each.request, each.begins, each.tokens, self._prompts.get(each.request))
                for each in self._scheduled.values()
            ),
        )
        if whole:
            ids = kwargs.get("input_ids", next(iter(args), None))
            rows = self._rows(index, ids if isinstance(ids, torch.Tensor) else None)
            for recorder in self._parts.recorders:
                recorder.sink.table(TOKEN_ROWS.name, rows)
        return RootCall(
            index, step=self._step, kind="engine", query=count, batch=len(self._scheduled)
        )

    def _rows(self, index: int, ids: torch.Tensor | None) -> list[TokenRow]:
        """Return the rows of the step that begins. ``ids``: int[tokens], as the model gets them.

        The scheduler says where each request begins, so a wrong position is recorded as what it
        is: a wrong value. Rows behind the last one are padding.
        """
        tokens = None if ids is None else ids.tolist()
        order = self._order or vllm_api.order_of(vllm_api.needed(self._runner, "input_batch"))
        rows: list[TokenRow] = []
        row = 0
        for name in order or ():
            each = self._scheduled[name]
            known = self._tokens[name]
            known.update(enumerate(each.prompt or ()))
            if each.resumed or each.prompt is not None:
                for position in range(each.begins):
                    rows.append(self._row(index, None, name, position))
            for position in range(each.begins, each.begins + each.tokens):
                known[position] = None if tokens is None else tokens[row]
                rows.append(self._row(index, row, name, position))
                row += 1
        return rows

    def _row(self, index: int, row: int | None, name: str, position: int) -> TokenRow:
        prompt = self._prompts.get(name)
        sampled = None if prompt is None else int(position >= prompt)
        token = self._tokens[name].get(position)
        return TokenRow(index, row, name, position, token, self._attempts[name], sampled)
