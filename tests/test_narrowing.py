"""A call that is given another tensor: the line that makes that tensor is blamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from recordings import AGREED
from recordings import record as recorded


class Positions(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(32, 24), nn.Embedding(64, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 8)

    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[-1])[None])
        return self.head(self.norm(self.tokens(ids) + places))


class LookedUp(Positions):
    """Takes positions from the part of the table that the context needs, and copies them."""

    def __init__(self, ahead=0):
        super().__init__()
        self.ahead = ahead

    def forward(self, ids):
        table, numbers = self.places.weight[:40], torch.arange(ids.shape[-1])[None]
        taken = table[numbers + self.ahead]
        places = torch.where(numbers[..., None] < 0, 0, taken).clone()
        x = self.tokens.weight[ids] + places
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + self.norm.eps).sqrt()
        return self.head(scaled * self.norm.weight + self.norm.bias)


class Biased(nn.Module):
    """Attention whose scores are less for tokens further away."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.head = nn.Linear(24, 72), nn.Linear(24, 8)
        self.slope = nn.Buffer(torch.rand(1))

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        distance = torch.arange(1 - 64, 1, dtype=torch.int32).view(1, 64) * self.slope
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = q @ k.mT * 24**-0.5 + distance[:, -len(x) :]
        return self.head(F.softmax(scores.masked_fill(later, -1e9), dim=-1) @ v)


class BiasedToo(Biased):
    def __init__(self, turned=False):
        super().__init__()
        self.turned = turned

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        numbers = (0, -len(x), -1) if self.turned else (1 - len(x), 1)
        distance = torch.arange(*numbers)
        scores = torch.matmul(q, k.mT) / 24**0.5 + distance * self.slope
        earlier = distance.new_ones(len(x), len(x)).tril().bool()
        return self.head(torch.where(earlier, scores, -1e9).softmax(-1).matmul(v))


def turned(x, start):
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(start, start + len(x)) * 1.0, 0.5 ** torch.arange(half))
    angles = torch.cat((angles, angles), -1)
    return x * angles.cos() + torch.cat((-x[:, half:], x[:, :half]), -1) * angles.sin()


class Turned(nn.Module):
    """Turns keys by their place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.key, self.head = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.head(torch.tanh(turned(self.key(x), 5)))


class Turn(nn.Module):
    def forward(self, x, start=0):
        places = torch.arange(len(x))[:, None] + start
        angles = places * 0.5 ** torch.arange(x.shape[-1] // 2)[None]
        first, second = x.chunk(2, -1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class TurnedToo(Turned):
    def __init__(self, start=5):
        super().__init__()
        self.turn, self.start = Turn(), start

    def forward(self, x):
        key = self.key(x)
        key = self.turn(key, start=self.start)
        return self.head(key.tanh())


CASES = {
    "a part of a table": (Positions, LookedUp, {"ahead": 1}, lambda: torch.arange(12)[None] * 2, 2),
    "a table of numbers": (Biased, BiasedToo, {"turned": True}, lambda: torch.randn(12, 24), 3),
    "a rotation by no angle": (Turned, TurnedToo, {"start": 0}, lambda: torch.randn(1, 24), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_line_that_makes_a_tensor_is_blamed_not_the_one_that_uses_it(case):
    theirs, ours, bug, inputs, line = CASES[case]
    torch.manual_seed(1)
    x = inputs()
    golden, right, wrong = (
        recorded(model, lambda model=model: model(x), f"run{n}", mode="module+api")
        for n, model in enumerate((theirs(), ours(), ours(**bug)))
    )
    assert ld.compare(golden, right).verdict in AGREED
    (finding, *_) = ld.compare(golden, wrong).findings
    assert finding.mine.line == ours.forward.__code__.co_firstlineno + line


class Normed(nn.Module):
    """Adds what a projection of a norm gives to a stream. ``norm``: the class of the norms."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project, self.head = (nn.Linear(24, n) for n in (24, 24, 8))
        self.first, self.last = norm(24, eps=1e-12), norm(24, eps=1e-12)

    def forward(self, x):
        stream = self.embed(x)
        return self.head(self.last(stream + self.project(self.first(stream))))


