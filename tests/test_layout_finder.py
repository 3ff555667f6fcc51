"""The layout of a tensor in another is found from the values, and nothing else passes for one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.reordered import is_within_heads
from llmdebug_nb.align.rounded import Steps
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site

HALF = 0.03  # relative L2 of a bfloat16 run after several layers


def finder(golden, mine, role="output", ops=("A", "B"), values=True, **site):
    """Return a finder and the two lists of records of tensors by slot."""
    sides, stores = [], []
    for op, tensors in zip(ops, (golden, mine), strict=True):
        sides.append(
            [
                Record(i, Site("m", role=role, slot=slot, **site), i, op, summarize(x), payload=i)
                for i, (slot, x) in enumerate(tensors.items())
            ]
        )
        stores.append(list(tensors.values()))
    load = tuple(lambda r, s=store: s[r.id] for store in stores) if values else None
    return LayoutFinder((sides[0], sides[1]), load), *sides


def found(golden, mine, **options):
    finds, (g,), (m,) = finder({"0": golden}, {"0": mine}, **options)
    return finds.fit(g, m)


def noised(x, share, seed):
    """Return a tensor whose relative L2 distance is ``share``."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 10_000))
    return x + noise * (share * x.norm() / noise.norm())


def random(*shape, seed=0, outliers=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if outliers:
        x[..., :: max(shape[-1] // 3, 1)] *= 30
    return x


def holds(golden, mine, golden_part, mine_part, noise=0.0, seed=0, **options):
    """Check that the fit brings the elements together that belong together.

    ``golden_part``, ``mine_part``: the numbers of the elements (float), in the layouts of the two.
    """
    fit = found(golden, noised(mine, noise, seed) if noise else mine, **options)
    assert fit is not None
    g, m = fit(golden_part, mine_part)
    assert g.shape == m.shape
    assert torch.equal(g, m), fit.says
    return fit, g


def numbers(x):
    return torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)


def check(x, make, noise, seed, share=1.0, **options):
    """Check that a layout is found both ways. ``make``: makes the layout from a tensor."""
    where = numbers(x)
    for turned in (False, True):
        pair = (make(x), x) if turned else (x, make(x))
        places = (make(where), where) if turned else (where, make(where))
        _, kept = holds(*pair, *places, noise, seed, **options)
        assert kept.numel() == round(where.numel() * share)


LAYOUTS = ["bhtd", "tbhd", "hbtd", "(bh)td", "(bt)hd", "(bt)(hd)", "b(t)(hd)"]
NOISE = st.sampled_from([0.0, 1e-6, HALF])
SEEDS = st.integers(0, 10_000)
B = st.integers(1, 3)
T = st.integers(3, 13)
H = st.sampled_from([2, 4, 6])
D = st.sampled_from([8, 16])


@settings(deadline=None, max_examples=30)
@given(B, T, H, D, st.sampled_from(LAYOUTS), NOISE, SEEDS, st.booleans())
def test_permuted_split_and_merged_axes_are_found(b, t, h, d, layout, noise, seed, outliers):
    x = random(b, t, h, d, seed=seed, outliers=outliers)
    make = {
        "bhtd": lambda x: x.permute(0, 2, 1, 3),
        "tbhd": lambda x: x.permute(1, 0, 2, 3),
        "hbtd": lambda x: x.permute(2, 0, 1, 3),
        "(bh)td": lambda x: x.permute(0, 2, 1, 3).reshape(b * h, t, d),
        "(bt)hd": lambda x: x.reshape(b * t, h, d),
        "(bt)(hd)": lambda x: x.reshape(b * t, h * d),
        "b(t)(hd)": lambda x: x.permute(0, 2, 1, 3).reshape(b, h * t, d),
    }[layout]
    if make(x).shape != x.shape:
        check(x, lambda y: make(y).contiguous(), noise, seed)


@settings(deadline=None, max_examples=15)
@given(B, T, H, D, NOISE, SEEDS)
def test_heads_first_is_found_in_flat_features(b, t, h, d, noise, seed):
    """[batch * heads, tokens, size] against [batch, tokens, heads * size]: both are split."""
    x = random(b, t, h * d, seed=seed)
    check(
        x,
        lambda y: y.reshape(b, t, h, d).permute(0, 2, 1, 3).reshape(b * h, t, d).contiguous(),
        noise,
        seed,
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 300), D, NOISE, SEEDS, st.booleans())
def test_rows_are_found_wherever_they_start(count, before, after, d, noise, seed, batched):
    x = random(before + count + after, 2 * d, seed=seed)

    def make(y):
        part = y[before : before + count]
        return part[None] if batched else part

    check(x, make, noise, seed, count / len(x))


@pytest.mark.parametrize("tokens", [65, 10_000])
def test_the_last_token_is_found_in_a_prompt_of_any_length(tokens):
    x = random(1, tokens, 64)
    fit = found(x[:, -1:].contiguous(), x)
    assert fit.says == f"{tokens - 1} of {tokens} along axis -2 of mine"


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), D, NOISE, SEEDS)
def test_requests_in_one_flat_batch_are_found_in_a_padded_one_in_any_order(lengths, d, noise, seed):
    x = random(len(lengths), max(lengths) + 1, 2 * d, seed=seed)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    check(
        x,
        lambda y: torch.cat([y[i, : lengths[i]] for i in order]),
        noise,
        seed,
        sum(lengths) / (x.shape[0] * x.shape[1]),
    )


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(2, 9), min_size=2, max_size=4), SEEDS, st.booleans(), st.booleans())
def test_token_ids_tell_the_rows_where_all_tokens_look_alike(lengths, seed, turned, batched):
    """Requests padded to [batch, tokens] against one flat row; every row of values is the same."""
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, 1 << 40, (n,), generator=rng) for n in lengths]
    size = max(lengths) + (sum(lengths) <= max(lengths))
    ids = torch.stack([torch.cat([row, row.new_zeros(size - len(row))]) for row in rows])
    flat = torch.cat(rows[::-1])
    x = torch.ones(*ids.shape, 4)
    sides = [
        {"input_ids": ids, "attention_mask": (ids > 0).long(), "0": x},
        {"input_ids": flat[None] if batched else flat, "0": torch.ones(1, len(flat), 4)[0]},
    ]
    finds, left, right = finder(*(sides[::-1] if turned else sides), role="input")
    fit = finds.fit(left[-1], right[-1])
    shown = [ids[..., None].expand(x.shape), flat[:, None].expand(len(flat), 4)]
    g, m = fit(*(shown[::-1] if turned else shown))
    assert torch.equal(g, m)
    assert g.numel() == 4 * len(flat)


