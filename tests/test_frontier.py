"""Where two programs part for good: regions, rejoining rewrites, and graphs that are no graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.align.pairing import pair
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.causes import causes
from llmdebug_nb.causes.judge import Judge
from llmdebug_nb.causes.tensor_kinds import near
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall
from llmdebug_nb.graph.data_dependence import Origin
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.graph.trace_back import back
from llmdebug_nb.search.frontier import Frontier
from recordings import AGREED
from recordings import record as recorded

# -- two programs ----------------------------------------------------------------------------------


class Frame(nn.Module):
    """Two projections around a part: what is under test stands in the middle."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part, self.after = nn.Linear(16, 16), part, nn.Linear(16, 16)

    def forward(self, x):
        return self.after(self.part(self.before(x)))


class Part(nn.Module):
    """What golden and mine write in their own way, with a weight and a norm to use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.wide = nn.LayerNorm(16), nn.Linear(16, 32)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2.0)


def written(name, forward):
    """Return a part whose forward is ``forward``, of a class called ``name``."""
    return type(name, (Part,), {"forward": forward})()


def compared(golden, mine, mode="module+api", x=None, **options):
    """Record two parts on one input, both inside the same frame, and compare."""
    torch.manual_seed(2)
    x = torch.randn(5, 16) if x is None else x
    runs = []
    for name, forward in (("Golden", golden), ("Mine", mine)):
        model = Frame(written(name, forward))
        runs.append(recorded(model, lambda model=model: model(x), name, mode=mode, **options))
    return ld.compare(*runs)


def softmaxed(self, x):
    scores = torch.matmul(x, x.T) * 0.25
    return torch.matmul(torch.softmax(scores, -1), self.norm(x))


def in_parts(self, x):
    scores = x @ x.T / 4.0
    powers = torch.exp(scores - torch.amax(scores, -1, keepdim=True))
    return (powers / torch.sum(powers, -1, keepdim=True)) @ self.norm(x)


def over_rows(self, x):
    scores = x @ x.T / 4.0
    powers = torch.exp(scores - torch.amax(scores, -1, keepdim=True))
    return (powers / torch.sum(powers, 0, keepdim=True)) @ self.norm(x)


def then_halved(self, x):
    scores = x @ x.T / 4.0
    powers = torch.exp(scores - torch.amax(scores, -1, keepdim=True))
    weights = powers / torch.sum(powers, -1, keepdim=True)
    return torch.mul(weights @ self.norm(x), 0.5)


def of_the_norm(self, x):
    x = self.norm(x)
    scores = x @ x.T / 4.0
    powers = torch.exp(scores - torch.amax(scores, -1, keepdim=True))
    return (powers / torch.sum(powers, -1, keepdim=True)) @ x


def without_the_norm(self, x):
    scores = x @ x.T / 4.0
    powers = torch.exp(scores - torch.amax(scores, -1, keepdim=True))
    return (powers / torch.sum(powers, -1, keepdim=True)) @ x


def test_a_rewrite_that_rejoins_is_no_divergence():
    report = compared(softmaxed, in_parts)
    assert report.verdict in AGREED
    assert report.findings == []
    assert report.coverage.observables_matched == report.coverage.observables == 1


def test_the_same_rewrite_with_a_bug_behind_it_blames_the_bug():
    report = compared(softmaxed, then_halved)
    assert report.verdict == "diverged"
    assert "mul" in report.findings[0].mine.op
    assert "0.5" in report.findings[0].mine.code


def test_a_bug_inside_a_rewrite_blames_no_line_before_it():
    finding = compared(softmaxed, over_rows).findings[0]
    assert finding.path.partition("/")[0] == "part"
    first = over_rows.__code__.co_firstlineno
    assert finding.mine.line in (first + 2, first + 3)  # not where the scores are computed


class Whole(nn.Module):
    """Layers with a residual each, a last norm, and a head."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 24)
        for norm in (self.norm, *(each.norm for each in self.layers)):
            nn.init.uniform_(norm.weight, 0.5, 2.0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


# as engines write it: a layer gives what it adds and what it adds to, and the next norm adds them
ENGINE = """
class Layer(Written):
    def forward(self, x, residual):
        residual = x if residual is None else x + residual
        return self.down(functional.silu(self.up(self.norm(residual)))), residual

class Engine(Model):
    def forward(self, x):
        x, residual = x[0], None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x + residual)
"""


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("wrong", [None, "layers.1.norm.weight", "layers.1.down.weight"])
def test_an_engines_layers_and_logits_are_compared_with_those_of_a_model(mode, wrong):
    names = {"Written": Layer, "Model": Whole, "functional": F, "__name__": "engine"}
    exec(compile(ENGINE, "engine.py", "exec"), names)
    golden, mine = Whole(Layer), names["Engine"](names["Layer"])
    if wrong is not None:
        with torch.no_grad():
            mine.get_parameter(wrong).mul_(torch.linspace(0.5, 1.5, 16 if "norm" in wrong else 32))
    x = torch.randn(2, 1, 5, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        with ld.dump(golden, name="golden", mode=mode, tokens="all") as one:
            for part in x:
                golden(part)
        with ld.dump(mine, name="mine", mode=mode, tokens="all") as other:
            for part in x:
                mine.head(mine(part))
    report = ld.compare(one, other)
    if wrong is None:
        assert report.verdict in ("match", "within_noise"), report
        assert report.coverage.observables_matched == report.coverage.observables == 2
    else:
        assert report.findings[0].path.startswith(wrong.removesuffix(".weight")), report


class Attends(nn.Module):
    """Attention over the tokens; ``by_tokens``: it takes a mask of tokens, not one to add."""

    def __init__(self, by_tokens, scale):
        super().__init__()
        torch.manual_seed(5)
        self.by_tokens, self.scale = by_tokens, scale
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT * self.scale
        if self.by_tokens:
            causal = torch.ones(5, 5, dtype=torch.bool).tril()
            scores = scores.masked_fill(~(causal & mask.bool()[:, None, :]), -torch.inf)
        else:
            scores = scores + mask
        return self.out(scores.softmax(-1) @ v)


class Masked(nn.Module):
    def __init__(self, attends):
        super().__init__()
        self.attends = attends

    def forward(self, x):
        if self.attends.by_tokens:
            shown = torch.ones(1, 3, dtype=torch.int64)
            return self.attends(x, mask=torch.cat([shown, shown[:, :2]], dim=1))
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)[None]
        mask = torch.zeros(1, 5, 5).masked_fill(hidden, torch.finfo(torch.float32).min)
        return self.attends(x, mask=mask)


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_mask_of_tokens_is_not_blamed_for_not_being_one_of_scores(mode):
    golden = Masked(Attends(False, 0.25))
    other = type("OtherAttends", (Attends,), {})
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(6))
    one = recorded(golden, lambda: golden(x), "golden", mode=mode)
    for scale in (0.25, 0.3):
        mine = Masked(other(True, scale))
        report = ld.compare(one, recorded(mine, lambda mine=mine: mine(x), "mine", mode=mode))
        if scale == 0.25:
            assert report.verdict in AGREED, report
        else:
            assert report.findings[0].path.startswith("attends"), report


