"""A tensor is found in a larger one by its landmarks, wherever it lies in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmdebug_nb.align.landmarks import Landmarks, landmarks
from llmdebug_nb.align.matches import ValueMatches, _first_of_each
from llmdebug_nb.align.sequence import MatchTolerance
from llmdebug_nb.core import constants
from test_layout_finder import finder

CLOSE = 0.02


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noised(x, share, seed):
    noise = random(*x.shape, seed=seed + 1_000)
    return x + noise * (share * x.norm() / noise.norm())


def held(small, large, tolerance=CLOSE):
    """Return the names of the larger tensors that hold a tensor."""
    marks = Landmarks([("small", small.numpy())], tolerance)
    return [name for _, name in marks.holders((name, x.numpy()) for name, x in large.items())]


def found(*tensors):
    """Return the landmarks of each tensor."""
    pieces = [*landmarks(tensors)]
    return [
        np.concatenate([np.zeros((0, constants.LANDMARK)), *(w[at == n] for w, at in pieces)])
        for n in range(len(tensors))
    ]


@given(
    rows=st.integers(2, 4),
    tokens=st.integers(24, 40),
    heads=st.integers(3, 5),
    channels=st.sampled_from((16, 24, 32)),
    half=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_rows_heads_and_tokens_are_found_in_any_layout(rows, tokens, heads, channels, half, seed):
    whole = random(rows, tokens, heads, channels, seed=seed)
    part = whole[rows - 1, 1:, : heads - 1]  # of one row, tokens and heads
    part = noised(part, 0.006 if half else 1e-6, seed).transpose(0, 1).contiguous()
    stored = whole.flatten(2) if seed % 2 else whole.transpose(1, 2)
    others = {"whole": stored, "other": random(*stored.shape, seed=seed + 1)}
    assert held(part, others, 0.06 if half else CLOSE) == ["whole"]


@given(seed=st.integers(0, 10_000), scale=st.sampled_from((1e-20, 1.0, 1e20)))
@settings(max_examples=30, deadline=None)
def test_unrelated_tensors_hold_nothing_of_each_other(seed, scale):
    large = {str(n): scale * random(4, 50, 64, seed=seed + n) for n in range(4)}
    assert held(scale * random(2, 10, 32, seed=seed + 9), large, 0.06) == []


def test_repeated_heads_are_no_part_of_the_heads_themselves():
    heads = random(3, 6, 16, seed=0)
    repeated = heads[:1].repeat(2, 1, 1)
    assert held(repeated, {"heads": heads}) == []
    assert held(heads[:1], {"repeated": repeated}) == ["repeated"]


@pytest.mark.parametrize(
    "values",
    [
        np.float32(1.0),
        np.ones((5, 7), np.float32),  # shorter than a window
        np.ones((5, 64), np.float32),
        np.full((5, 64), np.nan, np.float32),
        np.full((5, 64), -np.inf, np.float32),
        np.zeros((0, 64), np.float32),
    ],
)
def test_what_tells_nothing_has_no_landmarks(values):
    assert len(found(np.asarray(values))[0]) == 0


def test_a_cache_that_is_longer_than_its_content_matches_the_keys():
    keys = random(1, 2, 5, 16, seed=1)
    cache = torch.zeros(2, 12, 16)
    cache[:, :5] = noised(keys[0], 1e-6, 2)
    finds, golden, mine = finder(
        {"keys": keys}, {"cache": cache, "other": random(2, 12, 16, seed=3)}
    )
    matches = ValueMatches(golden, mine, finds, MatchTolerance())
    (match,) = matches.of_golden(golden[0])
    assert match.mine.site.slot == "cache"
    expected = float((cache[:, :5] - keys[0]).norm() / (keys[0] - keys.mean()).norm())
    assert match.error == pytest.approx(expected, rel=1e-3)
    assert [each.golden.site.slot for each in matches.of_mine(mine[0])] == ["keys"]


def test_each_part_of_a_fused_tensor_matches_it():
    parts = {
        name: random(1, 6, width, seed=width) for name, width in (("q", 64), ("k", 32), ("v", 16))
    }
    fused = torch.cat([noised(x, 1e-6, 5) for x in parts.values()], dim=-1)
    finds, golden, mine = finder(parts, {"qkv": fused})
    matches = ValueMatches(golden, mine, finds, MatchTolerance())
    assert {m.golden.site.slot for m in matches.of_mine(mine[0])} == {"q", "k", "v"}
    assert all(m.error < 1e-5 for m in matches.of_mine(mine[0]))


def test_a_tensor_with_a_partner_is_an_answer_and_no_question():
    whole = random(1, 6, 32, seed=1)
    finds, golden, mine = finder(
        {"whole": whole, "part": noised(whole[..., :16], 1e-6, 2)},
        {"again": noised(whole, 1e-6, 3)},
    )
    asked = ValueMatches(golden, mine, finds, MatchTolerance())
    assert [m.golden.site.slot for m in asked.of_mine(mine[0])] == ["whole", "part"]
    done = {golden[1].id}, set()
    fewer = ValueMatches(golden, mine, finds, MatchTolerance(), done)
    assert [m.golden.site.slot for m in fewer.of_mine(mine[0])] == ["whole"]
    done = {golden[0].id}, set()
    answer = ValueMatches(golden, mine, finds, MatchTolerance(), done)
    assert "whole" in {m.golden.site.slot for m in answer.of_mine(mine[0])}


def test_keys_with_one_wrong_token_match_no_cache():
    keys = random(1, 2, 6, 16, seed=1)
    cache = torch.zeros(2, 12, 16)
    cache[:, :6] = keys[0]
    cache[:, 3] = random(2, 16, seed=4)
    finds, golden, mine = finder({"keys": keys}, {"cache": cache})
    assert ValueMatches(golden, mine, finds, MatchTolerance()).of_golden(golden[0]) == []


def windows_of(values):
    """Return the landmarks of a tensor, one place after the other."""
    found = []
    for row in values.reshape(-1, values.shape[-1]) if values.ndim else []:
        for at in range(len(row) - constants.LANDMARK + 1):
            window = np.abs(row[at : at + constants.LANDMARK])
            top = window[constants.LANDMARK // 2]
            if np.isfinite(window.max()) and top == window.max() and window.min() < top:
                found.append(row[at : at + constants.LANDMARK])
    return np.array(found, np.float32).reshape(-1, constants.LANDMARK)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from((1, 7, 8, 9, 20))), min_size=1, max_size=6
    ),
    chunk=st.sampled_from((1, 30, 1 << 18)),
    seed=st.integers(0, 1000),
)
def test_tensors_that_are_taken_together_have_the_landmarks_of_each_alone(shapes, chunk, seed):
    draw = np.random.default_rng(seed)
    figures = np.array([0.0, 1.0, -1.0, 2.0, 3.0, np.nan, np.inf], np.float32)
    tensors = [draw.choice(figures, shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "CHUNK", chunk)
        together = found(*tensors)
    for values, windows in zip(tensors, together, strict=True):
        np.testing.assert_array_equal(windows, windows_of(values))


@settings(max_examples=60, deadline=None)
@given(
    small=st.integers(1, 6),
    large=st.integers(1, 6),
    chunk=st.sampled_from((1, 100, 1 << 18)),
    entries=st.sampled_from((1, 64, 1 << 20)),
)
def test_tensors_that_are_looked_up_together_have_the_holders_of_each_alone(
    small, large, chunk, entries
):
    parts = [random(4, 24, seed=n) for n in range(small)]
    wholes = {
        n: torch.cat([parts[n % small], random(4, 24, seed=100 + n)], n % 2) for n in range(large)
    }
    alone = {(n, name) for n, part in enumerate(parts) for name in held(part, wholes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "SCORE_ENTRIES", entries)
        patch.setattr(constants, "CHUNK", chunk)
        marks = Landmarks(enumerate(part.numpy() for part in parts), CLOSE)
        pairs = [*marks.holders((n, x.numpy()) for n, x in wholes.items())]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == alone
    assert {n for _, n in alone} == set(wholes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.sampled_from((2.0, 3.0, 6.0)))),
)
def test_the_candidates_of_a_tensor_are_the_most_alike_and_of_equals_the_first(drawn):
    pairs = list({(one, other): alike for one, other, alike in drawn}.items())
    one, other = (np.array([key[side] for key, _ in pairs], np.int64) for side in (0, 1))
    kept = _first_of_each(one, other, np.array([alike for _, alike in pairs]))
    expected = set()
    for number in set(one.tolist()):
        own = [(-alike, key) for key, alike in pairs if key[0] == number]
        expected |= {key for _, key in sorted(own)[: constants.CONFIRMED_CANDIDATES]}
    assert {key for (key, _), is_kept in zip(pairs, kept, strict=True) if is_kept} == expected