@settings(deadline=None, max_examples=40)
@given(T, H, D, st.integers(1, 3), st.integers(0, 2), st.tuples(*4 * [st.booleans()]), NOISE, SEEDS)
def test_one_part_of_a_fused_tensor_is_found(t, heads, d, per_group, part, forms, noise, seed):
    """q (``per_group`` heads), k and v of each group, block by block or group by group."""
    interleaved, split, flat, last = forms
    sizes = [per_group * heads * d, heads * d, heads * d]
    x = random(1, t, sum(sizes), seed=seed)

    def make(y):
        if interleaved:
            groups = y.reshape(1, t, heads, -1).split([per_group * d, d, d], -1)
            out = groups[part].reshape(1, t, -1)
        else:
            out = y.split(sizes, -1)[part]
        if last:
            out = out[:, -1:]
        if split:
            return out.reshape(1, out.shape[1], -1, d).transpose(1, 2).contiguous()
        return (out[0] if flat else out).contiguous()

    share = sizes[part] / sum(sizes) / (t if last else 1)
    check(x, make, noise, seed, share)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([2, 3, 5, 8, 16]), min_size=2, max_size=4), st.booleans(), SEEDS)
def test_unrelated_tensors_of_one_size_have_no_layout(shape, outliers, seed):
    """Also where mean and norm agree, as in the weights of norms."""
    if math.prod(shape) < 12:
        return
    x, y = (random(*shape, seed=s, outliers=outliers) + 20 for s in (seed, seed + 1))
    assert found(x, y.reshape(-1, shape[-1]).permute(1, 0).contiguous()) is None
    assert found(x, torch.cat([y, y * 0.9], -1)[..., : 2 * shape[-1] - 1]) is None


