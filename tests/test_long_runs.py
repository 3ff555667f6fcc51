"""Long runs: each N-th step, and the last N steps until something goes wrong."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.alarms import Alarms
from llmdebug_nb.core.errors import CaptureError, CorruptDumpError, OptionError
from llmdebug_nb.core.moments import Moment, Signal
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.store.payload_files import payload_files
from llmdebug_nb.store.signals import SIGNALS, Signals


def steps(run: ld.Run) -> list[int]:
    return [call.step for call in run.steps()]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


def unspoilt(step: int, x: torch.Tensor) -> None: ...


def train(
    net: nn.Module, count: int, spoil: Callable[[int, torch.Tensor], object] = unspoilt
) -> None:
    """Train for some steps; ``spoil(step, x)`` may change the input."""
    drawn = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(count):
        x = torch.randn(4, 6, generator=drawn)
        spoil(step, x)
        loss = ((net(x) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()


def nan_at(*at: int) -> Callable[[int, torch.Tensor], object]:
    return lambda step, x: x[0].fill_(math.nan) if step in at else None


def test_every_tenth_step_is_recorded_and_all_steps_are_meant():
    net = model()
    with ld.dump(net, name="tenth", every=10) as run:
        train(net, 35)
    assert steps(run) == [0, 10, 20, 30]
    with ld.dump(net, name="some", every=10, tokens="5-25") as run:
        train(net, 35)
    assert steps(run) == [10, 20]
    with ld.dump(net, name="first", every=2, tokens="0-3") as run:
        train(net, 9)
    assert steps(run) == [0, 2]


def test_a_launched_program_records_every_third_step_of_all(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(2, 2)\nfor _ in range(8): m(torch.ones(2))\n"
    )
    command = [
        sys.executable,
        "-m",
        "llmdebug_nb.cli",
        "dump",
        "--every",
        "3",
        "--",
        sys.executable,
    ]
    subprocess.run([*command, str(script)], check=True, cwd=tmp_path, capture_output=True)
    assert steps(ld.open_run("run")) == [0, 3, 6]


def test_only_the_last_steps_are_kept_with_the_values_that_they_have_in_a_whole_recording():
    net, same = model(), model()
    with ld.dump(net, name="whole", tokens="all") as whole:
        train(net, 20)
    with ld.dump(same, name="last", last=4) as run:
        train(same, 20)
    assert steps(run) == [16, 17, 18, 19]
    expected = [one for one in whole.records() if one.site.step >= 16]
    found = list(run.records())
    assert [one.site for one in found] == [one.site for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.summary == other.summary
        assert torch.equal(run.load(one), whole.load(other))
    assert run.meta["notes"] == ["of 20 steps, the last 4 are kept"]
    assert run.info()["bytes"] < whole.info()["bytes"] / 4
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters(), strict=True))


class Waits(torch.nn.Module):
    """One call of it waits in the middle until others have ended."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x, waits=False):
        x = self.inner(x)
        if waits:
            self.entered.set()
            assert self.go_on.wait(30)
        return self.inner(x + 1)


@pytest.mark.parametrize("stats_only", [False, True])
def test_a_step_stays_while_a_call_of_it_runs_in_another_thread(stats_only):
    model = Waits()
    with ld.dump(model, name="r", tokens="all", last=1, stats_only=stats_only) as run:
        thread = threading.Thread(target=model, args=(torch.full((3,), 7.0), True))
        model(torch.zeros(3))
        thread.start()
        assert model.entered.wait(30)
        for step in range(4):
            model(torch.full((3,), float(step)))
        model.go_on.set()
        thread.join()
        model(torch.full((3,), 20.0))
    held = {record.summary.max for record in run.records() if record.site.role == "output"}
    assert held == {20.0, 21.0}  # the last step, and nothing of the others
    assert len([*run.records()]) == 6
    assert run.meta["problems"] == run.meta["lost"] == {}


@pytest.mark.parametrize("stats_only", [False, True])
def test_the_late_backward_pass_of_a_step_that_is_gone_leaves_with_it(stats_only):
    net = model()
    with ld.dump(net, name="r", tokens="all", phase="both", last=2, stats_only=stats_only) as run:
        losses = [net(torch.full((2, 6), float(step))).sum() for step in range(5)]
        for loss in losses:
            loss.backward()
    found = {(record.site.step, record.site.phase) for record in run.records()}
    assert found == {(3, "forward"), (4, "forward"), (3, "backward"), (4, "backward")}
    assert run.meta["problems"] == run.meta["lost"] == {}


def test_a_call_that_raises_holds_no_step_of_the_last_ones():
    net = model()
    with ld.dump(net, name="r", tokens="all", last=1) as run:
        with pytest.raises(RuntimeError):
            net(torch.zeros(1, 3))
        for _ in range(3):
            net(torch.zeros(1, 6))
    assert {record.site.step for record in run.records()} == {3}


