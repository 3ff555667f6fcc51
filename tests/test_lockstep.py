"""Lockstep: the report of two dumps without dumps, in bounded memory, to the end or not."""

from __future__ import annotations

import _thread
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.app.lockstep.window import Held, Place, Window
from llmdebug_nb.core.errors import CaptureError, OptionError, TensorLookupError
from lockstep_pairs import (
    ALL,
    BUGS,
    DOWN,
    IDS,
    INPUTS,
    MODULES,
    SECRET,
    dumped,
    hooks,
    nothing_is_left,  # noqa: F401
    told,
    two,
)
from recordings import scaled

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from ports.sets import PORTS
from zoo.entry import Case
from zoo.sets import SETS

ZOO = {entry.number: entry for entry in SETS["zoo"]}


# -- as from dumps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "window", "options"),
    [("13", "1MB", ALL), ("8", "1GiB", MODULES), ("C5", "1MB", MODULES)],
)
def test_the_report_on_a_case_of_the_zoo_is_that_of_dumps(
    number: str, window: str, options: dict[str, Any]
) -> None:
    entry = ZOO[number]
    case = Case(entry, entry.on[0], "fp32" if "fp32" in entry.precisions else "bf16", 0)
    golden, (mine, _) = case.golden(), case.mine()

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    expected = told(dumped(golden.model, mine.model, work, **options))
    report = ld.lockstep(golden.model, mine.model, work, window=window, progress=False, **options)
    assert told(report) == expected
    assert report.lockstep.unsteady == 0


@pytest.mark.parametrize("bug", [None, "k_heads"])
def test_the_report_on_a_port_is_that_of_dumps(bug: str | None) -> None:
    port = PORTS["attention"]
    golden = port.golden()
    mine = port.mine(golden, bug and port.bug(bug))

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    expected = told(dumped(golden.model, mine.model, work, **MODULES))
    report = ld.lockstep(golden.model, mine.model, work, progress=False, **MODULES)
    assert told(report) == expected
    assert (report.verdict == "diverged") == (bug is not None)


def test_generated_tokens_are_compared() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> object:
        return model.generate(IDS, max_new_tokens=3, do_sample=False)

    report = ld.lockstep(golden, mine, work, progress=False)
    assert told(report) == told(dumped(golden, mine, work))
    assert len(report.golden.steps()) == 3


def test_gradients_are_compared() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> None:
        model(input_ids=IDS, labels=IDS).loss.backward()

    options = {"mode": "module", "phase": "both"}
    report = ld.lockstep(golden, mine, work, progress=False, **options)
    assert any(d.site.phase == "backward" for d in report.differences)
    assert all(p.grad is None for p in mine.parameters())
    assert told(report) == told(dumped(golden, mine, work, **options))


def test_other_lengths_are_told_as_from_dumps() -> None:
    golden, mine = two()

    def work(model: Any) -> object:
        return model(input_ids=IDS if model is golden else IDS[:, :5])

    report = ld.lockstep(golden, mine, work, progress=False)
    assert told(report) == told(dumped(golden, mine, work))


# -- memory ----------------------------------------------------------------------------------------


def test_values_beyond_the_window_are_made_again() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=8)
    whole = ld.lockstep(golden, mine, INPUTS, progress=False)
    small = ld.lockstep(golden, mine, INPUTS, window=30_000, progress=False)
    assert told(small) == told(whole)
    assert whole.lockstep.ran == (1, 1)
    assert sum(whole.lockstep.whole) > 4 * 30_000
    largest = max(m.summary.numel for m in small.mine.records()) * 4
    assert small.lockstep.most <= 30_000 + 3 * largest < sum(small.lockstep.whole)
    assert small.lockstep.ran > (1, 1)
    assert "at most" in str(small)


def test_a_value_larger_than_the_window_is_held_alone() -> None:
    window = Window(80)
    window.hold(Place(0, 0), Held(bytes(40), None))
    window.hold(Place(0, 40), Held(bytes(100), None))
    assert window.get(Place(0, 0)) is None
    assert window.get(Place(0, 40)) == Held(bytes(100), None)
    window.hold(Place(1, 0), Held(bytes(8), None))
    assert window.get(Place(0, 40)) is None
    assert window.most == 140  # of which 40 are forgotten at once


def test_values_are_there_after_the_comparison() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    before = mine(**INPUTS).logits.detach()
    report = ld.lockstep(golden, mine, INPUTS, window=20_000, progress=False)
    for run, model in ((report.golden, golden), (report.mine, mine)):
        tensor = run.tensor("lm_head")
        assert torch.equal(tensor, model(**INPUTS).logits)
        assert torch.equal(run.tensor("model.embed_tokens"), model.model.embed_tokens(IDS))
        assert not any(hooks(golden))
    assert torch.equal(mine(**INPUTS).logits, before)


