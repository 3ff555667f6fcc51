"""What is computed at places of a batch that hold no token is no bug; what is at tokens may be.

Golden is a small decoder whose attention is written out: a row of scores that is hidden as a whole
becomes an even choice. PyTorch's fused attention makes something else of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.comparison.padding import of_tokens
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.kernels.padding import Blanks, Padding, _are_blank
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site
from recordings import compared

SIZE, HEADS, TOKENS = 32, 4, 7
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
RIGHT = LEFT.flip(1)


def even(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores + mask, -1) @ v


def fused(q, k, v, mask):
    shown = mask == 0
    shown = shown | ~shown.any(-1, keepdim=True)  # else all of such a row is NaN
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)


def milder(q, k, v, mask):
    return even(q, k, v, mask.clamp(min=-1e4))


def leaking(q, k, v, mask):
    return even(q, k, v, mask.clamp(min=-2.0))


def scaled(q, k, v, mask):
    return fused(q * 1.2, k, v, mask)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.attend = even

    def forward(self, x, mask):
        heads = (*x.shape[:2], HEADS, -1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x, mask):
        x = x + self.attention(x, mask)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, pool, positions=None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(50, SIZE), nn.Embedding(80, SIZE)
        self.positions = positions
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.pool = pool

    def forward(self, ids, attention_mask):
        count = ids.shape[1]
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        shown = causal & (attention_mask[:, None, None, :] != 0)
        mask = torch.where(shown, 0.0, torch.finfo(torch.float32).min)
        x = self.tokens(ids)
        if self.positions is not None:
            at = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, self.positions)
            x = x + self.places(at)
        for layer in self.layers:
            x = layer(x, mask)
        return self.pool(x, attention_mask)


def states(x, attention_mask):
    return x


def mean(x, attention_mask):
    return x.mean(1)


def mean_of_tokens(x, attention_mask):
    weights = attention_mask[..., None].float()
    return (x * weights).sum(1) / weights.sum(1)


def recorded(name, attend, mask=LEFT, change=lambda model: None, pool=states, **options):
    model = Decoder(pool).eval()
    for layer in model.layers:
        layer.attention.attend = attend
    change(model)
    ids = torch.arange(3 * TOKENS).view(3, TOKENS) * 7 % 50
    options = {"mode": ("module", "api")} | options
    with ld.dump(model, name=name, **options) as run, torch.no_grad():
        model(ids, mask)
    return run


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("mode", [("module", "api"), ("module",), ("module", "api", "aten")])
def test_other_attention_agrees_though_it_differs_at_padding(mask, mode):
    report = ld.compare(
        recorded("golden", even, mask, mode=mode), recorded("mine", fused, mask, mode=mode)
    )
    assert report.verdict == "within_noise"
    assert not report.findings
    if mask is LEFT:  # on the right, a place without a token sees the tokens before it
        count = sum(d.rule is Rule.NO_TOKEN for d in report.differences)
        assert count
        assert f"Padding: {count:,} rows differ only where the batch has no token" in str(report)


def recorded_at(name, attend, tokens, positions=None):
    """Record two rows of so many tokens, the first one padded. ``positions``: those of padding."""
    model = Decoder(states, positions).eval()
    for layer in model.layers:
        layer.attention.attend = attend
    ids, marks = torch.arange(2 * tokens).view(2, -1) % 50, torch.ones(2, tokens).long()
    marks[0, :3] = 0
    with ld.dump(model, name=name, mode=("module", "api")) as run, torch.no_grad():
        model(ids, marks)
    return run


@pytest.mark.parametrize("tokens", [HEADS, 2 * HEADS, SIZE, 2 * SIZE])
def test_as_many_tokens_as_heads_or_channels_are_no_alarm(tokens):
    report = ld.compare(recorded_at("golden", even, tokens), recorded_at("mine", fused, tokens))
    assert report.verdict == "within_noise"


def test_other_positions_of_padding_are_no_other_positions():
    report = ld.compare(recorded_at("golden", even, 9, 0), recorded_at("mine", even, 9, 1))
    assert report.verdict == "within_noise"
    told = [d.pair.golden.summary.dtype for d in report.differences if d.rule is Rule.NO_TOKEN]
    assert "int64" in told


@pytest.mark.parametrize("pool", [states, mean_of_tokens])
def test_a_milder_fill_agrees(pool):
    report = ld.compare(recorded("golden", even, pool=pool), recorded("mine", milder, pool=pool))
    assert report.verdict == "within_noise"


def wrong_weight(model):
    model.layers[1].down.weight.data[3] *= 1.5


def wrong_norm(model):
    model.layers[2].norm.eps = 0.1


@pytest.mark.parametrize(
    ("attend", "change", "place"),
    [
        (fused, wrong_weight, "layers.1.down"),
        (fused, wrong_norm, "layers.2.norm"),
        (scaled, lambda model: None, "layers.0.attention"),
        (leaking, lambda model: None, "layers.0.attention"),
    ],
)
def test_a_bug_is_found_though_the_padding_differs_before_it(attend, change, place):
    report = ld.compare(recorded("golden", even), recorded("mine", attend, change=change))
    assert report.verdict == "diverged"
    assert report.findings[0].path.split("/")[0] == place


@pytest.mark.parametrize("attend", [even, fused])
def test_a_mask_that_forgets_the_padding_is_to_blame(attend):
    def forget(model):
        model.register_forward_pre_hook(lambda _, given: (given[0], torch.ones_like(given[1])))

    report = ld.compare(recorded("golden", even), recorded("mine", attend, change=forget))
    assert report.verdict == "diverged"
    assert "mask" in report.findings[0].cause


@pytest.mark.parametrize("change", [lambda model: None, wrong_weight], ids=["right", "wrong"])
def test_without_names_tensors_are_paired_by_what_they_hold_at_tokens(change):
    class Port(nn.Module):
        """The same decoder, written as functions; heads are the first axis."""

        def __init__(self, golden):
            super().__init__()
            self.table = golden.tokens.weight
            self.blocks = nn.ParameterList()
            for layer in golden.layers:
                attention, norm = layer.attention, layer.norm
                for part in (attention.qkv, attention.out, norm, layer.up, layer.down):
                    self.blocks += [part.weight, part.bias]

        def forward(self, ids, marks):
            x = self.table[ids]
            shown = torch.ones(TOKENS, TOKENS).tril()[None] * marks[:, None]
            shown = shown.bool() | ~shown.bool().any(-1, keepdim=True)
            for at in range(0, len(self.blocks), 10):
                x = self.block(x, shown, *self.blocks[at : at + 10])
            return x

        def block(self, x, shown, qkv, qkv_b, out, out_b, norm, norm_b, up, up_b, down, down_b):
            parts = torch.addmm(qkv_b, x.flatten(0, 1), qkv.t()).view(*x.shape[:2], 3, HEADS, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=shown[:, None])
            x = torch.add(torch.matmul(y.transpose(1, 2).flatten(2), out.t()) + out_b, x)
            y = F.gelu(F.linear(F.layer_norm(x, (SIZE,), norm, norm_b), up, up_b))
            return torch.add(F.linear(y, down, down_b), x)

    golden, changed = Decoder(states).eval(), Decoder(states).eval()
    change(changed)
    port, ids = Port(changed), torch.arange(3 * TOKENS).view(3, TOKENS) * 7 % 50
    report = compared(golden, port, ids, LEFT, mode=("module", "api"))
    if change is not wrong_weight:
        assert report.verdict == "within_noise"
        assert report.coverage.share > 0.8
    else:
        assert report.verdict == "diverged"
        first = report.findings[0]
        assert "layers.1.down" in first.path or "y, down, down_b" in first.mine.code


def test_padding_that_takes_part_in_a_result_counts():
    mine = recorded("mine", fused, pool=mean)
    report = ld.compare(recorded("golden", even, pool=mean), mine)
    assert report.verdict == "diverged"
    assert report.findings[0].path.startswith("layers.0.attention")
    assert not any(d.rule is Rule.NO_TOKEN for d in report.differences)


def test_lockstep_tells_padding_as_it_goes():
    golden, mine = Decoder(states).eval(), Decoder(states).eval()
    for layer in mine.layers:
        layer.attention.attend = fused
    ids = torch.arange(3 * TOKENS).view(3, TOKENS) * 7 % 50
    mode = ("module", "api")
    report = ld.lockstep(golden, mine, (ids, LEFT), mode=mode, progress=False)
    assert report.verdict == "within_noise"
    assert any(d.rule is Rule.NO_TOKEN for d in report.differences)


# -- which places these are ------------------------------------------------------------------------

ORDER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)  # what order alone hides


def hidden_by(blank, fixed=False):
    """Return where attention hides: bool [rows, 1, queries, keys].

    ``fixed``: a row that would be hidden as a whole is shown, as fused attention needs it.
    """
    hides = (ORDER | blank[:, None, :])[:, None]
    return hides & ~hides.all(-1, keepdim=True) if fixed else hides


def places(counts):
    """Return which places hold no token: the first ones of each row."""
    return torch.arange(TOKENS)[None] < torch.tensor(counts)[:, None]


def blanks_of(blank):
    return Blanks(*blank.shape, TOKENS, bytes(blank.flatten().tolist()))


lengths = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans())
def test_padding_is_what_a_mask_hides_from_every_token_and_what_sees_nothing(counts, fixed):
    blank = places(counts)
    hides = hidden_by(blank, fixed)
    assert _are_blank(blank, hides, None) == bool(blank.any())
    assert not _are_blank(blank, ORDER.expand_as(hides), None)
    assert not _are_blank(~blank, hides, None)
    if bool(blank.any()):
        assert not _are_blank(blank, ~hides, None)
        # in a later step, the prompt's blank places are still hidden
        longer = torch.cat([blank, torch.zeros(len(blank), 2, dtype=torch.bool)], 1)
        step = longer[:, None, None, :]
        assert _are_blank(longer, step, blanks_of(blank))
        assert not _are_blank(longer, step, None)
        assert not _are_blank(longer, torch.zeros_like(step), blanks_of(blank))


@pytest.mark.parametrize("side", ["keys", "documents", "last", "types"])
def test_what_is_no_padding_is_not_taken_for_it(side):
    first = torch.arange(TOKENS)[None] < 3
    if side == "keys":  # an encoder: places see the tokens, and may be what another stream holds
        hides = first[:, None, None, :].expand(1, 1, TOKENS, TOKENS)
    elif side == "documents":  # packed: each sees its own
        hides = (first[:, :, None] != first[:, None, :])[:, None]
    elif side == "last":
        first, hides = torch.arange(TOKENS)[None] == TOKENS - 1, ORDER[None, None]
    else:
        hides = ORDER[None, None]
    assert not _are_blank(first, hides, None)
    assert not _are_blank(~first, hides, None)
    assert not _are_blank(first, ~hides, None)
    assert not _are_blank(~first, ~hides, None)


@settings(max_examples=80, deadline=None)
@given(
    rows=lengths,
    order=st.permutations(range(4)),
    flat=st.sampled_from((None, (0, 1), (0, 2))),
    at_token=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_in_any_layout_what_differs_at_tokens_is_left(rows, order, flat, at_token, seed):
    blank = places(rows)
    draw = torch.Generator().manual_seed(seed)
    golden = torch.randn(len(rows), TOKENS, 3, 5, generator=draw)  # rows, tokens, heads, channels
    mine = golden.clone()
    mine[blank] += 1.0
    real = (~blank).nonzero()[0]
    mine[tuple(real)] += 0.25 * at_token
    if flat == (0, 1):
        both = [x.flatten(0, 1) for x in (golden, mine)]
    elif flat == (0, 2):
        both = [x.transpose(1, 2).flatten(0, 1) for x in (golden, mine)]
    else:
        both = [x.permute(order) for x in (golden, mine)]
    found = of_tokens(*both, blanks_of(blank), False)
    assert found is not None
    if not bool(blank.any()):
        assert found.first is None
        return
    left = found.whole["relative_euclidean_distance"]
    kept = golden[~blank]
    expected = (mine[~blank] - kept).norm() / kept.norm()
    assert left == pytest.approx(float(expected), rel=1e-5, abs=1e-9)
    assert found.are_states


def test_a_mask_is_no_state():
    blank = places([2, 0])
    golden = hidden_by(blank).float() * -1e9
    mine = (ORDER.float() * -1e9).expand_as(golden).clone()
    mine[0, :, 2:] = golden[0, :, 2:]
    found = of_tokens(golden, mine, blanks_of(blank), False)
    assert found is not None
    assert not found.are_states


class Head(nn.Module):
    """Takes one figure of each row: that of its last place, or the mean of its tokens."""

    def __init__(self, decoder, wrong, last):
        super().__init__()
        self.decoder, self.score, self.last = decoder, nn.Linear(SIZE, 3), last
        nn.init.normal_(self.score.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.score.bias)
        if wrong:
            self.score.weight.data[1] *= 1.5

    def forward(self, ids, marks):
        x = self.decoder(ids, marks)
        return self.score(x[:, -1] if self.last else mean_of_tokens(x, marks))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_wrong_head_behind_padded_states_is_to_blame(mode, last):
    ids = torch.arange(3 * TOKENS).view(3, TOKENS) * 7 % 50
    golden, mine = (Head(Decoder(states), wrong, last).eval() for wrong in (False, True))
    for model, attend in ((golden, even), (mine, fused)):
        for layer in model.decoder.layers:
            layer.attention.attend = attend
    report = compared(golden, mine, ids, LEFT, mode=mode)
    assert report.verdict == "diverged"
    assert report.findings[0].path.startswith("score")


DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float64,
    torch.int8, torch.uint8, torch.uint16, torch.int64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_any_dtype_are_told_from_padding(dtype):
    blank = places([2, 0])
    draw = torch.Generator().manual_seed(0)
    golden = torch.randint(1, 9, (2, TOKENS, 8), generator=draw).to(dtype)
    changed = golden.to(torch.float64, copy=True)
    changed[0, :2] += 1
    found = of_tokens(golden, changed.to(dtype), blanks_of(blank), False)
    assert found.are_states
    assert not found.first["relative_euclidean_distance"]
    changed[1, 3] += 2
    found = of_tokens(golden, changed.to(dtype), blanks_of(blank), False)
    assert found.first["relative_euclidean_distance"] > 0.05


class Narrow(nn.Module):
    """Rounds what a decoder gives, as quantised activations are, and goes on."""

    def __init__(self, attend, dtype):
        super().__init__()
        self.decoder, self.dtype = Decoder(states), dtype
        for layer in self.decoder.layers:
            layer.attention.attend = attend

    def forward(self, ids, marks):
        rounded = self.decoder(ids, marks).to(self.dtype)
        return torch.mul(rounded.to(torch.float32), 2.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_padded_program_with_narrow_tensors_is_compared(dtype):
    ids = torch.arange(3 * TOKENS).view(3, TOKENS) * 7 % 50
    golden, mine = (Narrow(attend, dtype).eval() for attend in (even, fused))
    report = compared(golden, mine, ids, LEFT, mode=("module", "api"))
    assert report.verdict == "within_noise"
    assert any(d.rule is Rule.NO_TOKEN for d in report.differences)


@pytest.mark.parametrize("values", [torch.zeros(3), torch.zeros(2, 9), torch.zeros(0, 0, 0)])
def test_a_dump_whose_marks_have_another_shape_than_it_says_knows_no_padding(values):
    def site(slot):
        return Site("", 0, 0, "forward", "input", slot)

    marks = Record(1, site("marks"), 1, "", summarize(LEFT), payload="a")
    mask = hidden_by(LEFT == 0).float() * -1e9
    hides = Record(2, site("mask"), 2, "", summarize(mask), payload="b")
    found = Padding(lambda record: LEFT if record is marks else mask)
    wrong = Padding(lambda record: values if record is marks else mask)
    for padding in (found, wrong):
        padding.add(marks)
        padding.add(hides)
    assert torch.equal(found.of(site("marks")).places, LEFT == 0)
    assert wrong.of(site("marks")) is None