class Root(nn.RMSNorm):
    """A norm by the formula."""

    def forward(self, x):
        return torch.mul(x, (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()) * self.weight


class Scaled(Normed):
    """Scales the stream, and what is added to it by ``added``; ``factor``: a bug of its own."""

    def __init__(self, added, factor=1.0):
        super().__init__(Root)
        self.added, self.factor = added, factor

    def forward(self, x):
        stream = torch.mul(self.embed(x), 3.0)
        added = torch.mul(self.project(self.first(stream)), self.added)
        return self.head(self.last(torch.add(stream, added)) * self.factor)


def scaled(added, factor=1.0):
    """Compare golden, of which the modules alone were recorded, with a scaled stream."""
    torch.manual_seed(1)
    x = torch.randn(6, 24)
    models = ("golden", Normed(), "module"), ("mine", Scaled(added, factor), "module+api")
    return ld.compare(*(recorded(m, lambda m=m: m(x), name, mode=how) for name, m, how in models))


def test_a_factor_that_one_norm_hides_is_blamed_if_the_next_one_does_not():
    (finding, *_) = scaled(1.0).findings
    assert finding.golden is None
    assert finding.mine.line == Scaled.forward.__code__.co_firstlineno + 1
    assert "times 3" in finding.relation


def test_a_factor_that_all_norms_hide_is_never_blamed():
    assert scaled(3.0).verdict in AGREED
    findings = scaled(3.0, factor=0.5).findings
    assert findings
    assert all("times 3" not in each.relation for each in findings)


class Tied(nn.Module):
    """Embeds tokens and ends with the same weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project = nn.Embedding(32, 24), nn.Linear(24, 24)

    def forward(self, ids):
        return F.linear(F.gelu(self.project(self.embed(ids))), self.embed.weight)


class TiedToo(Tied):
    """Takes both weights transposed. ``act``: between them."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, ids):
        x = self.embed.weight[ids] @ self.project.weight.t() + self.project.bias
        x = self.act(x)
        return torch.mm(x, self.embed.weight.t())


def tied(act):
    ids = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:9]
    models = ("golden", Tied()), ("mine", TiedToo(act))
    runs = (recorded(m, lambda m=m: m(ids), name, mode="module+api") for name, m in models)
    return ld.compare(*runs)


def test_a_weight_that_is_taken_in_two_layouts_is_known_in_both():
    assert tied(F.gelu).verdict in AGREED
    (finding,) = tied(torch.tanh).findings
    assert finding.golden.op == "Functional.gelu"
    assert finding.mine.line == TiedToo.forward.__code__.co_firstlineno + 2


class Twice(nn.Module):
    """Norms twice, with two weights, and once more for the result."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.LayerNorm(24) for _ in range(3))
        self.project, self.head = nn.Linear(24, 24), nn.Linear(24, 8)
        for norm in (self.first, self.second, self.last):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x):
        x = self.second(torch.tanh(self.project(self.first(x))))
        return self.head(torch.sigmoid(self.last(x)))


def normed(x, norm):
    scaled = F.layer_norm(x, (24,), None, None, 1e-5)
    return torch.addcmul(norm.bias, scaled, norm.weight)


class TwiceToo(Twice):
    """Norms by a helper. ``again``: the second time with the first weight."""

    def __init__(self, again=False):
        super().__init__()
        self.again = again

    def forward(self, x):
        x = torch.tanh(normed(x, self.first) @ self.project.weight.t() + self.project.bias)
        x = normed(x, self.first if self.again else self.second)
        return torch.sigmoid(normed(x, self.last)) @ self.head.weight.t() + self.head.bias


def twice(again):
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    models = ("golden", Twice()), ("mine", TwiceToo(again))
    runs = (recorded(m, lambda m=m: m(x), name, mode="module+api") for name, m in models)
    return ld.compare(*runs)


def test_a_weight_in_place_of_another_is_blamed_where_the_helper_is_given_it():
    assert twice(again=False).verdict in AGREED
    (finding,) = twice(again=True).findings
    assert finding.mine.line == TwiceToo.forward.__code__.co_firstlineno + 2
    assert "mine takes golden's" in finding.relation
    assert " of first/Functional.layer_norm where golden takes " in finding.relation
    assert finding.relation.endswith(" of second/Functional.layer_norm")
