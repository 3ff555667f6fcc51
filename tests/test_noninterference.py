"""Recording changes no result of a program, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import interference
import llmdebug_nb as ld
from models import VOCABULARY, generate, hooks_left, llama, prompt


@pytest.mark.parametrize("mode", interference.MODES)
@pytest.mark.parametrize("work", interference.WORKS)
@pytest.mark.parametrize("dtype", interference.DTYPES)
@pytest.mark.parametrize("model", interference.MODELS)
def test_no_result_of_the_program_differs_by_a_bit(model, dtype, work, mode):
    assert interference.differences(model, dtype, work, mode) == []


def test_the_table_in_the_docs_is_that_of_this_matrix():
    text = (Path(__file__).parent.parent / "docs" / "capture.md").read_text(encoding="utf-8")
    lines = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines()]
    start = lines.index(("model", "dtype", "work", *interference.MODES))
    sites = product(interference.MODELS, interference.DTYPES, interference.WORKS)
    wanted = [(*site, *["="] * len(interference.MODES)) for site in sites]
    assert lines[start + 2 : start + 2 + len(wanted)] == wanted
    assert lines[start + 2 + len(wanted)] == ()


@pytest.mark.slow
def test_recording_all_tensors_needs_no_more_memory_than_the_largest_of_them(tmp_path):
    """Compare the peaks of a recorded and a plain training step, each in its own process."""
    program = Path(__file__).parent / "memory_peak.py"
    # freed memory goes back at once: otherwise gaps of the allocator decide the peak
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }

    def measured(*args):
        done = subprocess.run(
            [sys.executable, program, *args], env=environment, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain, recorded = measured(), measured(str(tmp_path))
    assert recorded["kept"] > 300e6  # what held clones would have added
    assert recorded["peak"] - plain["peak"] < 64 * 2**20 + recorded["largest"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("found", [False, True], ids=["given", "found"])
def test_hooks_come_off_and_the_dump_stays_when_the_block_is_left_by(error, found):
    model = llama()

    def stop_in_the_middle(*_):
        raise error("stop")

    planted = model.model.layers[1].mlp.register_forward_pre_hook(stop_in_the_middle)
    with pytest.raises(error), ld.dump(None if found else model, name="cut"):
        model(prompt())
    planted.remove()
    assert hooks_left(model) == 0
    run = ld.open_run("cut")
    assert not run.info()["complete"]
    assert run.info()["ended_by"] == error.__name__
    assert run.tensor("model.layers.0.mlp").shape == (1, 7, 32)
    assert "prepare_inputs_for_generation" not in vars(model)


def test_a_caught_interrupt_does_not_lose_the_next_call():
    model = llama()
    stopped = []

    def stop_once(*_):
        if not stopped:
            stopped.append(1)
            raise KeyboardInterrupt

    planted = model.model.layers[1].mlp.register_forward_pre_hook(stop_once)
    with ld.dump(model, name="r", tokens="all") as run:
        with contextlib.suppress(KeyboardInterrupt):
            model(prompt())
        model(prompt())
    planted.remove()
    steps = [call.step for call in run.root_calls()]
    assert steps == [0, 1]
    assert run.tensor("lm_head", step=1).shape == (1, 7, VOCABULARY)


def test_a_copy_made_inside_the_block_is_not_recorded_and_keeps_working():
    import copy

    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        model(prompt())
        twin = copy.deepcopy(model)
        twin(prompt())
    assert len(run.root_calls()) == 1
    assert torch.equal(twin(prompt()).logits, model(prompt()).logits)


def test_a_copy_whose_call_raises_keeps_its_own_error():
    import copy

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with ld.dump(model, name="r"):
        model(torch.ones(1, 4))
        twin = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            twin(torch.ones(1, 5))
        assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))
        assert hooks_left(twin) == 0  # they went with the first call


def test_an_error_of_the_recorder_is_reported_and_not_raised(monkeypatch):
    from llmdebug_nb.capture.recorder import Recorder

    model = llama()
    expected = model(prompt()).logits
    whole = Recorder.record_tensor

    def fails_at_one_module(self, call, *rest, **named):
        if call.path == "model.norm":
            raise ZeroDivisionError("planted")
        return whole(self, call, *rest, **named)

    monkeypatch.setattr(Recorder, "record_tensor", fails_at_one_module)
    with ld.dump(model, name="r") as run:
        got = model(prompt()).logits
    assert torch.equal(got, expected)
    assert any("planted" in problem for problem in run.meta["problems"])
    assert not run.info()["complete"]
    assert "planted" in run.info()["ended_by"]


def test_function_and_dispatch_modes_of_the_program_do_not_see_the_recorder():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    model = llama()

    def count():
        functions, dispatches = Functions(), Dispatches()
        with torch.no_grad(), functions, dispatches:
            model(prompt())
        return functions.seen, dispatches.seen

    plain = count()
    with ld.dump(model, name="r"):
        watched = count()
    assert watched == plain


class Counting(torch.Tensor):
    """Counts, and draws a random number, each time that its owner's code is asked."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen += 1
        with torch._C.DisableTorchFunctionSubclass():
            torch.rand(1)
        return super().__torch_function__(function, types, args, kwargs or {})


