"""A right program in another precision agrees: masks, memory, choices and dtypes explain the rest.

Each case is a construct of some architecture in Transformers.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
import recordings
from llmdebug_nb.align.masks import are_masks
from llmdebug_nb.core.kernels.masks import without_masked
from llmdebug_nb.core.kernels.summary import summarize

LOW = [torch.bfloat16, torch.float16]
MODE = ("module", "api")


recorded = functools.partial(recordings.recorded, mode=MODE)


def compared(model, dtype, *inputs):
    """Compare a model with itself in another dtype."""
    low = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    golden = recorded(model, *inputs, name="golden")
    mine = recorded(copy.deepcopy(model).to(dtype), *low, name="mine")
    return ld.compare(golden, mine, progress=False)


def made(kind, seed=0, **options):
    torch.manual_seed(seed)
    model = kind(**options)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
    return model


class Attention(nn.Module):
    """Masks with the lowest number of a dtype, before its scores are divided."""

    def __init__(self, wide=False, capped=False, sink=False):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.wide, self.capped, self.sink = wide, capped, sink

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.wide:
            q, k = q.to(torch.float32), k.to(torch.float32)
        mask = torch.full((12, 12), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        scores = torch.matmul(q, k.mT)
        if self.capped:
            scores = torch.tanh(scores * 0.0625 / 50) * 50
        scores = scores + mask
        scores = scores / 4.0
        if self.sink:
            scores = scores - scores.max(-1, keepdim=True).values
        return torch.matmul(torch.softmax(scores, -1).to(x.dtype), x)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("options", [{}, {"wide": True}, {"sink": True}, {"capped": True}], ids=str)
def test_masked_scores_agree_whatever_the_fill_and_the_scale(options, dtype):
    torch.manual_seed(1)
    report = compared(made(Attention, **options), dtype, torch.randn(2, 12, 16))
    assert report.verdict == "within_noise", report
    assert report.coverage.share > 0.95


@pytest.mark.parametrize("wrong", ["one entry too many", "one too few"])
def test_a_mask_at_other_places_is_found_in_another_precision(wrong):
    class Wrong(Attention):
        def forward(self, x):
            q, k = self.q(x), self.k(x)
            shift = 0 if wrong == "one entry too many" else 2
            mask = torch.full((12, 12), torch.finfo(x.dtype).min, dtype=x.dtype).triu(shift)
            mask[0] = mask[0] * 0 if shift == 0 else mask[0]
            scores = (torch.matmul(q, k.mT) + mask) / 4.0
            return torch.matmul(torch.softmax(scores, -1).to(x.dtype), x)

    torch.manual_seed(1)
    x, model = torch.randn(2, 12, 16), made(Attention)
    bad = Wrong()
    bad.load_state_dict(model.state_dict())
    golden = recorded(model, x, name="golden")
    mine = recorded(bad.to(torch.bfloat16), x.to(torch.bfloat16), name="mine")
    assert ld.compare(golden, mine, progress=False).verdict == "diverged"


@given(
    scale=st.floats(0.01, 100),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, *LOW])] * 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_entries_are_left_out_where_both_sides_mask(scale, dtypes, seed):
    torch.manual_seed(seed)
    x, hidden = torch.randn(6, 6), torch.rand(6, 6) < 0.4
    hidden[0, 0] = True
    sides = [x.masked_fill(hidden, torch.finfo(dtype).min / max(scale, 1.0)) for dtype in dtypes]
    if all(float(side.min()) < -9e3 for side in sides):
        found = without_masked(*sides)
        one_is_sure = any(float(side.min()) < -(2**27) for side in sides)
        assert torch.equal(found[0], x.masked_fill(hidden, 0.0)) == one_is_sure
        assert torch.equal(*found) or not one_is_sure


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("fill", [-1e10, -1e9])
def test_a_fill_that_is_infinite_in_another_dtype_is_no_overflow(fill, dtype):
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            scores = torch.matmul(self.q(x), self.k(x).mT)
            bias = torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), fill)
            scores += bias.to(x.dtype)
            return torch.matmul(torch.softmax(scores.float(), -1).type_as(x), x)

    torch.manual_seed(1)
    report = compared(made(Filled), dtype, torch.randn(2, 12, 16))
    assert report.verdict == "within_noise", report


class Scores(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def forward(self, x):
        scores = torch.matmul(x, x.mT) * 20
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), self.fill)
        return torch.softmax(scores, -1)


def test_an_overflow_among_scores_is_found_beside_a_mask():
    torch.manual_seed(1)
    x = torch.randn(2, 12, 16) * 30
    golden = recorded(Scores(-1e10), x, name="golden")
    mine = recorded(Scores(float("-inf")), x.half(), name="mine")
    report = ld.compare(golden, mine, progress=False)
    assert report.verdict == "diverged"
    assert report.findings[0].cause == "overflow starts here"
    assert "mul" in report.findings[0].path


def test_large_scores_that_overflow_downwards_are_no_fill():
    x = torch.linspace(-3e5, 3e5, 64).reshape(8, 8)
    found = without_masked(x, x.half())
    assert torch.equal(found[0], x)


def test_an_activation_that_is_large_is_no_mask():
    x = torch.randn(4, 8)
    x[1, 2] = -6e4
    wrong = x.clone()
    wrong[1, 2] = -3e4
    assert all(torch.equal(a, b) for a, b in zip(without_masked(x, wrong), (x, wrong), strict=True))


def test_masked_scores_less_their_maximum_are_no_mask():
    x = torch.randn(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -3.4e38)
    less = summarize(x - x.max(-1, keepdim=True).values)
    low = summarize((x - x.max(-1, keepdim=True).values).clamp(-65504).half())
    assert not are_masks(less, low)
    for fill in (-3.4e38, float("-inf")):
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), fill)
        assert are_masks(summarize(mask), summarize(mask.clamp(-65504)))


class Filled(nn.Module):
    """Writes into new memory, part by part. ``junk``: what happens to lie there."""

    def __init__(self, how, junk):
        super().__init__()
        self.how, self.junk, self.out = how, junk, nn.Linear(8, 4)

    def forward(self, a, b):
        room = a.new_empty(3, 8)
        room.detach().numpy()[:] = self.junk
        if self.how == "copy_":
            room[..., :4].copy_(a)
            room[..., 4:].copy_(b)
        else:
            room[..., :4] = a
            room[..., 4:] = b
        return self.out(room)


@pytest.mark.parametrize("how", ["copy_", "assigned"])
@pytest.mark.parametrize("junk", [float("nan"), 7.0])
def test_memory_that_is_written_in_parts_is_compared_once_it_is_whole(how, junk):
    torch.manual_seed(0)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    model = made(Filled, how=how, junk=0.0)
    golden = recorded(model, a, b, name="golden")
    again = copy.deepcopy(model)
    again.junk = junk
    report = ld.compare(golden, recorded(again, a, b, name="mine"), progress=False)
    assert report.verdict == "match", report
    wrong = copy.deepcopy(again)
    report = ld.compare(golden, recorded(wrong, a, 1.1 * b, name="wrong"), progress=False)
    assert report.verdict == "diverged"
    rows = [d for d in report.differences if d.site.path == "out" and d.site.role == "input"]
    assert {d.verdict for d in rows} == {"diverged"}


class Chooses(nn.Module):
    """Takes the largest of numbers that are about equal: its place is chance. ``places``: used."""

    def __init__(self, places):
        super().__init__()
        self.lin, self.places = nn.Linear(8, 8), places

    def forward(self, x):
        y = self.lin(x)
        near = torch.cat([y, y * (1 + 2e-4), y * (1 - 2e-4)], -1)
        values, places = near.abs().max(-1, keepdim=True)
        return near / values if not self.places else near.gather(-1, places) * near


def test_places_that_nobody_uses_decide_nothing():
    torch.manual_seed(0)
    report = compared(made(Chooses, places=False), torch.bfloat16, torch.randn(40, 8))
    assert report.verdict == "within_noise"
    ties = [d for d in report.differences if d.site.slot == "1" and d.site.role == "output"]
    assert any(d.verdict == "unmatched" for d in ties)  # else the case shows nothing
    judged = [d for d in report.differences if d.site.role == "output" and d.site.path == ""]
    assert [d.verdict for d in judged] == ["within_noise"]


class Stack(nn.Module):
    """Several layers of one kind behind another module."""

    def __init__(self, first, block):
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """Its stream is float32 from the first one on, whatever the dtype of the weights."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return x.float() + self.lin(x.to(self.lin.weight.dtype)).float()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_call_may_be_given_the_coarser_dtype_that_another_one_made(dtype):
    torch.manual_seed(0)
    report = compared(made(Stack, first=nn.Linear(8, 8), block=Block), dtype, torch.randn(3, 8))
    assert report.verdict == "within_noise", report