def test_a_transposed_square_weight_is_a_layout_between_other_classes_alone():
    w = random(16, 16)
    turned = w.t().contiguous()
    assert found(w, turned, role="weight", ops=("Linear", "Linear")) is None
    assert found(w, turned, role="weight").says == "transposed"
    assert found(w, w.clone(), role="weight") is None


@settings(deadline=None, max_examples=20)
@given(st.integers(8, 40), D, NOISE, SEEDS)
def test_the_order_of_rows_is_told(n, d, noise, seed):
    w = random(n, 2 * d, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    mine = noised(w[order], noise, seed)
    finds, (g,), (m,) = finder({"w": w}, {"w": mine}, role="weight")
    assert torch.equal(finds.row_order(g, m), order)


def test_unrelated_weights_and_equal_ones_have_no_other_order():
    w = random(9, 16, seed=3)
    finds, (g,), (m,) = finder({"w": w}, {"w": w.clone()}, role="weight")
    assert finds.row_order(g, m) is None
    finds, (g,), (m,) = finder({"w": random(9, 16)}, {"w": random(9, 16)}, role="weight")
    assert finds.row_order(g, m) is None


def test_unrelated_weights_are_no_permutation():
    finds, (g,), (m,) = finder({"w": random(16, 32)}, {"w": random(16, 32, seed=1)}, role="weight")
    assert finds.row_order(g, m) is None


def test_empty_tensors_are_no_mismatch():
    fit = found(torch.empty(0), torch.empty(1, 8, 0, 32))
    g, m = fit(torch.empty(0), torch.empty(1, 8, 0, 32))
    assert g.shape == m.shape == (0,)
    finds, (g,), (m,) = finder({"0": torch.empty(0)}, {"0": torch.ones(3)})
    assert not finds.agree(g, m)


def test_sizes_that_are_no_number_have_no_layout():
    finds, (g,), (m,) = finder({"0": random(4, 6)}, {"0": random(6, 4)}, values=False)
    nested = replace(g, summary=replace(g.summary, shape=(4, -1)))
    assert finds.fit(nested, m) is None


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 5), D, NOISE, SEEDS)
def test_tensors_agree_in_any_layout_and_unrelated_ones_do_not(n, d, noise, seed):
    x = random(n, 3 * n + 1, d, seed=seed)
    mine = noised(x.transpose(0, 1).contiguous(), noise, seed)
    if noise == HALF:
        x, mine = x.bfloat16(), mine.bfloat16()
    finds, (g,), (m, other) = finder({"0": x}, {"0": mine, "1": random(*mine.shape, seed=seed + 1)})
    assert finds.agree(g, m)
    assert not finds.agree(g, other)


def _causal(n, fill):
    return torch.full((n, n), fill).triu(1)


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
def test_masks_are_compared_by_place(fill):
    golden, shows = _causal(7, fill), _causal(7, 1.0) == 0
    for mine in (shows, ~shows, shows[None, None], _causal(7, -5e4)):
        fit = found(golden, mine)
        g, m = fit(golden, mine)
        assert torch.equal(g, m)
        assert g.sum() == 21
    assert found(golden, shows.roll(2, 0)) is None


def test_a_mask_with_padding_is_cut_to_the_other():
    golden = _causal(6, float("-inf"))
    mine = torch.full((1, 1, 6, 9), float("-inf"))
    mine[0, 0, :, :6] = golden
    g, m = found(golden, mine)(golden, mine)
    assert torch.equal(g, m)


