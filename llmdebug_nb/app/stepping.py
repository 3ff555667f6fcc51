"""Stepping through a program: it halts where a condition holds, with its tensors at hand, and goes on as it is told.

The program runs in a thread of its own and waits there, so the notebook stays free: what is looked at or drawn meanwhile are ordinary cells.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmdebug_nb.align.tree import ModuleTree, partners
from llmdebug_nb.app.compare import compare
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.comparison.engine import error
from llmdebug_nb.core.errors import CaptureError, CompareError, LLMDebugError, OptionError, nearest
from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.layers import is_layer
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.options import EVERY_TOKEN, DumpKeywords, DumpOptions, shows_options
from llmdebug_nb.core.records import Record, RootCall, Site
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.layouts import Contents
from llmdebug_nb.store.reader import in_memory

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.core.records import Node
    from llmdebug_nb.show.views import View
    from llmdebug_nb.store.run import Run

COMMANDS = {
    "op": "to the end of the next operator or module",
    "layer": "to the end of the next numbered module, such as model.layers.3",
    "token": "to the first call of the next step",
    "continue": "to where a condition holds again",
    "replace": "put golden's values into what this call gave, and continue",
    "abort": "end the program here",
}
_WHEN = re.compile(r"(nan|inf)|(abs)\s*>\s*(\S+)|(diverges)(?:\s*>\s*(\S+))?")
_UNITS = 32  # of rounding: from there on, values diverge
_PATIENCE = 5.0  # seconds until a program that is interrupted must have come to a call


class Aborted(BaseException):
    """Ends the program at a call; no ``except Exception`` of the program holds it up."""


@dataclass(frozen=True)
class Conditions:
    """Where to halt: at a path or operator (glob), in a step, and when values are so. Each kind that is given must hold."""

    at: tuple[str, ...] = ()
    tokens: TokenSet = field(default_factory=lambda: TokenSet.parse("all"))
    when: tuple[tuple[str, float | None], ...] = ()

    @classmethod
    def of(cls, at: Any = (), tokens: Any = "all", when: Any = ()) -> Conditions:
        """Return conditions from texts. Raises OptionError."""
        return cls(_texts(at), TokenSet.parse(tokens), tuple(map(_condition, _texts(when))))

    def why(self, stop: Stop) -> str | None:
        """Return why to halt there, or None."""
        if stop.step not in self.tokens or (
            self.at and not any(_fits(stop, glob) for glob in self.at)
        ):
            return None
        if not self.when:
            return "asked for" if self.at else "a call"
        return next((said for name, bound in self.when if (said := stop.test(name, bound))), None)


def _texts(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else list(given or ())
    return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())


def _condition(text: str) -> tuple[str, float | None]:
    found = _WHEN.fullmatch(text)
    with contextlib.suppress(ValueError):
        if found and found[1]:
            return found[1], None
        if found and found[2]:
            return "abs", float(found[3])
        if found:
            return "diverges", float(found[5]) if found[5] else None
    raise OptionError(f"when: expected nan, inf, abs>1e4, diverges or diverges>1e-3, got {text!r}")


def _fits(stop: Stop, glob: str) -> bool:
    return any(fnmatchcase(name, glob) for name in (stop.path, stop.op, stop.op.partition(".")[2]))


class Golden:
    """The run to hold against. What a module is called there is found as in a comparison, from the modules alone."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._there: dict[str, str] = {}  # path of mine -> path of golden
        self._known = 0

    def learn(self, nodes: Sequence[Node]) -> None:
        """Take in the modules of the program that are known by now."""
        if len(nodes) == self._known:
            return
        self._known = len(nodes)
        found = partners(ModuleTree(self.run.nodes, ()), ModuleTree(nodes, ()), {})
        single = {there: here[0] for there, (here, _) in found.items() if len(here) == 1}
        shared = Counter(single.values())  # a fused module is no other's
        self._there = {here: there for there, here in single.items() if shared[here] == 1}

    def tensors(self, stop: Stop, role: str) -> dict[str, torch.Tensor]:
        """Return what was recorded in place of a call's inputs or outputs, by their slots."""
        module, slash, operator = stop.path.partition("/")
        path = self._there.get(module, module) + slash + operator
        found = self.run.records(
            path=path,
            call=stop.call,
            generation=stop.generation,
            step=stop.step,
            phase="forward",
            role=role,
        )
        kept = {
            r.site.slot: self.run.load(r) for r in found if r.payload is not None and r.kept is None
        }
        live = stop.inputs if role == "input" else stop.outputs
        if len(kept) == len(live) == 1:  # whatever it is called
            return dict(zip(live, kept.values(), strict=True))
        return kept


