"""What clears a call that is written otherwise: the same elements in another order or in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from llmdebug_nb.search.value_sets import Values
from test_frontier import compared

LIMIT = 1e-6  # relative L2, as the rounding of a few float32 operators makes
SEEDS = st.integers(0, 2**31 - 1)


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- elements --------------------------------------------------------------------------------------


@given(SEEDS)
def test_elements_are_found_in_any_order_with_any_sign_and_in_parts(seed):
    golden = noise(seed, 12, 16)
    values = Values([golden])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    assert values.hold(golden[order], LIMIT)
    assert values.hold(-golden[:, 8:], LIMIT)
    assert values.hold(torch.view_as_complex(golden.view(12, 8, 2)), LIMIT)


@given(SEEDS, st.integers(0, 191))
def test_one_changed_element_is_not_found(seed, at):
    golden = noise(seed, 12, 16)
    mine = golden.clone()
    mine.view(-1)[at] += 0.1
    assert not Values([golden]).hold(mine, LIMIT)
    assert not Values([golden]).hold(mine.flatten()[max(0, at - 20) : at + 20], LIMIT)


@given(SEEDS)
def test_each_element_is_found_once(seed):
    golden = noise(seed, 12, 16)
    assert not Values([golden]).hold(golden[[0, 0]], LIMIT)


@given(SEEDS)
def test_other_numbers_of_the_same_distribution_are_not_found(seed):
    golden, mine = noise(seed, 64, 64), noise(seed + 1, 64, 64)
    assert not Values([golden]).hold(mine, LIMIT)
    assert not Values([golden]).hold(mine[0], LIMIT)
    # bfloat16: 64 of its eps are more than the distance between any two samples
    assert not Values([golden]).hold(mine, 0.1)


@given(SEEDS)
def test_a_fused_result_and_a_longer_cache_are_covered(seed):
    q, k = noise(seed, 5, 16), noise(seed + 1, 5, 8)
    values = Values([q, k])
    assert values.cover(torch.cat((q, k), 1), LIMIT)
    assert values.cover(torch.cat((k, torch.zeros(3, 8))), LIMIT)
    assert not values.cover(torch.cat((q, noise(seed + 2, 5, 8)), 1), LIMIT)


@pytest.mark.parametrize("shift", [0, 1])
def test_masks_are_the_same_only_at_the_same_places(shift):
    golden = torch.full((6, 6), -torch.inf).triu(1)
    mine = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1 + shift)
    assert Values([golden]).have(mine, LIMIT) == (shift == 0)


@given(SEEDS, st.booleans())
def test_a_tensor_is_found_in_a_longer_one_if_the_rest_is_empty(seed, in_front):
    keys = noise(seed, 2, 5, 8)
    cache = torch.zeros(12, 2, 8)
    cache[7:] = keys.transpose(0, 1)
    cache = cache if in_front else cache.roll(5, 0)
    assert Values([keys]).pad(cache, LIMIT)
    assert Values([cache]).pad(keys, LIMIT)
    other = cache.clone()
    other[6] = 1.0  # not empty
    assert not Values([keys]).pad(other, LIMIT)
    swapped = cache.flip(1)  # the heads in another order
    assert not Values([keys]).pad(swapped, LIMIT)


def test_a_mask_is_found_in_that_of_a_longer_cache():
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    longer = F.pad(allowed, (0, 7))
    assert Values([allowed]).pad(longer, LIMIT)
    assert not Values([allowed]).pad(longer.roll(1, -1), LIMIT)


# -- programs --------------------------------------------------------------------------------------


def rows(self, x):
    return F.silu(F.linear(x, self.wide.weight)).sum(-1, keepdim=True) * x


def reversed_rows(wrong):
    """Return a part that computes on the rows in another order and puts them back."""

    def forward(self, x):
        y = torch.einsum("ij,kj->ik", x.flip(0), self.wide.weight)
        y = y * torch.sigmoid(y)
        total = y.sum(-1, keepdim=True)
        return total * x if wrong else total.flip(0) * x

    return forward


def test_work_on_rows_in_another_order_is_a_rewrite_if_they_are_put_back():
    report = compared(rows, reversed_rows(False))
    assert report.verdict in ("match", "within_noise")
    assert report.findings == []


def test_rows_that_are_not_put_back_are_blamed_from_where_they_leave_their_order():
    report = compared(rows, reversed_rows(True))
    named = [pair.mine.code for pair in report.findings[0].pairs if pair.state == "guilty"]
    assert "x.flip(0)" in named[0], named