OPTIONS = [{}, {"mode": "module+api"}, {"stats_only": True}, {"slice": "0"}, {"weights": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_tensor_subclass_of_the_program_does_not_see_the_recorder(options):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5))

    def run():
        torch.manual_seed(1)
        Counting.seen = 0
        result = model(torch.ones(2, 8).as_subclass(Counting))
        return Counting.seen, result.as_subclass(torch.Tensor)

    plain, output = run()
    with ld.dump(model, name="r", **options) as recorded:
        watched, other = run()
    assert watched == plain
    assert torch.equal(output, other)
    assert recorded.info()["complete"]
    assert len(recorded)


TRANSFORMS = {
    "grad": lambda loss, model, x: torch.func.grad(loss)(x),
    "vmap": lambda loss, model, x: torch.func.vmap(model)(x),
    "vjp": lambda loss, model, x: torch.func.vjp(model, x)[1](x)[0],
    "jvp": lambda loss, model, x: torch.func.jvp(model, (x,), (x,))[1],
    "jacrev": lambda loss, model, x: torch.func.jacrev(model)(x[0]),
    "jacfwd": lambda loss, model, x: torch.func.jacfwd(model)(x[0]),
    "hessian": lambda loss, model, x: torch.func.hessian(loss)(x[0]),
}


@pytest.mark.parametrize("mode", ["module", "module+api+aten"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_recorded_to_the_end(transform, mode):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def run():
        return TRANSFORMS[transform](lambda x: model(x).square().sum(), model, x)

    plain = run()
    with ld.dump(model, name="r", mode=mode) as recorded:
        assert torch.equal(run(), plain)
        model(x)  # what comes behind it is recorded, too
    info = recorded.info()
    assert (info["complete"], info["ended_by"]) == (True, None)
    assert not recorded.meta.get("problems")


def test_generate_is_put_back():
    from transformers import GenerationMixin

    before = GenerationMixin.generate
    model = llama()
    with ld.dump(model, name="r"):
        assert GenerationMixin.generate is not before
        generate(model)
    assert GenerationMixin.generate is before
    assert "prepare_inputs_for_generation" not in vars(model)


def test_a_model_can_be_saved_whole_inside_the_block(tmp_path):
    model = llama()
    with ld.dump(model, name="r"):
        model(prompt())
        torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(prompt()).logits, model(prompt()).logits)


WITHOUT_US = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llmdebug_nb":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Hidden())
import torch

model = torch.load(sys.argv[1], weights_only=False)
torch.save(model(torch.ones(1, 4)), sys.argv[2])
"""


def test_a_model_that_was_saved_inside_the_block_needs_no_package_of_ours(tmp_path):
    model, file, output = torch.nn.Linear(4, 4), tmp_path / "model.pt", tmp_path / "output.pt"
    with ld.dump(model, name="r"):
        model(torch.ones(1, 4))
        torch.save(model, file)
    subprocess.run([sys.executable, "-c", WITHOUT_US, str(file), str(output)], check=True)
    assert torch.equal(torch.load(output), model(torch.ones(1, 4)))