@dataclass
class Stop:
    """Where the program stands: a call that has just ended.

    ``inputs``, ``outputs``: its live tensors by slot; what is written to them, the program goes on with. ``golden``: what golden's
    run recorded in place of ``outputs``, by slot. ``errors``: relative L2 error of ``outputs``. ``why``: why it halted.
    """

    path: str
    op: str
    call: int
    generation: int
    step: int
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    against: Golden | None = None
    why: str = ""

    @cached_property
    def golden(self) -> dict[str, torch.Tensor]:
        return {} if self.against is None else self.against.tensors(self, "output")

    @cached_property
    def errors(self) -> dict[str, float]:
        pairs = [
            (slot, theirs, self.outputs[slot])
            for slot, theirs in self.golden.items()
            if slot in self.outputs
        ]
        return {
            slot: error(theirs, mine.detach().cpu())
            for slot, theirs, mine in pairs
            if theirs.numel() == mine.numel()
        }

    def view(self) -> View:
        """Return what an explorer shows of the tensors as they are now: beside golden's, where it has any."""
        mine = self._run(
            "stop", {"input": self.inputs, "output": self.outputs}, "stop.{role}s[{slot!r}]"
        )
        if self.against is not None and self.golden:
            theirs = {"input": self.against.tensors(self, "input"), "output": self.golden}
            golden = self._run("golden", theirs, "stop.golden[{slot!r}]")
            with contextlib.suppress(CompareError):
                return compare(golden, mine, explain=False, progress=False).view()
        return RunView(mine)

    def _run(self, name: str, tensors: Mapping[str, Mapping[str, torch.Tensor]], code: str) -> Run:
        """Return tensors by role and slot as a run."""
        records: list[Record] = []
        values: dict[int, torch.Tensor] = {}
        for role, named in tensors.items():
            for slot, tensor in named.items():
                number, why = len(records), unreadable(tensor)
                site = Site(
                    self.path,
                    self.step,
                    self.call,
                    role=role,
                    slot=slot,
                    generation=self.generation,
                )
                values[number] = tensor.detach()
                payload = number if why is None else None
                records.append(
                    Record(
                        number,
                        site,
                        number,
                        self.op,
                        summarize(values[number]),
                        str(tensor.device),
                        None,
                        payload,
                        why,
                    )
                )
        codes = {
            role: code.replace("{role}", role)
            for role in tensors
            if role == "output" or "{role}" in code
        }
        calls = [RootCall(0, self.generation, self.step)]
        contents = Contents(
            records, calls, [], lambda record: values[record.id].cpu(), {"code": codes}
        )
        return in_memory(
            name,
            contents,
            sum(tensor.numel() * tensor.element_size() for tensor in values.values()),
        )

    def test(self, name: str, bound: float | None) -> str | None:
        """Return how a condition on values holds, or None."""
        for slot, tensor in self.outputs.items():
            if name == "diverges":
                off = self.errors.get(slot, 0.0)
                if off > (_limit(tensor) if bound is None else bound):
                    return f"{slot} is {off:.2g} off golden"
                continue
            values = _values(tensor)
            if values is None or not (values.is_floating_point() or values.is_complex()):
                continue
            if name == "abs":
                largest = float(values.abs().max())
                if largest > (bound or 0.0):
                    return f"{slot} reaches {largest:.4g}"
            elif bool((values.isnan() if name == "nan" else values.isinf()).any()):
                return f"{slot} holds {name}"
        return None

    def __repr__(self) -> str:
        lines = [f"{self.path or 'the model'} ({self.op}), step {self.step}: {self.why}"]
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            for slot, tensor in tensors.items():
                off = self.errors.get(slot) if kind == "output" else None
                beside = "" if off is None else f", {off:.2g} off golden"
                kindly = str(tensor.dtype).removeprefix("torch.")
                lines.append(
                    f"  {kind:6} {slot}  {kindly} {list(tensor.shape)}{_range(tensor)}{beside}"
                )
        return "\n".join(lines)