def test_a_module_that_mine_leaves_out_is_named():
    report = compared(softmaxed, without_the_norm)
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == "part.norm"


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_module_that_is_called_elsewhere_is_no_match(mode):
    report = compared(softmaxed, of_the_norm, mode)
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] in ("part", "part.norm")


class Squeezed(nn.Module):
    """A norm of several operators, which ports write by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 16))

    def forward(self, x):
        return self.weight * (x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt())


class Stacked(Part):
    def __init__(self):
        super().__init__()
        self.squeezed = Squeezed()


def squeezed(self, x):
    hidden = F.gelu(self.wide(x))
    return self.squeezed(hidden[:, :16] + x)


def left_as_it_is(self, x):
    hidden = F.gelu(self.wide(x))
    return hidden[:, :16] + x


@pytest.mark.parametrize(("golden", "mine"), [(squeezed, left_as_it_is), (left_as_it_is, squeezed)])
def test_a_chain_that_is_a_whole_module_is_named_as_the_module_and_the_line_that_calls_it(
    golden, mine
):
    runs = []
    for name, forward in (("Golden", golden), ("Mine", mine)):
        model = Frame(type(name, (Stacked,), {"forward": forward})())
        torch.manual_seed(2)
        x = torch.randn(5, 16)
        runs.append(recorded(model, lambda model=model, x=x: model(x), name, mode="module+api"))
    finding = ld.compare(*runs).findings[0]
    assert finding.path == "part.squeezed"
    side = finding.golden if golden is squeezed else finding.mine
    assert side.code == "return self.squeezed(hidden[:, :16] + x)"


class Windowed(nn.Module):
    """A mask for all lengths is a buffer, of which each call takes a part."""

    def __init__(self, begin):
        super().__init__()
        self.begin = begin
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)

    def forward(self, x, padding):
        part = self.mask[self.begin : self.begin + len(x), : len(x)]
        allowed = part * padding
        return torch.softmax((x @ x.T).masked_fill(allowed == 0, -1e9), -1) @ x


class Padded(nn.Module):
    """The model makes another mask beside it, of what is padded."""

    def __init__(self, begin):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.attention = nn.Linear(16, 16), Windowed(begin)

    def forward(self, x):
        if self.attention.begin:  # it is written otherwise
            seen = torch.cat([torch.zeros(1), torch.ones(len(x) - 1)])
        else:
            seen = torch.arange(len(x)).gt(0).float()
        return self.attention(self.before(x), seen)


def test_a_part_of_a_buffer_is_made_of_no_operators_around_it():
    runs = []
    for name, begin in (("golden", 0), ("mine", 2)):
        model, x = Padded(begin), torch.arange(80.0).sin().reshape(5, 16)
        runs.append(recorded(model, lambda model=model, x=x: model(x), name, mode="module+api"))
    report = ld.compare(*runs)
    assert report.findings[0].path.startswith("attention")
    assert "self.mask[" in report.findings[0].mine.code
    flow = Flow(list(report.differences), 1)
    part = next(
        r
        for r in flow.records.values()
        if (r.site.path, r.site.role, r.site.slot) == ("attention/Tensor.mul", "input", "0")
    )
    assert all(source.producer is None for source in flow.sources(part)[0])


def gated(self, x):
    gate, up = self.wide(x).chunk(2, -1)
    return torch.mul(F.silu(gate), up)


def swapped(self, x):
    up, gate = self.wide(x).chunk(2, -1)
    return torch.mul(torch.sigmoid(gate) * gate, up)


def test_an_input_that_is_another_part_of_goldens_tensor_blames_where_it_is_taken():
    report = compared(gated, swapped)
    assert report.verdict == "diverged"
    (finding, *_) = report.findings
    assert finding.path.partition("/")[0] == "part"
    assert "made by part.wide" in finding.evidence
    first = swapped.__code__.co_firstlineno
    assert finding.mine.line in (first + 1, first + 2)


class LastToken(nn.Module):
    def __init__(self, token=-1):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head, self.token = nn.LayerNorm(96), nn.Linear(96, 8), token

    def forward(self, x):
        return self.head(self.norm(x)[self.token :])


class ChosenToken(LastToken):
    def forward(self, x):
        hidden = self.norm(x)
        return self.head(hidden[torch.tensor([len(x) + self.token])])


def test_a_token_chosen_wrongly_blames_the_line_that_chooses_it():
    x = torch.randn(16, 96)
    models = LastToken(), ChosenToken(), ChosenToken(-2)
    golden, right, wrong = (
        recorded(model, lambda model=model: model(x), f"run{n}", mode="module+api")
        for n, model in enumerate(models)
    )
    assert ld.compare(golden, right).verdict in AGREED
    (finding,) = ld.compare(golden, wrong).findings
    assert finding.mine.line == ChosenToken.forward.__code__.co_firstlineno + 2


class Angles(nn.Module):
    """Gives the angles by which channels are turned."""

    def forward(self, places):
        return places[:, None] / torch.arange(1, 17)


class Cosines(nn.Module):
    """Gives their cosines already."""

    def forward(self, places):
        return torch.cos(places[:, None] / torch.arange(1, 17))


class GoldenTurned(Part):
    def __init__(self):
        super().__init__()
        self.turn, self.out = Cosines(), nn.Linear(16, 16)

    def forward(self, x):
        turned = x * self.turn(torch.arange(1.0, 6.0))
        return self.out(self.norm(turned)) + x


class MineTurned(GoldenTurned):
    """Takes the cosines itself; doubles what the norm gives, if it is wrong."""

    def __init__(self, wrong):
        super().__init__()
        self.turn, self.wrong = Angles(), wrong

    def forward(self, x):
        turned = x * torch.cos(self.turn(torch.arange(1.0, 6.0)))
        normed = self.norm(turned)
        return self.out(torch.add(normed, normed) if self.wrong else normed) + x


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("wrong", [False, True])
def test_angles_at_the_place_of_cosines_are_not_blamed(mode, wrong):
    runs = []
    for name, part in (("golden", GoldenTurned()), ("mine", MineTurned(wrong))):
        frame = Frame(part)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
        runs.append(
            recorded(frame, lambda frame=frame, x=x: frame(x), name, mode=mode, weights=True)
        )
    report = ld.compare(*runs)
    assert (report.verdict in AGREED) == (not wrong)
    assert bool(report.findings) == wrong
    if mode != "module":  # by modules, all the code between turn and out may be wrong
        assert [f.path for f in report.findings if "turn" in f.path] == []


class Turned(nn.Module):
    """Scales both heads by the cosines that it is given, or by what it keeps."""

    def __init__(self):
        super().__init__()
        self.out, self.kept = nn.Linear(16, 16), 1 / HeadCosines()(torch.arange(5.0))

    def forward(self, x, cosines=None):
        heads = x.unflatten(-1, (2, 8))
        scaled = heads / self.kept[:, None] if cosines is None else heads * cosines[:, None]
        return self.out(scaled.flatten(-2))


class HeadCosines(nn.Module):
    def forward(self, places):
        return (places[:, None] / torch.arange(1, 9)).cos()


class Expert(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2


class Block(nn.Module):
    """A layer: attention and expert, each with what enters it added."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.expert = nn.LayerNorm(16), Turned(), Expert()

    def forward(self, x, cosines):
        x = x + self.attention(self.norm(x), cosines)
        return x + self.expert(x)