@settings(deadline=None, max_examples=10)
@given(SEEDS, NOISE)
def test_masked_scores_are_fitted_by_what_they_show(seed, noise):
    scores = random(1, 4, 9, 9, seed=seed)
    hides = torch.ones(9, 9).triu(1) > 0
    golden = scores.masked_fill(hides, float("-inf"))
    mine = noised(scores, noise, seed)[0] + _causal(9, -1e9)
    fit = found(golden, mine[:, -2:].contiguous())
    g, _ = fit(golden, mine[:, -2:])
    assert torch.equal(g, golden[0, :, -2:]) or torch.equal(g, golden[:, :, -2:])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("grouping", ["tensor", "row", "column", "groups", "groups first"])
def test_quantised_weights_are_found_with_their_scales(grouping, zeros, turned):
    w = random(24, 32)
    shape = {"tensor": (1, 1, 24, 32), "row": (24, 1, 1, 32), "column": (1, 32, 24, 1),
             "groups": (24, 4, 1, 8), "groups first": (24, 4, 1, 8)}[grouping]  # fmt: skip
    blocks = w.reshape(shape[0], shape[2], shape[1], shape[3])
    if zeros:
        low = blocks.amin((1, 3), keepdim=True).clamp(max=0)
        high = blocks.amax((1, 3), keepdim=True).clamp(min=0)
    else:
        high = blocks.abs().amax((1, 3), keepdim=True)
        low = -high
    step = (high - low) / 254
    zero = torch.round(-127 - low / step) if zeros else torch.zeros_like(step)
    q = torch.round(blocks / step + zero).reshape(24, 32).to(torch.int8)
    scale, zero = (x[:, 0, :, 0] if x.dim() == 4 else x for x in (step, zero))
    if grouping == "groups first":
        scale, zero = scale.t().contiguous(), zero.t().contiguous()
    mine = {"qweight": q.t().contiguous() if turned else q, "scales": scale}
    if turned:
        mine["scales"] = scale.t().contiguous()
        zero = zero.t().contiguous()
    if zeros:
        mine["zero_point"] = zero.to(torch.int8)
    finds, (g,), (m, *_) = finder({"weight": w}, mine, role="weight")
    fit = finds.fit(g, m)
    assert fit.says.startswith("dequantised")
    a, b = fit(w, mine["qweight"])
    assert (a - b).norm() / a.norm() < 0.02


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("dtype", "count"), [(torch.uint8, 2), (torch.int32, 8)])
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_integers_are_unpacked(axis, dtype, count, signed):
    w = random(32, 64)
    scale = w.abs().amax(1, keepdim=True) / 7
    q = torch.round(w / scale).long()
    nibbles = (q % 16 if signed else q + 8).movedim(axis, -1).unflatten(-1, (-1, count))
    packed = sum(nibbles[..., i] << (4 * i) for i in range(count)).movedim(-1, axis).to(dtype)
    finds, (g,), (m, *_) = finder({"weight": w}, {"q": packed, "scales": scale}, role="weight")
    _, b = finds.fit(g, m)(w, packed)
    assert torch.allclose(b, q * scale.double())


def test_statistics_alone_propose_a_layout_and_say_how_sure_it_is():
    x = random(1, 12, 32)
    fit = found(x, x.reshape(12, 32), values=False)
    assert fit.whole
    assert 0.5 < fit.certainty < 1
    assert found(x, random(12, 32, seed=3) * 2, values=False) is None
    finds, (g,), (m,) = finder({"0": x}, {"0": x[..., :8]}, values=False)
    assert finds.fit(g, m) is None
    assert finds.fit(g, m, fused=True).certainty <= 0.25


