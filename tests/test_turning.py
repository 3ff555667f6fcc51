"""Weights whose rows don't fit the rotary embedding are named, whatever the layout of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.causes.rotary_pairs import equal_columns, follow, turned

TOKENS, WIDTH = 7, 48


def halves(channels):
    """Return the partner of each channel of a head: that of the other half."""
    return torch.arange(channels).roll(channels // 2)


def neighbours(channels):
    return torch.arange(channels).view(-1, 2).flip(1).flatten()


def interleaved(heads, channels):
    """Return which of golden's rows each row is in a port that turns neighbours."""
    return torch.arange(heads * channels).view(heads, 2, -1).transpose(1, 2).flatten()


def rotate(x, pairs, slowest=1e-2):
    """Turn the channels [tokens, heads, channels] in pairs, each by another angle."""
    first = torch.arange(x.shape[-1])[torch.arange(x.shape[-1]) < pairs]
    speed = slowest ** (torch.arange(len(first)) / len(first))
    angle = torch.arange(x.shape[0])[:, None, None] * speed
    a, b = x[..., first], x[..., pairs[first]]
    out = x.clone()
    out[..., first] = a * angle.cos() - b * angle.sin()
    out[..., pairs[first]] = b * angle.cos() + a * angle.sin()
    return out


SEEDS = st.integers(0, 1000)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 5),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([halves, neighbours]),
    st.permutations(range(3)),
    st.sampled_from(["", "each", "all"]),
    SEEDS,
)
def test_which_channels_turn_together_is_seen_in_values(heads, channels, pairs, axes, again, seed):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(1, TOKENS, heads * channels, generator=generator)
    after = rotate(before[0].unflatten(-1, (heads, channels)), pairs(channels))
    if again:
        after = after.repeat_interleave(2, 1) if again == "each" else after.repeat(1, 2, 1)
    found = turned(before, after.permute(axes)[None], torch.finfo(torch.float32).eps)
    assert found is not None
    known = found >= 0
    assert known.sum() >= channels // 2
    assert torch.equal(found[known], pairs(channels)[known])


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.sampled_from([4, 8, 16]), st.booleans(), SEEDS)
def test_what_is_no_rotation_turns_no_channels(heads, channels, moved, seed):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(TOKENS, heads * channels, generator=generator)
    split = before.unflatten(-1, (heads, channels))
    other = torch.randn(split.shape, generator=generator)
    after = split.flip(-1) if moved else other * split.norm() / other.norm()
    eps = torch.finfo(torch.float32).eps
    assert turned(before, split, eps) is None
    found = turned(before, after, eps)
    assert moved or found is None


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.sampled_from([4, 8, 16]), st.sampled_from([halves, neighbours]), SEEDS)
def test_channels_of_one_angle_have_equal_columns(rows, channels, pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    partners = pairs(channels)
    table = torch.empty(rows + 1, channels)
    for channel, partner in enumerate(partners.tolist()):
        if channel < partner:
            column = torch.randn(rows + 1, generator=generator)
            table[:, channel] = table[:, partner] = column
    assert torch.equal(equal_columns(table), partners)
    assert equal_columns(torch.randn(rows + 1, channels, generator=generator)) is None
    assert equal_columns(torch.ones(rows + 1, channels)) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.sampled_from([4, 8, 16]), SEEDS)
def test_rows_follow_if_they_are_in_the_order_that_is_turned(heads, channels, seed):
    rows = torch.arange(heads * channels)
    right = interleaved(heads, channels)
    own, other = halves(channels), neighbours(channels)
    shuffled = torch.randperm(heads, generator=torch.Generator().manual_seed(seed))
    assert follow(rows, own, own)
    assert follow(right, own, other)
    assert follow(right.view(heads, -1)[shuffled].flatten(), own, other)
    assert not follow(rows, own, other)
    assert not follow(right, own, own)
    assume(heads > 1)
    assert not follow(interleaved(1, heads * channels), own, other)