class WithCosines(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.turn, self.block, self.end = HeadCosines(), Block(), nn.LayerNorm(16)

    def forward(self, x):
        return self.end(self.block(x, self.turn(torch.arange(5.0))))


class Flat(WithCosines):
    """The same without a layer, an expert or cosines of its own, as an engine may be written."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.attention, self.function = self.block.norm, self.block.attention, function
        del self.block, self.turn

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return self.end(x + self.function(x) * 2)


@pytest.fixture
def flat_report(request):
    """The comparison of a layer with its flat port, which has this function for an expert."""
    runs = []
    for name, part, mode in (
        ("golden", WithCosines(), "module"),
        ("mine", Flat(request.param), "module+api"),
    ):
        frame = Frame(part)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
        runs.append(recorded(frame, lambda frame=frame, x=x: frame(x), name, mode=mode))
    return ld.compare(*runs)


@pytest.mark.parametrize("flat_report", [torch.sin], indirect=True)
def test_cosines_are_not_blamed_for_what_follows_the_attention_that_takes_them(flat_report):
    assert flat_report.findings[0].golden.path == "part.block.expert"


@pytest.mark.parametrize("flat_report", [torch.tanh], indirect=True)
def test_cosines_are_equal_in_effect_if_all_that_takes_them_is_the_attention_of_a_layer(
    flat_report,
):
    assert flat_report.verdict in AGREED
    places = {("part.turn", "output"), ("part.block", "input"), ("part.block.attention", "input")}
    alone = [d for d in flat_report.differences if d.pair.mine is None]
    rejoined = {(d.site.path, d.site.role) for d in alone if d.rule is Rule.REJOINED}
    assert places <= rejoined, {(d.site.path, d.site.role): d.reason for d in alone}


def normed_twice(self, x):
    first, second = self.norm(x), torch.tanh(x)
    return torch.mul(first, first) + torch.sin(second)


def normed_once(self, x):
    first, _ = self.norm(x), torch.tanh(x)
    return torch.mul(first, first) + torch.sin(first)


def test_an_input_that_is_another_of_goldens_tensors_blames_the_call_that_takes_it():
    report = compared(normed_twice, normed_once)
    assert report.verdict == "diverged"
    assert "sin" in report.findings[0].mine.op


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_bug_in_code_that_both_share_is_found_behind_a_rewrite(mode):
    def first(self, x):
        return self.norm(softmaxed(self, x))

    def second(self, x):
        return self.norm(in_parts(self, x))

    golden, mine = (Frame(written(n, f)) for n, f in (("Golden", first), ("Mine", second)))
    with torch.no_grad():
        mine.after.weight[3] *= 1.5
    x = torch.randn(5, 16)
    runs = [
        recorded(model, lambda model=model: model(x), name, mode=mode)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    report = ld.compare(*runs)
    assert [(f.path, f.cause) for f in report.findings] == [("after", causes.WEIGHT)]


def joined(self, x):
    return torch.cat((torch.mul(x[:2], 0.5), torch.mul(x[2:], 2.0)))


def written_in_place(self, x):
    y = torch.zeros_like(x)
    y[:2] = torch.mul(x[:2], 0.5)
    y[2:] = torch.mul(x[2:], 2.5)
    return y


def rolled(self, x):
    return torch.relu(self.norm(x).roll(1, -1))


def normed(self, x):
    return torch.relu(self.norm(x))


def test_an_operator_of_mine_alone_that_keeps_the_norm_is_no_cast():
    torch.manual_seed(2)
    x, runs = torch.randn(5, 16), []
    for forward, dtype in ((normed, torch.float32), (rolled, torch.bfloat16)):
        model, given = Frame(written("Kind", forward)).to(dtype), x.to(dtype)
        name = forward.__name__
        runs.append(recorded(model, lambda model=model, x=given: model(x), name, mode="module+api"))
    finding = ld.compare(*runs).findings[0]
    assert (finding.path, finding.cause) == ("part/Tensor.roll", causes.OTHER_OPS)


def test_what_is_written_in_place_is_made_of_what_is_written():
    (finding, *_) = compared(joined, written_in_place).findings
    first = written_in_place.__code__.co_firstlineno
    lines = {pair.mine.line for pair in finding.pairs if pair.state == "guilty" and pair.mine}
    assert first + 3 in lines
    assert first + 2 not in lines


class Gated(nn.Module):
    """A gate and what goes through it."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(3)
        for name in names:
            setattr(self, name, nn.Linear(16, 16))

    def forward(self, x):
        gate, up = (child(x) for child in self.children())
        return torch.mul(F.silu(gate), up)


class TakenForEachOther(Gated):
    def forward(self, x):
        up, gate = (child(x) for child in self.children())
        return torch.mul(F.silu(gate), up)


@pytest.mark.parametrize("wrong", ["weights", "code"])
def test_weights_in_another_order_are_told_from_code_that_takes_the_wrong_one(wrong):
    golden = Frame(Gated("a", "b"))
    mine = Frame((Gated if wrong == "weights" else TakenForEachOther)("c", "d"))
    if wrong == "weights":
        mine.part.c.load_state_dict(golden.part.b.state_dict())
        mine.part.d.load_state_dict(golden.part.a.state_dict())
    x = torch.randn(5, 16)
    runs = [
        recorded(model, lambda model=model: model(x), name, mode="module+api", weights=True)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    (finding, *_) = ld.compare(*runs).findings
    assert (finding.cause == causes.WEIGHT) == (wrong == "weights")
    assert (finding.path in ("part.a", "part.b")) == (wrong == "weights")


class Given(nn.Module):
    """Passes two views to a part."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part = nn.Linear(16, 32), part

    def forward(self, x):
        first, second = self.before(x).chunk(2, -1)
        return self.part(first, second)


def takes_both(self, first, second):
    return torch.sin(first) + torch.cos(self.norm(second))


def takes_one(self, first, second):
    return torch.sin(second) + torch.cos(self.norm(second))


def test_a_view_that_was_made_outside_is_not_blamed_for_being_taken():
    x = torch.randn(5, 16)
    parts = (("Golden", takes_both), ("Mine", takes_one))
    models = [(name, Given(written(name, forward))) for name, forward in parts]
    runs = [
        recorded(model, lambda model=model: model(x), name, mode="module+api")
        for name, model in models
    ]
    (finding, *_) = ld.compare(*runs).findings
    assert finding.mine.line == takes_one.__code__.co_firstlineno + 1


def residual(self, x):
    return self.norm(x + torch.tanh(self.wide(x)).chunk(2, -1)[0])


def no_residual(self, x):
    return self.norm(x * 1.0) + 0 * self.wide(x).sum()


def test_by_modules_the_code_that_gives_a_module_another_tensor_is_blamed():
    (finding, *_) = compared(residual, no_residual, "module").findings
    assert (finding.golden.path, finding.mine.path) == ("part", "part")


def norm_of_sum(self, x):
    y = torch.tanh(x) + x
    return self.wide(self.norm(y)).chunk(2, -1)[0] + y


def norm_of_input(self, x):
    y = torch.tanh(x) + x
    return self.wide(self.norm(x)).chunk(2, -1)[0] + y  # x, not y


def helped(self, x):
    return doubled(torch.tanh(x)) + torch.sin(x)


def helped_wrongly(self, x):
    y = torch.sin(x)
    return doubled(y) + y


def doubled(x):
    return torch.exp(x)


@pytest.mark.parametrize(
    ("golden", "mine", "line"), [(norm_of_sum, norm_of_input, 2), (helped, helped_wrongly, 2)]
)
def test_the_line_that_gives_a_module_or_a_helper_another_tensor_is_named(golden, mine, line):
    (finding, *_) = compared(golden, mine).findings
    assert (finding.mine.line, finding.cause) == (
        mine.__code__.co_firstlineno + line,
        "introduced",
    )


def test_an_einsum_is_replayed_so_that_what_it_takes_is_blamed():
    def golden(self, x):
        return torch.nn.functional.linear(torch.tanh(self.norm(x)), self.wide.weight[:16])

    def mine(self, x):
        return torch.einsum("tc,wc->tw", torch.tanh(x), self.wide.weight[:16])

    (finding, *_) = compared(golden, mine).findings
    assert finding.golden.path.startswith("part.norm")


class Attention(nn.Module):
    """Attention with a projection for each of query, key and value."""

    def __init__(self, theirs):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            for own, weight in zip(
                (self.q, self.k, self.v), theirs.in_proj_weight.chunk(3), strict=True
            ):
                own.weight.copy_(weight)
                own.bias.zero_()
        self.out.load_state_dict(theirs.out_proj.state_dict())

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(0, 1) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


class Torchs(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def test_a_module_whose_weights_are_used_without_it_is_paired_where_it_would_run():
    torch.manual_seed(4)
    theirs = Torchs(16, 2)
    golden, mine = Frame(Attention(theirs)), Frame(theirs)
    with torch.no_grad():
        theirs.in_proj_weight[:16] *= -1
    x = torch.randn(5, 16)
    runs = [
        recorded(model, lambda model=model: model(x), name, mode="module")
        for name, model in (("golden", golden), ("mine", mine))
    ]
    (finding, *_) = ld.compare(*runs).findings
    assert (finding.golden.path, finding.mine.path) == ("part", "part")


# -- bad values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
def test_one_value_everywhere_gets_a_verdict_and_equal_programs_agree(mode, value):
    x = torch.full((5, 16), value)
    same = compared(softmaxed, softmaxed, mode, x)
    assert same.verdict in AGREED, same
    assert same.findings == []
    other = compared(softmaxed, in_parts, mode, x)
    assert other.verdict in (*AGREED, "incomparable"), other


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_part_that_gives_one_value_in_mine_alone_is_found(value):
    def broken(self, x):
        return torch.mul(in_parts(self, x), 0.0) + value

    report = compared(softmaxed, broken)
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == "part"


def many(self, x):
    ones = [torch.mul(torch.ones_like(x), 1.0) for _ in range(300)]
    return self.norm(x) + ones[7]


def fewer(self, x):
    ones = [torch.mul(torch.ones_like(x), 1.0) for _ in range(200)]
    return torch.add(ones[3], self.norm(x))


def test_hundreds_of_equal_values_are_paired():
    report = compared(many, fewer)
    assert report.verdict in AGREED
    assert report.findings == []


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_statistics_alone_find_the_bug_and_clear_the_rewrite(mode, side):
    torch.manual_seed(2)
    x = torch.randn(5, 16)

    def run(name, forward, lean):
        model = Frame(written(name, forward))
        return recorded(model, lambda: model(x), name, mode=mode, stats_only=lean)

    golden = run("golden", softmaxed, side in (0, 2))
    assert ld.compare(golden, run("mine", in_parts, side in (1, 2))).findings == []
    report = ld.compare(golden, run("bug", then_halved, side in (1, 2)))
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == "part"


# -- graphs by hand --------------------------------------------------------------------------------


def tensor(number, path, role="output", *, producer=None, slot="0", value=None, step=0):
    """A record of a float tensor; ``value`` stands for its bytes."""
    value = number if value is None else value
    summary = Summary("float32", (4,), -1.0, 1.0, 0.1 * value, 2.0 + value, 0, 0, 0, f"x:{value}")
    return Record(
        number, Site(path, step, role=role, slot=slot), number, path.partition("/")[2] or "M",
        summary, producer=producer,
    )  # fmt: skip


def rows(*pairs):
    """Differences of (golden, mine, verdict), with one side None for a row of one side."""
    return [
        Difference(i, Pair(golden, mine, ""), verdict, *((0.5, 1e-6) if golden and mine else ()))
        for i, (golden, mine, verdict) in enumerate(pairs)
    ]


def both(verdict, number, *args, **options):
    """A pair of records in the same place of two programs."""
    return tensor(number, *args, **options), tensor(number, *args, **options), verdict


def other_code(golden, mine):
    return False


def chain(verdicts, cut=()):
    """A module whose operators take each other's output; those of ``cut`` lost their producer."""
    made = [both("match", 0, "", "input")]
    for i, verdict in enumerate(verdicts):
        before = None if i in cut else made[-1][0].id
        made.append(both(made[-1][2], 2 * i + 1, f"/Op.f{i}", "input", producer=before))
        made.append(both(verdict, 2 * i + 2, f"/Op.f{i}"))
    made.append(both(verdicts[-1], 2 * len(verdicts) + 2, "", producer=made[-1][0].id))
    return rows(*made)


def blamed(frontier):
    return [call.key.path for region in frontier.guilty for call in region.mine]


def test_the_first_call_that_differs_is_the_frontier_and_the_rest_inherits():
    frontier = Frontier(chain(["match", "diverged", "diverged"]), "forward", other_code)
    assert blamed(frontier) == ["/Op.f1"]
    assert frontier.guilty[0].is_one_call
    assert frontier.rejoins == []


def test_what_differs_and_agrees_again_rejoins():
    differences = chain(["match", "diverged", "match"])
    frontier = Frontier(differences, "forward", other_code)
    assert frontier.guilty == []
    assert {d.site.path for d in frontier.rejoins} == {"/Op.f1", "/Op.f2"}


def test_what_only_an_earlier_divergence_excuses_does_not_rejoin():
    differences = chain(["match", "diverged", "within_noise"])
    follows = [replace(d, follows=d.verdict == "within_noise") for d in differences]
    assert Frontier(differences, "forward", other_code).guilty == []
    assert blamed(Frontier(follows, "forward", other_code)) == ["/Op.f1"]


def test_the_same_code_on_the_same_tensors_must_give_the_same():
    frontier = Frontier(chain(["match", "diverged", "match"]), "forward", lambda a, b: True)
    assert "/Op.f1" in blamed(frontier)


def test_a_chain_that_only_golden_has_is_a_region_without_mine():
    given = both("match", 1, "", "input")
    alone = [tensor(2, "/Op.f", "input", producer=1), tensor(3, "/Op.f")]
    result = tensor(4, "", producer=3), tensor(4, "", producer=1, value=1), "diverged"
    differences = rows(given, *((one, None, "unmatched") for one in alone), result)
    (region,) = Frontier(differences, "forward", other_code).guilty
    assert [call.key.path for call in region.golden] == ["/Op.f"]
    assert region.mine == []
    assert [d.site.role for d in region.entries] == ["input", "input"]  # once for each side


@pytest.mark.parametrize("cut", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_lost_producer_still_leads_to_the_first_call_of_the_same_code_that_differs(cut):
    differences = chain(["match", "diverged", "diverged"], cut)
    assert "/Op.f1" in blamed(Frontier(differences, "forward", lambda golden, mine: True))


def test_without_any_producer_the_order_leads_to_the_first_call_that_differs():
    """As in the dumps of other tools."""
    made = chain(["match", "diverged", "diverged"], (0, 1, 2))
    output = made.pop().pair.golden
    last = replace(output, producer=None)
    made.append(Difference(len(made), Pair(last, last, ""), "diverged", 0.5, 1e-6))
    assert blamed(Frontier(made, "forward", other_code)) == ["/Op.f1"]


def test_a_cyclic_graph_ends_and_blames_something():
    made = [
        both("diverged", 1, "/Op.f", "input", producer=4),
        both("diverged", 2, "/Op.f"),
        both("diverged", 3, "/Op.g", "input", producer=2),
        both("diverged", 4, "/Op.g"),
        both("diverged", 5, "", producer=4),
    ]
    assert Frontier(rows(*made), "forward", other_code).guilty


def test_pairs_that_cross_blame_something():
    """Golden makes a before b, mine b before a: each inherits the other's error."""
    given = both("match", 1, "", "input")
    a = tensor(2, "/Op.a", producer=None), tensor(5, "/Op.a"), "diverged"
    b = tensor(4, "/Op.b"), tensor(3, "/Op.b"), "diverged"
    takes_b = None, tensor(4, "/Op.a", "input", producer=3), "unmatched"
    takes_a = tensor(3, "/Op.b", "input", producer=2), None, "unmatched"
    result = tensor(6, "", producer=4), tensor(6, "", producer=5), "diverged"
    assert Frontier(rows(given, a, takes_a, takes_b, b, result), "forward", other_code).guilty


@st.composite
def _graphs(draw):
    """Two runs of up to twelve calls with any producers, cycles included, and any verdicts."""
    count = draw(st.integers(1, 12))
    ids = st.one_of(st.none(), st.integers(0, 3 * count + 3))
    verdicts = st.sampled_from(["match", "within_noise", "diverged", "unmatched", "expected"])
    made = []
    for i in range(3 * count):
        path = draw(st.sampled_from(["", "a", "a.b", f"a/Op.f{i // 3}", f"a.b/Op.g{i // 3}"]))
        role = ("input", "output", draw(st.sampled_from(["output", "weight", "input"])))[i % 3]
        verdict = draw(verdicts)
        sides = [tensor(i, path, role, producer=draw(ids), slot=str(i)) for _ in range(2)]
        if verdict == "unmatched" and draw(st.booleans()):
            sides[draw(st.integers(0, 1))] = None
        made.append((*sides, verdict))
    return rows(*made)


@settings(deadline=None)
@given(_graphs(), st.booleans())
def test_any_graph_has_a_frontier_of_what_differs_and_counts(differences, same):
    frontier = Frontier(differences, "forward", lambda golden, mine: same)
    guilty = {region.row.index for region in frontier.guilty}
    rejoined = {d.index for d in frontier.rejoins}
    bad = {d.index for d in differences if d.verdict == "diverged"}
    assert guilty <= frontier.reaching <= bad
    assert rejoined == bad - frontier.reaching
    for region in frontier.guilty:
        for calls in (region.golden, region.mine):
            assert [c.start for c in calls] == sorted(c.start for c in calls)


@settings(deadline=None)
@given(_graphs(), st.booleans())
def test_what_counts_is_always_blamed_on_something(differences, same):
    frontier = Frontier(differences, "forward", lambda golden, mine: same)
    assert bool(frontier.guilty) == bool(frontier.reaching)


@settings(deadline=None)
@given(_graphs())
def test_the_way_back_ends_at_tensors_with_partners(differences):
    for side in (0, 1):
        flow = Flow(differences, side)
        for one in flow.records.values():
            entries, calls = back(flow, one)
            assert all(flow.agrees(entry) is not None for entry in entries)
            assert len({id(call) for call in calls}) == len(calls)


def test_records_without_order_get_pairs_and_a_frontier():
    """A dump of single files may number its tensors in any order."""
    golden = [tensor(i, f"layers.{i % 4}.fc", "output", value=i % 4) for i in (3, 1, 2, 0)]
    mine = [tensor(i, f"layers.{i % 4}.fc", "output", value=i % 4) for i in (0, 2, 3, 1)]
    pairs = pair(golden, mine)
    assert all(p.golden.site.path == p.mine.site.path for p in pairs)
    differences = [Difference(i, p, "diverged", 0.5, 1e-6) for i, p in enumerate(pairs)]
    assert Frontier(differences, "forward", other_code).guilty


def test_a_cut_graph_of_thousands_of_calls_is_searched():
    verdicts = ["match"] * 500 + ["diverged"] * 1500
    differences = chain(verdicts, cut=range(2000))
    assert Frontier(differences, "forward", other_code).guilty


# -- pairs that are taken apart --------------------------------------------------------------------


def two_things(path):
    """Two tensors at one place that have nothing in common, though golden's is taken rightly."""
    differs = tensor(2, path), tensor(2, path, value=20), "diverged"
    taken = tensor(3, "a/Op.h", "input", producer=2, value=2), None, "unmatched"
    made = rows(both("match", 1, "", "input"), differs, taken, both("match", 4, "a/Op.h"))
    return [replace(d, error=2.0) if d.verdict == "diverged" else d for d in made]


def test_two_things_at_one_place_are_taken_apart():
    frontier = Frontier(two_things("a/Op.f"), "forward", other_code)
    assert frontier.guilty == []
    assert [d.index for d in frontier.rejoins] == [1]


def test_a_result_that_counts_is_never_taken_apart():
    """Whatever is made of golden's result later: mine's is wrong."""
    frontier = Frontier(two_things(""), "forward", other_code)
    assert [region.row.index for region in frontier.guilty] == [1]
    assert frontier.rejoins == []


def masked_otherwise(layers, error=0.6):
    """Layers that take one mask, made of other numbers in mine; ``layers``: their verdicts."""
    numbers = tensor(1, "/Torch.arange"), tensor(1, "/Torch.ones", value=20), "diverged"
    made = [both("match", 0, "", "input"), numbers]
    for side, op in enumerate(("/Tensor.le", "/Tensor.tril")):
        given = tensor(2, op, "input", producer=1, value=numbers[side].id + 19 * side)
        for record in (given, tensor(3, op, value=30 + side)):
            made.append((*((None, record) if side else (record, None)), "unmatched"))
    before = 0
    for n, verdict in enumerate(layers):
        first, path = 10 + 3 * n, f"h.{n}/Op.f"
        made.append(
            both("match" if n == 0 else layers[n - 1], first, path, "input", producer=before)
        )
        masks = (
            tensor(first + 1, path, "input", producer=3, slot="1", value=30 + s) for s in (0, 1)
        )
        made += [
            (record, None, "unmatched") if n == 0 else (None, record, "unmatched")
            for n, record in enumerate(masks)
        ]
        made.append(both(verdict, first + 2, path))
        before = first + 2
    made.append(both(layers[-1], 40, "", producer=before))
    return [
        replace(d, error=error) if d.pair.mine and d.site.path == "/Torch.arange" else d
        for d in rows(*made)
    ]


def test_a_mask_that_one_layer_takes_rightly_is_not_blamed_for_the_next_one():
    frontier = Frontier(masked_otherwise(["match", "diverged"]), "forward", other_code)
    assert [region.row.site.path for region in frontier.guilty] == ["h.1/Op.f"]


def test_a_mask_that_no_layer_takes_rightly_is_unsure_if_it_has_little_in_common():
    """What both make of no tensor may be two things; masks that are nearly equal are one."""
    for error, is_sure in ((0.6, False), (0.1, True)):
        differences = masked_otherwise(["diverged", "diverged"], error)
        frontier = Frontier(differences, "forward", other_code)
        (region,) = frontier.guilty
        assert [call.key.path for call in region.mine] == ["/Torch.ones"]
        assert frontier.is_sure(region) == is_sure


def test_a_call_is_that_of_mine_whose_tensors_have_most_in_common():
    added, compared = (tensor(n, f"/Tensor.{op}") for n, op in ((3, "add"), (5, "le")))
    given = tensor(2, "/Tensor.add", "input"), tensor(4, "/Tensor.le", "input"), "diverged"
    result = tensor(3, "/Tensor.add"), tensor(3, "/Tensor.add", value=30), "diverged"
    apart, near_to_it = rows(given, result, (None, compared, "unmatched"))[:2]
    differences = [replace(apart, error=math.inf), replace(near_to_it, error=0.08)]
    call = Calls(differences, "forward").of(differences[1])
    assert call.mine == added.site.key


def test_a_region_has_another_one_in_it_if_it_is_that_code_and_more():
    paths = [tensor(n, f"/Op.{n}").site.key for n in range(3)]
    calls = [FlowCall(key) for key in paths]
    row = rows(both("diverged", 1, ""))[0]
    wide, one, other = (Region(row, mine=[calls[n] for n in part]) for part in ((0, 1), (1,), (2,)))
    assert wide.has_in_it(one)
    assert not any(a.has_in_it(b) for a, b in ((one, wide), (one, one), (wide, other)))
    frontier = Frontier(
        rows(both("diverged", 1, ""), both("diverged", 2, "/Op.f")), "forward", other_code
    )
    inside = replace(rows(both("diverged", 2, "/Op.f"))[0], index=1)
    assert frontier.is_vague(wide, [one])  # of it, a result is all that is known
    assert not frontier.is_vague(Region(inside, mine=wide.mine), [one])
    assert not wide.has_in_it(Region(row))  # nothing recorded is between
    lacking = Region(row, golden=calls[:1])
    assert Region(row, golden=calls[:2], mine=calls[2:]).has_in_it(lacking)


def test_operators_show_what_a_cache_holds_so_nothing_is_carried_over_unseen():
    start = rows(both("diverged", 1, ""))[0]
    later = tensor(2, "h.0", step=1).site.key, tensor(3, "h.0/Op.f", step=1).site.key
    for operated, seen in (({"h.0"}, [False, False]), (set(), [True, False])):
        judge = SimpleNamespace(start=start, calls=SimpleNamespace(operated=operated))
        assert [Judge._earlier(judge, ComparedCall(key, key)) for key in later] == seen


def two_layers(path):
    """Two layers that differ between tensors that agree; mine gives the second one's to the end.

    ``path``: of the operator that differs in the second layer.
    """
    made = [both("match", 1, "", "input")]
    for n, op in enumerate(("h.0/Op.f", path)):
        first = 2 + 4 * n
        made.append(both("match", first, op, "input", producer=made[-1][0].id))
        made.append((tensor(first + 1, op), tensor(first + 1, op, value=90 + n), "diverged"))
        made.append(both("match", first + 2, f"h.{n}/Op.g", "input", producer=first + 1, value=50))
        made.append(both("match", first + 3, f"h.{n}/Op.g"))
    result = tensor(20, "", producer=7), tensor(20, "", producer=7, value=99), "diverged"
    return rows(*made, result)


@pytest.mark.parametrize(("path", "blamed_row"), [("h.1/Op.f", 9), ("h.1/Op.e", 6)])
def test_a_place_that_differs_harmlessly_in_another_layer_is_not_blamed(path, blamed_row):
    frontier = Frontier(two_layers(path), "forward", other_code)
    assert [region.row.index for region in frontier.guilty] == [blamed_row]


@pytest.mark.parametrize(("dtype", "blamed_row"), [("int64", 5), ("float32", 2)])
def test_two_kinds_of_tensor_at_the_border_of_a_container_say_nothing(dtype, blamed_row):
    golden, mine = (tensor(2, "m", "input", slot="mask", value=50 + n) for n in range(2))
    mine = replace(mine, summary=replace(mine.summary, dtype=dtype))
    taken = tensor(4, "m/Op.f", "input", slot="1", producer=2, value=60)
    made = rows(
        both("match", 0, "", "input"),
        both("match", 1, "m", "input", producer=0),
        (golden, mine, "diverged"),
        both("match", 3, "m/Op.f", "input", producer=1),
        (taken, None, "unmatched"),
        (tensor(5, "m/Op.f"), tensor(5, "m/Op.f", value=90), "diverged"),
        (None, replace(taken, summary=mine.summary), "unmatched"),
        (tensor(6, "m", producer=5), tensor(6, "m", producer=5, value=91), "diverged"),
        (tensor(7, "", producer=6), tensor(7, "", producer=6, value=92), "diverged"),
    )
    frontier = Frontier(made, "forward", other_code)
    assert [region.row.index for region in frontier.guilty] == [blamed_row]


# -- errors of the search --------------------------------------------------------------------------


def test_a_damaged_dump_met_while_blaming_is_told_and_is_no_error_of_ours(monkeypatch):
    def fails(*args):
        raise CorruptDumpError("the code of a call stack is damaged")

    monkeypatch.setattr("llmdebug_nb.findings.blame._Search._finding", fails)
    report = compared(softmaxed, over_rows)
    assert report.verdict == "diverged"
    assert "could not be searched: the code of a call stack is damaged" in str(report)


@pytest.mark.parametrize("broken", ["causes.judge.Judge.blamed", "findings.blame._Search._finding"])
def test_an_error_while_blaming_leaves_table_and_verdict_and_is_told(monkeypatch, broken):
    whole = compared(softmaxed, over_rows)

    def fails(*args):
        raise KeyError("no such thing")

    monkeypatch.setattr(f"llmdebug_nb.{broken}", fails)
    with pytest.warns(RuntimeWarning, match="could not be searched.*KeyError"):
        report = compared(softmaxed, over_rows)
    assert report.verdict == whole.verdict == "diverged"
    assert len(report.differences) == len(whole.differences)
    assert report.findings[0].step == whole.findings[0].step
    assert "could not be searched because of an error of ours (KeyError" in str(report)


def test_an_error_while_searching_for_regions_leaves_the_verdict_and_is_told(monkeypatch):
    def fails(*args):
        raise IndexError("no such thing")

    monkeypatch.setattr(Frontier, "_follow", fails)
    with pytest.warns(RuntimeWarning, match="IndexError"):
        report = compared(softmaxed, over_rows)
    assert report.verdict == "diverged"
    assert report.findings == []
    assert "an error of ours (IndexError: no such thing)" in str(report)


# -- what is near ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
def test_of_the_calls_of_a_rewrite_those_of_the_module_of_the_wrong_tensor_come_first(side):
    paths = ["/Op.mask", "h.0/Op.position", "h.0.attn/Op.scores", "h.0.norm/Op.mean", "h.1/Op.f"]
    keys = [tensor(n, path).site.key for n, path in enumerate(paths)]
    calls = [ComparedCall(*((key, None) if side == 0 else (None, key)), []) for key in keys]
    wrong = tensor(9, "h.0.attn/Op.scores"), tensor(9, "h.0.attn/Op.scores"), "diverged"
    found = near(calls, side, rows(wrong)[0])
    assert found == [calls[n] for n in (1, 2, 0, 3, 4)]  # else in the order in which they ran


def test_calls_of_the_other_program_alone_come_last():
    key = tensor(1, "h.0/Op.f").site.key
    calls = [ComparedCall(key, None, []), ComparedCall(None, key, [])]
    wrong = tensor(9, "h.0/Op.g"), tensor(9, "h.0/Op.g"), "diverged"
    assert near(calls, 1, rows(wrong)[0]) == calls[::-1]
    assert near(calls, 0, rows(wrong)[0]) == calls


def test_of_a_chain_the_first_call_that_the_other_program_lacks_is_found():
    shared, alone = (tensor(n, f"h.0/Op.{n}").site.key for n in range(2))
    calls = [ComparedCall(shared, shared), ComparedCall(None, alone)]
    region = SimpleNamespace(golden=[], mine=[FlowCall(key) for key in (shared, alone)])
    judge = SimpleNamespace(
        calls=SimpleNamespace(at=lambda side, key: (side, key)),
        narrowing=SimpleNamespace(made_up=lambda call, chain, side: call),
    )
    assert Judge._first_alone(judge, calls, region, 1) == (1, alone)


def test_what_is_made_of_no_other_tensor_is_a_constant_however_many_operators_make_it():
    places = tensor(1, "/Torch.arange"), tensor(1, "/Torch.arange")
    taken = [tensor(2, "/Tensor.ge", "input", producer=1) for _ in range(2)]
    mask = tensor(3, "/Tensor.ge"), tensor(3, "/Tensor.ge")
    x = tensor(4, "a/Tensor.add", "input"), tensor(4, "a/Tensor.add", "input")
    also = [tensor(5, "a/Tensor.add", "input", producer=3, slot="1") for _ in range(2)]
    scores = tensor(6, "a/Tensor.add"), tensor(6, "a/Tensor.add")
    flow = Flow(rows(*((*each, "match") for each in (places, taken, mask, x, also, scores))), 0)
    assert Origin(flow).is_constant(mask[0])
    assert Origin(flow).is_constant(places[0])
    assert not Origin(flow).is_constant(scores[0])  # it is made of x, too
    assert not Origin(flow).is_constant(x[0])


def test_what_depends_on_an_input_is_told_only_where_it_can_be_seen():
    taken, slopes = ((tensor(n, "/Tensor.mul", "input", slot=str(n)),) * 2 for n in (0, 1))
    held = (tensor(2, "a", "weight"),) * 2
    bias, result = (tensor(3, "/Tensor.mul"),) * 2, (tensor(4, "", producer=3),) * 2
    slopes = tuple(replace(r, summary=held[0].summary) for r in slopes)
    of_both = Flow(rows(*((*each, "match") for each in (taken, slopes, held, bias, result))), 0)
    assert Origin(of_both).is_told
    assert not Origin(of_both).is_constant(bias[0], held=True)
    of_held = Flow(rows(*((*each, "match") for each in (slopes, held, bias, result))), 0)
    assert not Origin(of_held).is_told  # as where an engine does not show the tokens
    assert Origin(of_held).is_constant(bias[0], held=True)
    assert not Origin(of_held).is_constant(bias[0])
