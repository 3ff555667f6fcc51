"""PrecisionDebugger: loops of training steps, msprobe's config.json, and calls in the wrong place."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb import msit, msprobe
from llmdebug_nb.app.upstream.precision_debugger_config import (
    _COMMON,
    _IDLE,
    _INSTEAD,
    _OTHER_TASKS,
    _SECTIONS,
    read_config,
)
from models import generate, hooks_left, llama

UPSTREAM_DEFAULT = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "extra_info": True,
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}
OLD_DEFAULT = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "enable_dataloader": False,
    "async_dump": False,
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
    "free_benchmark": {
        "scope": [],
        "list": [],
        "fuzz_device": "npu",
        "pert_mode": "improve_precision",
    },
}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(number=0):
    return torch.full((2, 3), float(number + 1))


def train(debugger, model, steps, given=True):
    """The loop of msprobe's users; return what each forward pass gave."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for number in range(steps):
        debugger.start(model) if given else debugger.start()
        output = model(batch(number))
        output.sum().backward()
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()
        outputs.append(output.detach())
    return outputs


def modules(**given):
    return msprobe.PrecisionDebugger(**{"task": "tensor", "level": "L0", **given})


@pytest.fixture(autouse=True)
def _no_hook_stays_and_nothing_warns_unless_a_test_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- loops ------------------------------------------------------------------------------------------


def test_all_steps_of_a_loop_are_in_one_run():
    model, debugger = mlp(), modules()
    outputs = train(debugger, model, 4)
    run = debugger.close()
    assert [run.tensor("", step=step).tolist() for step in range(4)] == [
        output.tolist() for output in outputs
    ]
    assert run.info()["steps"] == 4
    assert run.info()["complete"]
    assert ld.open_run("debugger").path == run.path
    assert hooks_left(model) == 0


def test_only_the_steps_asked_for_are_recorded_and_the_last_one_finishes_the_run():
    model, debugger = mlp(), modules(step=[1, "3-4"])
    outputs = train(debugger, model, 8)
    run = debugger.run
    assert run.info()["complete"]  # though nobody closed it
    assert sorted(set(run.to_pandas().step)) == [1, 3, 4]
    assert torch.equal(run.tensor("", step=4), outputs[4])
    assert hooks_left(model) == 0
    assert debugger.close().path == run.path


def test_steps_that_are_not_asked_for_leave_no_hook_on_the_modules_inside():
    model, debugger = mlp(), modules(step=[1])
    counts = []
    watcher = model[0].register_forward_pre_hook(
        lambda *_: counts.append(len(model[1]._forward_hooks))
    )
    train(debugger, model, 3)
    watcher.remove()
    assert counts == [0, 1, 0]