# -- in programs -----------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Turns halves; ``turn`` is called as a function of the module, so that a port may differ."""

    heads, groups, channels = 4, 2, 8

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, self.heads * self.channels, bias=False)
        self.k = nn.Linear(WIDTH, self.groups * self.channels, bias=False)
        self.v = nn.Linear(WIDTH, self.groups * self.channels, bias=False)
        self.o = nn.Linear(self.heads * self.channels, WIDTH, bias=False)

    def turn(self, x):
        angle = torch.outer(torch.arange(x.shape[-2]), 100.0 ** -torch.linspace(0, 1, 4))
        angle = torch.cat((angle, angle), -1)
        first, last = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-last, first), -1) * angle.sin()

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = self.turn(q), self.turn(k)
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        scores = (q @ k.mT / self.channels**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class _Port(_Attention):
    """Turns neighbours, under other names."""

    def __init__(self, theirs):
        super().__init__()
        del self.q, self.k, self.v, self.o
        self.wq, self.wk = nn.Linear(1, 1), nn.Linear(1, 1)
        self.wv, self.wo = theirs.v, theirs.o
        for own, weight, heads in (
            (self.wq, theirs.q.weight, self.heads),
            (self.wk, theirs.k.weight, self.groups),
        ):
            own.weight = nn.Parameter(weight.detach()[interleaved(heads, self.channels)])
            own.register_parameter("bias", None)

    def turn(self, x):
        angle = torch.outer(torch.arange(x.shape[-2]), 100.0 ** -torch.linspace(0, 1, 4))
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = angle.cos(), angle.sin()
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    def forward(self, x):
        q, k, v = (
            part(x).view(*x.shape[:2], -1, self.channels).permute(0, 2, 1, 3)
            for part in (self.wq, self.wk, self.wv)
        )
        k, v = (
            part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (self.turn(k), v)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.turn(q), k, v)
        return self.wo(mixed.permute(0, 2, 1, 3).flatten(2))


def recorded(name, layers):
    model = nn.Sequential(*layers)
    with ld.dump(model, name=name, weights=True, mode=("module", "api")) as run, torch.no_grad():
        model(torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)))
    return run


def _not_permuted(linear, heads):
    return linear.weight[interleaved(heads, 8).argsort()]


def _permuted_as_queries(linear, heads):
    return _not_permuted(linear, heads)[interleaved(4, len(linear.weight) // 4)]


@pytest.fixture
def ports():
    torch.manual_seed(0)
    theirs = [_Attention() for _ in range(3)]
    return theirs, [_Port(layer) for layer in theirs]


def test_a_right_port_that_turns_neighbours_agrees(ports):
    report = ld.compare(*map(recorded, ("golden", "mine"), ports))
    assert report.verdict == "within_noise"
    assert not report.findings


@pytest.mark.parametrize(
    ("change", "which"),
    [
        (_not_permuted, "wk"),
        (_not_permuted, "wq"),
        (_not_permuted, "wq wk"),
        (_permuted_as_queries, "wk"),
    ],
)
def test_the_weight_whose_rows_do_not_fit_is_named(ports, change, which):
    golden = recorded("golden", ports[0])
    for layer in ports[1]:
        for name in which.split():
            linear = getattr(layer, name)
            heads = 4 if name == "wq" else 2
            linear.weight = nn.Parameter(change(linear, heads).detach())
    found = ld.compare(golden, recorded("mine", ports[1])).findings[0]
    assert found.cause == "weight differs"
    assert found.mine.path in [f"0.{name}" for name in which.split()]


def test_a_bug_behind_other_orders_is_named_at_its_line(ports, monkeypatch):
    def turn(self, x):
        angle = torch.outer(torch.arange(x.shape[-2]), 100.0 ** -torch.linspace(0, 1, 4))
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = angle.cos(), angle.sin()
        one = a * c - b * s
        other = b * c - a * s  # the wrong sign
        return torch.stack((one, other), -1).flatten(-2)

    monkeypatch.setattr(_Port, "turn", turn)
    found = ld.compare(*map(recorded, ("golden", "mine"), ports)).findings[0]
    assert found.cause != "weight differs"
    assert found.mine.frames[0].function == "turn"


def test_a_table_without_entries_turns_nothing():
    assert equal_columns(torch.zeros(0, 4)) is None
    assert equal_columns(torch.zeros(3, 0)) is None