@pytest.mark.parametrize("turned", [False, True])
def test_values_that_differ_are_compared_though_one_has_more_axes_of_size_1(turned):
    for shapes in ([(1, 1), (1,)], [(1, 5, 8), (5, 8)], [(5, 1, 8), (5, 8, 1)]):
        ordered = shapes[::-1] if turned else shapes
        golden, mine = (random(*shape, seed=i) for i, shape in enumerate(ordered))
        finds, (left,), (right,) = finder({"0": golden}, {"0": mine})
        g, m = finds.fit(left, right)(golden, mine)
        assert g.shape == m.shape
        assert torch.equal(g.flatten(), golden.flatten())
        assert torch.equal(m.flatten(), mine.flatten())
        assert not finds.agree(left, right)
    assert found(random(5, 8), random(8, 5, seed=1)) is None


def test_other_layouts_go_before_axes_of_size_1():
    x = random(6, 6)
    g, m = found(x, x.t()[None])(x, x.t()[None])
    assert torch.equal(g, m)


@pytest.mark.parametrize("wrong", [1.0, 1.5])
@pytest.mark.parametrize("turned", [False, True])
def test_a_packed_weight_is_brought_to_the_float_weights_shape_with_its_steps(turned, wrong):
    w = random(32, 64)
    scale = w.abs().amax(1, keepdim=True) / 7
    q = torch.round(w / scale).long()
    packed = ((q[:, ::2] + 8) + ((q[:, 1::2] + 8) << 4)).to(torch.uint8)
    stored = {"q": packed, "scales": scale * wrong}
    sides = (stored, {"weight": w}) if turned else ({"weight": w}, stored)
    finds, (g, *_), (m, *_) = finder(*sides, role="weight")
    fit, pair = finds.fit(g, m), (packed, w) if turned else (w, packed)
    values, steps = fit(*pair)[not turned], fit.grain(*pair)
    assert torch.equal(steps, (scale * wrong).double().expand(32, 64))
    assert torch.equal(values, q * steps)


def test_a_layout_of_ten_million_elements_is_found():
    x = random(1, 4096, 32 * 80)
    y = x.reshape(4096, 32, 80).transpose(0, 1).contiguous()
    finds, (g,), (m,) = finder({"0": x}, {"0": y})
    fit = finds.fit(g, m)
    assert torch.equal(*fit(x, y))


@pytest.mark.parametrize("value", [1.0, None])
@pytest.mark.parametrize("start", [0, 4])
def test_what_tells_nothing_of_its_place_is_an_end_of_a_longer_tensor(value, start):
    few = torch.full((2, 3, 1), value) if value else torch.tensor([[[0.5]]])
    many = torch.zeros(*few.shape[:2], 5)
    many[..., start : start + 1] = few
    for golden, mine in ((few, many), (many, few)):
        a, b = found(golden, mine)(golden, mine)
        assert torch.equal(a, few)
        assert torch.equal(b, few)
        assert found(golden + 3, mine) is None
    telling = random(2, 3, 1)
    assert moves.end_of_longer(telling, torch.cat([telling, telling], 2)) is None


def _scaled(x, steps):
    return x * steps.scale


def test_fits_have_one_key_if_they_do_the_same_and_another_if_not():
    def fit(says, scale):
        steps = Steps("int8", torch.full((3,), scale), torch.zeros(3), 1)
        return moves.Fit(says, golden=(partial(_scaled, steps=steps),))

    assert fit("one way to say it", 2.0).key == fit("another", 2.0).key
    assert fit("the same words", 2.0).key != fit("the same words", 3.0).key
    hash(fit("", 2.0).key)


def test_only_channels_within_all_heads_are_an_order_of_outputs():
    channels = torch.arange(8).view(2, 4).T.flatten()  # pairs in place of halves
    within = (torch.arange(4)[:, None] * 8 + channels).flatten()
    assert is_within_heads(within)
    assert not is_within_heads(torch.arange(32))
    assert not is_within_heads(torch.arange(32).view(4, 8)[[1, 0, 3, 2]].flatten())  # other heads
    assert not is_within_heads(within.view(4, 8)[[1, 0, 3, 2]].flatten())  # both
    assert not is_within_heads(torch.cat([within[:8], torch.arange(8, 32)]))  # one head alone
    assert not is_within_heads(torch.randperm(32, generator=torch.Generator().manual_seed(0)))