def test_training_comes_out_as_without_a_debugger():
    plain, watched = mlp(), mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        plain(batch(number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    train(modules(), watched, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True)
    )


def test_the_model_may_be_given_at_once_or_not_at_all():
    model = mlp()
    at_once = modules(model=model, name="at_once")
    outputs = train(at_once, model, 2, given=False)
    assert torch.equal(at_once.close().tensor("", step=1), outputs[1])
    found = modules(name="found")
    outputs = train(found, model, 2, given=False)
    assert torch.equal(found.close().tensor("", step=1), outputs[1])


def test_several_forward_calls_in_a_step_share_it():
    model, debugger = mlp(), modules()
    for number in range(2):
        with debugger.start(model):
            first, second = model(batch(number)), model(batch(number + 5))
        debugger.step()
    run = debugger.close()
    assert torch.equal(run.tensor("", step=1, call=0), first)
    assert torch.equal(run.tensor("", step=1, call=1), second)


def test_a_whole_generate_is_one_step():
    model, debugger = llama(), modules(step=[1])
    for _ in range(3):
        with debugger.start(model):
            generate(model, new=3)
        debugger.step()
    run = debugger.run
    frame = run.to_pandas()
    assert set(frame.step) == {1}
    assert [run.tensor("lm_head", step=1, call=call).shape[1] for call in range(3)] == [1, 1, 1]


def test_several_models_are_recorded_side_by_side():
    actor, critic = mlp(), nn.Sequential(nn.Linear(3, 1))
    debugger = modules()
    for number in range(2):
        with debugger.start([actor, critic]):
            out, value = actor(batch(number)), critic(batch(number))
        debugger.step()
    run = debugger.close()
    assert torch.equal(run.tensor("", step=1), out)
    assert torch.equal(run.tensor("Sequential~1", step=1), value)


def test_start_and_stop_may_come_often_within_a_step():
    model, debugger = mlp(), modules()
    with debugger.start(model):
        model(batch(1))
    model(batch(2))
    with debugger.start(model):
        model(batch(3))
    debugger.step()
    run = debugger.close()
    assert [
        call.tolist() for call in (run.tensor("0", role="input", call=n)[0] for n in (0, 1))
    ] == [
        [2.0] * 3,
        [4.0] * 3,
    ]
    with pytest.raises(ld.errors.TensorLookupError):
        run.tensor("0", call=2)


def test_any_number_of_debuggers_works_side_by_side():
    model = mlp()
    first, second = modules(name="first"), modules(name="second", step=[1])
    assert first is not second
    for number in range(2):
        first.start(model)
        second.start(model)
        model(batch(number))
        second.stop()
        first.stop()
        first.step()
        second.step()
    assert sorted(set(first.close().to_pandas().step)) == [0, 1]
    assert sorted(set(second.close().to_pandas().step)) == [1]


def test_the_run_can_be_read_while_recording_goes_on():
    model, debugger = mlp(), modules()
    seen = []
    for number in range(3):
        debugger.start(model)
        model(batch(number))
        debugger.stop()
        debugger.step()
        seen.append(len(debugger.run))
    assert seen[0] > 0
    assert seen == [seen[0], 2 * seen[0], 3 * seen[0]]
    assert debugger.close() is debugger.run


def test_a_debugger_is_a_context():
    model = mlp()
    with modules() as debugger:
        train(debugger, model, 2)
    assert debugger.run.info()["complete"]


def test_statistics_are_the_default_and_keep_no_tensors():
    model, debugger = mlp(), msprobe.PrecisionDebugger(level="L0")
    train(debugger, model, 1)
    run = debugger.close()
    assert run.info()["payloads"] == 0
    assert run.to_pandas().l2norm.notna().all()


def test_a_token_range_records_these_calls_of_the_model():
    model = mlp()
    for first, last in ((0, 0), (1, 2), (2, 9)):
        debugger = modules()
        for _ in range(2):
            with debugger.start(model, token_range=[first, last]):
                for number in range(5):
                    model(batch(number))
            model(batch(77))
            debugger.step()
        run = debugger.close()
        for step in range(2):
            frame = run.to_pandas()
            frame = frame[(frame.step == step) & (frame.path == "")]
            expected = [float(number + 1) for number in range(first, min(last, 4) + 1)]
            assert list(frame[frame.role == "input"]["max"]) == expected
            assert (frame.role == "output").sum() == len(expected)
    assert hooks_left(model) == 0


def test_a_model_may_be_copied_and_pickled_between_start_and_stop():
    model, debugger = mlp(), modules()
    with debugger.start(model, token_range=[0, 1]):
        model(batch())
        copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for _ in range(3):
            copied(batch(1))
            unpickled(batch(1))
        model(batch())
    run = debugger.close()
    assert set(run.to_pandas().query("path == '' and role == 'input'")["max"]) == {1.0}


def test_after_forward_backward_dump_end_only_the_backward_pass_is_recorded():
    model, debugger = mlp(), modules()
    for number in range(2):
        debugger.start(model)
        output = model(batch(number))
        debugger.forward_backward_dump_end()
        model(batch(77)).sum()
        output.sum().backward()
        debugger.stop()
        debugger.step()
    frame = debugger.close().to_pandas()
    assert set(frame[frame.phase == "forward"].call) == {0}
    assert 78.0 not in set(frame["max"])
    assert {(step, "2") for step in (0, 1)} <= set(
        zip(
            frame[frame.phase == "backward"].step,
            frame[frame.phase == "backward"].path,
            strict=True,
        )
    )


def test_a_backward_pass_between_start_and_stop_is_recorded_and_one_after_it_is_not():
    model = mlp()
    during, after = modules(name="during"), modules(name="after")
    train(during, model, 1)
    with after.start(model):
        output = model(batch())
    output.sum().backward()
    after.step()
    assert set(during.close().to_pandas().phase) == {"forward", "backward"}
    assert set(after.close().to_pandas().phase) == {"forward"}


@pytest.mark.parametrize(
    ("level", "there"), [("L0", {False}), ("L1", {True}), ("mix", {False, True})]
)
def test_levels_are_modules_operators_or_both(level, there):
    model, debugger = mlp(), msprobe.PrecisionDebugger(task="tensor", level=level)
    train(debugger, model, 1)
    paths = debugger.close().to_pandas().path
    assert {"/" in path for path in paths} == there


def test_overflow_check_records_the_calls_with_nan_or_infinity():
    model, debugger = mlp(), msprobe.PrecisionDebugger(task="overflow_check", level="L0")
    with debugger.start(model):
        model(batch())
        model(torch.full((2, 3), float("inf")))
    debugger.step()
    frame = debugger.close().to_pandas()
    assert len(frame)
    assert set(frame.call) == {1}


# -- save -------------------------------------------------------------------------------------------


def test_level_debug_records_what_is_saved_and_nothing_else():
    model, debugger = mlp(), msprobe.PrecisionDebugger(task="tensor", level="debug")
    for number in range(2):
        debugger.start(model)
        output = model(batch(number))
        debugger.save({"out": output, "parts": [output + 1]}, "mine")
        debugger.save(output + 2, "mine")
        debugger.stop()
        debugger.step()
    run = debugger.close()
    assert set(run.to_pandas().path) == {"save/mine"}
    assert torch.equal(run.tensor("save/mine", step=1, slot="out"), output)
    assert torch.equal(run.tensor("save/mine", step=1, slot="parts.0"), output + 1)
    assert torch.equal(run.tensor("save/mine", step=1, call=1), output + 2)
    assert hooks_left(model) == 0


def test_level_debug_needs_no_start_and_knows_its_steps():
    debugger = msprobe.PrecisionDebugger(task="tensor", level="debug", step=[1, 2])
    for number in range(5):
        debugger.save(torch.tensor([float(number)]), "x")
        debugger.step()
    run = debugger.run
    assert run.info()["complete"]
    assert [run.tensor("save/x", step=step).item() for step in (1, 2)] == [1.0, 2.0]
    assert sorted(set(run.to_pandas().step)) == [1, 2]


def test_saving_works_at_every_level_between_start_and_stop():
    model, debugger = mlp(), modules(step=[0])
    with debugger.start(model):
        debugger.save(model(batch()), "mine")
    debugger.step()
    with debugger.start(model):
        debugger.save(model(batch()), "mine")  # of a step that was not asked for
    assert {"save/mine", "0"} <= set(debugger.run.to_pandas().path)
    assert set(debugger.run.to_pandas().step) == {0}


def test_the_gradient_of_what_is_saved_comes_later_unless_it_is_not_wanted():
    debugger = msprobe.PrecisionDebugger(task="tensor", level="debug")
    x = torch.ones(2, requires_grad=True)
    with_gradient, without = x * 2, [(x * 3, {"deep": x * 4})]
    debugger.save(with_gradient, "with_gradient")
    debugger.save(without, "without", save_backward=False)
    (with_gradient.sum() + without[0][0].sum() + without[0][1]["deep"].sum()).backward()
    debugger.step()
    frame = debugger.close().to_pandas()
    assert set(frame[frame.phase == "backward"].path) == {"save/with_gradient"}
    assert set(frame[frame.path == "save/without"].slot) == {"0.0", "0.1.deep"}


def test_saving_outside_of_a_step_is_said():
    debugger = modules()
    with pytest.warns(
        UserWarning, match=r"save\('x'\) was not recorded: call it between start\(\) and stop\(\)"
    ):
        debugger.save(torch.ones(1), "x")
    with pytest.raises(ld.errors.EmptyDumpError):
        debugger.close()
    with pytest.warns(UserWarning, match="is closed"):
        debugger.save(torch.ones(1), "x")
    closed = msprobe.PrecisionDebugger(task="tensor", level="debug")
    closed.save(torch.ones(1), "x")
    closed.close()
    with pytest.warns(UserWarning, match="is closed"):
        closed.save(torch.ones(1), "x")


@pytest.mark.parametrize(
    "arguments", [(torch.ones(1), 3), (torch.ones(1), ""), (torch.ones(1), "x", "yes")]
)
def test_save_refuses_names_that_are_none(arguments):
    with pytest.raises(ld.errors.OptionError, match=r"save"):
        msprobe.PrecisionDebugger(level="debug").save(*arguments)


# -- calls in the wrong place -----------------------------------------------------------------------


def test_a_stop_without_start_is_said_and_harmless():
    model, debugger = mlp(), modules()
    with pytest.warns(UserWarning, match=r"stop\(\) without start\(\)"):
        debugger.stop()
    with pytest.warns(UserWarning, match=r"without start\(\)"):
        debugger.forward_backward_dump_end()
    train(debugger, model, 1)
    assert len(debugger.close())


def test_a_step_before_the_first_start_is_said_and_counts():
    model, debugger = mlp(), modules()
    with pytest.warns(UserWarning, match=r"step\(\) before the first start\(\)"):
        debugger.step()
    debugger.step()
    train(debugger, model, 1)
    assert set(debugger.close().to_pandas().step) == {2}


def test_a_step_between_start_and_stop_loses_nothing():
    model, debugger = mlp(), modules(step=[0, 1])
    debugger.start(model)
    model(batch(0))
    with pytest.warns(
        UserWarning, match=r"step\(\) between start\(\) and stop\(\): recording goes on as step 1"
    ):
        debugger.step()
    model(batch(1))
    with pytest.warns(UserWarning, match="as step 2"):
        debugger.step()
    model(batch(2))
    debugger.stop()
    run = debugger.close()
    assert [run.tensor("0", role="input", step=step)[0, 0].item() for step in (0, 1)] == [1.0, 2.0]
    assert set(run.to_pandas().step) == {0, 1}


def test_a_second_start_is_said_and_changes_nothing():
    model, debugger = mlp(), modules()
    debugger.start(model)
    model(batch(0))
    with pytest.warns(UserWarning, match=r"start\(\) again before stop\(\)"), debugger.start(model):
        model(batch(1))
    model(batch(2))
    debugger.stop()
    debugger.step()
    assert sorted(
        set(debugger.close().to_pandas().query("path == '0' and role == 'input'")["max"])
    ) == [1.0, 2.0, 3.0]


def _fail_after(model, x):
    model(x)
    raise ZeroDivisionError


def test_an_exception_in_the_loop_loses_nothing_and_the_loop_may_go_on():
    model, debugger = mlp(), modules()
    debugger.start(model)
    model(batch(0))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 99))
    assert len(debugger.run.to_pandas().query("path == ''")) >= 2
    debugger.stop()
    debugger.step()
    with pytest.raises(ZeroDivisionError), debugger.start(model):
        _fail_after(model, batch(1))
    debugger.step()
    model(batch(2))  # after the block nothing is recorded
    run = debugger.close()
    assert run.tensor("0", role="input", step=1)[0, 0].item() == 2.0
    assert set(run.to_pandas().step) == {0, 1}