def _limit(tensor: torch.Tensor) -> float:
    import torch

    return _UNITS * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _range(tensor: torch.Tensor) -> str:
    values = _values(tensor)
    if values is None or values.is_complex():
        return ""
    return f", {float(values.min()):.4g} to {float(values.max()):.4g}"


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor to compute figures of; None where it has none (empty, sparse, quantised)."""
    import torch

    if not tensor.numel() or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    values = tensor.detach()
    return (
        values.float() if values.is_floating_point() and values.dtype.itemsize == 1 else values
    )  # float8 has no min


@dataclass
class _Ended:
    result: Any = None
    error: BaseException | None = None


class Stepper:
    """A program that is stepped through. Made by `step`; it runs once.

    ``stop``: where it is halted, or None. ``run``: what has been recorded of it. ``result``: what it gave.
    """

    def __init__(
        self, model: Any, conditions: Conditions, golden: Golden | None, options: DumpOptions
    ) -> None:
        """Raises OptionError."""
        self._recording = Recording(model, options)
        self._conditions, self._golden = conditions, golden
        self._commands: queue.Queue[str] = queue.Queue()
        self._told: queue.Queue[Stop | _Ended | LLMDebugError] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._until = (
            "op" if conditions == Conditions() else "continue"
        )  # the command that is being carried out
        self._now = False  # halt at the next call
        self._last: Stop | None = None
        self._seen: set[str] = set()  # paths and operators that came by before the first halt
        self.stop: Stop | None = None
        self.run: Run | None = None
        self.result: Any = None

    @property
    def running(self) -> bool:
        """It has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], Any]) -> Stop | None:
        """Run ``work()`` up to the first halt and return that; None: it ran to its end.

        Raises CaptureError, and whatever the program raises.
        """
        if self._thread is not None:
            raise CaptureError(
                "this program has been stepped through already; make another with ld.step"
            )
        self._thread = threading.Thread(
            target=self._work, args=(_as_here(work),), name="llmdebug step", daemon=True
        )
        self._thread.start()
        return self.wait()

    def go(self, command: str = "continue") -> Stop | None:
        """Carry out a command of `COMMANDS`. Return the next halt; None: the program has ended.

        Raises:
            OptionError: no such command. CaptureError: the program is not halted, or has no golden values here.
        """
        if command not in COMMANDS:
            raise OptionError(f"step: unknown command {command!r}{nearest(command, COMMANDS)}")
        if self.stop is None:
            raise CaptureError(
                "the program is not halted" + ("" if self.running else ": it has ended")
            )
        if command == "replace":
            self._check_replacement(self.stop)
        self._commands.put(command)
        return self.wait()

    def abort(self) -> None:
        """End the program at the call where it is halted; nothing happens where it isn't."""
        if self.stop is not None:
            self.go("abort")

    @property
    def note(self) -> str:
        """Why it never halted, or ""."""
        if self._last is not None or self.running:
            return ""
        missed = [
            glob
            for glob in self._conditions.at
            if not any(fnmatchcase(name, glob) for name in self._seen)
        ]
        if missed:
            return f"it never halted: no call is named {missed[0]}{nearest(missed[0], sorted(self._seen))}"
        return "it never halted: the conditions did not hold at any call"

    # -- in the thread of who steps -------------------------------------------------------------------

    def wait(self) -> Stop | None:
        """Wait for the next halt, or the end. An interrupt halts the program at its next call."""
        halted, self.stop = self.stop, None
        asked = False
        while True:
            try:
                told = self._told.get(timeout=_PATIENCE if asked else None)
                break
            except KeyboardInterrupt:
                if asked:
                    raise
                self._now = asked = True
            except queue.Empty:
                raise CaptureError(
                    "interrupted, but the program is busy with something that is not recorded; it halts at its next call"
                ) from None
        if isinstance(told, LLMDebugError):
            self.stop = halted
            raise told
        if isinstance(told, Stop):
            self.stop = told
            return told
        if self._thread is not None:
            self._thread.join()
        self.result = told.result
        if told.error is not None and not isinstance(told.error, Aborted):
            raise told.error
        return None

    @staticmethod
    def _check_replacement(stop: Stop) -> None:
        if not stop.golden:
            raise CaptureError(
                f"replace: golden has no values of {stop.path or 'the model'} in step {stop.step}"
            )
        for slot, theirs in stop.golden.items():
            mine = stop.outputs.get(slot)
            if mine is None or mine.shape != theirs.shape:
                seen = "nothing" if mine is None else list(mine.shape)
                raise CaptureError(
                    f"replace: golden's output {slot} has shape {list(theirs.shape)}, mine {seen}"
                )

    # -- in the thread of the program -----------------------------------------------------------------

    def _work(self, work: Callable[[], Any]) -> None:
        ended = _Ended()
        try:
            self.run = self._recording.start()
            self._recording.on_call_end(self._ends)
            try:
                ended.result = work()
            except BaseException as raised:
                ended.error = raised
            with _beside(ended):
                self._recording.stop(
                    type(ended.error).__name__ if ended.error is not None else None
                )
        except BaseException as raised:
            ended.error = ended.error or raised
        self._told.put(ended)

    def _ends(self, call: Any, place: Any, outputs: Sequence[tuple[str, Any]]) -> None:
        """A call has ended: halt there, if it is to be."""
        if threading.current_thread() is not self._thread:
            return
        if self._golden is not None:
            self._golden.learn(self._recording.nodes)
        stop = Stop(
            call.path, call.op, call.number, place.generation, place.step,
            _tensors(call.inputs), _tensors(outputs), self._golden,
        )  # fmt: skip
        why = self._why(stop)
        if self._last is None:
            self._seen |= {stop.path, stop.op, stop.op.partition(".")[2]}
        if why is None:
            return
        self._now, stop.why = False, why
        self._last = stop
        self._told.put(stop)
        while not self._obey(self._commands.get(), stop):
            pass

    def _why(self, stop: Stop) -> str | None:
        if self._now:
            return "interrupted"
        if self._until == "op":
            return "next call"
        if self._until == "layer" and is_layer(stop.path):
            return "next layer"
        last = self._last
        if (
            self._until == "token"
            and last is not None
            and (last.generation, last.step) != (stop.generation, stop.step)
        ):
            return "next step"
        return self._conditions.why(stop) if self._conditions != Conditions() else None

    def _obey(self, command: str, stop: Stop) -> bool:
        """Carry out a command; False where it can't be, and the program stays halted."""
        if command == "abort":
            raise Aborted
        if command == "replace":
            try:
                _write(stop.outputs, stop.golden)
            except RuntimeError as failed:
                why = str(failed).partition("\n")[0]
                self._told.put(
                    CaptureError(
                        f"replace: {stop.path or 'the model'} gave a tensor that can't be written to: {why}"
                    )
                )
                return False
        self._until = "continue" if command == "replace" else command
        return True


