"""Stepping: a program's halts, the tensors at a halt, going on, and cleaning up."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.stepping import COMMANDS
from llmdebug_nb.notebook import display
from llmdebug_nb.notebook.step_panel import StepPanel
from llmdebug_nb.show import saved_page
from models import generate, hooks_left, llama, prompt


@pytest.fixture
def golden():
    model = llama()
    with ld.dump(model, name="golden", tokens="all", mode="module+api"), torch.no_grad():
        model.golden_logits = model(prompt()).logits
    return model


@pytest.fixture
def broken(golden):
    model = copy.deepcopy(golden)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model


def run(model):
    with torch.no_grad():
        return model(prompt()).logits


def to_the_end(stepper, command="continue"):
    halts = []
    while stepper.stop is not None:
        halts.append(stepper.stop)
        stepper.go(command)
    return halts


# -- where it halts --------------------------------------------------------------------------------


def test_inputs_and_outputs_of_a_halted_call_are_shown_beside_golden(broken):
    stop = ld.step(broken, when="diverges", golden="golden").start(lambda: run(broken))
    view = stop.view()
    overview = view.overview()
    assert (overview["verdict"], overview["rows"]) == ("diverged", 2)
    row = view.find(stop.path, None, "output")
    assert (view.array(row, "mine") == stop.outputs["0"].numpy()).all()
    assert (view.array(row, "golden") == stop.golden["0"].numpy()).all()
    assert "rows could not be compared" not in " ".join(overview["notes"])
    codes = [side["code"] for side in view.detail({"op": "detail", "row": row})["sides"]]
    assert codes == [
        "stop.golden['0']",
        "stop.outputs['0']",
        "stop.outputs['0'] - stop.golden['0']",
    ]
    data, _ = display.bundle(stop)
    assert data["text/plain"] == repr(stop)


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


of_any_kind = pytest.mark.parametrize("make", [
    lambda x: x.to(torch.float8_e4m3fn), lambda x: x.to_sparse(), lambda x: x > 0, lambda x: x[:0],
        lambda x: x + 1j,
])  # fmt: skip


@of_any_kind
def test_without_golden_the_explorer_is_of_the_live_tensors_of_any_kind(make):
    model = nn.Sequential(Makes(make))
    stepper = ld.step(model, at="0", mode="module")
    stop = stepper.start(lambda: model(torch.ones(2)))
    view = stop.view()
    assert view.overview()["title"] == "Tensors at this halt"
    assert "in memory" in view.overview()["lines"][0]
    for row in (0, 1):
        [side] = view.detail({"op": "detail", "row": row})["sides"]
        assert side["kept"] == (side["why"] == "")
    stepper.abort()


def test_it_halts_at_the_first_divergence_from_golden_with_both_tensors_at_hand(broken):
    stop = ld.step(broken, when="diverges", golden="golden").start(lambda: run(broken))
    assert stop.path == "model.layers.1.mlp.act_fn"
    assert torch.equal(stop.golden["0"], nn.functional.silu(stop.inputs["0"]))
    assert torch.equal(stop.outputs["0"], nn.functional.gelu(stop.inputs["0"]))
    assert stop.errors["0"] > 0.01
    assert "output 0 is 0.0" in stop.why
    assert "off golden" in repr(stop)


@pytest.mark.parametrize(
    ("when", "plant", "says"),
    [
        ("nan", float("nan"), "output 0 holds nan"),
        ("inf", float("inf"), "holds inf"),
        ("abs>1e4", 1e5, "reaches"),
        ("nan,abs>10000", 1e5, "reaches"),
    ],
)
def test_it_halts_at_the_first_values_that_are_so(when, plant, says):
    model = nn.Sequential(nn.Identity(), Makes(lambda x: x * plant), nn.Identity())
    stepper = ld.step(model, when=when, mode="module")
    stop = stepper.start(lambda: model(torch.ones(2)))
    assert (stop.path, says in stop.why) == ("1", True)
    to_the_end(stepper)


@of_any_kind
def test_whatever_a_call_gives_can_be_shown_and_tested(make):
    model = nn.Sequential(Makes(make))
    stepper = ld.step(model, when="nan", mode="module")
    assert stepper.start(lambda: model(torch.ones(2))) is None
    assert stepper.run.meta["problems"] == {}
    stepper = ld.step(model, at="0", mode="module")
    assert "output 0" in repr(stepper.start(lambda: model(torch.ones(2))))
    stepper.abort()


def test_every_kind_of_condition_that_is_given_must_hold():
    model = llama()
    stepper = ld.step(
        model, at="model.layers.*.mlp, Functional.softmax", tokens="1", mode="module+api"
    )
    stepper.start(lambda: generate(model, new=3))
    halts = to_the_end(stepper)
    assert {stop.step for stop in halts} == {1}
    assert {stop.path for stop in halts if "/" not in stop.path} == {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    }


def test_without_a_condition_it_halts_at_every_call_that_a_recording_has():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    stepper = ld.step(model)
    stepper.start(lambda: model(torch.ones(1, 2)))
    paths = [stop.path for stop in to_the_end(stepper, "op")]
    assert paths == ["0/Functional.linear", "0", "1/Functional.relu", "1", ""]


def test_steps_go_by_operator_layer_and_token():
    model = llama()
    stepper = ld.step(model)
    assert (
        stepper.start(lambda: generate(model, new=3)).path
        == "model.embed_tokens/Functional.embedding"
    )
    assert stepper.go("op").path == "model.embed_tokens"
    layers = [stepper.go("layer") for _ in range(3)]
    assert [(stop.path, stop.step) for stop in layers] == [
        ("model.layers.0", 0),
        ("model.layers.1", 0),
        ("model.layers.0", 1),
    ]
    assert stepper.go("token").step == 2
    stepper.abort()


def test_a_condition_that_never_held_says_so_with_the_nearest_names():
    model = llama()
    stepper = ld.step(model, at="model.layers.1.mpl")
    assert stepper.start(lambda: run(model)) is None
    assert "no call is named model.layers.1.mpl; nearest: model.layers.1.mlp" in stepper.note
    stepper = ld.step(model, when="nan")
    stepper.start(lambda: run(model))
    assert "did not hold" in stepper.note


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def renamed(module, names):
    """Register children under other names; they stay attributes for the code that calls them."""
    children = dict(module._modules)
    module._modules.clear()
    for name, child in children.items():
        module._modules[names.get(name, name)] = child
        object.__setattr__(module, name, child)


@pytest.mark.parametrize("how", ["wrapped", "renamed"])
def test_golden_is_found_even_if_modules_have_other_names(golden, how):
    program, path = copy.deepcopy(golden), "model.layers.1.ffn.down"
    with torch.no_grad():
        program.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    if how == "wrapped":
        program, path = Wrapper(program), "inner.model.layers.1.mlp.down_proj"
    else:
        for layer in program.model.layers:
            renamed(layer.mlp, {"down_proj": "down"})
            renamed(layer, {"mlp": "ffn", "self_attn": "attention"})
    stepper = ld.step(program, when="diverges", golden="golden")
    stop = stepper.start(lambda: run(program))
    assert stop.path == f"{path}/Functional.linear"
    assert torch.allclose(stop.outputs["0"], stop.golden["0"] * 1.01, atol=1e-6)
    assert stepper.go("replace") is None
    assert torch.equal(stepper.result, golden.golden_logits)
    assert stepper.run.meta["problems"] == {}


# -- how it goes on --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_that_is_stepped_through_computes_the_same_result(golden, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        alone = generate(golden, new=3, do_sample=True)
        after = torch.rand(1)
        torch.manual_seed(0)
        stepper = ld.step(golden, at="*.mlp")
        stepper.start(lambda: generate(golden, new=3, do_sample=True))
        to_the_end(stepper)
        assert torch.equal(stepper.result, alone)
        assert torch.equal(torch.rand(1), after)
        assert hooks_left(golden) == 0
    finally:
        torch.set_num_threads(before)


def test_with_goldens_tensor_in_its_place_the_rest_is_golden(golden, broken):
    stepper = ld.step(broken, when="diverges", golden="golden")
    stepper.start(lambda: run(broken))
    to_the_end(stepper, "replace")
    assert torch.equal(stepper.result, golden.golden_logits)
    assert not torch.equal(run(broken), golden.golden_logits)


def test_the_program_goes_on_with_values_written_to_a_live_tensor(golden):
    stepper = ld.step(golden, at="lm_head", mode="module")
    stop = stepper.start(lambda: run(golden))
    stop.outputs["0"].zero_()
    stepper.go()
    assert not stepper.result.any()


def test_without_golden_values_replacing_is_refused_and_the_program_stays_halted(golden):
    stepper = ld.step(golden, at="lm_head", mode="module")
    stepper.start(lambda: run(golden))
    with pytest.raises(ld.errors.CaptureError, match="golden has no values of lm_head"):
        stepper.go("replace")
    assert stepper.go() is None


def test_a_view_that_cannot_be_written_to_says_so_and_the_program_stays_halted():
    class Spread(nn.Module):
        def forward(self, x):
            return x.expand(3, 2)

    model = nn.Sequential(Spread())
    with ld.dump(model, name="golden"):
        model(torch.ones(1, 2))
    stepper = ld.step(model, at="0", golden="golden", mode="module")
    stepper.start(lambda: model(torch.zeros(1, 2)))
    with pytest.raises(ld.errors.CaptureError, match="can't be written to"):
        stepper.go("replace")
    assert stepper.stop is not None
    assert stepper.go() is None


def test_aborting_ends_the_program_there_and_keeps_what_was_recorded(golden):
    reached = []
    stepper = ld.step(golden, at="model.layers.0", mode="module")
    stepper.start(lambda: (run(golden), reached.append(1)))
    stepper.abort()
    assert (stepper.running, reached, hooks_left(golden)) == (False, [], 0)
    assert "model.layers.0" in {r.site.path for r in ld.open_run("stepped").records()}
    assert "lm_head" not in {r.site.path for r in ld.open_run("stepped").records()}


def test_an_error_of_the_program_is_raised_to_who_steps_and_hooks_come_off(golden):
    stepper = ld.step(golden, at="lm_head")
    stepper.start(lambda: run(golden).no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        stepper.go()
    assert hooks_left(golden) == 0


def test_while_it_is_halted_the_model_may_be_called_and_gradients_stay_as_they_were(golden):
    stepper = ld.step(golden, at="model.layers.0")
    with torch.no_grad():
        stop = stepper.start(lambda: golden(prompt()).logits)
    assert torch.equal(run(golden), golden.golden_logits)  # in this thread: it does not halt
    assert not stop.outputs["0"].requires_grad
    to_the_end(stepper)
    assert torch.equal(stepper.result, golden.golden_logits)


def test_an_interrupt_halts_a_running_program_at_its_next_call():
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.05)
            return x

    model = nn.Sequential(Slow())
    ended = threading.Event()

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        while not ended.is_set():
            model(torch.ones(1))

    stepper = ld.step(model, when="nan", mode="module")
    stop = stepper.start(work)
    assert stop.why == "interrupted"
    ended.set()
    assert stepper.go() is None


def test_a_second_interrupt_ends_the_program_at_its_next_call():
    model = nn.Sequential(nn.Linear(1, 1))

    def work():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2)  # two that wait at once are one; a busy machine takes its time
        model(torch.ones(1))

    stepper = ld.step(model, when="nan", mode="module")
    with pytest.raises(KeyboardInterrupt):
        stepper.start(work)
    stepper._thread.join(60)
    assert not stepper.running
    assert hooks_left(model) == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"when": "nann"}, "expected nan, inf, abs>1e4"),
        ({"when": "abs>much"}, "expected nan, inf, abs>1e4"),
        ({"when": "diverges"}, "needs golden"),
        ({"tokens": "a-b"}, "tokens"),
        ({"mode": "modul"}, "mode"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused(given, says):
    with pytest.raises(ld.errors.OptionError, match=says):
        ld.step(nn.Identity(), **given)


def test_a_command_that_does_not_exist_or_comes_at_the_wrong_time_is_refused(golden):
    stepper = ld.step(golden, at="lm_head")
    with pytest.raises(ld.errors.CaptureError, match="not halted: it has not started"):
        stepper.go()
    stepper.start(lambda: run(golden))
    with pytest.raises(
        ld.errors.OptionError,
        match=r"unknown command 'contine'; nearest: continue.*; known: op, layer",
    ):
        stepper.go("contine")
    stepper.abort()
    with pytest.raises(ld.errors.CaptureError, match="it has ended"):
        stepper.go()
    with pytest.raises(ld.errors.CaptureError, match="already"):
        stepper.start(lambda: None)


# -- in a notebook ---------------------------------------------------------------------------------


@pytest.fixture
def shell(ipython, golden, broken):
    ipython.user_ns.update(model=broken, ids=prompt(), torch=torch)
    return ipython


def _cell(shell, capsys, text):
    capsys.readouterr()
    result = shell.run_cell(text, store_history=True)
    out, err = capsys.readouterr()
    return result, out + err


def test_a_cell_halts_and_later_cells_tell_it_how_to_go_on(shell, capsys):
    _, text = _cell(
        shell,
        capsys,
        "%%llmstep model --when diverges --golden golden\nout = model(ids)\nout.logits.shape",
    )
    assert text.startswith("model.layers.1.mlp.act_fn (GELU), step 0: output 0 is")
    result, _ = _cell(shell, capsys, "stop.inputs['0'].shape")
    assert result.result == torch.Size([1, 7, 64])
    assert "out" not in shell.user_ns
    _, text = _cell(shell, capsys, "%llmstep status")
    assert text.startswith("model.layers.1.mlp.act_fn")
    result, text = _cell(shell, capsys, "%llmstep replace")
    assert result.result == torch.Size([1, 7, 96])
    assert "stepped:" in text
    assert torch.equal(shell.user_ns["out"].logits.detach(), shell.user_ns["model"].golden_logits)
    assert shell.user_ns["stop"] is None
    assert isinstance(shell.user_ns["stepped"], ld.Run)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (["%llmstep op"], "no program is halted"),
        (["%llmstep opp"], "nearest: op"),
        (["%%llmstep model --when nann\nmodel(ids)"], "when: expected nan"),
        (
            ["%%llmstep model --at lm_head\nmodel(ids)", "%%llmstep model\nmodel(ids)"],
            "another program is halted",
        ),
        (["%%llmstep modle\nmodel(ids)"], "nearest: model"),
        (["%%llmstep model --att lm_head\nmodel(ids)"], "--at"),
    ],
)
def test_bad_input_is_one_line(shell, capsys, cells, says):
    for cell in cells:
        _, text = _cell(shell, capsys, cell)
    assert says in text
    assert text.strip().count("\n") == 0
    if len(cells) > 1:
        _cell(shell, capsys, "%llmstep abort")


@pytest.fixture
def halted(golden, broken):
    """A stepper that is halted at the port's bug, and its panel with the halts that it saw."""
    stepper = ld.step(broken, when="diverges", golden="golden")
    stepper.start(lambda: run(broken))
    halts = []
    return stepper, StepPanel(stepper, halts.append), halts