def test_an_exception_that_leaves_the_context_is_what_ended_the_run():
    model = mlp()
    debugger = modules()
    with pytest.raises(ZeroDivisionError), debugger, debugger.start(model):
        _fail_after(model, batch())
    assert debugger.run.info()["ended_by"] == "ZeroDivisionError"
    assert len(debugger.run)
    assert hooks_left(model) == 0


def test_an_exception_is_not_hidden_by_an_empty_run():
    with (
        pytest.warns(UserWarning, match=r"start\(\) was never called"),
        pytest.raises(ZeroDivisionError),
        modules(),
    ):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("", ""),
        ("raise ValueError('theirs')", "ValueError: theirs"),
        ("import sys; sys.exit(3)", ""),
    ],
    ids=["end", "exception", "exit"],
)
def test_the_end_of_the_process_finishes_the_run(tmp_path, ending, message):
    script = (
        "import torch, llmdebug_nb as ld\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(task='tensor', level='L0', dump_path={str(tmp_path)!r})\n"
        "debugger.start(model); model(torch.ones(1, 3)); debugger.stop(); debugger.step()\n"
        "debugger.start(model); model(torch.ones(1, 3))\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert message in done.stderr
    assert "llmdebug" not in done.stderr
    run = ld.open_run(tmp_path)
    assert run.info()["complete"]
    assert run.tensor("0", step=1).shape == (1, 3)


def test_a_killed_process_keeps_what_was_recorded(tmp_path):
    script = (
        "import os, signal, torch, llmdebug_nb as ld\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(task='tensor', level='L0', dump_path={str(tmp_path)!r})\n"
        "for _ in range(2):\n"
        "    debugger.start(model); model(torch.ones(1, 3)); debugger.stop(); debugger.step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True)
    run = ld.open_run(tmp_path)
    assert not run.info()["complete"]
    assert run.tensor("0", step=1).shape == (1, 3)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "start() was never called"),
        (
            "debugger.start(model); model(torch.ones(1, 3)); debugger.stop(); debugger.step()",
            "step 5 never came: step() was called 1 time",
        ),
    ],
    ids=["never started", "step never came"],
)
def test_a_process_that_recorded_nothing_says_so_at_its_end(tmp_path, lines, said):
    script = (
        "import torch, llmdebug_nb as ld\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(level='L0', step=[5], dump_path={str(tmp_path)!r})\n"
        + lines
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert f"nothing was recorded: {said}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_debugger_that_recorded_nothing_says_why():
    model = mlp()
    with pytest.raises(ld.errors.EmptyDumpError, match=r"start\(\) was never called"):
        modules().close()
    with pytest.raises(ld.errors.EmptyDumpError, match=r"save\(\) was never called"):
        msprobe.PrecisionDebugger(level="debug").close()
    late = modules(step=[7])
    train(late, model, 2)
    with pytest.raises(
        ld.errors.CaptureError,
        match=r"there is no run yet: step 7 never came: step\(\) was called 2 times",
    ):
        late.run  # noqa: B018
    with pytest.raises(
        ld.errors.EmptyDumpError, match=r"step 7 never came: step\(\) was called 2 times"
    ):
        late.close()
    idle = modules()
    idle.start(model)
    idle.stop()
    with pytest.raises(ld.errors.EmptyDumpError, match="nothing was recorded"):
        idle.close()
    with pytest.raises(ld.errors.EmptyDumpError, match="nothing was recorded"):
        idle.run  # noqa: B018
    assert ld.runs() == []


def test_an_empty_run_does_not_end_the_programs_loop():
    model, debugger = mlp(), modules(step=[0])
    debugger.start(model)
    debugger.stop()
    with pytest.warns(UserWarning, match="nothing was recorded"):
        debugger.step()
    debugger.start(model)
    debugger.stop()
    debugger.step()
    with pytest.raises(ld.errors.EmptyDumpError):
        debugger.close()


def test_a_closed_debugger_does_not_begin_again():
    model, debugger = mlp(), modules()
    train(debugger, model, 1)
    run = debugger.close()
    assert debugger.close() is run
    with pytest.raises(ld.errors.CaptureError, match="is closed; make a new one"):
        debugger.start(model)
    with pytest.warns(UserWarning, match="closed"):
        debugger.step()


def test_closing_between_start_and_stop_finishes_the_run():
    model, debugger = mlp(), modules()
    debugger.start(model)
    model(batch())
    assert debugger.close().info()["complete"]
    assert hooks_left(model) == 0


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [3, "model", [3], {"a": 1}])
def test_something_that_is_no_model_is_refused(model):
    with pytest.raises(ld.errors.OptionError, match=r"model: expected a torch\.nn\.Module"):
        modules(model=model)
    with pytest.raises(ld.errors.OptionError, match=r"model: expected a torch\.nn\.Module"):
        modules().start(model)


