"""Proofs of findings: golden's value goes into mine's live model, and the step runs on."""

import gc
import html
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.core.errors import ProofError
from llmdebug_nb.findings.finding import Proof
from llmdebug_nb.replay.in_place import in_place
from llmdebug_nb.replay.operators import CannotReplay
from models import generate, gpt2, hooks_left, prompt
from recordings import recorded_both
from reimplemented import GPT

SIZE, TOKENS = 16, 5


class Attention(nn.Module):
    """``scale``, ``axis``: what a patch changes."""

    scale, axis = 0.25, -1

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        return self.out(torch.softmax(scores, self.axis) @ v)


class Mlp(nn.Module):
    act = staticmethod(F.gelu)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(SIZE), Attention()
        self.norm2, self.mlp = nn.LayerNorm(SIZE), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tiny(nn.Module):
    """``counts``: its forward changes a buffer."""

    counts = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(SIZE, 32, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        if self.counts:
            self.calls += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(2 * TOKENS).reshape(2, TOKENS)


def recorded(model, name, mode="module+api", ids=IDS, **options):
    with ld.dump(model, name=name, mode=mode, tokens="all", **options) as run, torch.no_grad():
        model(ids)
    return run


def compared(change, mode="module+api", **options):
    """Compare a model with one that is changed; return the report and both models."""
    golden, mine = Tiny(), Tiny()
    change(mine)
    runs = [recorded(m, n, mode, **options) for m, n in ((golden, "golden"), (mine, "mine"))]
    return ld.compare(*runs), golden, mine


def one_bug(model):
    model.blocks[1].mlp.act = F.relu


def counting(model):
    model.counts = True
    two_bugs(model)


def two_bugs(model):
    model.blocks[0].attention.scale = 0.5
    one_bug(model)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("mode", ["module", "module+api", "module+aten"])
def test_one_bug_is_proven(mode):
    report, _, _mine = compared(one_bug, mode)
    proof = report.findings[0].prove()
    assert isinstance(proof, Proof)
    assert proof.agrees
    assert proof.rows_mended > 0
    assert (proof.rows_left, proof.next) == (0, None)
    assert "agrees with golden" in proof.says


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_the_bug_behind_the_first_comes_out_and_is_proven_in_turn(mode):
    report, _, _mine = compared(two_bugs, mode)
    first = report.findings[0]
    proof = first.prove()
    assert first.path.startswith("blocks.0.attention")
    assert not proof.agrees
    assert proof.rows_mended > 0
    assert proof.rows_left > 0
    assert proof.next.path.startswith("blocks.1.mlp")
    assert proof.next.path in proof.says
    last = proof.next.prove()
    assert last.agrees
    assert (last.rows_left, last.next) == (0, None)


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_bug_in_the_code_of_every_layer_is_proven_in_every_layer(mode):
    def change(model):
        for block in model.blocks:
            block.mlp.act = F.relu

    report, _, _mine = compared(change, mode)
    proof = report.findings[0].prove()
    assert proof.agrees, proof.says
    assert proof.next is None
    assert "in every layer" in proof.says


def test_weights_that_are_wrong_in_every_layer_are_proven():
    def change(model):
        with torch.no_grad():
            for block in model.blocks:
                block.mlp.up.weight[3] *= 2

    report, _golden, _mine = compared(change, "module")
    proof = report.findings[0].prove()
    assert proof.agrees, proof.says


def test_what_mines_dtype_cannot_hold_is_put_in_behind_it():
    def change(model):
        model.blocks[1].mlp.act = lambda x: F.gelu(x.to(torch.bfloat16)).float()

    report, _, _mine = compared(change)
    proof = report.findings[0].prove()
    assert proof.agrees, proof.says


def test_a_value_that_is_not_the_cause_mends_nothing():
    report, _, _mine = compared(two_bugs, "module")
    row = next(d for d in report.differences if str(d.site) == "blocks.1.mlp output[0] step 0")
    proof = replace(report.findings[0], path="blocks.1.mlp", difference=row).prove()
    assert not proof.agrees
    assert proof.rows_mended == 0
    assert proof.next.path.startswith("blocks.0")


@pytest.mark.parametrize("weights", [True, False])
def test_a_wrong_weight_is_proven_and_stays_wrong(weights):
    def change(model):
        with torch.no_grad():
            model.blocks[1].mlp.up.weight[3] *= 2

    report, _golden, mine = compared(change, "module", weights=weights)
    before, address = state(mine), mine.blocks[1].mlp.up.weight.data_ptr()
    proof = report.findings[0].prove()
    assert report.findings[0].cause == "weight differs"
    assert proof.agrees
    assert proof.rows_left == 0
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in before.items())
    assert mine.blocks[1].mlp.up.weight.data_ptr() == address


