"""Error checks: planted faults are named where they begin, and programs that mean it are clean."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import llmdebug_nb as ld
import models
from llmdebug_nb.app.errcheck import ErrorCheck
from llmdebug_nb.capture.errcheck.checker import Checker
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.faults import CRITICAL, HIGH, MEDIUM, CheckResult, Fault

MODES = ("aten", "module")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up_proj = nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 16)
        self.layers = nn.ModuleList([Mlp() for _ in range(3)])
        self.head = nn.Linear(16, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Lambda(nn.Module):
    """A model that computes one function of its input and a parameter of ones."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """Return a function that runs work under a check and returns it."""

    def run(model: nn.Module | None, work: Any, **options: Any) -> ErrorCheck:
        with ld.errcheck(model, output=tmp_path, **options) as checked:
            work()
        return checked

    return run


def faults(checked: ErrorCheck) -> list[Fault]:
    assert checked.result is not None
    return [fault for _, fault in checked.result.faults]


def only(checked: ErrorCheck) -> Fault:
    (fault,) = faults(checked)
    return fault


def verdict(checked: ErrorCheck) -> str:
    assert checked.result is not None
    return checked.result.verdict


# -- planted faults -------------------------------------------------------------------------------


def overflowing() -> Model:
    """A model in half precision whose second down_proj overflows: NaN comes later, in a norm."""
    model = Model().half()
    with torch.no_grad():
        model.layers[1].down_proj.weight.mul_(2e5).clamp_(-6e4, 6e4)
    return model


@pytest.mark.parametrize(("mode", "path"), [
    ("aten", "layers.1.down_proj/Aten.addmm"), ("module", "layers.1.down_proj"),
])  # fmt: skip
def test_an_overflow_is_named_where_it_begins_not_where_it_becomes_nan(check, mode, path):
    model = overflowing()
    fault = only(check(model, lambda: model(IDS), mode=mode))
    assert (fault.kind, fault.call.level, fault.call.path) == ("overflow", CRITICAL, path)
    assert fault.reached == "output 0 of the model"
    assert [each.level for each in fault.followed][:1] == [HIGH]
    assert fault.call.data_info.output[0].inf > 0
    assert all(each.nan == each.inf == 0 for each in fault.call.data_info.input_args)
    assert any("test_errcheck.py" in line for line in fault.call.stack_info)
    assert "layers.1" in fault.call.construct_info or mode == "module"


def test_an_overflow_in_the_dtype_is_told_from_a_division_by_zero(check):
    model = overflowing()
    evidence = only(check(model, lambda: model(IDS))).evidence
    assert "in float64 it reaches" in evidence
    divides = Lambda(lambda x, w: w / x)
    assert "in float64 as well" in only(check(divides, lambda: divides(torch.zeros(4)))).evidence


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_one_lane_is_found(check, mode):
    lane = Lambda(lambda x, w: torch.sqrt(x) * w)
    x = torch.ones(64, 4)
    x[17, 2] = -1
    fault = only(check(lane, lambda: lane(x), mode=mode))
    assert (fault.kind, fault.call.data_info.output[0].nan) == ("nan", 1)
    assert fault.call.path == ("/Aten.sqrt" if mode == "aten" else "")


def test_zero_divided_by_zero_in_a_norm_is_found(check):
    norm = Lambda(lambda x, w: w * (x - x.mean()) / (x - x.mean()).pow(2).mean().sqrt())
    fault = only(check(norm, lambda: norm(torch.full((4,), 3.0))))
    assert (fault.kind, fault.call.path) == ("nan", "/Aten.div.Tensor")
    assert "0/0" in fault.evidence


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_that_overflows_is_found(check, dtype):
    cast = Lambda(lambda x, w: (x * w).to(dtype).float())
    fault = only(check(cast, lambda: cast(torch.full((4,), 1e6))))
    assert (fault.kind, fault.call.path) == ("cast", "/Aten._to_copy")
    # some releases of torch cut float8 off at its largest number: nothing bad is to be seen then
    assert "finite" in fault.evidence or "cut off at" in fault.evidence


def test_an_underflow_that_loses_all_values_is_found(check):
    squares = Lambda(lambda x, w: x * torch.rsqrt((x * x).mean() + 1e-6) * w, torch.float16)
    fault = only(check(squares, lambda: squares(torch.full((4,), 1e-4, dtype=torch.float16))))
    assert (fault.kind, fault.call.level, fault.call.path) == (
        "underflow",
        HIGH,
        "/Aten.mul.Tensor",
    )
    assert "in float64 they reach 1e-08" in fault.evidence


def test_a_cast_that_loses_all_values_is_found(check):
    cast = Lambda(lambda x, w: (x * w).half())
    assert only(check(cast, lambda: cast(torch.full((4,), 1e-9)))).kind == "cast"


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sub(gradient).div(gradient - gradient)


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_the_backward_pass_alone_is_found(check, mode):
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _BadBackward.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Bad(), nn.Linear(4, 1))
    fault = only(check(model, lambda: model(torch.ones(2, 4)).sum().backward(), mode=mode))
    assert (fault.kind, fault.call.phase) == ("nan", "backward")
    assert fault.call.path == ("1/Aten.div.Tensor" if mode == "aten" else "1")
    assert fault.reached.startswith("gradient of 0.")


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_an_optimizer_step_is_found(check, mode):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)

    def step() -> None:
        (model(torch.ones(2, 4)) * 0.0).sum().backward()  # gradients of 0: Adam divides 0 by 0
        optimizer.step()

    fault = only(check(model, step, mode=mode))
    assert (fault.kind, fault.call.level) == ("nan", CRITICAL)
    assert fault.call.path.startswith("Adam")
    assert fault.reached.startswith("parameter ") or mode == "module"


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_holds_nan_is_named(check, mode):
    model = Model()
    with torch.no_grad():
        model.layers[1].up_proj.weight[3, 3] = math.nan
    fault = only(check(model, lambda: model(IDS), mode=mode))
    assert fault.call.path.startswith("layers.1.up_proj")
    if mode == "aten":
        assert "layers.1.up_proj.weight already holds NaN" in fault.evidence


def test_memory_that_was_never_written_is_named_if_it_reaches_a_result(check, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(
            True
        )  # empty memory is then NaN, so the test can't pass by luck
        try:
            model = Lambda(lambda x, w: torch.empty(4) + w)
            fault = only(check(model, lambda: model(torch.ones(4))))
        finally:
            torch.use_deterministic_algorithms(False)
    assert "never written" in fault.evidence


def test_a_number_that_the_program_reads_is_a_result(check):
    checked = check(None, lambda: torch.log(torch.zeros(1)).item())
    assert only(checked).reached == "a number that the program reads"


def test_a_module_that_returns_its_input_makes_nothing(check):
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(torch.sqrt(self.linear(x) - 100))

    model = Between()
    fault = only(check(model, lambda: model(torch.ones(1, 4)), mode="module"))
    assert "input 0 already holds NaN" in fault.evidence  # made between modules


def test_what_recurs_is_one_fault_with_its_count_and_what_is_masked_out_is_forgotten(check):
    weight = Lambda(lambda x, w: x.log().clamp(min=0) + w)
    with torch.no_grad():
        weight.weight[0] = math.nan
    checked = check(weight, lambda: [weight(torch.zeros(4)) for _ in range(5)])
    assert only(checked).times == 5
    assert checked.result.processes[0].masked == {"Aten.log": 5}
    assert len(checked._check._checker._origins) == 1


def test_types_select_what_counts(check):
    model = overflowing()
    assert faults(check(model, lambda: model(IDS), types="underflow nan")) == []
    assert only(check(model, lambda: model(IDS), types=["overflow"])).kind == "overflow"


# -- clean controls -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_generation_with_masks_padding_caches_and_sampling_is_clean(
    check, name, attention, dtype, mode
):
    model = getattr(models, name)().to(dtype)
    model.set_attn_implementation(attention)
    ids = torch.arange(2, 22).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def work() -> None:
        for options in ({"top_k": 5, "top_p": 0.8, "do_sample": True}, {"num_beams": 2}):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, **options)

    checked = check(model, work, mode=mode)
    assert verdict(checked) == "clean", str(checked)
    assert checked.result.processes[0].problems == {}


@pytest.mark.parametrize("mode", MODES)
def test_training_with_gradscaler_is_clean_though_steps_overflow(check, mode):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    scales = []

    def train() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())

    checked = check(model, train, mode=mode)
    assert scales[0] < 2.0**24  # the first step has overflowed, so there was something to excuse
    assert verdict(checked) == "clean", str(checked)


def test_infinities_that_are_given_are_no_error(check):
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mask = torch.full((4, 4), -math.inf).triu(1)
        scores = (x + mask).masked_fill(torch.eye(4) == 0, -math.inf)
        return scores.softmax(-1) * w

    model = Lambda(attend)
    checked = check(model, lambda: model(torch.randn(4, 4)))
    assert verdict(checked) == "clean"
    assert checked.result.processes[0].meant["Aten.full"] == 1


def test_a_cast_of_finfo_min_that_softmax_masks_out_is_no_error(check):
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(torch.float32).min
        mask = (1.0 - torch.ones(4, 4).tril()) * lowest  # as models of old extend their masks
        return (x.half() + mask.half()).softmax(-1).float() * w

    model = Lambda(attend)
    checked = check(model, lambda: model(torch.randn(4, 4)))
    assert verdict(checked) == "clean", str(checked)
    assert checked.result.processes[0].masked == {"Aten._to_copy": 1}


def test_the_same_cast_is_an_error_if_a_whole_row_is_masked(check):
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mask = torch.full((4, 4), torch.finfo(torch.float32).min)
        return (x.half() + mask.half()).softmax(-1).float() * w

    model = Lambda(attend)
    fault = only(check(model, lambda: model(torch.randn(4, 4))))
    assert (fault.kind, fault.call.op_name) == ("cast", "Aten._to_copy.1.forward")


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = 500 * x.half()  # squares of 300 are too large for it, and one over their root is 0
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).float() * w


def test_an_overflow_is_an_error_if_a_finite_result_is_made_of_it(check):
    model = Lambda(rms_norm)
    assert not model(torch.ones(2, 4)).any()  # all is lost, and nothing is infinite
    fault = only(check(model, lambda: model(torch.ones(2, 4))))
    assert (fault.kind, fault.call.op_name) == ("overflow", "Aten.pow.Tensor_Scalar.0.forward")
    assert "Aten.rsqrt" in fault.reached


@pytest.mark.parametrize("function", [
    lambda x, w: (x.half() * 1e5).sigmoid().float() * w,
    lambda x, w: (x.half() * 1e5).clamp(max=10).float() * w,
    lambda x, w: (x.half() * 1e5).isfinite() * w,
    lambda x, w: (1 / (x - x + 0.0)).reciprocal() * w,  # infinite in float64 as well
], ids=["sigmoid", "clamp", "asked", "mathematics"])  # fmt: skip
def test_an_infinity_is_no_error_if_the_result_is_that_of_a_large_number(check, function):
    model = Lambda(function)
    assert verdict(check(model, lambda: model(torch.ones(4)))) == "clean"


def test_bad_values_that_a_call_ends_are_medium_if_others_reach_a_result(check):
    model = Lambda(lambda x, w: torch.where((big := x * 1e38) > 1, w, 0 * w) + big)
    fault = only(check(model, lambda: model(torch.full((4,), 1e30))))
    assert fault.kind == "overflow"
    assert MEDIUM in [each.level for each in fault.followed]


def test_the_example_of_the_documentation_finds_what_it_says(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parent.parent / "docs" / "errcheck.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    printed = capsys.readouterr().out
    for line in ("→ CRITICAL overflow: down_proj/Aten.addmm", "HIGH: norm/Aten.native_layer_norm"):
        assert line in text
        assert line in printed


# -- headroom -------------------------------------------------------------------------------------


def test_headroom_tells_how_far_values_are_from_the_largest_number(check):
    model = Lambda(lambda x, w: x * w, torch.float16)
    checked = check(model, lambda: model(torch.full((4,), 20000.0, dtype=torch.float16)))
    assert checked.result.processes[0].headroom == ()  # the program gave it these values
    checked = check(model, lambda: model(torch.full((4,), 200.0, dtype=torch.float16) * 100))
    (room,) = checked.result.processes[0].headroom
    assert (room.dtype, room.limit, room.reach) == ("float16", 65504.0, 20000.0)
    assert [(near.path, near.reach) for near in room.near] == [("/Aten.mul.Tensor", 20000.0)]
    assert room.factor == pytest.approx(65504 / 20000)


# -- nothing is changed ---------------------------------------------------------------------------


def _training() -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8)).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), torch.rand(3), torch.get_rng_state()]


@pytest.mark.parametrize("mode", MODES)
def test_a_check_changes_no_bit_and_no_random_number(check, mode):
    alone, checked = _training(), []
    result = check(None, lambda: checked.extend(_training()), mode=mode)
    assert verdict(result) == "clean"
    assert all(torch.equal(a, b) for a, b in zip(alone, checked, strict=True))


def _hooks(model: nn.Module) -> int:
    each = (m._forward_hooks | m._forward_pre_hooks for m in model.modules())
    return sum(map(len, each))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exit", [False, True])
def test_all_hooks_come_off_whether_it_stops_or_not(check, mode, exit):
    from torch.optim import optimizer
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model = overflowing()
    check(model, lambda: model(IDS), mode=mode, exit=exit)
    assert _hooks(model) == 0
    assert not _get_current_function_mode_stack()
    assert not _get_current_dispatch_mode_stack()
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def test_an_error_of_the_program_is_its_own_and_the_result_is_written(tmp_path):
    model = overflowing()
    with (
        pytest.raises(RuntimeError, match="probability tensor"),
        ld.errcheck(model, output=tmp_path) as checked,
    ):
        torch.multinomial(model(IDS)[0].float().softmax(-1), 1)
    assert only(checked).kind == "overflow"
    assert checked.result.processes[0].ended_by == "RuntimeError"


# -- exit and the result file ---------------------------------------------------------------------


def test_exit_stops_there_and_dumps_what_the_first_bad_call_was_given(check):
    model, after = overflowing(), []
    checked = check(model, lambda: (model(IDS), after.append(1)), exit=True)
    assert after == []
    run = ld.open_run(checked.dumped)
    records = {(each.site.role, each.site.slot): each for each in run.records()}
    assert {key[0] for key in records} == {"input", "output"}
    output, bias, inputs, weight = (
        run.load(records[key])
        for key in (("output", "0"), ("input", "0"), ("input", "1"), ("input", "2"))
    )
    assert torch.equal(torch.addmm(bias, inputs, weight), output)


def test_exit_after_the_end_of_the_block_stops_nothing(check):
    loss = []  # the program holds it at the end
    checked = check(None, lambda: loss.append(torch.log(torch.zeros(2))), exit=True)
    assert only(checked).reached == "a tensor that the program holds at the end"
    assert checked.dumped is not None


def test_exit_keeps_inputs_that_the_call_overwrites(check):
    model = Lambda(lambda x, w: (x * 1.0).mul_(1e38) * w)
    checked = check(model, lambda: model(torch.full((4,), 1e30)), exit=True)
    run = ld.open_run(checked.dumped)
    (given,) = (each for each in run.records() if each.site.role == "input")
    assert torch.equal(run.load(given), torch.full((4,), 1e30))


@pytest.mark.parametrize("clean", [True, False])
def test_the_result_file_is_written_in_any_case_in_upstreams_shape(check, clean):
    model = Model() if clean else overflowing()
    checked = check(model, lambda: model(IDS))
    text = checked.path.read_bytes()
    whole = json.loads(text)
    assert whole["verdict"] == ("clean" if clean else "error")
    assert msgspec.json.decode(text, type=CheckResult) == checked.result
    keys = {"op_name", "data_info", "construct_info", "stack_info", "level"}
    assert all(keys <= entry.keys() for entry in whole["rank_0"])
    assert bool(whole["rank_0"]) is not clean
    if not clean:
        output = whole["rank_0"][0]["data_info"]["output"][0]
        assert (output["dtype"], output["Max"]) == ("torch.float16", "inf")


def test_a_block_in_which_nothing_ran_is_not_clean(check):
    checked = check(Model(), lambda: None)
    assert verdict(checked) == "nothing checked"
    assert "no model ran" in str(checked)


@pytest.mark.parametrize("options", [{"types": "owerflow"}, {"mode": "api"}, {"types": ""}])
def test_an_option_that_makes_no_sense_is_refused(options):
    with pytest.raises(OptionError):
        ld.errcheck(**options)


# -- calls that pass ------------------------------------------------------------------------------


def told(checked: ErrorCheck) -> dict[str, Any]:
    assert checked.result is not None
    told = json.loads(checked.result.as_json())
    for process in told["processes"]:
        process["pid"] = 0
    return told


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("planted", [False, True])
def test_calls_that_pass_unseen_change_nothing_of_the_result(check, monkeypatch, mode, planted):
    model = overflowing() if planted else Model()

    def work() -> None:
        with torch.no_grad():
            model(IDS)
        model(IDS).float().sum().backward()
        model(IDS)

    results = []
    for _ in range(2):  # the same line of the program both times
        model.zero_grad()
        results.append(told(check(model, work, mode=mode)))
        monkeypatch.setattr(Checker, "passes", lambda *_: False)
        monkeypatch.setattr(Checker, "may_wait", lambda *_: False)
    assert results[0] == results[1]


def test_a_model_is_exported_during_a_check(check):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    exported = []

    def export() -> None:
        model(torch.ones(2, 4))
        exported.append(torch.export.export(model, (torch.ones(2, 4),)))

    assert verdict(check(model, export)) == "clean"
    assert torch.equal(exported[0].module()(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_an_error_of_the_check_never_reaches_the_program(check, monkeypatch):
    def raises(*_: Any) -> bool:
        raise ValueError("ours")

    monkeypatch.setattr(Checker, "passes", raises)
    model = Model()
    assert verdict(check(model, lambda: model(IDS))) == "clean"


def test_a_module_that_raises_leaves_no_call_open(check):
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("caught")

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.last = Raises(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(KeyError):
                self.bad(x)
            return self.last(x * 3e38 * 10)

    model = nn.Sequential(nn.Linear(4, 4), Catches())
    with torch.no_grad():
        fault = only(check(model, lambda: model(torch.ones(1, 4))))
    assert fault.call.path == "1/Aten.mul.Tensor"