def test_a_model_twice_in_a_list_is_refused():
    model = mlp()
    with pytest.raises(ld.errors.OptionError, match="twice"):
        modules().start([model, model])


def test_another_model_than_before_is_refused():
    model, other = mlp(), mlp()
    with pytest.raises(
        ld.errors.OptionError, match=r"another model than before \(which was Sequential\)"
    ):
        modules(model=model).start(other)
    debugger = modules()
    train(debugger, model, 1)
    with pytest.raises(ld.errors.OptionError, match="another model than before"):
        debugger.start([model, other])
    debugger.close()
    unnamed = modules()
    train(unnamed, model, 1, given=False)
    with pytest.raises(ld.errors.OptionError, match=r"which was none"):
        unnamed.start(model)
    unnamed.close()


@pytest.mark.parametrize(
    "token_range", [3, [1], [2, 1], [-1, 2], ["0", "1"], [0, 1, 2], [0.0, 1.0], [True, True]]
)
def test_a_token_range_that_is_none_is_refused(token_range):
    with pytest.raises(ld.errors.OptionError, match=r"token_range"):
        modules().start(mlp(), token_range)


def test_a_token_range_needs_one_model():
    with pytest.raises(ld.errors.OptionError, match="of one model"):
        modules().start(token_range=[0, 1])
    with pytest.raises(ld.errors.OptionError, match="of one model"):
        modules().start([mlp(), mlp()], [0, 1])


