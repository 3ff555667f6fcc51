"""Calls with gradients, and gradients: the rows that C helps to make are those of Python alone."""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import llmdebug_nb as ld
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.tape import native
from models import gpt2, llama
from test_tape import tables

pytestmark = pytest.mark.skipif(native.tape(False) is None, reason="the tape was not built")


class Residual(nn.Module):
    """Uses its input twice, writes in place, gives a tuple and a dict, and shares a weight."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.shared, self.drop = nn.Linear(6, 6), shared, nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, *, bias=None):
        y = self.drop(self.first(x)).relu_()
        y = self.shared(y + x) * self.scale
        if bias is not None:
            y = y + bias
        return (y + x, x), {"y": y.t(), "plain": y.detach()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Residual(shared) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2))
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            (x, _), more = layer(x, bias=self.bias)
            x = x + more["y"].t() * 0.5
        with torch.no_grad():
            self.frozen(x)
        return self.head(self.frozen(x))


class Checkpointed(Net):
    def forward(self, x):
        for layer in self.layers:
            ((x, _), _) = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Inside(Net):
    """Runs a backward pass inside its forward pass, and catches what a part raises."""

    def forward(self, x):
        with torch.enable_grad():
            y = self.head(x)
            (slope,) = torch.autograd.grad(y.square().sum(), self.bias, allow_unused=True)
            (own,) = torch.autograd.grad(y.sum(), self.head[1].weight, create_graph=True)
        assert slope is None
        with contextlib.suppress(RuntimeError):
            self.head(x[:, :2])
        return self.head(x) * own.sum()


def train(model):
    """Three steps: the second one twice, the third with the gradients of gradients."""
    results = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 6, requires_grad=step == 1)
        loss = model(x).square().sum()
        if step == 1:
            loss.backward(retain_graph=True)
        if step == 2:
            weight = model.head[1].weight
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True, retain_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return results


def language(model):
    ids = torch.arange(10).reshape(2, 5)
    results = []
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        results += [p.grad.clone() for p in model.parameters()]
    return results


PROGRAMS = {
    "residual": (Net, train),
    "checkpointed": (Checkpointed, train),
    "backward inside": (Inside, train),
    "llama": (llama, language),
    "gpt2": (gpt2, language),
}
OPTIONS = [
    {}, {"mode": "module+aten"}, {"mode": "module+api"}, {"part": "in"}, {"part": "out"},
    {"phase": "backward"}, {"phase": "forward"}, {"last": 2}, {"types": "Linear"},
    {"stats_only": False},
]  # fmt: skip


def recorded(tmp_path, name, program, **options):
    make, work = PROGRAMS[program]
    torch.manual_seed(0)
    model = make().train()
    options = {"stats_only": True, "tokens": "all", **options}
    with ld.dump(model, name=name, path=tmp_path, **options) as run:
        results = work(model)
    return run, results


def in_python(monkeypatch):
    monkeypatch.setattr(native, "_make", lambda: None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_and_without_c_all_rows_are_equal(program, options, tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(True)  # fills memory that nothing was written to
    try:
        with_it, first = recorded(tmp_path, "with", program, **options)
        in_python(monkeypatch)
        without, second = recorded(tmp_path, "without", program, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    a, b = tables(with_it), tables(without)
    assert a["records"]
    for name, rows in a.items():
        assert rows == b[name], name


def test_rows_of_gradients_are_made_by_c(tmp_path, monkeypatch):
    slow = []
    describe = Recorder._describe

    def count(self, row, tensor):
        slow.append(row)
        describe(self, row, tensor)

    monkeypatch.setattr(Recorder, "_describe", count)
    run, _ = recorded(tmp_path, "run", "llama")
    assert sum(each.site.phase == "backward" for each in run.records()) > 100
    assert not slow


class Marked(torch.autograd.Function):
    """The identity, whose node holds a mark."""

    marks: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        ctx.mark = nn.Module()
        Marked.marks.append(weakref.ref(ctx.mark))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Marks(nn.Module):
    def forward(self, x):
        return Marked.apply(x)


class Sampling(nn.Module):
    """Drops the graph of each step inside one call."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), Marks())

    def forward(self, x):
        for _ in range(5):
            x = self.body(x).detach()
            assert Marked.marks[-1]() is None
        return x


def test_no_graph_outlives_what_the_program_holds(tmp_path):
    Marked.marks.clear()
    model = nn.Sequential(nn.Sequential(Sampling()))
    with ld.dump(model, name="run", path=tmp_path, stats_only=True, tokens="all"):
        for _ in range(2):
            model(torch.randn(2, 3))
    assert len(Marked.marks) == 10