def press(panel, command):
    answer, _ = panel._bridge.answer({"op": "step", "re": 1, "command": command})
    return answer


def shown(panel):
    answer, _ = panel._bridge.answer({"op": "halt", "re": 1})
    return answer


def test_the_panel_shows_the_line_the_tensors_and_what_can_be_done(halted):
    stepper, panel, _ = halted
    halt = shown(panel)
    code = halt["listing"]["lines"][halt["listing"]["at"]]
    assert "self.act_fn(" in code["mine"]
    assert code["state"] == "halted"
    assert code["mine_line"] == halt["line"]
    assert halt["place"] == f"modeling_llama.py:{halt['line']}"
    assert halt["where"] == "model.layers.1.mlp.act_fn (GELU), step 0"
    assert "off golden" in halt["why"]
    assert "float32 [1, 7, 64]" in halt["tensors"]
    assert [(c["name"], c["can"]) for c in halt["commands"]] == [(c, True) for c in COMMANDS]
    assert panel.snapshot["title"] == "golden against stop"
    assert [step["label"] for step in panel.snapshot["steps"]] == ["0 forward"]
    stepper.abort()


def test_the_panel_goes_on_by_its_buttons_and_by_commands_elsewhere(halted):
    stepper, panel, halts = halted
    first = panel.snapshot
    assert press(panel, "op")["halt"] == panel.snapshot["halt"] == first["halt"] + 1
    assert halts == [stepper.stop]
    assert shown(panel)["why"] == "next call"
    stepper.go("layer")
    assert shown(panel)["why"] == stepper.stop.why
    assert halts[-1] is stepper.stop
    press(panel, "abort")
    ended = shown(panel)
    assert ended["ended"]
    assert ended["why"] == "the program was ended here"
    assert not any(command["can"] for command in ended["commands"])
    assert halts[-1] is None
    assert "not halted" in press(panel, "op")["error"]