@pytest.mark.parametrize("rank", [-1, "0", 1.0, True])
def test_a_rank_that_is_none_is_refused(rank):
    with pytest.raises(ld.errors.OptionError, match="rank_id"):
        modules().start(mlp(), rank_id=rank)


def test_a_model_that_can_not_be_recorded_is_refused_and_nothing_is_left():
    model, debugger = mlp(), modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = torch.compile(model)
    with pytest.raises(ld.errors.CaptureError, match=r"torch\.compile"):
        debugger.start(compiled)
    train(debugger, model, 1)
    assert len(debugger.close())
    assert len(ld.runs()) == 1


def test_a_rank_that_was_not_asked_for_records_nothing_and_says_so_once(tmp_path, monkeypatch):
    config = _file(tmp_path, {"rank": ["1-2"], "level": "L0", "dump_path": str(tmp_path / "runs")})
    model, debugger = mlp(), msprobe.PrecisionDebugger(config)
    with pytest.warns(
        UserWarning, match="this process is rank 0, and rank 1-2 was asked for"
    ) as said:
        train(debugger, model, 3)
    assert len(said) == 1
    assert debugger.close() is None
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RANK", "2")
    train(there := msprobe.PrecisionDebugger(config), model, 1)
    assert len(there.close())


def test_a_rank_given_to_start_is_the_rank_of_the_process(tmp_path):
    config = _file(tmp_path, {"rank": [3], "level": "L0", "dump_path": str(tmp_path / "runs")})
    model, debugger = mlp(), msprobe.PrecisionDebugger(config)
    with debugger.start(model, rank_id=3):
        model(batch())
    debugger.step()
    assert set(debugger.close().to_pandas()["rank"]) == {3}


# -- config.json: what each field means -------------------------------------------------------------


def _file(folder: Path, values, name="config.json"):
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def _options(folder, values):
    return read_config(_file(folder, values)).options


def _refusal(folder, values):
    with pytest.raises(ld.errors.OptionError) as caught:
        read_config(_file(folder, values))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(folder))
    return message


@pytest.mark.parametrize(
    "values", [UPSTREAM_DEFAULT, OLD_DEFAULT, {}], ids=["26.x", "8.3.3", "empty"]
)
def test_upstreams_own_config_files_are_taken(tmp_path, values):
    config = read_config(_file(tmp_path, values))
    options = config.options
    assert (options.mode, options.stats_only, str(options.tokens), options.ranks) == (
        ("api",),
        True,
        "0-",
        None,
    )
    assert options.path == values.get("dump_path")
    assert (options.phase, options.part, options.contains, options.scope) == (
        "both",
        "both",
        (),
        (),
    )
    assert not config.saves_only
    assert config.switch.is_on()


def test_without_a_file_the_defaults_are_the_same(tmp_path):
    assert (
        read_config().options
        == _options(tmp_path, {})
        == _options(tmp_path, dict.fromkeys(_COMMON))
    )


@pytest.mark.parametrize(
    ("values", "option", "value"),
    [
        ({"task": "statistics"}, "stats_only", True),
        ({"task": "tensor"}, "stats_only", False),
        ({"task": "overflow_check"}, "overflow", 1),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": 5}}, "overflow", 5),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": -1}}, "overflow", 0),
        ({"task": "overflow_check", "overflow_check": {"check_mode": "all"}}, "stats_only", False),
        ({"task": "statistics", "overflow_check": {"overflow_nums": 5}}, "overflow", None),
        ({"dump_path": "some/where"}, "path", "some/where"),
        ({"rank": [0, "4-6"]}, "ranks", "0,4-6"),
        ({"rank": []}, "ranks", "None"),
        ({"step": [7, "4-6", 0]}, "tokens", "0,4-6,7"),
        ({"step": 3}, "tokens", "3"),
        ({"step": "2-3"}, "tokens", "2-3"),
        ({"step": []}, "tokens", "0-"),
        ({"level": "L0"}, "mode", ("module",)),
        ({"level": "L1"}, "mode", ("api",)),
        ({"level": "mix"}, "mode", ("module", "api")),
        ({"extra_info": True}, "sources", True),
        ({"extra_info": False}, "sources", False),
        ({"risk_level": "ALL"}, "mode", ("api",)),
        ({"statistics": {"summary_mode": "statistics"}}, "fingerprint", "xxh3"),
        ({"statistics": {"summary_mode": "md5"}}, "fingerprint", "crc32"),
        ({"statistics": {"summary_mode": "xor"}}, "fingerprint", "xor"),
        ({"task": "tensor", "tensor": {"summary_mode": "statistics"}}, "fingerprint", "xxh3"),
        ({"statistics": {"list": ["relu", "fc1"]}}, "contains", ("relu", "fc1")),
        ({"task": "tensor", "tensor": {"list": ["relu"]}}, "contains", ("relu",)),
        ({"task": "overflow_check", "overflow_check": {"list": ["relu"]}}, "contains", ("relu",)),
        ({"task": "statistics", "tensor": {"list": ["relu"]}}, "contains", ()),
        (
            {"statistics": {"scope": ["Torch.a.0.forward", "Torch.b.1.backward"]}},
            "scope",
            ("Torch.a.0.forward", "Torch.b.1.backward"),
        ),
        (
            {
                "level": "mix",
                "statistics": {"scope": ["Module.a.Linear.forward.0", "Torch.b.1.forward"]},
            },
            "scope",
            ("Module.a.Linear.forward.0", "Torch.b.1.forward"),
        ),
        ({"statistics": {"data_mode": ["all"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["forward"]}}, "phase", "forward"),
        ({"statistics": {"data_mode": ["forward"]}}, "part", "both"),
        ({"statistics": {"data_mode": ["backward", "input"]}}, "phase", "backward"),
        ({"statistics": {"data_mode": ["backward", "input"]}}, "part", "input"),
        ({"statistics": {"data_mode": ["output"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["forward", "backward"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["input", "output", "forward"]}}, "part", "both"),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 1, "begin": 0, "end": 4}]}},
            "slice",
            ":,0:4",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"begin": 2}, {"dim": 2, "end": -1}]}},
            "slice",
            "2:,:,0:-1",
        ),
        ({"task": "tensor", "tensor": {"slice": []}}, "slice", None),
    ],
)
def test_each_field_becomes_its_option(tmp_path, values, option, value):
    found = getattr(_options(tmp_path, values), option)
    assert (str(found) if option in ("tokens", "ranks") else found) == value


