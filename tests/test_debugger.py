"""PrecisionDebugger: loops of training steps, arguments, and calls in the wrong place."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from debugger_loops import batch, config_file, mlp, train
from llmdebug_nb import msprobe
from models import generate, hooks_left, llama


def modules(**given):
    return msprobe.PrecisionDebugger(**{"task": "tensor", "level": "L0", **given})


@pytest.fixture(autouse=True)
def _no_hook_stays_and_nothing_warns_unless_a_test_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- loops ----------------------------------------------------------------------------------------


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


# -- save -----------------------------------------------------------------------------------------


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


# -- calls in the wrong place ---------------------------------------------------------------------


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
        "import torch\nfrom llmdebug_nb import msprobe\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(task='tensor', level='L0', "
        f"dump_path={str(tmp_path)!r})\n"
        "debugger.start(model); model(torch.ones(1, 3)); debugger.stop(); debugger.step()\n"
        "debugger.start(model); model(torch.ones(1, 3))\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8")
    assert message in done.stderr
    assert "llmdebug" not in done.stderr
    run = ld.open_run(tmp_path)
    assert run.info()["complete"]
    assert run.tensor("0", step=1).shape == (1, 3)


def test_a_killed_process_keeps_what_was_recorded(tmp_path):
    script = (
        "import os, signal, torch\nfrom llmdebug_nb import msprobe\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(task='tensor', level='L0', "
        f"dump_path={str(tmp_path)!r})\n"
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
        "import torch\nfrom llmdebug_nb import msprobe\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"debugger = msprobe.PrecisionDebugger(level='L0', step=[5], dump_path={str(tmp_path)!r})\n"
        + lines
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True
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


# -- arguments ------------------------------------------------------------------------------------


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
    config = config_file(
        tmp_path, {"rank": ["1-2"], "level": "L0", "dump_path": str(tmp_path / "runs")}
    )
    model, debugger = mlp(), msprobe.PrecisionDebugger(config)
    with pytest.warns(
        UserWarning, match="this process is rank 0, and only rank 1-2 is recorded"
    ) as said:
        train(debugger, model, 3)
    assert len(said) == 1
    assert debugger.close() is None
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RANK", "2")
    train(there := msprobe.PrecisionDebugger(config), model, 1)
    assert len(there.close())


def test_a_rank_given_to_start_is_the_rank_of_the_process(tmp_path):
    config = config_file(
        tmp_path, {"rank": [3], "level": "L0", "dump_path": str(tmp_path / "runs")}
    )
    model, debugger = mlp(), msprobe.PrecisionDebugger(config)
    with debugger.start(model, rank_id=3):
        model(batch())
    debugger.step()
    assert set(debugger.close().to_pandas()["rank"]) == {3}


# -- dump_enable ----------------------------------------------------------------------------------


def _change(path, values):
    """Write a config file so that its time of change differs."""
    before = path.stat().st_mtime_ns
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    os.utime(path, ns=(before + 10**9, before + 10**9))


def _switched(folder, on):
    """Return a config file with ``dump_enable``, its values, a model, and the file's debugger."""
    values = {"task": "tensor", "level": "L0", "dump_path": str(folder / "out"), "dump_enable": on}
    path = config_file(folder, values)
    return path, values, mlp(), msprobe.PrecisionDebugger(path)


def test_dump_enable_switches_recording_on_and_off_while_the_loop_runs(tmp_path):
    path, values, model, debugger = _switched(tmp_path, False)
    for number in range(6):
        if number in (2, 4):
            _change(path, {**values, "dump_enable": number == 2})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(debugger, model, 1)
    assert sorted(set(debugger.close().to_pandas().step)) == [2, 3]


def test_dump_enable_that_stays_off_records_nothing_and_says_so(tmp_path):
    path = config_file(
        tmp_path, {"level": "L0", "dump_path": str(tmp_path / "out"), "dump_enable": False}
    )
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    with pytest.warns(UserWarning, match="nothing is recorded: dump_enable is false") as said:
        train(debugger, model, 2)
    assert len(said) == 1
    assert debugger.close() is None
    assert not (tmp_path / "out").exists()


def test_a_file_that_breaks_while_the_loop_runs_changes_nothing_but_is_said(tmp_path):
    path, _, model, debugger = _switched(tmp_path, True)
    train(debugger, model, 1)
    _change(path, "{")
    with pytest.warns(UserWarning, match=r"config\.json.*recording stays on"):
        train(debugger, model, 1)
    path.unlink()
    with pytest.warns(UserWarning, match="no such file; .*recording stays on"):
        train(debugger, model, 1)
    assert sorted(set(debugger.close().to_pandas().step)) == [0, 1, 2]


def test_only_dump_enable_is_read_again(tmp_path):
    path, values, model, debugger = _switched(tmp_path, True)
    train(debugger, model, 1)
    _change(path, {**values, "level": "L1", "step": [0]})
    with pytest.warns(UserWarning, match="only dump_enable is read again, not level, step"):
        train(debugger, model, 2)
    assert sorted(set(debugger.close().to_pandas().step)) == [0, 1, 2]


def test_a_file_without_dump_enable_is_read_once(tmp_path):
    path = config_file(
        tmp_path, {"task": "tensor", "level": "L0", "dump_path": str(tmp_path / "out")}
    )
    model, debugger = mlp(), msprobe.PrecisionDebugger(path)
    train(debugger, model, 1)
    _change(path, {"dump_enable": False})
    train(debugger, model, 1)
    assert debugger.close().info()["steps"] == 2