def test_an_error_of_the_program_is_said_and_ends_the_panel(golden):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))
    stepper = ld.step(model, at="0", mode="module")
    stepper.start(lambda: model(torch.ones(1, 2)))
    panel = StepPanel(stepper, lambda stop: None)
    assert "RuntimeError" in press(panel, "continue")["error"]
    assert shown(panel)["why"].startswith("the program raised RuntimeError")


def test_without_golden_there_is_nothing_to_replace(broken):
    stepper = ld.step(broken, at="lm_head", mode="module")
    stepper.start(lambda: run(broken))
    can = {c["name"]: c["can"] for c in shown(StepPanel(stepper, lambda stop: None))["commands"]}
    assert not can.pop("replace")
    assert all(can.values())
    stepper.abort()


def test_names_in_the_panel_are_text():
    model = nn.Sequential()
    model.add_module("<img onerror=x>\x1b[0m", nn.Identity())
    stepper = ld.step(model, mode="module")
    stepper.start(lambda: model(torch.ones(1)))
    panel = StepPanel(stepper, lambda stop: None)
    assert "\x1b" not in shown(panel)["where"]
    page = str(panel._repr_mimebundle_()[0]["text/html"])
    assert "<img" not in page
    stepper.abort()


def test_a_saved_notebook_shows_the_halt(halted):
    stepper, panel, _ = halted
    page = saved_page.contents(panel._view, panel._state)
    assert any(kept["answer"].get("place") == shown(panel)["place"] for kept in page["answers"])
    stepper.abort()