def test_level_debug_records_saves_only(tmp_path):
    assert read_config(_file(tmp_path, {"level": "debug"})).saves_only


def test_arguments_go_before_the_file(tmp_path):
    path = _file(
        tmp_path, {"task": "statistics", "level": "mix", "dump_path": "there", "step": [1]}
    )
    options = msprobe.PrecisionDebugger(str(path), "tensor", "here", "L0", None, [2]).options
    assert (options.stats_only, options.mode, options.path, str(options.tokens)) == (
        False,
        ("module",),
        "here",
        "2",
    )
    assert options.name == "debugger"


def test_a_file_configures_a_whole_recording(tmp_path):
    values = {
        "task": "tensor",
        "level": "L0",
        "step": [1],
        "dump_path": str(tmp_path / "out"),
        "tensor": {"data_mode": ["forward", "output"]},
    }
    model, debugger = mlp(), msprobe.PrecisionDebugger(_file(tmp_path, values))
    train(debugger, model, 3)
    frame = ld.open_run(tmp_path / "out").to_pandas()
    assert (set(frame.step), set(frame.role), set(frame.phase)) == ({1}, {"output"}, {"forward"})


def test_list_and_scope_select_calls(tmp_path):
    model = mlp()
    listed = msprobe.PrecisionDebugger(
        _file(tmp_path, {"task": "tensor", "level": "L0", "tensor": {"list": ["ReLU"]}})
    )
    train(listed, model, 1)
    assert set(listed.close().to_pandas().path) == {"1"}
    scope = ["Module.1.ReLU.forward.0", "Module.2.Linear.forward.0"]
    scoped = msprobe.PrecisionDebugger(
        _file(tmp_path, {"task": "tensor", "level": "L0", "tensor": {"scope": scope}})
    )
    train(scoped, model, 1)
    frame = scoped.close().to_pandas()
    assert set(frame[frame.phase == "forward"].path) == {"1", "2"}


# -- config.json: what has no effect, and what is refused --------------------------------------------


@pytest.mark.parametrize("name", _IDLE)
def test_fields_without_effect_are_taken_and_checked(tmp_path, name):
    for value in (*_IDLE[name], None):
        values = (
            {"task": "tensor", "tensor": {name: value}}
            if name in _SECTIONS["tensor"]
            else {name: value}
        )
        assert _options(tmp_path, values)
    values = (
        {"task": "tensor", "tensor": {name: "odd"}}
        if name in _SECTIONS["tensor"]
        else {name: "odd"}
    )
    assert f"{name} 'odd': expected" in _refusal(tmp_path, values)


@pytest.mark.parametrize("name", _INSTEAD)
def test_fields_that_are_not_supported_are_refused_with_what_to_do(tmp_path, name):
    home = next((task for task in _SECTIONS if name in _SECTIONS[task]), None)
    empty, full = (
        ({name: []}, {name: ["x"]})
        if home is None
        else ({"task": home, home: {name: None}}, {"task": home, home: {name: ["x"]}})
    )
    assert _options(tmp_path, empty)
    message = _refusal(tmp_path, full)
    assert f"{name} is not supported: " in message
    assert message.endswith(_INSTEAD[name])


