"""Rounds as msit counts them; when inputs are looked at; which classes and devices are recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.selection import is_device, starts_with_any
from llmdebug_nb.core.msit_rounds import Rounds, round_of
from llmdebug_nb.core.options import DumpOptions
from models import generate, hooks_left, llama, prompt


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.mul_(2) + self.weight


# -- rounds ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), min_size=1, max_size=6)
)
def test_pairs_are_inclusive_ranges_and_come_back_from_their_text(pairs):
    rounds = Rounds.parse(",".join(f"{low},{high}" for low, high in pairs))
    wanted = {number for low, high in pairs for number in range(low, high + 1)}
    assert {number for number in range(70) if number in rounds} == wanted
    assert Rounds.parse(str(rounds)) == rounds
    assert rounds.last == max(wanted) + 1


def test_nothing_is_round_0_and_all_has_no_end():
    assert str(Rounds.parse("")) == "0,0"
    assert 10**6 in Rounds.parse("all")
    assert Rounds.parse("all").last is None


@pytest.mark.parametrize(
    "text", ["1", "1,2,3", "2,1", "a,b", "0-3", "-1,0", "1,", "1,1," * 130 + "1,1"]
)
def test_invalid_pairs_are_refused(text):
    with pytest.raises(ld.errors.OptionError, match="pair"):
        DumpOptions(rounds=text)


def test_rounds_and_tokens_exclude_each_other():
    with pytest.raises(ld.errors.OptionError, match="rounds and tokens exclude each other"):
        DumpOptions(rounds="0,0", tokens="5")


@pytest.mark.parametrize(
    ("warmed", "tokens"), [(False, [[0, 1], [2], [3]]), (True, [[], [0, 1], [2], [3]])]
)
def test_tokens_of_each_round_as_msit_counts_them(warmed, tokens):
    kinds = ["prefill", "decode", "decode", "decode"]
    found = [[] for _ in tokens]
    for step, kind in enumerate(kinds):
        found[round_of(step, kind, False, warmed)].append(step)
    assert found == tokens
    assert round_of(2, "decode", True, warmed) == 0  # the warm-up itself


@pytest.mark.parametrize(
    ("rounds", "recorded"),
    [("0,0", {(0, 0), (0, 1)}), ("1,1", {(0, 2)}), ("1,1,3,9", {(0, 2), (0, 4)})],
)
def test_a_generation_is_recorded_by_rounds(rounds, recorded):
    model = llama()
    with ld.dump(model, name="r", rounds=rounds) as run:
        generate(model, new=5)
    assert {
        (g, t) for g, t in zip(run.to_pandas().generation, run.to_pandas().step, strict=True)
    } == recorded
    assert hooks_left(model) == 0


@pytest.mark.parametrize(
    ("rounds", "recorded"), [("0,0", {(-1, 0)}), ("1,1", {(0, 0), (0, 1)}), ("2,2", {(0, 2)})]
)
def test_a_warm_up_is_round_0(rounds, recorded):
    model = llama()
    with ld.dump(model, name="r", rounds=rounds, warmup=1) as run:
        generate(model, new=1)
        generate(model, new=4)
    assert {
        (g, t) for g, t in zip(run.to_pandas().generation, run.to_pandas().step, strict=True)
    } == recorded


def test_a_model_that_generates_nothing_makes_a_round_of_each_call():
    model = nn.Linear(2, 2)
    with ld.dump(model, name="r", rounds="1,2") as run:
        for _ in range(4):
            model(torch.ones(1, 2))
    assert set(run.to_pandas().step) == {1, 2}


# -- when inputs are looked at --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "seen"),
    [
        (0, {("input", 1.0)}),
        (1, {("input", 2.0), ("output", 3.0)}),
        (2, {("input", 1.0), ("after", 2.0), ("output", 3.0)}),
        (3, {("input", 1.0), ("output", 3.0)}),
    ],
)
def test_inputs_that_a_module_changes_are_recorded_before_after_or_both(time, seen):
    model = Doubling()
    with ld.dump(model, name="r", time=time, phase="forward") as run:
        given = torch.ones(2)
        result = model(given)
    assert {(r.site.role, r.summary.max) for r in run.records()} == seen
    assert torch.equal(result, torch.full((2,), 3.0))


@pytest.mark.parametrize("mode", ["api", "aten"])
def test_inputs_that_an_operator_changes_are_recorded_after_it_too(mode):
    model = Doubling()
    with ld.dump(model, name="r", time=2, mode=mode, apis="mul_", phase="forward") as run:
        model(torch.ones(2))
    figures = {(r.site.role, r.summary.max) for r in run.records() if r.site.slot == "0"}
    assert figures == {("input", 1.0), ("after", 2.0), ("output", 2.0)}


@pytest.mark.parametrize("time", [0, 1, 2])
def test_looking_at_other_times_leaves_gradients_as_they_are(time):
    def trained(record):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
        given = torch.randn(4, 3)
        if record:
            with ld.dump(model, name="r", time=time, mode="module+api+aten"):
                model(given).sum().backward()
        else:
            model(given).sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize(
    "options", [{"time": 4}, {"time": True}, {"time": "1"}, {"time": 0, "part": "out"}]
)
def test_times_that_make_no_sense_are_refused(options):
    with pytest.raises(ld.errors.OptionError, match="time"):
        DumpOptions(**options)


# -- which ----------------------------------------------------------------------------------------


def test_classes_are_chosen_by_how_their_names_begin_in_any_case():
    model = llama()
    with ld.dump(model, name="r", opname="llamarms,LINEAR", tokens="0") as run:
        model(prompt())
    assert set(run.to_pandas().op) == {"LlamaRMSNorm", "Linear"}


def test_operators_are_chosen_by_how_their_names_begin():
    model = llama()
    with ld.dump(model, name="r", opname="mul", mode="aten", tokens="0", phase="forward") as run:
        model(prompt())
    assert set(run.to_pandas().op) == {"Aten.mul.Tensor"}
    assert starts_with_any("Aten.mul", ["aten.m"])


@pytest.mark.parametrize(
    ("device", "wanted", "same"),
    [("cpu", "cpu", True), ("cuda:0", "cuda0", True), ("cuda", "cuda0", True), ("cuda:1", "cuda",
        True), ("cuda:1", "0", False),
     ("cuda:1", "1", True), ("cpu", "3", True), ("cpu", "cuda0", False)],
)  # fmt: skip
def test_devices_are_known_by_name_or_number(device, wanted, same):
    assert is_device(torch.device(device), wanted) is same


def test_a_model_on_another_device_is_left_out_and_reported():
    model = nn.Linear(2, 2)
    with (
        pytest.raises(
            ld.errors.EmptyDumpError, match="device cuda0 was asked for, and the models ran on cpu"
        ),
        ld.dump(model, name="r", device="cuda:0"),
    ):
        model(torch.ones(1, 2))


def test_runs_with_inputs_at_both_times_are_compared():
    model = Doubling()
    for name in ("golden", "mine"):
        with ld.dump(model, name=name, time=2, phase="forward"):
            model(torch.ones(2))
    assert ld.compare("golden", "mine", progress=False).verdict == "match"