def test_a_wrong_weight_without_goldens_model_says_what_to_record():
    def change(model):
        with torch.no_grad():
            model.blocks[1].mlp.up.weight[3] *= 2

    report, golden, _mine = compared(change, "module")
    del golden
    gc.collect()
    with pytest.raises(ProofError, match="weights=True"):
        report.findings[0].prove()


def test_a_module_that_mine_leaves_out_is_proven():
    def change(model):
        model.blocks[1].norm2.forward = None
        Without = type("Without", (Block,), {"forward": lambda s, x: _without_norm(s, x)})
        model.blocks[1].__class__ = Without

    report, _, _mine = compared(change)
    proof = report.findings[0].prove()
    assert proof.agrees, proof.says
    assert proof.rows_left == 0


def _without_norm(block, x):
    x = x + block.attention(block.norm1(x))
    return x + block.mlp(x)


def test_a_wrong_input_is_put_in_wherever_the_step_takes_it():
    class Masked(nn.Module):
        def __init__(self, diagonal):
            super().__init__()
            torch.manual_seed(0)
            self.mask = lambda: torch.ones(TOKENS, TOKENS).tril(diagonal)
            self.layers = nn.ModuleList(MaskedLayer() for _ in range(3))

        def forward(self, x):
            mask = self.mask()
            for layer in self.layers:
                x = layer(x, mask)
            return x

    class MaskedLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x, mask):
            return mask @ self.linear(x)

    golden, mine = Masked(0), Masked(1)
    x = torch.randn(TOKENS, SIZE)
    report = ld.compare(*(recorded(m, n, "module", x) for m, n in ((golden, "g"), (mine, "m"))))
    proof = report.findings[0].prove()
    assert report.findings[0].difference.site.role == "input"
    assert proof.agrees, proof.says
    assert proof.rows_left == 0


def test_the_model_and_the_random_state_are_as_before():
    report, golden, mine = compared(counting)
    mine.blocks[2].train()
    before, hooks, rng = state(mine), hooks_left(mine), torch.get_rng_state()
    python, modes = random.getstate(), [part.training for part in mine.modules()]
    attributes = [set(vars(part)) for part in mine.modules()]
    report.findings[0].prove()
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in before.items())
    assert (hooks_left(mine), hooks_left(golden)) == (hooks, hooks)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (random.getstate(), [part.training for part in mine.modules()]) == (python, modes)
    assert [set(vars(part)) for part in mine.modules()] == attributes
    assert mine.calls == 1


def test_the_model_is_as_before_when_it_fails():
    report, _, mine = compared(one_bug)
    before, hooks, rng = state(mine), hooks_left(mine), torch.get_rng_state()
    calls = []

    def fails(module, args):
        calls.append(module)
        if len(calls) > 2:  # the model still gives what was recorded, then the proof fails
            raise ValueError("no more")

    handle = mine.blocks[2].register_forward_pre_hook(fails)
    with pytest.raises(ProofError, match="ValueError: no more"):
        report.findings[0].prove()
    handle.remove()
    assert len(calls) == 3
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in before.items())
    assert hooks_left(mine) == hooks
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert report.findings[0].prove().agrees


def test_a_model_that_is_gone_is_told_and_another_one_can_be_given():
    report, _, mine = compared(one_bug)
    weights = mine.state_dict()
    del mine, _
    gc.collect()
    with pytest.raises(ProofError, match="the model is gone"):
        report.findings[0].prove()
    again = Tiny()
    one_bug(again)
    again.load_state_dict(weights)
    assert report.findings[0].prove(again).agrees


def test_a_model_that_changed_is_not_used():
    report, _, mine = compared(one_bug)
    with torch.no_grad():
        mine.head.weight *= 2
    with pytest.raises(ProofError, match="no longer computes"):
        report.findings[0].prove()