@pytest.mark.parametrize("task", _OTHER_TASKS)
def test_tasks_that_are_not_supported_are_refused_with_what_to_do(tmp_path, task):
    assert _refusal(tmp_path, {"task": task}).endswith(_OTHER_TASKS[task])
    with pytest.raises(ld.errors.OptionError, match=f"^task '{task}' is not supported"):
        msprobe.PrecisionDebugger(task=task)
    assert _options(tmp_path, {task: {"anything": 1}})  # a section of a task that was not chosen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # unknown
        ({"taks": "tensor"}, "taks: no such field; nearest: task"),
        ({"statistics": {"lits": []}}, "statistics.lits: no such field; nearest: list"),
        ({"task": "tensor", "tensor": {"overflow_nums": 1}}, "tensor.overflow_nums: no such field"),
        ({"task": "tensr"}, "task 'tensr' is not known; nearest: tensor"),
        ({"level": "L3"}, "level 'L3' is not known; nearest: L1"),
        ({"level": "l1"}, "level 'l1' is not known"),
        (
            {"statistics": {"summary_mode": "sha"}},
            "statistics.summary_mode 'sha' is not known; nearest: ",
        ),
        (
            {"statistics": {"data_mode": ["forwards"]}},
            "statistics.data_mode 'forwards' is not known; nearest: forward",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dims": 1}]}},
            "tensor.slice.dims: no such field; nearest: dim",
        ),
        # not supported
        (
            {"level": "L2"},
            "level 'L2' is not supported: kernels of the device are not seen; use level L1",
        ),
        ({"risk_level": "CORE"}, "risk_level 'CORE' is not supported"),
        ({"risk_level": "FOCUS"}, "risk_level 'FOCUS' is not supported"),
        (
            {"statistics": {"list": ["name-regex(a.*)"]}},
            "statistics.list: name-regex(…) is not supported",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"check_mode": "aicore"}},
            "check_mode 'aicore' is not supported: use all",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 0, "size": 8, "end": 2}]}},
            "tensor.slice.size is not supported",
        ),
        # wrong types
        ({"task": 3}, "task 3: expected one of"),
        ({"level": ["L1"]}, "level ['L1']: expected one of L0, L1, mix, debug"),
        ({"dump_path": 3}, "dump_path 3: expected a path"),
        ({"dump_path": ""}, "dump_path '': expected a path"),
        ({"dump_path": "a\0b"}, "expected a path"),
        ({"dump_path": "a\ud800b"}, "expected a path"),
        ({"rank": "all"}, "rank 'all': expected a list of numbers and ranges"),
        ({"rank": [-1]}, "rank [-1]: expected a list of numbers and ranges"),
        ({"step": [1.5]}, "step [1.5]: expected a list"),
        ({"step": [True]}, "step [True]: expected a list"),
        ({"step": ["a-b"]}, "step ['a-b']: expected a list"),
        ({"step": ["4-"]}, "step ['4-']: expected a list"),
        ({"step": {"from": 1}}, "expected a list"),
        ({"step": ["6-4"]}, "runs backwards; write 4-6"),
        ({"dump_enable": "yes"}, "dump_enable 'yes': expected true or false"),
        ({"extra_info": 1}, "extra_info 1: expected true or false"),
        ({"statistics": []}, "statistics []: expected an object"),
        ({"grad_probe": 3}, "grad_probe 3: expected an object"),
        ({"statistics": {"scope": "x"}}, "statistics.scope 'x': expected a list of texts"),
        ({"statistics": {"list": [1]}}, "statistics.list [1]: expected a list of texts"),
        ({"statistics": {"list": [""]}}, "statistics.list ['']: expected a list of texts"),
        (
            {"statistics": {"data_mode": "all"}},
            "statistics.data_mode 'all': expected a list of texts",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": 0}},
            "overflow_nums 0: expected how many calls",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": True}},
            "overflow_nums True: expected how many calls",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": "1"}},
            "overflow_nums '1': expected how many calls",
        ),
        (
            {"task": "tensor", "tensor": {"slice": {"dim": 0}}},
            "tensor.slice {'dim': 0}: expected a list",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": -1}]}},
            "tensor.slice.dim -1: expected a dimension",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 10**8}]}},
            "expected a dimension from 0 to 63",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"begin": "0"}]}},
            "tensor.slice.begin '0': expected a whole number",
        ),
        # contradictions
        ({"statistics": {"data_mode": ["all", "input"]}}, "all can't be combined with others"),
        ({"statistics": {"scope": ["Torch.a.0.forward"]}}, "expected two full names"),
        (
            {"statistics": {"scope": ["Module.a.Linear.forward.0"] * 2}},
            "level L1 records operators",
        ),
        (
            {"level": "L0", "statistics": {"scope": ["Torch.a.0.forward"] * 2}},
            "level L0 records modules",
        ),
        (
            {"task": "tensor", "tensor": {"summary_mode": "md5"}},
            "summary_mode 'md5' (which is CRC-32 of the bytes) goes with task statistics, not with task tensor",
        ),
        (
            {"statistics": {"slice": [{"dim": 0, "end": 1}]}},
            "slice goes with task tensor, not with task statistics",
        ),
        (
            {"task": "overflow_check", "level": "debug"},
            "task overflow_check and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"scope": ["a", "b"]}},
            "statistics.scope and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"list": ["a"]}},
            "statistics.list and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"data_mode": ["input"]}},
            "statistics.data_mode and level debug exclude each other",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 0, "begin": 2, "end": 2}]}},
            "from 2 to 2 there is nothing",
        ),
        ({"task": "tensor", "tensor": {"slice": [{"dim": 0}, {"dim": 0}]}}, "each one once"),
    ],
)
def test_what_makes_no_sense_in_a_file_is_named(tmp_path, values, message):
    assert message in _refusal(tmp_path, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"task": "tensor",}', "expected a JSON object"),
        ("[]", "it holds a list"),
        ("3", "it holds a int"),
        ('{"task": "tensor", "task": "statistics"}', "'task' is there twice"),
        ('{"tensor": {"list": [], "list": ["a"]}}', "'list' is there twice"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"step": [' + "9" * 5000 + "]}", "expected a"),
        ('{"a\\nb": 1}', "no such field"),
        ('{"\\ud800": 1}', "no such field"),
        ('{"' + "x" * 10_000 + '": 1}', "no such field"),
        ('{"level": "' + "x" * 10_000 + '"}', "is not known"),
        (" " * (1 << 21), "larger than 1 MiB"),
    ],
    ids=range(14),
)
def test_hostile_files_are_refused_in_one_readable_line(tmp_path, text, message):
    said = _refusal(tmp_path, text)
    assert message in said
    said.encode()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["tensor", "debug", "1-2", "all"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dim", "begin", "end", "x"]) | st.text(), inner)
    ),
    max_leaves=8,
)
_FIELDS = sorted({*_COMMON, *_SECTIONS})
_IN_SECTIONS = sorted({name for section in _SECTIONS.values() for name in section})


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_FIELDS),
        _JSON | st.dictionaries(st.sampled_from(_IN_SECTIONS), _JSON),
        max_size=3,
    ),
    st.sampled_from([None, "statistics", "tensor", "overflow_check"]),
)
def test_whatever_a_file_says_is_taken_or_refused_in_one_line(tmp_path_factory, values, task):
    path = _file(tmp_path_factory.getbasetemp(), values, "fuzzed.json")
    try:
        read_config(path, task=task)
    except ld.errors.OptionError as error:
        said = str(error)
        assert said.isprintable(), said


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ld.errors.OptionError, match=r"nowhere\.json: there is no such file"):
        read_config(tmp_path / "nowhere.json")
    with pytest.raises(ld.errors.OptionError, match="there is no such file"):
        read_config(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ld.errors.OptionError, match=r"binary\.json"):
        read_config(tmp_path / "binary.json")
    for odd in (3, ["config.json"], b"config.json"):
        with pytest.raises(ld.errors.OptionError, match="config_path"):
            msprobe.PrecisionDebugger(odd)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ld.errors.OptionError, match="there is no such file"):
        read_config(tmp_path / "pipe.json")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"level": "L0"}).encode())
    assert read_config(path).options.mode == ("module",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "tensr"}, "^task 'tensr' is not known; nearest: tensor"),
        ({"task": 3}, "^task 3"),
        ({"level": "L2"}, "^level 'L2' is not supported"),
        ({"level": "L9"}, "^level 'L9' is not known"),
        ({"step": "x"}, "^step 'x'"),
        ({"step": [-1]}, r"^step \[-1\]"),
        ({"dump_path": 3}, "path 3"),
        ({"name": "../x"}, "name '../x'"),
        ({"task": "overflow_check", "level": "debug"}, "exclude each other"),
    ],
)
def test_arguments_that_make_no_sense_are_named(given, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        msprobe.PrecisionDebugger(**given)


def test_every_field_and_every_parameter_has_its_place_in_the_documentation():
    text = (Path(__file__).parent.parent / "docs" / "precision_debugger.md").read_text()
    parameters = inspect.signature(msit.DumpConfig).parameters.keys() - {"name"}
    fields = {
        *_COMMON,
        *_IDLE,
        *_INSTEAD,
        *_SECTIONS,
        *_OTHER_TASKS,
        *(name for section in _SECTIONS.values() for name in section),
    }
    assert [name for name in sorted(fields | parameters) if f"`{name}`" not in text] == []


# -- dump_enable ------------------------------------------------------------------------------------


def _change(path, values):
    """Write a config file so that its time of change differs."""
    before = path.stat().st_mtime_ns
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_dump_enable_switches_recording_on_and_off_while_the_loop_runs(tmp_path):
    values = {
        "task": "tensor",
        "level": "L0",
        "dump_path": str(tmp_path / "out"),
        "dump_enable": False,
    }
    path = _file(tmp_path, values)
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    for number in range(6):
        if number in (2, 4):
            _change(path, {**values, "dump_enable": number == 2})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(debugger, model, 1)
    assert sorted(set(debugger.close().to_pandas().step)) == [2, 3]


def test_dump_enable_that_stays_off_records_nothing_and_says_so(tmp_path):
    path = _file(
        tmp_path, {"level": "L0", "dump_path": str(tmp_path / "out"), "dump_enable": False}
    )
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    with pytest.warns(UserWarning, match="nothing is recorded: dump_enable is false") as said:
        train(debugger, model, 2)
    assert len(said) == 1
    assert debugger.close() is None
    assert not (tmp_path / "out").exists()


def test_a_file_that_breaks_while_the_loop_runs_changes_nothing_but_is_said(tmp_path):
    values = {
        "task": "tensor",
        "level": "L0",
        "dump_path": str(tmp_path / "out"),
        "dump_enable": True,
    }
    path = _file(tmp_path, values)
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    train(debugger, model, 1)
    _change(path, "{")
    with pytest.warns(UserWarning, match=r"config\.json.*recording stays on"):
        train(debugger, model, 1)
    path.unlink()
    with pytest.warns(UserWarning, match="no such file; .*recording stays on"):
        train(debugger, model, 1)
    assert sorted(set(debugger.close().to_pandas().step)) == [0, 1, 2]


def test_only_dump_enable_is_read_again(tmp_path):
    values = {
        "task": "tensor",
        "level": "L0",
        "dump_path": str(tmp_path / "out"),
        "dump_enable": True,
    }
    path = _file(tmp_path, values)
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    train(debugger, model, 1)
    _change(path, {**values, "level": "L1", "step": [0]})
    with pytest.warns(UserWarning, match="only dump_enable is read again, not level, step"):
        train(debugger, model, 2)
    assert sorted(set(debugger.close().to_pandas().step)) == [0, 1, 2]


def test_a_file_without_dump_enable_is_read_once(tmp_path):
    path = _file(tmp_path, {"task": "tensor", "level": "L0", "dump_path": str(tmp_path / "out")})
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    train(debugger, model, 1)
    _change(path, {"dump_enable": False})
    train(debugger, model, 1)
    assert debugger.close().info()["steps"] == 2