def test_a_program_that_changes_its_weights_is_not_run_again() -> None:
    golden, mine = two(num_hidden_layers=8)

    def work(model: Any) -> None:
        model(input_ids=IDS)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)

    report = ld.lockstep(golden, mine, work, window=20_000, progress=False)
    with pytest.raises(TensorLookupError, match="changes its weights"):
        report.mine.tensor("model.embed_tokens")


def test_a_program_that_does_not_repeat_itself_is_told() -> None:
    golden, mine = two(num_hidden_layers=8)
    calls: list[int] = []

    def work(model: Any) -> None:
        calls.append(1)
        model(input_ids=IDS.roll(len(calls)))

    report = ld.lockstep(golden, mine, work, window=20_000, progress=False)
    with pytest.raises(TensorLookupError, match="does not repeat itself"):
        report.mine.tensor("model.embed_tokens")


def test_memory_that_nothing_was_written_to_does_not_move_other_values() -> None:
    golden, mine = two(num_hidden_layers=8)
    seen: list[int] = []

    def blank(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(1)  # now as the tensor before it, now as none before
        junk = output.clone() if len(seen) % 2 else torch.full_like(output, float(len(seen)))
        torch.mul(junk, 1.0)
        return output

    mine.model.embed_tokens.register_forward_hook(blank)
    report = ld.lockstep(golden, mine, INPUTS, window=60_000, progress=False, **ALL)
    assert torch.equal(report.mine.tensor("model.norm"), report.golden.tensor("model.norm"))
    assert report.lockstep.unsteady <= 2
    assert len(seen) > 1


def test_random_numbers_are_the_same_in_each_run_and_left_alone() -> None:
    golden, mine = two(scaled(DOWN, 1.1), attention_dropout=0.3, num_hidden_layers=4)
    for model in (golden, mine):
        model.train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    report = ld.lockstep(golden, mine, INPUTS, window=30_000, progress=False)
    assert torch.equal(torch.rand(4), expected)
    assert report.lockstep.ran > (1, 1)
    assert report.lockstep.unsteady == 0
    assert report.findings[0].path.startswith(DOWN)


# -- bad input -------------------------------------------------------------------------------------


def test_an_exception_of_one_program_ends_both() -> None:
    golden, mine = two()
    mine.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    before = hooks(golden, mine)
    with pytest.raises(CaptureError, match="mine failed: ZeroDivisionError"):
        ld.lockstep(golden, mine, INPUTS, progress=False)
    assert hooks(golden, mine) == before


def test_an_interrupt_ends_both() -> None:
    golden, mine = two()

    def interrupted(*_: object) -> None:
        _thread.interrupt_main()
        time.sleep(0.5)  # an interrupt is raised while the main thread waits for this one

    mine.model.layers[1].register_forward_pre_hook(interrupted)
    before = hooks(golden, mine)
    with pytest.raises(KeyboardInterrupt):
        ld.lockstep(golden, mine, INPUTS, progress=False)
    assert hooks(golden, mine) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": "last"}, "expected 'first'"),
        ({"stop": "first", "graft": True}, "goes on with nothing"),
        ({"window": "much"}, "number of bytes"),
        ({"name": "x"}, "writes no dump"),
        ({"inputs": 3}, "inputs: expected"),
        ({"mine": 3}, "torch.nn.Module"),
        ({"golden": "golden"}, "golden: .*got .golden.; ld.compare"),
        ({"mine": "localhost:3", "secret": SECRET}, "tcp://host:port"),
        ({"mine": "tcp://127.0.0.1:1"}, "at least 8 characters"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    golden, mine = two()
    given = {"golden": golden, "mine": mine, "inputs": INPUTS, "progress": False, **arguments}
    with pytest.raises(OptionError, match=message):
        ld.lockstep(**given)


def test_two_models_with_a_module_in_common_are_refused() -> None:
    golden, mine = two()
    mine.lm_head = golden.lm_head
    with pytest.raises(OptionError, match="share the module lm_head"):
        ld.lockstep(golden, mine, INPUTS)


def test_a_running_recording_is_left_alone() -> None:
    golden, mine = two()
    with ld.dump(golden, name="r"):
        golden(**INPUTS)
        with pytest.raises(CaptureError, match="a recording is running"):
            ld.lockstep(golden, mine, INPUTS)