def test_a_random_model_is_not_used():
    golden, mine = Tiny(), Tiny()
    one_bug(mine)
    for model in (golden, mine):
        model.blocks[2].mlp.act = lambda x: F.dropout(F.gelu(x), 0.5, training=True)
    report = ld.compare(recorded(golden, "golden"), recorded(mine, "mine"))
    with pytest.raises(ProofError, match="two calls on the same inputs give two results"):
        report.findings[0].prove()


def test_values_that_were_not_kept_are_told():
    report, _, _mine = compared(one_bug, "module", stats_only=True)
    with pytest.raises(ProofError, match="were not kept"):
        report.findings[0].prove()


def test_a_running_recording_does_not_see_the_proof():
    report, _, mine = compared(counting)
    other = nn.Linear(2, 2)
    with ld.dump(name="other") as run:
        other(torch.ones(2))
        with pytest.raises(ProofError, match="a recording is running"):
            report.findings[0].prove()
    assert {record.site.path for record in run.records()} == {""}
    assert mine.calls == 1


def test_a_finding_without_its_report_is_told():
    report, _, _mine = compared(one_bug)
    finding = report.findings[0]
    del report
    gc.collect()
    with pytest.raises(ProofError, match="report of this finding is gone"):
        finding.prove()


def test_compare_proves_and_text_and_page_say_so(tmp_path):
    golden, mine = Tiny(), Tiny()
    one_bug(mine)
    report = ld.compare(recorded(golden, "golden"), recorded(mine, "mine"), prove=True)
    says = report.findings[0].proof.says
    assert says in str(report)
    assert says in html.unescape(report.to_html(tmp_path / "r.html").read_text())
    del mine
    gc.collect()
    report = ld.compare("golden", "mine", prove=True)
    assert report.findings[0].proof is None
    assert any("the model is gone" in note for note in report.notes())


def test_a_prefill_is_proven():
    golden, mine = gpt2(), gpt2()
    mine.transformer.h[1].mlp.act.forward = torch.relu
    runs = recorded_both(golden, mine, lambda model: generate(model, new=2), tokens="0-1")
    proof = ld.compare(*runs).findings[0].prove()
    assert proof.agrees, proof.says


def test_a_later_step_is_proven_as_that_step():
    golden, mine = Tiny(), Tiny()
    mine.blocks[1].mlp.act = lambda x: F.gelu(x) * (2 if x.shape[1] == 3 else 1)
    with torch.no_grad():
        report = ld.compare(
            *recorded_both(golden, mine, lambda model: (model(IDS), model(IDS[:, :3])))
        )
    proof = report.findings[0].prove()
    assert report.findings[0].step == 1
    assert proof.agrees, proof.says
    assert {d.site.step for d in proof.report.differences} == {1}


def test_a_step_that_takes_a_cache_is_told():
    golden, mine = gpt2(), gpt2()
    mine.transformer.h[1].mlp.act.forward = lambda x: (
        golden.transformer.h[1].mlp.act(x) * (2 if x.shape[1] == 1 else 1)
    )
    runs = recorded_both(golden, mine, lambda model: generate(model, new=2), tokens="0-1")
    with pytest.raises(ProofError, match="cache of earlier tokens"):
        ld.compare(*runs).findings[0].prove()


def test_a_port_of_another_class_and_layout_is_proven():
    golden = gpt2()
    mine = GPT(golden, fused=False).eval()
    mine.blocks[0].attention.wo.bias.data[3] += 0.1
    ids = prompt()
    with ld.dump(golden, name="golden", weights=True) as theirs, torch.no_grad():
        golden(ids, use_cache=False)
    with ld.dump(mine, name="mine", weights=True) as ours, torch.no_grad():
        mine(ids)
    report = ld.compare(theirs, ours)
    proof = report.findings[0].prove()
    assert report.findings[0].mine.path == "blocks.0.attention.wo"
    assert proof.agrees, proof.says


def test_a_value_that_is_the_result_itself_proves_nothing():
    report, _, _mine = compared(one_bug, "module")
    row = next(d for d in report.differences if str(d.site) == "(root) output[0] step 0")
    with pytest.raises(ProofError, match="it is the result itself"):
        replace(report.findings[0], path="", difference=row).prove()


# -- layouts --------------------------------------------------------------------------------------


class _Fit:
    says, whole = "a layout", True

    def __init__(self, golden, mine):
        self.golden, self.mine = golden, mine

    def __call__(self, golden, mine):
        return self.golden(golden), self.mine(mine)


def _same(x):
    return x