class Rounds(nn.Module):
    """Computes in float32 in a step of one row."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        y = self.lin(x.to(self.lin.weight.dtype))
        y = torch.mul(y if len(x) > 1 else y.float(), 0.5)
        return y.float() + x.float()


def test_a_dtype_that_differs_between_steps_is_the_same_in_all_layers():
    torch.manual_seed(0)
    model, x = made(Stack, first=nn.Identity(), block=Rounds), torch.randn(5, 8)
    runs = []
    for name, dtype in (("golden", torch.float32), ("mine", torch.bfloat16)):
        own = copy.deepcopy(model).to(dtype)
        with ld.dump(own, name=name, mode=MODE, tokens="all") as run, torch.no_grad():
            own(x.to(dtype))
            own(x[:1].to(dtype))
        runs.append(run)
    report = ld.compare(*runs, progress=False)
    assert report.verdict == "within_noise", report


class Capped(nn.Module):
    """Two multiplications with about the same result, as a soft cap has; a cast beside them."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.lin(x) * 0.0625
        scores = torch.tanh(scores / 50) * 50
        return torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_operators_with_about_the_same_result_are_paired_in_their_order(seed, dtype):
    torch.manual_seed(seed)
    report = compared(nn.Sequential(made(Capped, seed)), dtype, torch.randn(3, 8))
    assert report.verdict == "within_noise", report


class Magnifies(nn.Module):
    """The difference of two numbers that are nearly equal; one of them was cast in between."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        wide = torch.softmax(self.lin(x), -1, dtype=torch.float32)
        return torch.sub(wide.to(x.dtype), 0.0623)


def test_a_cast_to_the_dtype_of_the_program_is_not_blamed_for_what_another_call_magnifies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Magnifies())
    with torch.no_grad():
        model[1].lin.weight.mul_(0.02)
        model[1].lin.bias.zero_()
    report = compared(model, torch.bfloat16, torch.randn(5, 16))
    assert not any("Tensor.to" in finding.path for finding in report.findings), report