def test_weights_that_are_recorded_once_outlive_their_step():
    net = model()
    first = net[0].weight.detach().clone()
    with ld.dump(net, name="once", last=2, weights=True) as run:
        train(net, 10)
    weights = [one for one in run.records() if one.site.role == "weight"]
    assert len(weights) == 4
    (one,) = (w for w in weights if w.site.path == "0" and w.site.slot == "weight")
    assert torch.equal(run.load(one), first)


def test_a_nan_keeps_the_steps_before_it_and_the_rest_goes(capsys):
    net = model()
    with ld.dump(net, name="nan", last=3, alarm="nan", phase="forward") as run:
        train(net, 20, nan_at(9))
    assert steps(run) == [6, 7, 8, 9, 10, 17, 18, 19]  # the loss of step 9 is seen in step 10
    first, second = run.alarms()
    assert (first.step, first.first) == (9, 6)
    assert first.reason.startswith("NaN in the model input[0]")
    assert second.reason == "the loss is nan"
    assert "the steps from 6 on are kept" in capsys.readouterr().err
    assert "3 are kept" not in run.meta["notes"][0]
    assert run.meta["notes"] == ["of 20 steps, the last 3 and those before 2 alarms are kept"]


def test_a_nan_that_stays_raises_one_alarm():
    net = model()
    with ld.dump(net, name="stays", last=2, alarm="nan", phase="forward") as run:
        train(net, 20, nan_at(*range(8, 20)))
    assert [alarm.step for alarm in run.alarms()] == [8, 9]


def test_a_mask_of_minus_infinity_raises_no_alarm():
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x > 0, -math.inf)

    net = nn.Sequential(Masked(), nn.Softmax(-1))
    with ld.dump(net, name="mask", last=2, alarm="nan") as run:
        for _ in range(4):
            net(torch.tensor([[1.0, -1.0]]))
    assert run.alarms() == []


def test_a_loss_far_above_those_before_is_a_spike():
    net = model()
    with ld.dump(net, name="spike", last=2, alarm="spike") as run:
        train(net, 60, lambda step, x: x.mul_(100) if step == 40 else None)
    (alarm,) = run.alarms()
    assert (alarm.step, alarm.first) == (41, 39)  # a loss is seen when the next step ends
    assert alarm.reason.startswith("the loss is ")
    assert steps(run) == [39, 40, 41, 58, 59]


@pytest.mark.parametrize("trend", [0.0, -1e-3])
def test_normal_losses_around_a_level_or_a_falling_line_are_no_spikes(trend):
    noise = np.random.default_rng(0).normal(size=5000)
    alarms = Alarms(["spike"], lambda work, *args: work(*args))
    for step, each in enumerate(noise):
        alarms.add_losses([torch.tensor(10 + trend * step + 0.1 * each, dtype=torch.float64)])
    assert alarms.raised(0, 0) == []


@given(st.lists(st.floats(-100, 100), min_size=16, max_size=40))
def test_a_loss_at_or_below_the_median_is_never_a_spike(losses):
    alarms = Alarms(["spike:0.5"], lambda work, *args: work(*args))
    for loss in losses:
        alarms.add_losses([torch.tensor(loss, dtype=torch.float64)])
    alarms.raised(0, 0)
    alarms.add_losses([torch.tensor(float(np.median(losses)), dtype=torch.float64)])
    assert alarms.raised(0, 1) == []


def test_a_constant_loss_that_moves_by_a_rounding_is_no_spike():
    alarms = Alarms(["spike"], lambda work, *args: work(*args))
    for loss in [2.0] * 40 + [2.0 + 2**-7]:  # the next bfloat16 above 2 is 2 + 2**-6
        alarms.add_losses([torch.tensor(loss, dtype=torch.bfloat16)])
    assert alarms.raised(0, 0) == []
    alarms.add_losses([torch.tensor(4.0, dtype=torch.bfloat16)])
    assert len(alarms.raised(0, 1)) == 1


def test_a_condition_of_ones_own_raises_an_alarm_and_one_that_fails_is_reported(capsys):
    def high(moment: Moment) -> object:
        return moment.step == 5 and f"step {moment.step}, loss {moment.loss < 100}"

    def broken(moment: Moment) -> bool:
        raise ZeroDivisionError("no")

    net = model()
    with ld.dump(net, name="own", last=2, alarm=[high, broken]) as run:
        train(net, 9)
    (alarm,) = run.alarms()
    assert alarm.reason == "step 5, loss True"
    assert steps(run) == [3, 4, 5, 7, 8]
    assert run.meta["problems"] == {"ZeroDivisionError while recording: no": 9}
    told = [line for line in capsys.readouterr().err.splitlines() if "fails" in line]
    assert told == ["llmdebug: the alarm broken fails: ZeroDivisionError: no"]  # once


