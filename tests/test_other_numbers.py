"""Numbers of places and masks that mine makes otherwise are not blamed for an error elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from recordings import AGREED
from recordings import record as recorded

WIDTH = 24


class Decoder(nn.Module):
    """Three layers of attention that take one mask, made of numbers of places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        places = torch.arange(len(x))
        seen = places[None, :] <= places[:, None]
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            scores = (q @ k.mT * WIDTH**-0.5).masked_fill(~seen, -torch.inf)
            x = x + F.softmax(scores, -1) @ v
        return self.head(x)


class Otherwise(Decoder):
    """``wrong``: the layer whose scores have another scale."""

    def __init__(self, wrong=None):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        later = torch.ones(len(x), len(x)).tril() == 0
        for at, layer in enumerate(self.layers):
            q, k, v = (x @ layer.weight.t() + layer.bias).unflatten(-1, (3, -1)).unbind(-2)
            scale = 0.3 if at == self.wrong else WIDTH**-0.5
            scores = torch.einsum("td,sd->ts", q, k) * scale
            scores = torch.where(later, -1e30, scores)
            x = x + torch.einsum("ts,sd->td", scores.softmax(-1), v)
        return F.linear(x, self.head.weight, self.head.bias)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_mask_made_otherwise_is_not_blamed_for_an_error_in_a_layer(wrong):
    torch.manual_seed(1)
    x = torch.randn(7, WIDTH)
    golden, right, mine = (
        recorded(model, lambda model=model: model(x), f"run{n}", mode="module+api")
        for n, model in enumerate((Decoder(), Otherwise(), Otherwise(wrong)))
    )
    assert ld.compare(golden, right).verdict in AGREED
    findings = ld.compare(golden, mine).findings
    assert "* scale" in findings[0].mine.code
    assert not any("later =" in f.mine.code for f in findings)


class Rotation(nn.Module):
    def forward(self, x, places):
        angles = places[:, None].float() * 0.5 ** torch.arange(WIDTH // 2)
        return angles.cos(), angles.sin()


class Turned(nn.Module):
    """Turns what it is given by its place, and keeps it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rotation = Rotation()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, kept):
        places = torch.arange(len(x)) + len(kept[0])
        cosines, sines = self.rotation(x, places)
        for at, layer in enumerate(self.layers):
            key = turned(layer(x), cosines, sines)
            kept[at] = torch.cat((kept[at], key))
            given = key[None], kept[at][None], kept[at][None]
            x = x + F.scaled_dot_product_attention(*given, is_causal=len(x) > 1)[0]
        return self.head(x)


def turned(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class TurnedToo(Turned):
    """``ahead``: how far places are ahead once something was kept."""

    def __init__(self, ahead=0):
        super().__init__()
        self.ahead = ahead

    def forward(self, x, kept):
        past, end = len(kept[0]), len(kept[0]) + len(x)
        places = torch.arange(past, end) + (self.ahead if past else 0)
        angles = torch.outer(places.float(), 0.5 ** torch.arange(WIDTH // 2))
        for at, layer in enumerate(self.layers):
            key = turned(x @ layer.weight.t() + layer.bias, angles.cos(), angles.sin())
            kept[at] = torch.cat((kept[at], key))
            seen = torch.arange(end)[None] <= torch.arange(past, end)[:, None]
            scores = torch.einsum("td,sd->ts", key, kept[at]) * WIDTH**-0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            x = x + torch.einsum("ts,sd->td", scores.softmax(-1), kept[at])
        return F.linear(x, self.head.weight, self.head.bias)


def generated(model):
    kept, source = [torch.zeros(0, WIDTH)] * 3, torch.Generator().manual_seed(1)
    for count in (6, 1, 1):
        model(torch.randn(count, WIDTH, generator=source), kept)


def test_wrong_places_are_named_by_the_line_that_makes_them_not_by_a_mask_of_the_same_numbers():
    golden, right, mine = (
        recorded(model, lambda model=model: generated(model), f"run{n}", mode="module+api")
        for n, model in enumerate((Turned(), TurnedToo(), TurnedToo(ahead=1)))
    )
    assert ld.compare(golden, right).verdict in AGREED
    finding = ld.compare(golden, mine).findings[0]
    assert finding.step == 1
    assert "places =" in finding.mine.code


class Gated(nn.Module):
    """A gated layer over a prompt, and then over one token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down, self.head = nn.Linear(40, WIDTH, bias=False), nn.Linear(WIDTH, 8)

    def forward(self, x):
        y = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class InChunks(Gated):
    """Takes a prompt in parts. ``swapped``: gate and up are."""

    def __init__(self, swapped=False):
        super().__init__()
        self.both = nn.Parameter(torch.cat((self.gate.weight, self.up.weight)))
        self.swapped = swapped

    def mixed(self, x):
        both = F.rms_norm(x, (WIDTH,), self.norm.weight, self.norm.eps) @ self.both.t()
        first, second = both.chunk(2, -1)
        gate, up = (second, first) if self.swapped else (first, second)
        return F.linear(F.silu(gate) * up, self.down.weight)

    def forward(self, x):
        parts = [self.head(part + self.mixed(part)) for part in x.split(3)]
        return torch.cat(parts)


def stepped(model):
    source = torch.Generator().manual_seed(1)
    for count in (8, 1):
        model(torch.randn(count, WIDTH, generator=source))


def test_of_a_prompt_in_parts_and_a_later_token_the_one_that_leads_to_less_code_is_named():
    golden, right, mine = (
        recorded(model, lambda model=model: stepped(model), f"run{n}", mode="module+api")
        for n, model in enumerate((Gated(), InChunks(), InChunks(swapped=True)))
    )
    assert ld.compare(golden, right).verdict in AGREED
    finding = ld.compare(golden, mine).findings[0]
    lines = InChunks.mixed.__code__.co_firstlineno
    assert finding.mine.line - lines in (2, 3, 4)