@shows_options(tokens=EVERY_TOKEN, name="stepped", mode="module+api")
def step(
    model: Any = None, *, at: Any = (), when: Any = (), golden: Any = None,
    **options: Unpack[DumpKeywords],
) -> Stepper:  # fmt: skip
    """Return a stepper: ``step(model, when="nan").start(lambda: model.generate(ids))`` runs up to the first halt.

    ``at``: globs over module paths, operators (``Functional.softmax``) or paths of operators; ``tokens``: steps; ``when``: ``nan``, ``inf``,
    ``abs>1e4``, ``diverges`` (from ``golden``, by 32 units of rounding) or ``diverges>1e-3``. Several are given as a list or with commas; each kind that is
    given must hold, and with none the program halts at every call. ``golden``: a run, with tensors, of this model or of one whose modules answer to
    its. What is stepped through is recorded as ``name``, with
    these ``mode`` and further options of `DumpOptions`.

    Raises:
        OptionError: a condition or option that makes no sense. UnknownRunError: there is no such golden run.
    """
    conditions = Conditions.of(at, options.get("tokens", EVERY_TOKEN), when)
    run = None if golden is None else open_run(golden)
    if run is None and any(kind == "diverges" for kind, _ in conditions.when):
        raise OptionError("when: diverges needs golden, the run to hold against")
    against = None if run is None else Golden(run)
    recording: DumpKeywords = {
        "name": "stepped", "mode": "module+api", **options, "tokens": EVERY_TOKEN,
    }  # fmt: skip
    return Stepper(model, conditions, against, DumpOptions.of(**recording))


def _tensors(found: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    import torch

    return {slot: leaf for slot, leaf in found if isinstance(leaf, torch.Tensor)}


def _write(outputs: Mapping[str, torch.Tensor], golden: Mapping[str, torch.Tensor]) -> None:
    """Write golden's values into live tensors, so that whoever holds them goes on with these."""
    import torch

    with torch.no_grad():
        for slot, theirs in golden.items():
            outputs[slot].data.copy_(theirs)


@contextlib.contextmanager
def _beside(ended: _Ended) -> Iterator[None]:
    """Let an error of the recording count only where the program itself raised none."""
    try:
        yield
    except LLMDebugError as ours:
        ended.error = ended.error or ours


def _as_here(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``work`` to be run in another thread as it would run in this one: threads have modes of their own."""
    import torch

    context = contextvars.copy_context()
    grad, inference, threads = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
    )
    casts = [
        torch.autocast(kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def run() -> Any:
        torch.set_num_threads(threads)
        with contextlib.ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for cast in casts:
                stack.enter_context(cast)
            return context.run(work)

    return run