def test_an_alarm_by_hand_keeps_the_steps_and_needs_the_option():
    net = model()
    recording = ld.dump(net, name="hand", last=2)
    with recording as run:
        train(net, 5)
        recording.alarm("validation loss rose")
        train(net, 5)
    (alarm,) = run.alarms()
    assert (alarm.reason, alarm.first, alarm.step) == ("validation loss rose", 3, 5)
    plain = ld.dump(net, name="plain")
    with plain:
        net(torch.ones(1, 6))
        with pytest.raises(CaptureError, match="last=8"):
            plain.alarm("x")


def test_a_killed_program_leaves_its_last_steps(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, torch
        import llmdebug_nb as ld
        net = torch.nn.Linear(64, 64)
        ld.dump(net, name="killed", last=3, alarm="nan").start()
        for step in range(50):
            net(torch.full((4, 64), float(step))).sum().backward()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    run = ld.open_run("killed")
    assert steps(run) == [47, 48, 49]
    first = next(one for one in run.records(step=47) if one.site.role == "input")
    assert run.load(first).unique().tolist() == [47.0]


def test_a_run_can_be_read_while_its_steps_come_and_go():
    net = nn.Linear(32, 32)
    recording = ld.dump(net, name="live", last=2)
    with recording as run:
        for step in range(12):
            net(torch.full((2, 32), float(step)))
            seen = ld.open_run("live")
            assert steps(seen) == list(range(max(0, step - 1), step + 1))
            for one in seen.records():
                if one.site.role == "input":
                    assert seen.load(one).unique().tolist() == [float(one.site.step)]
    assert steps(run) == [10, 11]


def test_the_log_of_the_index_does_not_grow_with_the_steps():
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    recording, sizes = ld.dump(net, name="log", last=2, stats_only=True), []
    with recording as run:
        for step in range(400):
            net(torch.full((1, 2), float(step)))
            if step in (199, 399):
                folder = next(run.path.glob("rank*"))
                sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    assert sizes[1] < 1.5 * sizes[0]


def test_a_payload_file_that_begins_inside_another_is_refused():
    net = model()
    with ld.dump(net, name="inside", last=2) as run:
        train(net, 6)
    folder = next(run.path.glob("rank*"))
    file = payload_files(folder)[-1]
    with contextlib.suppress(FileExistsError):
        os.link(file.path, folder / f"tensors.{file.start + 8}.bin")
    with pytest.raises(CorruptDumpError, match="begins inside"):
        ld.open_run(run.path).info()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alarm": "nan"}, "last=8"),
        ({"alarm": "fire", "last": 2}, "spike:8"),
        ({"alarm": 3, "last": 2}, "spike:8"),
        ({"alarm": "", "last": 2}, "spike:8"),
        ({"alarm": "spike:0", "last": 2}, "spike:8"),
        ({"last": 0}, "1 or more"),
        ({"every": 0}, "1 or more"),
        ({"every": True}, "1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        DumpOptions.of(**options)


def test_the_options_survive_a_launch():
    for given_ in ({"every": 2, "tokens": "0-3"}, {"last": 3}, {"last": 3, "alarm": "nan,spike:9"}):
        options = DumpOptions.of(**given_)
        assert DumpOptions.of(**options.given()) == options


def test_a_copy_of_a_run_keeps_its_steps_and_values(tmp_path: Path):
    net = model()
    with ld.dump(net, name="copied", last=3, alarm="nan", phase="forward") as run:
        train(net, 12, nan_at(5))
    small = ld.reduce_run(run, "minmax")
    assert steps(small) == steps(run)
    assert small.alarms() == run.alarms()


def test_alarms_of_other_processes_are_heard_once_and_junk_is_no_alarm(tmp_path: Path):
    early = Signals(tmp_path, "rank0_1", 0)
    other = Signals(tmp_path, "rank1_2", 1)
    assert early.heard() == []
    other.tell(0, 7)
    early.tell(0, 8)
    assert early.heard() == [Signal("rank1_2", 1, 0, 7)]
    assert other.heard() == [Signal("rank0_1", 0, 0, 8)]
    assert early.heard() == other.heard() == []
    late = Signals(tmp_path, "rank2_3", 2)
    with open(tmp_path / SIGNALS, "ab") as file:
        file.write(b'[1]\n{"sender": 3}\n' + b"[" * 5000 + b'\n{"torn')
    assert late.heard() == []
    with open(tmp_path / SIGNALS, "ab") as file:
        file.write(b'"}\n')
    other.tell(0, 9)
    assert late.heard() == [Signal("rank1_2", 1, 0, 9)]


def test_a_link_in_the_place_of_the_alarms_is_not_followed(tmp_path: Path):
    (tmp_path / "mine").write_text("kept")
    signals = Signals(tmp_path, "rank0_1", 0)
    (tmp_path / SIGNALS).symlink_to(tmp_path / "mine")
    with pytest.raises(CorruptDumpError, match="is a link"):
        signals.tell(0, 1)
    with pytest.raises(CorruptDumpError, match="is a link"):
        signals.heard()
    assert (tmp_path / "mine").read_text() == "kept"
