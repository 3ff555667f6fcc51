"""Interrupts at chosen bytecodes of an activity, and what they leave behind.

``python tests/interruption.py recording 2000`` interrupts an activity at 2,000 seeded points, and
``all`` each one.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.runs import recorded
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.options import runs_folder
from models import generate, hooks_left, llama, prompt

OURS = str(Path(ld.__file__).parent) + os.sep
UNSAFE = {dis.opmap[name] for name in ("PUSH_EXC_INFO", "POP_EXCEPT", "RERAISE")}
"""Where a trace function must not raise, and no signal arrives: the interpreter handles an
exception there, and its table of handlers does not cover them."""


class Interruption:
    """A context that counts bytecodes, also of threads that start in it, and interrupts one.

    ``at``: the count from which the signal ``number`` is sent, at ``where``. ``own``: only those of
    our own code count. ``count``: so far.
    """

    def __init__(self, at: int | None, own: bool, number: int = signal.SIGINT) -> None:
        self.at, self.own, self.count, self.where = at, own, 0, ""
        self._number = number

    def __enter__(self) -> Interruption:
        threading.settrace(self._enter)  # of threads that start now
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # the stubs lack None

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if name == __file__ or (self.own and not name.startswith(OURS)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self._here(frame):
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(self._number)
        return self._step

    def _here(self, frame: FrameType) -> bool:
        if self.at is None or self.count < self.at or self.where:
            return False
        return frame.f_code.co_code[frame.f_lasti] not in UNSAFE


class Small(nn.Module):
    """Two linear layers with a view, an in-place operation and a softmax between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu_().view(-1, 6)
        return self.second(x.softmax(-1))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def train(model: nn.Module) -> list[torch.Tensor]:
    """One step forward and backward; return the loss and the gradients."""
    model.zero_grad()
    loss = model(torch.arange(8.0).view(2, 4)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


class Recording:
    """A training step of a small model, recorded on all levels, and next to it a plain block."""

    def __init__(self) -> None:
        self.model: Any = small()

    def work(self) -> None:
        with ld.dump(self.model, name="r", mode="module+api+aten", phase="both"):
            train(self.model)


class Noting:
    """Statistics of modules and operators alone: what sees them only notes it."""

    def __init__(self) -> None:
        self.model: Any = small()

    def work(self) -> None:
        options = {"tokens": "all", "stats_only": True, "mode": "module+aten"}
        with ld.dump(self.model, name="r", **options), torch.no_grad():
            for _ in range(3):
                self.model(torch.ones(2, 4))


class Generating:
    """Two generated tokens of a model that the recording has to find."""

    def __init__(self) -> None:
        self.model: Any = llama(num_hidden_layers=1)
        self.model.generation_config.use_cache = True

    def work(self) -> None:
        with ld.dump(name="r", tokens="all", mode="module+api", seed=1):
            generate(self.model, prompt(3), new=2)


class Session:
    """Runs of a session of ONNX Runtime, first one that is recorded as it is seen."""

    def __init__(self) -> None:
        import onnxruntime
        from onnx import helper

        nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Neg", ["h"], ["y"])]
        values = [helper.make_tensor_value_info(name, 1, (2, 4)) for name in ("x", "y")]
        graph = helper.make_graph(nodes, "small", values[:1], values[1:])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        self.model = small()  # what a recording may hook besides
        self.session = onnxruntime.InferenceSession(made.SerializeToString())

    def next(self) -> None:
        self.session.run(None, {"x": torch.ones(2, 4).numpy()})

    def work(self) -> None:
        with ld.dump(name="r"):
            self.next()
            self.next()


class Comparing:
    """The comparison of a model with one whose weights differ, explained and proven."""

    def __init__(self) -> None:
        self.model: Any = small()
        self.other: Any = small()
        with torch.no_grad():
            self.other.second.weight *= 1.5
        for name, model in (("golden", self.model), ("mine", self.other)):
            with ld.dump(model, name=name, mode="module+api"):
                model(torch.ones(2, 4))

    def work(self) -> None:
        report = ld.compare("golden", "mine", progress=False)
        str(report)
        if report.findings:
            report.prove(report.findings[0], self.other)


class Exporting(Comparing):
    """A saved page, tables, and the topology. Pictures would be matplotlib's bytecodes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.report = ld.compare("golden", "mine", progress=False)

        self._folder = tempfile.mkdtemp()  # for all points: leaving it could be interrupted too

    def work(self) -> None:
        folder = self._folder
        self.report.to_csv(f"{folder}/report.csv")
        ld.export(self.report, f"{folder}/report.html")
        ld.export("golden", f"{folder}/golden.html")
        ld.write_topology("golden", folder)


class Stepping:
    """Three halts of a program that is stepped through, and its end."""

    def __init__(self) -> None:
        self.model: Any = small()

    def work(self) -> None:
        stepper = ld.step(self.model, at=("first", "second"))
        try:
            stepper.start(lambda: self.model(torch.ones(2, 4)))
            while stepper.stop is not None:
                str(stepper.stop)
                stepper.go()
        finally:
            _end(stepper)


def _end(stepper: Any) -> None:
    """End a program that an interrupt may have left halted or on its way to the next halt."""
    deadline = time.monotonic() + 60
    while stepper.running and time.monotonic() < deadline:
        if stepper.stop is None:
            stepper.wait()
        stepper.abort()


ACTIVITIES: dict[str, Callable[[], Any]] = {
    "recording": Recording,
    "noting": Noting,
    "session": Session,
    "generating": Generating,
    "comparing": Comparing,
    "exporting": Exporting,
    "stepping": Stepping,
}


def state(model: nn.Module) -> dict[str, object]:
    """Return all that a recording changes while it runs, of a model and of the process."""
    from torch.nn.modules import module as internals
    from transformers import GenerationMixin

    gc.collect()
    return {
        "hooks of the model": hooks_left(model),
        "attributes of modules": [sorted(vars(part)) for part in model.modules()],
        "weights": [hash(tensor.numpy().tobytes()) for tensor in model.state_dict().values()],
        "global hooks": len(internals._global_forward_pre_hooks),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch functions on": torch._C._is_torch_function_enabled(),
        "gradients on": torch.is_grad_enabled(),
        "default device and dtype": (torch.get_default_device(), torch.get_default_dtype()),
        "generate": GenerationMixin.generate,
        "module call": nn.Module.__call__,
        "engine": torch.autograd._engine_run_backward,
        "has_torch_function": torch.overrides.has_torch_function,
        "session run": _session_run(),
        "collectives": torch.distributed.all_reduce,
        "messages between ranks": torch.distributed.ProcessGroup.send,
        "importers": len(sys.meta_path),
        "path": list(sys.path),
        "handler of interrupts": signal.getsignal(signal.SIGINT),
        "owners of the handler": len(interrupts._owners),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(descriptors()),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


def _session_run() -> object:
    module = sys.modules.get("onnxruntime")
    return None if module is None else vars(module.InferenceSession).get("run")


def descriptors() -> list[str]:
    """Return what each open descriptor of this process refers to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    # ONNX Runtime opens files of its own when it likes, in another thread
    ours = [name for name in found if "/.onnxruntime/" not in name]
    return [name for name in ours if not name.endswith("/fd") and "/fd" not in name]


def total(activity: Any, own: bool) -> int:
    """Count the bytecodes of an activity."""
    with Interruption(None, own) as counted:
        activity.work()
    return counted.count


def interrupted(activity: Any, at: int, own: bool) -> tuple[str, bool]:
    """Interrupt an activity at one point; return the place, and whether it was cut short."""
    try:
        with Interruption(at, own) as point:
            activity.work()
    except KeyboardInterrupt:
        return point.where, True
    return point.where, False


def fingerprint_of_next(activity: Any) -> list[object]:
    """Record a step of the activity's model or session anew; return what the run holds."""
    if isinstance(activity, Session):
        with ld.dump(activity.session, name="next") as run:
            activity.next()
    else:
        model = activity.model
        with ld.dump(model, name="next", mode="module+api") as run, torch.no_grad():
            model(torch.ones(2, 4) if isinstance(model, Small) else prompt(3))
    found = [(r.site.path, r.site.role, r.site.slot, r.summary.fingerprint) for r in run.records()]
    ld.delete_run(run)
    return found


def outcomes(name: str, points: int, seed: int = 0) -> Iterator[tuple[str, bool, list[str]]]:
    """Interrupt an activity at seeded points: half of them in our own code, half anywhere.

    Yield the place, whether the interrupt arrived, and what it left behind: each leftover once, at
    the point that made it.
    """
    activity = ACTIVITIES[name]()
    activity.work()  # imports, caches
    activity.work()
    reference = fingerprint_of_next(activity)
    fingerprint_of_next(activity)
    gc.collect()
    gc.freeze()  # what is there by now need not be looked through at each point
    before = state(activity.model)
    counts = {own: total(activity, own) for own in (True, False)}
    chosen = random.Random(seed)
    for number in range(points):
        own = number % 2 == 0
        where, cut = interrupted(activity, chosen.randrange(1, counts[own] + 1), own)
        after, found = state(activity.model), fingerprint_of_next(activity)
        problems = [
            f"{what}: {before[what]} became {now}"
            for what, now in after.items()
            if now != before[what]
        ]
        if found != reference:
            problems.append("the next recording holds something else")
        yield where, cut, problems
        for folder in runs_folder().iterdir():
            if folder.name not in ("golden", "mine"):
                shutil.rmtree(folder)
                recorded.pop(folder.name, None)
        if problems:
            before, reference = state(activity.model), found


def main(name: str, points: int) -> int:
    """Print the outcome of an activity's interrupts; return the number of bad ones."""
    began, done, cut, bad = time.monotonic(), 0, 0, 0
    places: collections.Counter[str] = collections.Counter()
    tempfile.tempdir = None
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "tmp"
        scratch.mkdir()
        os.environ["LLMDEBUG_RUNS"], tempfile.tempdir = str(Path(folder) / "runs"), str(scratch)
        for where, was_cut, problems in outcomes(name, points):
            cut += was_cut
            done += 1
            bad += bool(problems)
            for problem in problems:
                places[problem.partition(":")[0]] += 1
                print(f"{where}: {problem}"[:400], flush=True)
                if bad > 20:
                    return bad
            if done % 100 == 0:
                print(f"{name}: {done} points, {cut} cut short, {bad} bad", flush=True)
    what = ", ".join(f"{number} {each}" for each, number in places.items())
    print(
        f"{name}: {points} points, {cut} cut it short, {bad} left something ({what or 'none'})"
        f" in {time.monotonic() - began:.0f} s"
    )  # fmt: skip
    return bad


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    warnings.simplefilter("ignore")  # blocks that are cut short record nothing
    names = list(ACTIVITIES) if sys.argv[1] == "all" else sys.argv[1].split(",")
    sys.exit(min(1, sum(main(name, int(sys.argv[2])) for name in names)))