# -- what follows from a replacement ---------------------------------------------------------------


def test_after_the_only_cause_was_replaced_the_rest_agrees(golden, broken):
    stepper = ld.step(broken, when="diverges", golden="golden")
    stepper.start(lambda: run(broken))
    assert stepper.rest == ""
    assert stepper.go("replace") is None
    assert "put in at model.layers.1.mlp.act_fn, the rest agrees" in stepper.rest
    assert "the only cause" in stepper.rest


def test_after_one_of_two_causes_was_replaced_the_other_is_named(golden, broken):
    broken.lm_head = copy.deepcopy(broken.lm_head)
    with torch.no_grad():
        broken.lm_head.weight.mul_(1.5)
    stepper = ld.step(broken, at="*.act_fn", when="diverges", golden="golden")
    stepper.start(lambda: run(broken))
    assert stepper.go("replace") is None
    assert "still differ, first that of lm_head" in stepper.rest
    assert "there is another cause" in stepper.rest
    # with a halt at the second cause, it is said there
    stepper = ld.step(broken, when="diverges", golden="golden")
    stepper.start(lambda: run(broken))
    stop = stepper.go("replace")
    assert stop.path.startswith("lm_head")
    assert "here it departs again: another cause" in stepper.rest
    stepper.abort()
    assert "did not run to its end" in stepper.rest


