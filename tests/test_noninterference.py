"""Recording changes nothing of what is measured: bit for bit."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from models import ARCHITECTURES, VOCABULARY, generate, hooks_left, llama, prompt

MODES = {
    "tensors": {},
    "statistics only": {"stats_only": True},
    "outermost module found": {"found": True},
    "one layer, outputs": {"layers": "*1*", "part": "out"},
}


def _rng() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def _recording(model, mode):
    options = {"tokens": "all", "name": "r", **MODES[mode]}
    return ld.dump(None if options.pop("found", False) else model, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_logits_and_rng_are_bit_equal(architecture, dtype, mode):
    model = ARCHITECTURES[architecture]().to(dtype)

    def run():
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        out = model.generate(
            prompt(batch=2),
            attention_mask=torch.ones(2, 7, dtype=torch.long),
            max_new_tokens=5,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences, torch.stack(out.logits), _rng()

    plain = run()
    with _recording(model, mode):
        watched = run()
    again = run()
    for other in (watched, again):
        assert torch.equal(plain[0], other[0])
        assert torch.equal(plain[1], other[1])
        assert plain[2] == other[2]
    assert hooks_left(model) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradients_and_rng_are_bit_equal(architecture, dtype, mode):
    model = ARCHITECTURES[architecture]().to(dtype).train()
    ids = prompt(batch=2)

    def run():
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach().clone(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    def graph_size(loss):
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [parent for parent, _ in node.next_functions]
        return len(seen)

    plain = run()
    plain_graph = graph_size(model(input_ids=ids, labels=ids).loss)
    with _recording(model, mode):
        watched = run()
        watched_graph = graph_size(model(input_ids=ids, labels=ids).loss)
    assert torch.equal(plain[0], watched[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])
    assert plain_graph == watched_graph
    assert hooks_left(model) == 0


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


def test_an_error_of_the_recorder_is_said_and_not_raised(monkeypatch):
    from llmdebug_nb.capture.recorder import Recorder

    model = llama()
    expected = model(prompt()).logits
    whole = Recorder.tensor

    def fails_at_one_module(self, root_call, path, *rest):
        if path == "model.norm":
            raise ZeroDivisionError("planted")
        return whole(self, root_call, path, *rest)

    monkeypatch.setattr(Recorder, "tensor", fails_at_one_module)
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