@pytest.mark.parametrize(
    ("to_mine", "to_golden"),
    [
        (lambda x: x.permute(2, 0, 1), lambda x: x.permute(1, 2, 0)),
        (lambda x: x.reshape(6, 4), lambda x: x.reshape(2, 3, 4)),
        (lambda x: x.permute(1, 0, 2).reshape(3, 8), lambda x: x.reshape(3, 2, 4).permute(1, 0, 2)),
    ],
)
def test_a_layout_is_turned_round(to_mine, to_golden):
    golden = torch.randn(2, 3, 4)
    own = torch.zeros_like(to_mine(golden))
    assert torch.equal(in_place(golden, _Fit(_same, to_golden))(own), to_mine(golden))


def test_a_part_of_a_fused_tensor_leaves_the_rest():
    golden, own = torch.randn(2, 3), torch.randn(2, 9)
    new = in_place(golden, _Fit(_same, lambda x: x[:, 3:6]))(own)
    assert torch.equal(new, torch.cat((own[:, :3], golden, own[:, 6:]), 1))


@pytest.mark.parametrize(
    "fit", [_Fit(_same, lambda x: x / 3), _Fit(_same, lambda x: x.expand(4, 3))]
)
def test_a_layout_that_cannot_be_turned_round_is_refused(fit):
    with pytest.raises(CannotReplay, match="can't be turned round"):
        in_place(torch.randn(4, 3), fit)(torch.zeros(1, 3))


def test_golden_value_takes_mines_dtype():
    new = in_place(torch.randn(3), None)(torch.zeros(3, dtype=torch.bfloat16))
    assert new.dtype == torch.bfloat16


# -- inside a module ------------------------------------------------------------------------------


def test_looking_inside_names_the_operator_and_proves_it():
    report, _golden, mine = compared(one_bug, "module")
    before = state(mine)
    inside = report.look_inside()
    finding = inside.findings[0]
    assert report.findings[0].path == "blocks.1.mlp"
    assert finding.path.startswith("blocks.1.mlp/")
    assert finding.mine.op == "Functional.relu"
    assert {d.site.path.split("/")[0] for d in inside.differences} <= {
        "blocks.1.mlp", "blocks.1.mlp.up", "blocks.1.mlp.down"
    }  # fmt: skip
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in before.items())
    proof = finding.prove()
    assert proof.agrees, proof.says


def test_looking_inside_runs_given_programs():
    report, golden, mine = compared(one_bug, "module")
    del golden, mine
    gc.collect()

    def program(change):
        model = Tiny()
        change(model)
        return lambda: model(IDS)

    inside = report.look_inside(program=(program(lambda m: None), program(one_bug)))
    assert inside.findings[0].path.startswith("blocks.1.mlp/")


def test_looking_inside_runs_the_module_alone_if_the_model_was_not_recorded():
    report, _golden, _mine = compared(one_bug, "module", layers="blocks.*.mlp")
    inside = report.look_inside()
    assert inside.findings[0].mine.op == "Functional.relu"


def test_looking_inside_without_models_says_what_to_record():
    report, golden, mine = compared(one_bug, "module")
    del golden, mine
    gc.collect()
    with pytest.raises(ProofError) as told:
        report.look_inside()
    command = 'ld.dump(model, name="mine", layers="blocks.1.mlp", mode=("module", "api"))'
    assert command in str(told.value)


def test_looking_inside_an_operator_is_refused():
    report, _, _mine = compared(one_bug)
    with pytest.raises(ProofError, match="operators were recorded"):
        report.look_inside()


class Keeping(nn.Module):
    """Keeps what it takes in a container that its caller gives it."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.factor = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), factor

    def forward(self, x, kept):
        kept.setdefault("x", []).append(x)
        return self.down(torch.tanh(self.up(kept["x"][-1])) * self.factor)


class Headed(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.body, self.head = Keeping(factor), nn.Linear(SIZE, 4)

    def forward(self, x, kept):
        return self.head(self.body(x, kept))


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_step_that_was_given_an_empty_container_is_run_again_with_one(mode):
    x = torch.randn(TOKENS, SIZE)
    golden, mine = Headed(), Headed(2.0)
    runs = recorded_both(golden, mine, lambda model: model(x, {}), mode=mode)
    report = ld.compare(*runs, progress=False)
    assert report.prove(report.findings[0]).agrees
    if mode == "module":
        assert "self.factor" in report.look_inside().findings[0].mine.code