class Mlp(nn.Module):
    """An MLP that its operators' numbers tell apart: a port makes one call more before."""

    def __init__(self, own, scale):
        super().__init__()
        self.own, self.scale = own, scale

    def forward(self, x):
        y = self.own.act_fn(self.own.gate_proj(x * 1.0)) * self.own.up_proj(x)
        return self.own.down_proj(y) * self.scale


def ported(golden, scale=1.0):
    port = copy.deepcopy(golden)
    for layer in port.model.layers:
        layer.mlp = Mlp(layer.mlp, 1.0)
    port.model.layers[1].mlp.scale = scale
    return port


def test_a_right_port_that_calls_other_operators_is_not_halted(golden):
    port = ported(golden)
    assert ld.step(port, when="diverges", golden="golden").start(lambda: run(port)) is None


def test_the_wrong_call_of_such_a_port_is_halted(golden):
    port = ported(golden, 1.01)
    stop = ld.step(port, when="diverges", golden="golden").start(lambda: run(port))
    assert stop.path.startswith("model.layers.1.mlp")


@pytest.mark.parametrize("command", ["op", "abort"])
def test_a_panel_shows_calls_that_are_not_the_first_of_their_place(golden, command):
    port = ported(golden)
    stepper = ld.step(port, at="*.layers.0.mlp/Tensor.mul")
    stepper.start(lambda: run(port))
    panel = StepPanel(stepper, lambda stop: None)
    for _ in range(3):  # Tensor.mul is called three times there
        if stepper.stop is not None:
            stepper.go("continue")
            assert panel.selected >= -1
    if stepper.stop is not None:
        stepper.go(command)
