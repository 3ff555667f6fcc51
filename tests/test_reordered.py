"""The order of a weight's rows, and angles for cosines, are layouts of the tensors behind them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmdebug_nb.align.reordered import in_heads
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site

SEEDS = st.integers(0, 1000)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shuffled(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def finder(golden, mine, paths=("theirs", "ours")):
    """Return a finder and the records of both, the first tensor of each as a weight."""
    sides = [
        [
            Record(
                i,
                Site(path, role="output" if i else "weight", slot="0"),
                i,
                path,
                summarize(x),
                payload=i,
            )
            for i, x in enumerate(tensors)
        ]
        for path, tensors in zip(paths, (golden, mine), strict=True)
    ]
    load = tuple(lambda r, own=own: own[r.id] for own in (golden, mine))
    return LayoutFinder((sides[0], sides[1]), load), *sides


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 5), st.sampled_from([5, 7, 11]), SEEDS)
def test_an_order_of_rows_is_made_of_heads_and_channels(heads, channels, seed):
    of_heads, of_channels = shuffled(heads, seed), shuffled(channels, seed + 1)
    order = (of_heads[:, None] * channels + of_channels).flatten()
    rows = (of_heads[:, None] * channels + torch.arange(channels)).flatten()
    found = [each.tolist() for each in in_heads(order)]
    wanted = [each.tolist() for each in (of_channels, of_heads, rows)]
    assert found == [each for each in wanted if each != sorted(each)]


def keeps_blocks(order, size):
    """Tell whether blocks of rows stay together, all in one inner order."""
    blocks = order.view(-1, size)
    inside, whole = blocks % size, blocks // size
    return torch.equal(inside, inside[:1].expand_as(inside)) and bool((whole == whole[:, :1]).all())


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 5),
    st.sampled_from([4, 6, 8]),
    st.sampled_from(["t(hd)", "thd", "htd", "hdt", "td"]),
    st.booleans(),
    SEEDS,
)
def test_the_order_of_a_weight_is_followed_in_any_layout(heads, channels, layout, turned, seed):
    """Only the order of the weight's rows: any other one is no layout."""
    tokens, order = 9, shuffled(heads, seed)[:, None] * channels + shuffled(channels, seed + 1)
    order = order.flatten()
    # an order that repeats within a head is known by its smaller blocks alone
    smaller = [n for n in range(2, channels) if len(order) % n == 0]
    assume(layout != "td" or not any(keeps_blocks(order, n) for n in smaller))
    weight, x = random(heads * channels, 24, seed=seed), random(tokens, heads * channels, seed=seed)

    def laid(x):
        if layout == "td":
            return x[:, :channels]
        if layout == "t(hd)":
            return x
        split = x.unflatten(-1, (heads, channels))
        return split.permute({"thd": (0, 1, 2), "htd": (1, 0, 2), "hdt": (1, 2, 0)}[layout])

    mine = laid(x[:, order]) if layout != "td" else x[:, :channels][:, order[:channels] % channels]
    golden = laid(x).transpose(0, 1).contiguous() if turned and layout == "thd" else laid(x)
    if torch.equal(golden.flatten(), mine.flatten()):
        return
    finds, theirs, ours = finder([weight, golden], [weight[order], mine.contiguous()])
    shown = finds.fit(theirs[1], ours[1])
    if layout == "t(hd)" and shown is not None:  # the output shows the order within heads, no other
        assert torch.equal(order // channels, torch.arange(len(order)) // channels)
        assert torch.equal(*shown(golden, mine))
    else:
        assert shown is None or golden.shape != mine.shape  # not known yet
    if finds.fit(theirs[0], ours[0]) is None:  # the rows have golden's order
        return
    fit = finds.fit(theirs[1], ours[1])
    assert fit is not None
    assert torch.equal(*fit(golden, mine))
    assert finds.distance(theirs[1], ours[1]) == 0.0


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 5), st.sampled_from([4, 6, 8]), SEEDS)
def test_another_order_than_that_of_a_weight_is_no_layout(heads, channels, seed):
    rows = heads * channels
    weight, x = random(rows, 24, seed=seed), random(9, rows, seed=seed)
    order, other = shuffled(rows, seed), shuffled(rows, seed + 7)
    if torch.equal(order, other):
        return
    finds, theirs, ours = finder([weight, x], [weight[order], x[:, other].contiguous()])
    finds.fit(theirs[0], ours[0])
    assert finds.fit(theirs[1], ours[1]) is None
    assert finds.distance(theirs[1], ours[1]) is None


def test_in_one_program_another_order_is_no_layout():
    weight, x, order = random(12, 24), random(9, 12), shuffled(12, 1)
    finds, theirs, ours = finder(
        [weight, x], [weight[order], x[:, order].contiguous()], ("one", "one")
    )
    assert finds.fit(theirs[0], ours[0]) is None
    assert finds.fit(theirs[1], ours[1]) is None


@settings(deadline=None, max_examples=40)
@given(st.integers(4, 20), st.sampled_from([4, 8, 16]), st.booleans(), st.booleans())
def test_angles_are_compared_with_cosines_and_sines(tokens, channels, sine, turned):
    angles = torch.outer(torch.arange(tokens), 50.0 ** -torch.linspace(0, 1, channels))
    waves = angles.sin() if sine else angles.cos()
    pair = (angles, waves) if turned else (waves, angles)
    finds, theirs, ours = finder([random(4, 4), pair[0]], [random(4, 4), pair[1]])
    fit = finds.fit(theirs[1], ours[1])
    assert ("sines" if sine else "cosines") in fit.says
    assert torch.equal(*fit(*pair))


@pytest.mark.parametrize("wrong", [1.2, 1.05])
def test_wrong_angles_are_angles_that_differ(wrong):
    angles = torch.outer(torch.arange(12), 50.0 ** -torch.linspace(0, 1, 8))
    golden, mine = (angles / wrong).cos(), angles
    finds, theirs, ours = finder([random(4, 4), golden], [random(4, 4), mine])
    fit = finds.fit(theirs[1], ours[1])
    assert fit is not None
    g, m = fit(golden, mine)
    assert 0.02 < (g - m).norm() / g.norm() < math.sqrt(2)


def test_what_is_no_angle_has_no_cosines():
    waves, x = random(12, 8).cos(), 3 * random(12, 8, seed=5)
    finds, theirs, ours = finder([random(4, 4), waves], [random(4, 4), x])
    assert finds.fit(theirs[1], ours[1]) is None
